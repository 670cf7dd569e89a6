"""Bytes and operations of the fused loss on a GPU, and the milliseconds that follow. Nothing here is measured: these are predictions.

    python benchmarks/traffic_model.py                       # the tables of docs/gpu.md, as Markdown
    python benchmarks/traffic_model.py --update docs/gpu.md  # writes them into it, between the two markers

N tokens go in chunks of n rows through a head of V words and width H. Every step of a chunk moves bytes and does operations, and takes the
longer of the two times: bytes at the rate of a device copy, operations at the rate of the library's GEMM, or of ours. Steps follow one
another; nothing is hidden behind anything else. Logits are [n, V] of 4 bytes from the library's GEMM and of 2 as exponentials. Before
the first step the device waits for the host.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Strategy = Literal["library", "anchored"]
STRATEGIES: tuple[Strategy, ...] = ("library", "anchored")

# One H100's cuBLAS on the three products of an LM head (8192, 4096, 151936), TRL #7244: 728 of 989 TFLOP/s.
CUBLAS_SHARE = 728 / 989
# A device copy of one H200: 4.3 of 4.8 TB/s.
COPY_SHARE = 0.9
# Assumed: Triton's plain-pipelined GEMM reaches 80 to 95 % of the library's.
TRITON_SHARE = 0.85
# Estimated, 0.4 to 0.7, from some 80 operations of torch (counted on a CPU) of 5 to 9 us each: what a caller who waits for the result waits
# for before the first product runs. Later the host is ahead of the device.
HOST_MS = 0.5
COLUMN_TILE = 128  # of the anchored GEMM: one partial sum of each kind per row and tile
ROWS_AT_ONCE = 2  # of the row kernel per multiprocessor: programs of 16 warps with 52 to 64 registers a thread


@dataclass(frozen=True)
class Device:
    """flops: per second, dense bfloat16. bandwidth: bytes per second. l2: bytes."""

    name: str
    flops: float
    bandwidth: float
    l2: float
    multiprocessors: int

    def __str__(self) -> str:
        rates = f"{self.flops / 1e12:.0f} TFLOP/s, {self.bandwidth / 1e12:.2f} TB/s, {self.l2 / 1e6:.0f} MB of L2"
        return f"{self.name} ({rates}, {self.multiprocessors} multiprocessors)"

    @property
    def gemm(self) -> float:
        """Operations per second of the library's GEMM."""
        return self.flops * CUBLAS_SHARE

    @property
    def copy(self) -> float:
        """Bytes per second of a device copy, read and written."""
        return self.bandwidth * COPY_SHARE


H100 = Device("H100", 989e12, 3.35e12, 50e6, 132)
H200 = Device("H200", 989e12, 4.8e12, 50e6, 132)
A100 = Device("A100", 312e12, 2.0e12, 40e6, 108)
DEVICES = (H100, H200, A100)


def device_named(name: str) -> Device | None:
    """The model's device for what CUDA calls it, such as "NVIDIA H100 80GB HBM3"; None: not one of them. By a part of the name, so that
    a GH200 and an H100 PCIe are taken for an H200 and an H100: who uses it says which was taken."""
    return next((device for device in DEVICES if device.name in name), None)


@dataclass(frozen=True)
class Step:
    name: str
    bytes: float
    flops: float = 0.0
    efficiency: float = 1.0  # of its operations, as a share of the library's rate

    def milliseconds(self, device: Device) -> float:
        return 1e3 * max(self.bytes / device.copy, self.flops / (device.gemm * self.efficiency))


@dataclass(frozen=True)
class Prediction:
    """host: milliseconds before the first step, in which the device has nothing to do."""

    steps: tuple[Step, ...]
    device: Device
    host: float = 0.0

    @property
    def milliseconds(self) -> float:
        return self.host + sum(step.milliseconds(self.device) for step in self.steps)

    @property
    def bytes(self) -> float:
        return sum(step.bytes for step in self.steps)

    @property
    def flops(self) -> float:
        return sum(step.flops for step in self.steps)


def padded(vocabulary: int) -> int:
    """Columns of a chunk's buffer."""
    return -(-vocabulary // 64) * 64


# The row kernels, as bytes per logit.


def row_kernel_bytes(rows: int, vocabulary: int, itemsize: int, device: Device, *, reads: int, writes: int) -> float:
    """Of a kernel that goes over each row `reads` times in one program, the second time backwards. Of each row in work about half, what
    is read and not yet read again, must be in the L2 cache: where that fits, only the first time is one of memory."""
    fits = ROWS_AT_ONCE * device.multiprocessors * vocabulary * itemsize / 2 <= device.l2
    return rows * vocabulary * itemsize * ((1 if fits else reads) + writes)


def anchor_rows_bytes(rows: int, vocabulary: int, stored: int) -> float:
    """Of float32 products, read once, and `stored` bytes written over each: 2, or 0 where only the sums are wanted."""
    return rows * vocabulary * (4.0 + stored)


# The steps of a chunk of n rows.


def target_products(n: int, H: int) -> Step:
    # The chunk's rows of h are gathered, 2 + 2; then one read of each and of its row of W.
    return Step("h of the chunk, target products", bytes=(2.0 + 2.0 + 2.0 + 2.0) * n * H, flops=2.0 * n * H)


def logits_steps(strategy: Strategy, n: int, H: int, V: int, *, keep: bool) -> list[Step]:
    """GEMM 1 and the exponentials; `keep`: they are stored, for the gradients."""
    operands, flops = 2.0 * (n + V) * H, 2.0 * n * H * V
    if strategy == "library":
        return [
            Step("GEMM 1, float32 products", operands + 4.0 * n * V, flops),
            Step("row kernel", anchor_rows_bytes(n, V, 2 if keep else 0)),
        ]
    sums = 2 * 2 * 4.0 * n * math.ceil(V / COLUMN_TILE)  # two sums per row and tile, written and read
    return [Step("anchored GEMM 1", operands + sums + (2.0 * n * V if keep else 0.0), flops, TRITON_SHARE)]


def weight_gradient(n: int, H: int, V: int, *, first: bool, only: bool = False) -> Step:
    """dW is float32, written by the first chunk, read and written by the others; where there is `only` one chunk, nothing is added up,
    and it is bfloat16."""
    per_weight = 2.0 if only else 4.0 if first else 8.0
    return Step("GEMM 3, dW += E' (a h)", 2.0 * n * V + 2.0 * n * H + per_weight * V * H, 2.0 * n * H * V)


def gradient_steps(n: int, H: int, V: int, *, first: bool, only: bool = False) -> list[Step]:
    """GEMM 2 and 3 from bfloat16 exponentials, and what is [n, H] around them."""
    return [
        Step("GEMM 2, sums = E W", 2.0 * n * V + 2.0 * V * H + 4.0 * n * H, 2.0 * n * H * V),
        Step("scaled h", (2.0 + 2.0) * n * H),
        weight_gradient(n, H, V, first=first, only=only),
        # The float32 sums read and written over, and the targets' rows of W; then copied to their places in a dh that was cleared.
        Step("gradient of h, to its place", (4.0 + 4.0 + 2.0 + 4.0 + 4.0 + 4.0) * n * H),
    ]


def chunks(N: int, most: int) -> list[int]:
    count = math.ceil(N / most)
    return [N // count + (i < N % count) for i in range(count)]


def forward(strategy: Strategy, N: int, H: int, V: int, chunk: int, device: Device) -> Prediction:
    """Log-probabilities and entropies alone: `linear_logprobs` without gradients."""
    parts = ([target_products(n, H), *logits_steps(strategy, n, H, V, keep=False)] for n in chunks(N, chunk))
    return Prediction(tuple(step for part in parts for step in part), device)


def loss(strategy: Strategy, N: int, H: int, V: int, chunk: int, device: Device) -> Prediction:
    """Loss and both gradients: `linear_grpo_loss` forward and backward, for a caller who waits for them."""
    steps: list[Step] = []
    only = chunk >= N
    for i, n in enumerate(chunks(N, chunk)):
        steps += [target_products(n, H), *logits_steps(strategy, n, H, V, keep=True), *gradient_steps(n, H, V, first=i == 0, only=only)]
    # Of one chunk dW is bfloat16 already, and the upstream gradient is 1.
    steps.append(Step("dh and dW to bfloat16", 6.0 * N * H + (0.0 if only else 6.0) * V * H))
    return Prediction(tuple(steps), device, HOST_MS)


def floor(N: int, H: int, V: int, device: Device, *, products: int = 3, at_peak: bool = False) -> float:
    """Milliseconds of the bare products, at the library's rate or at the device's peak."""
    return 1e3 * products * 2.0 * N * H * V / (device.flops if at_peak else device.gemm)


@dataclass(frozen=True)
class Memory:
    """Bytes. `over_inputs`: the peak; `over_gradients`: without the bfloat16 gradients that the caller gets."""

    workspace: float
    over_inputs: float
    over_gradients: float


def memory(strategy: Strategy, N: int, H: int, V: int, chunk: int) -> Memory:
    """Of the loss: a chunk's logits, its rows of h, their scaled copy and their float32 gradient, beside dW and dh in float32; in
    backward, when all of the chunk is gone, dW and dh beside their roundings. Of one chunk dW is bfloat16 from the start."""
    n, only = max(chunks(N, chunk)), chunk >= N
    workspace = n * padded(V) * (4.0 if strategy == "library" else 2.0)
    gradients = 2.0 * (N + V) * H
    accumulators = 4.0 * N * H + (2.0 if only else 4.0) * V * H
    peak = max(workspace + (2.0 + 2.0 + 4.0) * n * H + accumulators, accumulators + (2.0 * N * H if only else gradients))
    return Memory(workspace, peak, peak - gradients)


def break_even_width(device: Device, triton_share: float = TRITON_SHARE, *, forward_alone: bool = False) -> float:
    """The H at which the row kernel's bytes per logit, 6 or without a gradient 4, cost what the anchored GEMM loses on its 2 H
    operations per logit."""
    return (4.0 if forward_alone else 6.0) / device.copy * device.gemm / (2.0 * (1.0 / triton_share - 1.0))


def best_strategy(H: int, device: Device, *, forward_alone: bool = False) -> Strategy:
    return "anchored" if break_even_width(device, forward_alone=forward_alone) > H else "library"


def wave_efficiency(rows: int, columns: int, device: Device) -> float:
    """How full the last wave leaves the multiprocessors: a product of this size in tiles of 128 x 256, without split-K."""
    tiles = math.ceil(rows / 128) * math.ceil(columns / 256)
    return tiles / (math.ceil(tiles / device.multiprocessors) * device.multiprocessors)


# The tables of docs/gpu.md.

SHAPES = ((32768, 4096, 151936), (16384, 2048, 151936), (4096, 4096, 131072))


def chunk_rows(strategy: Strategy, N: int, H: int, V: int, *, weight_gradient: bool = True) -> int:
    """Rows of a chunk, as the backend chooses them (`grpo_kernels/backends/triton.py`): as many as fit 1.25 GiB, or all."""
    saved = 4 * V * H if weight_gradient else 0
    per_row = (4 if strategy == "library" else 2) * V
    fitting = min(4096, max(1024, (5 << 28) // per_row // 256 * 256))
    return N if N <= 4096 and N * per_row <= (5 << 28) + saved else fitting


BEGIN, END = "<!-- traffic_model.py: begin -->", "<!-- traffic_model.py: end -->"


def markdown() -> str:
    shapes = [part for shape in SHAPES for part in (_steps(*shape), _whole(*shape))]
    return "\n".join([*shapes, _given_logits(8192, 151936), _break_even(), _chunk_rows()])


def _table(title: str, header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _steps(N: int, H: int, V: int) -> str:
    n = min(N, 4096)
    steps = [target_products(n, H)]
    for strategy in STRATEGIES:
        steps += logits_steps(strategy, n, H, V, keep=True)
    steps += gradient_steps(n, H, V, first=False, only=n == N)
    rows = ([s.name, f"{s.bytes / 1e9:.2f}", f"{s.flops / 1e12:.2f}", f"{s.milliseconds(H100):.2f}"] for s in steps)
    title = f"**N = {N}, H = {H}, V = {V} on an {H100.name}.** Per {n} rows, the steps of both strategies:"
    return _table(title, ["step", "GB", "TFLOP", "ms"], rows)


def _whole(N: int, H: int, V: int) -> str:
    bare = floor(N, H, V, H100)
    rows = [["3 GEMMs at the peak rate", "", f"{floor(N, H, V, H100, at_peak=True):.1f}", "", "", "", ""]]
    rows.append(["3 GEMMs at the library's rate: the floor", "", f"{bare:.1f}", "1.000", "", f"{bare / 3:.1f}", ""])
    for strategy in STRATEGIES:
        n = chunk_rows(strategy, N, H, V)
        whole = loss(strategy, N, H, V, n, H100)
        alone = forward(strategy, N, H, V, chunk_rows(strategy, N, H, V, weight_gradient=False), H100)
        times = [f"{whole.milliseconds:.1f}", f"{whole.milliseconds / bare:.3f}", f"{whole.bytes / 1e9:.0f}", f"{alone.milliseconds:.1f}"]
        rows.append([strategy, str(n), *times, f"{memory(strategy, N, H, V, n).over_gradients / 1e9:.2f}"])
    rows.append(["4 GEMMs, which recomputation needs", "", f"{floor(N, H, V, H100, products=4):.1f}", f"{4 / 3:.3f}", "", "", ""])
    header = ["forward + backward", "rows per chunk", "ms", "x floor", "GB", "forward alone, ms", "peak over inputs and gradients, GB"]
    return _table("All rows:", header, rows)


def _given_logits(rows: int, V: int) -> str:
    table = []
    for dtype, itemsize in (("bf16", 2), ("float32", 4)):
        for name, reads, writes in (("statistics", 1, 0), ("gradient, from statistics", 1, 1), ("loss, in two passes", 2, 1)):
            moved = [row_kernel_bytes(rows, V, itemsize, d, reads=reads, writes=writes) for d in DEVICES]
            times = [f"{1e3 * m / d.copy:.2f}" for m, d in zip(moved, DEVICES, strict=True)]
            table.append([f"{name}, {dtype}", f"{(reads + writes) * itemsize}", *times])
    anchored = anchor_rows_bytes(rows, V, 2)
    table.append(["float32 products to bf16 exponentials, in place", "6", *(f"{1e3 * anchored / d.copy:.2f}" for d in DEVICES)])
    title = f"**The row kernels on logits [{rows}, {V}]**, in ms. A second read is from L2 where half the rows of all programs fit it:"
    return _table(title, ["kernel", "bytes per logit", *(device.name for device in DEVICES)], table)


def _break_even() -> str:
    shares, rows = (0.75, 0.80, TRITON_SHARE, 0.90, 0.95), []
    for device in DEVICES:
        for name, alone in (("loss", False), ("forward alone", True)):
            rows.append([f"{device.name}, {name}", *(f"{break_even_width(device, share, forward_alone=alone):.0f}" for share in shares)])
    title = "**Break-even H**: the anchored GEMM wins below it, by the share of the library's rate that Triton's GEMM reaches:"
    return _table(title, ["", *(f"{share:.0%}" for share in shares)], rows)


def _chunk_rows() -> str:
    widths, rows = (1024, 2048, 4096), []
    for n in (512, 1024, 2048, 4096, 8192):
        step = weight_gradient(n, 4096, 151936, first=False)
        traffic = (step.bytes / H100.copy) / (step.flops / H100.gemm)
        rows.append([str(n), f"{traffic:.2f}", *(f"{wave_efficiency(n, H, H100):.0%}" for H in widths)])
    title = (
        f"**Rows per chunk** on an {H100.name}: GEMM 3's time by bytes over that by operations, and how full GEMM 2's waves of tiles are:"
    )
    return _table(title, ["rows", "GEMM 3, bytes / operations", *(f"GEMM 2, H = {H}" for H in widths)], rows)


def update(path: Path) -> None:
    text = path.read_text()
    path.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n\n{markdown()}\n{END}{text.split(END)[1]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--update"]:
        update(Path(sys.argv[2]))
    else:
        print(markdown())
