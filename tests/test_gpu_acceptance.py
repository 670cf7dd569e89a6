"""The traffic model against hand-computed figures, its tables in docs/gpu.md, and the acceptance script: run dry, and made to fail."""

# ruff: noqa: E402

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import acceptance_checks as checks
import gpu_acceptance
import gpu_contenders
import traffic_model
from acceptance_checks import OBJECTIVES, Case, Judge
from gpu_acceptance import Bench, Contestant, Section
from traffic_model import A100, H100, H200

from grpo_kernels.backends.triton import TritonBackend
from grpo_kernels.head import Head
from grpo_kernels.triton_kernels.selection import LIBRARY_FROM, OVERRIDE
from problems import DEVICE

A, B, C = (32768, 4096, 151936), (16384, 2048, 151936), (4096, 4096, 131072)
CPU = torch.device("cpu")


# The model, against figures computed by hand from the shapes (../shared/facts/kernels.md 2.1 has them too).


def test_the_floor_of_three_products() -> None:
    peak = [traffic_model.floor(*shape, H100, at_peak=True) for shape in (A, B)]
    library = [traffic_model.floor(*shape, H100) for shape in (A, B, C)]
    assert peak == pytest.approx([123.7, 30.9], abs=0.05)
    assert library == pytest.approx([168.1, 42.0, 18.1], abs=0.05)
    assert traffic_model.floor(*A, H100, products=4) == pytest.approx(224.1, abs=0.1)


def test_bytes_of_the_row_kernels() -> None:
    logits = 32768 * 151936
    assert traffic_model.anchor_rows_bytes(32768, 151936, 2) == 6 * logits
    # Half of 264 rows of bfloat16 is 40 MB, inside the L2 cache of 50: the second read is none of memory. Of float32 it is 80 MB.
    assert traffic_model.row_kernel_bytes(32768, 151936, 2, H100, reads=2, writes=1) == 4 * logits
    assert traffic_model.row_kernel_bytes(32768, 151936, 4, H100, reads=2, writes=1) == 12 * logits
    # "4 B read + 2 B write at 90 % bandwidth: 9.9 ms"
    assert traffic_model.Step("", 6.0 * logits).milliseconds(H100) == pytest.approx(9.9, abs=0.05)


def test_a_step_takes_the_longer_of_its_two_times() -> None:
    few, many = (traffic_model.weight_gradient(n, 4096, 151936, first=False) for n in (512, 4096))
    assert few.milliseconds(H100) == pytest.approx(1e3 * (8 * 4096 * 151936 + 2 * 512 * (4096 + 151936)) / (0.9 * 3.35e12))
    assert many.milliseconds(H100) == pytest.approx(1e3 * 2 * 4096 * 4096 * 151936 / 728e12)


def test_every_operation_of_the_loss_is_counted_once() -> None:
    for shape in (A, B, C):
        for strategy in traffic_model.STRATEGIES:
            whole = traffic_model.loss(strategy, *shape, 4096, H100)
            assert whole.flops == pytest.approx(6 * math.prod(shape), rel=1e-4)  # the target logits besides
            assert traffic_model.forward(strategy, *shape, 4096, H100).flops == pytest.approx(2 * math.prod(shape), rel=1e-4)
            assert whole.milliseconds > traffic_model.floor(*shape, H100)


def test_predictions_are_those_of_the_design() -> None:
    """kernels.md 2.1: the library's GEMM and the row kernel 178-185 and 46-48 ms, of the steps that it counts."""

    def library(shape: tuple[int, int, int]) -> float:
        steps = traffic_model.loss("library", *shape, 4096, H100).steps
        return sum(step.milliseconds(H100) for step in steps if step.bytes > 2e9 or step.flops > 1e12)  # not what is [n, H] alone

    assert 178 <= library(A) <= 185
    assert 46 <= library(B) <= 48


@pytest.mark.parametrize("device", [H100, H200, A100])
def test_the_strategies_cost_the_same_at_the_break_even_width(device: traffic_model.Device) -> None:
    width = traffic_model.break_even_width(device)
    for H, faster in ((int(0.9 * width), "anchored"), (int(1.1 * width), "library")):
        times = {s: traffic_model.loss(s, 16384, H, 151936, 4096, device).milliseconds for s in traffic_model.STRATEGIES}
        assert traffic_model.best_strategy(H, device) == faster == min(times, key=lambda s: times[s])
    assert traffic_model.break_even_width(H100) == pytest.approx(4105, abs=1)


def test_what_a_chunk_does_beside_its_products() -> None:
    """Bytes per element of [n, H], by the kernels: h gathered 2 + 2; target products 2 + 2; the scaled copy 2 + 2; the gradient of h, read
    as float32 sums and written over them, with a row of W, 4 + 4 + 2; dh cleared 4, the gradient copied into it 4 + 4."""
    n, H = 4096, 2048
    small = [traffic_model.target_products(n, H), *traffic_model.gradient_steps(n, H, 151936, first=False)]
    assert [s.bytes / (n * H) for s in small if not s.name.startswith("GEMM")] == [4 + 4, 4, 10 + 12]
    host = traffic_model.loss("library", *B, 4096, H100)
    assert host.milliseconds == pytest.approx(traffic_model.HOST_MS + sum(step.milliseconds(H100) for step in host.steps))
    assert traffic_model.loss("library", *C, 4096, H100).steps[-1].bytes == 6 * 4096 * 4096  # one chunk: dW is bfloat16 already
    assert host.steps[-1].bytes == 6 * (16384 + 151936) * 2048


@pytest.mark.parametrize("device", traffic_model.DEVICES, ids=lambda d: d.name)
def test_the_selection_table_is_the_models(device: traffic_model.Device) -> None:
    assert LIBRARY_FROM[device.name] == pytest.approx(traffic_model.break_even_width(device), rel=0.05)
    assert LIBRARY_FROM.keys() == {d.name for d in traffic_model.DEVICES}


def test_memory() -> None:
    room = traffic_model.memory("library", *B, 4096)
    assert room.workspace == 4096 * 151936 * 4  # a multiple of 64 already
    # float32 accumulators less bfloat16 gradients; a chunk's h, its scaled copy and its float32 sums
    assert room.over_gradients == room.workspace + 2 * (16384 + 151936) * 2048 + (2 + 2 + 4) * 4096 * 2048
    assert traffic_model.memory("anchored", *B, 4096).workspace == room.workspace / 2
    assert traffic_model.padded(50257) == 50304


@pytest.mark.parametrize("strategy", traffic_model.STRATEGIES)
def test_chunks_are_those_of_the_backend(strategy: traffic_model.Strategy) -> None:
    for N, H, V in (A, B, C, (8192, 1024, 151936), (512, 896, 50257)):
        head = Head.of(torch.empty(V, H, dtype=torch.bfloat16, device="meta"), None, None, None)
        with gpu_acceptance.chosen(strategy):
            for wanted in (True, False):
                rows = TritonBackend(CPU).rows_per_chunk(head, N, "exponentials", weight_gradient=wanted)
                assert traffic_model.chunk_rows(strategy, N, H, V, weight_gradient=wanted) == rows


def test_device_names() -> None:
    assert traffic_model.device_named("NVIDIA H100 80GB HBM3") is H100
    assert traffic_model.device_named("NVIDIA A100-SXM4-80GB") is A100
    assert traffic_model.device_named("NVIDIA GeForce RTX 4090") is None


def test_the_document_is_up_to_date(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert traffic_model.markdown() in text, "run python benchmarks/traffic_model.py --update docs/gpu.md"
    copy = tmp_path / "gpu.md"
    copy.write_text(text.replace("| 123.7 |", "| 1 |"))
    traffic_model.update(copy)
    assert copy.read_text() == text


# The script


def test_a_dry_run(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_acceptance.py"), "--dry-run", "--output", str(output)]
    committed = sorted((ROOT / "benchmarks" / "results").iterdir())
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == committed
    record = json.loads(output.read_text())
    sections = record["sections"]
    assert list(sections) == list(gpu_acceptance.SECTIONS)
    for name, section in sections.items():
        assert section["rows"], name
        assert not section["failures"], name
    assert sections["header"]["rows"][0]["torch"] == torch.__version__
    assert "H100 (989 TFLOP/s, 3.35 TB/s" in sections["header"]["rows"][0]["predictions_assume"]
    operators = {"linear_grpo_loss", "linear_logprobs", "grpo_loss in place", "selected_logprobs", "token_objective", "row_gradient"}
    launchers = {"row_statistics", "row_loss", "anchor_rows", "products_gradient", "anchored_products", "group_advantages_of"}
    launchers |= {"target_products", "hidden_gradient"}
    checked = {row["name"].split(":")[0].split(",")[0] for row in sections["correctness"]["rows"]}
    if not sections["correctness"]["cut"]:
        assert checked == operators | launchers
        assert {row["where"].rsplit(", ")[-1] for row in sections["correctness"]["rows"]} >= {"library", "anchored"}
    assert {row["kernel"] for row in sections["row_kernels"]["rows"]} >= {"device copy", "row_statistics", "row_loss, in place"}
    assert {row["contestant"] for row in sections["losses"]["rows"]} >= {"3 GEMMs, whole", "ours, library", "ours, anchored", "eager"}
    assert {row["direction"] for row in sections["losses"]["rows"]} == {"forward", "forward + backward"}
    for figure in numbers(record):
        assert math.isfinite(figure)
    assert all(target["measured"] is not None for target in record["targets"])
    text = output.with_suffix(".txt").read_text()
    assert text.strip() in done.stdout
    assert "DRY RUN" in text
    assert "NOT MET" in text  # an interpreter meets no target, and that is no failure


def numbers(value: Any) -> list[float]:
    """All of a record; what was not finite is text there, and is turned back."""
    if isinstance(value, dict):
        return [x for item in value.values() for x in numbers(item)]
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    if value in ("nan", "inf", "-inf"):
        return [float(value)]
    return [float(value)] if isinstance(value, (int, float)) else []


def late() -> float:
    return time.monotonic() + 60


def bench(**sizes: Any) -> Bench:
    return Bench(CPU, H100, replace(gpu_acceptance.DRY, **sizes), dry=True)


WRONG: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "target_products": (checks.target_rows, "target_products", lambda p: p * (1 + 1e-5)),
    "hidden_gradient": (checks.target_rows, "hidden_gradient", lambda g: g * (1 + 1e-5)),
    "row_statistics: entropy": (checks.rows, "row_statistics", lambda s: s * torch.tensor([1, 1 + 1e-4, 1, 1, 1])[:, None].to(s.device)),
    "token_objective: slopes": (checks.objective, "token_objective", lambda both: (both[0], both[1] * (1 + 1e-5))),
    "group_advantages_of, none": (checks.advantages, "group_advantages_of", lambda a: a + 1e-5),
    "anchor_rows, sums only: others": (checks.rows, "anchor_rows", lambda sums: (sums[0] * (1 + 1e-4), sums[1])),
    "anchored_products, sums only: weighted": (checks.anchored_gemm, "anchored_products", lambda sums: (sums[0], sums[1] * (1 + 1e-4))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose results are off by little more than rounding; without it, the same case passes."""
    module, launcher, spoil = WRONG[name]
    correct = getattr(module, launcher)
    case = Case.random((3, 16, 70), torch.bfloat16, torch.device(DEVICE))

    def failures() -> list[str]:
        judge = Judge("here")
        if launcher in ("anchor_rows", "anchored_products"):
            checks.check_products(judge, case)
        elif module is checks.target_rows:
            checks.check_targets(judge, case)
        elif launcher == "row_statistics":
            checks.check_rows(judge, case, OBJECTIVES["dapo + kl"], checks.products(case.hidden, case.weight, case.temperature))
        else:
            checks.check_tokens(judge, case, OBJECTIVES["dapo + kl"])
        return [check.name for check in judge.checks if not check.passed]

    assert not failures()
    monkeypatch.setattr(module, launcher, lambda *args, **kwargs: spoil(correct(*args, **kwargs)))
    assert name in failures()


def test_a_failed_check_is_a_failure_of_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(judge: Judge, *_: object) -> None:
        pass

    def wrong(judge: Judge, *_: object) -> None:
        judge.absolute("logp", torch.ones(3) * 1.001, torch.ones(3), torch.ones(3))
        judge.absolute("entropy", torch.ones(3), torch.ones(3), torch.ones(3))

    for name in ("check_products", "check_targets", "check_rows", "check_logits", "check_tokens"):
        monkeypatch.setattr(checks, name, nothing)
    monkeypatch.setattr(checks, "check_linear", wrong)
    section = Section("correctness", deadline=late())
    gpu_acceptance.check_case(section, Case.random((3, 16, 70), torch.bfloat16, CPU), "here")
    expected = ["dapo + kl, library", "dapo + kl, anchored", "dapo + entropy, library"]
    assert section.failures == [f"logp, here, {where}: error 1.00e-03, allowed 2.00e-05" for where in expected]
    assert [row["passed"] for row in section.rows] == 3 * [False, True]


@pytest.mark.parametrize("wrong", [lambda g: g * 0, lambda g: g * 1.02, lambda g: g * math.nan])
def test_a_wrong_gradient_is_no_rounding(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In bfloat16, where torch's own error is several percent."""
    exact = torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torchs = (exact * 1.05).bfloat16()
    judge = Judge("here")
    judge.relative("right", exact.bfloat16(), exact, torchs)
    judge.relative("wrong", wrong(exact).bfloat16(), exact, torchs)
    assert [check.passed for check in judge.checks] == [True, False]


def test_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """0, and 1 for a failed check, a section that raises, or correctness that was cut; the others run all the same, and all is written."""

    def fine(bench: Bench, section: Section) -> None:
        section.rows.append({"device": "none"})

    def failing(bench: Bench, section: Section) -> None:
        section.failures.append("a check failed")

    def raising(bench: Bench, section: Section) -> None:
        raise RuntimeError("planted")

    def cut(bench: Bench, section: Section) -> None:
        section.cut.append("the rest")

    for name, second, status in (
        ("correctness", fine, 0),
        ("correctness", failing, 1),
        ("correctness", raising, 1),
        ("correctness", cut, 1),
        ("losses", cut, 0),
    ):
        sections = dict.fromkeys(gpu_acceptance.SECTIONS, lambda bench, section: None) | {"header": fine}
        sections[name] = second if second is not fine else sections[name]
        monkeypatch.setattr(gpu_acceptance, "SECTIONS", sections)
        monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", "--dry-run", "--output", str(tmp_path / "out.json")])
        assert gpu_acceptance.main() == status
        assert ("planted" in capsys.readouterr().out) == (second is raising)
        assert json.loads((tmp_path / "out.json").read_text())["sections"]["header"]["rows"]


def test_a_late_section_is_cut() -> None:
    section = Section("losses", deadline=time.monotonic() - 1)
    gpu_acceptance.run_losses(bench(), section)
    gpu_acceptance.run_correctness(bench(), section)
    assert not section.rows
    assert section.cut[0] == "4×16×130"
    assert len(section.cut) == 6  # two shapes, and two shapes in two dtypes


def test_who_raises_is_left_out_and_ours_fails() -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image")

    section = Section("losses", deadline=late())
    ran: list[str] = []
    contestants = [
        Contestant("good", lambda: ran.append("good")),
        Contestant("a peer", broken),
        Contestant("ours", broken, ours=True),
    ]
    samples = gpu_acceptance.compete(bench(rounds=3), section, "here", contestants)
    assert list(samples) == ["good"]
    assert len(samples["good"]) == 3
    assert len(ran) == 5  # twice to warm up
    assert section.left_out == ["here: a peer: RuntimeError: no kernel image"]
    assert section.failures == ["here: ours: RuntimeError: no kernel image"]


def test_a_strategy_is_chosen_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "library")
    with gpu_acceptance.chosen("anchored"):
        assert os.environ[OVERRIDE] == "anchored"
    with gpu_acceptance.chosen(None):
        assert OVERRIDE not in os.environ
    assert os.environ[OVERRIDE] == "library"


def test_results_go_where_they_should(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wet = replace(bench(), dry=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.delenv("OUT", raising=False)
    assert gpu_acceptance.output_path(None, wet) == ROOT / "benchmarks" / "results" / "gpu_acceptance_nvidia_h100_80gb_hbm3.json"
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_acceptance.output_path(None, wet) == tmp_path / "gpu_acceptance_nvidia_h100_80gb_hbm3.json"
    assert gpu_acceptance.output_path(tmp_path / "x.json", wet) == tmp_path / "x.json"
    assert not gpu_acceptance.output_path(None, bench()).is_relative_to(ROOT)


def test_all_sections_fit_eight_minutes() -> None:
    assert sum(gpu_acceptance.FULL.seconds.values()) + 40 <= gpu_acceptance.LIMIT <= 470
    assert gpu_acceptance.FULL.seconds.keys() == gpu_acceptance.DRY.seconds.keys() == gpu_acceptance.SECTIONS.keys()


# Guards


def row(kernel: str, dtype: str, of_copy: float) -> dict[str, Any]:
    return {"kernel": kernel, "where": f"4096×151936 {dtype}", "of_copy": of_copy}


@pytest.mark.parametrize(("share", "met"), [(0.9, True), (0.8, False)])
def test_the_row_target_is_judged_on_bf16_row_loss(share: float, met: bool) -> None:
    sections = {name: Section(name, late()) for name in gpu_acceptance.SECTIONS}
    sections["row_kernels"].rows += [
        row("device copy", "bf16", 1.0),
        row("row_loss, in place", "bf16", share),
        row("row_loss, in place", "float32", 0.67),
        row("row_gradient, in place", "bf16", 0.95),
    ]
    goal = gpu_acceptance.targets(bench(), sections)[1]
    assert (goal["measured"], goal["met"]) == (share, met)
    assert goal["beside"] == {"row_loss, in place, float32": 0.67, "row_gradient, in place, bf16": 0.95}
    text = gpu_acceptance.table(sections | {"row_kernels": Section("row_kernels", late())}, [goal])
    assert "(no target: row_loss, in place, float32 0.67; row_gradient, in place, bf16 0.95)" in text


class Event:
    """Of a pretended device, which has not got to it before `synchronize`."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self) -> None:
        self._log.append("event")

    def query(self) -> bool:
        return "sleep" not in self._log

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@pytest.mark.parametrize("device_only", [True, False])
def test_a_row_kernel_is_queued_behind_a_delay(device_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(log))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    contestant = Contestant("kernel", lambda: log.append("call"), device_only=device_only)
    sample = gpu_acceptance.measure(replace(bench(), device=torch.device("cuda")), contestant)
    assert log == ["synchronize", *(["sleep"] if device_only else []), "event", "call", "event", "synchronize"]
    assert sample.waited is not device_only


def test_row_kernels_and_their_copy_are_timed_on_the_device_alone() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert all(c.device_only for c in gpu_acceptance.row_contestants(bench(), dtype))
    there = replace(bench(), device=torch.device(DEVICE))
    inputs = gpu_contenders.random_inputs((4, 16, 70), 2, there.device)
    section = Section("losses", late())
    assert not any(c.device_only for c in gpu_acceptance.loss_contestants(there, section, (4, 16, 70), inputs))


def test_compiling_comes_last_and_at_the_first_shape_only() -> None:
    there = replace(bench(), device=torch.device(DEVICE))

    def names(shape: tuple[int, int, int]) -> list[str]:
        inputs = gpu_contenders.random_inputs(shape, 2, there.device)
        return [c.name for c in gpu_acceptance.loss_contestants(there, Section("losses", late()), shape, inputs)]

    first, second = (names(shape) for shape in gpu_acceptance.DRY.losses)
    assert first[-1] == "torch.compile"
    assert second == first[:-1]


def test_nothing_is_released_between_warm_up_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[object] = []
    monkeypatch.setattr(gpu_acceptance, "release", released.append)
    calls: list[str] = []
    contestants = [Contestant(name, lambda name=name: calls.append(name)) for name in "ab"]
    gpu_acceptance.compete(bench(rounds=2), Section("losses", late()), "here", contestants)
    assert calls == [*"aabb", *"ab", *"ba"]
    assert not released


@pytest.mark.parametrize(("seconds_late", "rounds"), [(1.0, 3), (gpu_acceptance.GRACE + 1, 1)])
def test_three_warm_rounds_unless_much_too_late(seconds_late: float, rounds: int) -> None:
    section = Section("losses", late())

    def delayed() -> None:
        section.deadline = time.monotonic() - seconds_late

    samples = gpu_acceptance.compete(bench(rounds=9), section, "here", [Contestant("a", delayed)])
    assert len(samples["a"]) == rounds
    assert section.cut == [f"here: rounds {rounds + 1} to 9"]


def fails_at(run: int, error: Exception) -> Callable[[], None]:
    runs: list[int] = []

    def call() -> None:
        runs.append(1)
        if len(runs) == run:
            raise error

    return call


@pytest.mark.parametrize("run", [1, 2, 3, 4])
@pytest.mark.parametrize("ours", [True, False])
def test_out_of_memory_in_any_run_loses_one_contestant(run: int, ours: bool) -> None:
    section = Section("losses", late())
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    contestants = [Contestant("wide", fails_at(run, error), ours=ours), Contestant("narrow", lambda: None)]
    samples = gpu_acceptance.compete(bench(rounds=3), section, "here", contestants)
    assert {name: len(values) for name, values in samples.items()} == ({"wide": 1} if run == 4 else {}) | {"narrow": 3}
    notes = ["here: wide: OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"]
    assert (section.failures, section.left_out) == ((notes, []) if ours else ([], notes))


LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("error", [LOST, RuntimeError("CUDA error: unspecified launch failure")])
def test_a_lost_device_stops_the_sections_and_all_is_written(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def header(bench: Bench, section: Section) -> None:
        section.rows.append({"device": "none"})

    def rows(bench: Bench, section: Section) -> None:
        ran.append("row_kernels")
        gpu_acceptance.compete(bench, section, "here", [Contestant("a peer", fails_at(1, error)), Contestant("b", lambda: ran.append("b"))])

    sections = dict.fromkeys(gpu_acceptance.SECTIONS, lambda bench, section: ran.append(section.name))
    monkeypatch.setattr(gpu_acceptance, "SECTIONS", sections | {"header": header, "row_kernels": rows})
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", "--dry-run", "--output", str(tmp_path / "out.json")])
    assert gpu_acceptance.main() == 1
    assert ran == ["correctness", "row_kernels"]
    record = json.loads((tmp_path / "out.json").read_text())["sections"]
    assert record["row_kernels"]["failures"] == [f"here: a peer: {type(error).__name__}: {error}"]  # once
    assert record["strategies"]["cut"] == ["strategies, for the device was lost"]
    assert "FAILED: here: a peer" in capsys.readouterr().out


def test_a_device_is_lost_where_it_no_longer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch by Triton says neither AcceleratorError nor "CUDA error"."""
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert not gpu_acceptance.is_lost(error)
    assert not gpu_acceptance.is_lost(RuntimeError("CUDA error: out of memory"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not gpu_acceptance.is_lost(error)
    monkeypatch.setattr(torch.cuda, "synchronize", fails_at(1, LOST))
    assert gpu_acceptance.is_lost(error)


@pytest.mark.parametrize("answer", ["", "\n", "570.1, 1980\n", "No devices were found\n"])
def test_odd_answers_of_nvidia_smi(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "0"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: Properties)
    answers: dict[str, Any] = {"args": [], "returncode": 0}
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess(**answers, stdout=answer))
    assert gpu_acceptance.query_nvidia_smi() == {}
    good = "570.1, 1980 MHz, 2619 MHz, 1980 MHz, 300 W, 700 W, 40, 0x0\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess(**answers, stdout=good))
    assert gpu_acceptance.query_nvidia_smi()["clocks.sm"] == "1980 MHz"


def test_results_that_cannot_be_written_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    sections = dict.fromkeys(gpu_acceptance.SECTIONS, lambda bench, section: section.left_out.append(f"{section.name} ran"))
    monkeypatch.setattr(gpu_acceptance, "SECTIONS", sections)
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", "--dry-run", "--output", str(tmp_path / "file" / "out.json")])
    assert gpu_acceptance.main() == 1
    text = capsys.readouterr().out
    assert "NOT WRITTEN" in text
    assert all(f"left out: {name} ran" in text for name in sections)


def test_a_release_that_raises_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", fails_at(1, LOST))
    gpu_acceptance.release(replace(bench(), device=torch.device("cuda")))


def test_what_does_not_fit_the_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = gpu_acceptance.FULL.correctness[1]
    assert 20e9 <= checks.bytes_needed(shape) <= 25e9
    section = Section("correctness", late())
    for free, width in ((30e9, 4096), (20e9, 2048), (10e9, 1024), (1e9, None)):
        monkeypatch.setattr(gpu_acceptance, "free_bytes", lambda bench, free=free: free)
        chosen = gpu_acceptance.narrowed(bench(), section, shape)
        assert chosen == (None if width is None else (128, width, 151936))
    assert section.left_out[0] == "128×4096×151936, for want of memory: 128×2048×151936 is checked instead"
    assert len(section.left_out) == 2
    assert section.cut == ["128×4096×151936: it needs 24 GB of memory, and 1 can be had"]
    gpu_acceptance.run_losses(bench(losses=(A,)), section)
    assert section.left_out[-1] == "32768×4096×151936: it needs 24 GB of memory, and 1 can be had"


def test_peers_with_full_logits_need_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_acceptance, "free_bytes", lambda bench: 13.0 * A[0] * A[2])
    section = Section("losses", late())
    run: dict[str, Any] = dict.fromkeys(("eager", "torch.compile", "Liger, on logits", "TRL, chunked"), lambda: torch.zeros)
    assert [name for name, _ in gpu_acceptance.available(bench(), section, A, run)] == ["Liger, on logits", "TRL, chunked"]
    assert [note.split(": ")[1] for note in section.left_out] == ["eager", "torch.compile"]
    monkeypatch.setattr(gpu_acceptance, "free_bytes", lambda bench: 1.0 * A[0] * A[2])
    assert [name for name, _ in gpu_acceptance.available(bench(), section, A, run)] == ["TRL, chunked"]


def test_arguments_of_verls_kernel() -> None:
    """As they were in 2025, and as they are."""
    known = {"hidden": "h", "weight": "w", "labels": "y", "temperature": 1.0, "reduction": "none"}

    def before(ctx, hidden, weight, labels, reduction="mean", temperature=1.5, dist_process_group=None) -> None: ...  # type: ignore[no-untyped-def]

    def now(ctx, hidden, weight, labels, temperature=1.5, reduction="none", dist_process_group=None) -> None: ...  # type: ignore[no-untyped-def]

    def unlike(ctx, hidden, weight, labels, scale) -> None: ...  # type: ignore[no-untyped-def]

    assert gpu_contenders.arguments(before, known) == ["h", "w", "y", "none", 1.0, None]
    assert gpu_contenders.arguments(now, known) == ["h", "w", "y", 1.0, "none", None]
    with pytest.raises(TypeError, match="scale"):
        gpu_contenders.arguments(unlike, known)
