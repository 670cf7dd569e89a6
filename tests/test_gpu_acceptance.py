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
import traffic_model
from acceptance_checks import OBJECTIVES, Case, Judge
from gpu_acceptance import Bench, Contestant, Section
from traffic_model import A100, H100, H200

from grpo_kernels.backends.triton import TritonBackend
from grpo_kernels.head import Head
from grpo_kernels.triton_kernels.selection import OVERRIDE
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
    # 132 rows of bfloat16 are 40 MB, inside the L2 cache of 50: the second read is none of memory. float32 rows are 80 MB.
    assert traffic_model.row_kernel_bytes(32768, 151936, 2, H100, reads=2, writes=1) == 4 * logits
    assert traffic_model.row_kernel_bytes(32768, 151936, 4, H100, reads=2, writes=1) == 12 * logits
    # "4 B read + 2 B write at 90 % bandwidth: 9.9 ms"
    assert traffic_model.Step("", 6.0 * logits).milliseconds(H100) == pytest.approx(9.9, abs=0.05)


def test_a_step_takes_the_longer_of_its_two_times() -> None:
    few, many = (traffic_model.gradient_steps(n, 4096, 151936, first=False)[-1] for n in (512, 4096))
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
    """kernels.md 2.1: the library's GEMM and the row kernel 178-185 and 46-48 ms."""
    library = [traffic_model.loss("library", *shape, 4096, H100).milliseconds for shape in (A, B)]
    assert 178 <= library[0] <= 185
    assert 46 <= library[1] <= 48


@pytest.mark.parametrize("device", [H100, H200, A100])
def test_the_strategies_cost_the_same_at_the_break_even_width(device: traffic_model.Device) -> None:
    width = traffic_model.break_even_width(device)
    for H, faster in ((int(0.9 * width), "anchored"), (int(1.1 * width), "library")):
        times = {s: traffic_model.loss(s, 16384, H, 151936, 4096, device).milliseconds for s in traffic_model.STRATEGIES}
        assert traffic_model.best_strategy(H, device) == faster == min(times, key=lambda s: times[s])
    assert traffic_model.break_even_width(H100) == pytest.approx(4105, abs=1)


def test_memory() -> None:
    room = traffic_model.memory("library", *B, 4096)
    assert room.workspace == 4096 * 151936 * 4  # a multiple of 64 already
    assert room.over_gradients == room.workspace + 2 * (16384 + 151936) * 2048  # float32 accumulators less bfloat16 gradients
    assert traffic_model.memory("anchored", *B, 4096).workspace == room.workspace / 2
    assert traffic_model.padded(50257) == 50304


@pytest.mark.parametrize("strategy", traffic_model.STRATEGIES)
def test_chunks_are_those_of_the_backend(strategy: traffic_model.Strategy) -> None:
    for N, H, V in (A, B, C, (8192, 1024, 151936), (512, 896, 50257)):
        head = Head.of(torch.empty(V, H, dtype=torch.bfloat16, device="meta"), None, None, None)
        with gpu_acceptance.chosen(strategy):
            assert traffic_model.chunk_rows(strategy, N, H, V) == TritonBackend(CPU).rows_per_chunk(head, N, "exponentials")


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
    operators = {"linear_grpo_loss", "linear_logprobs", "grpo_loss in place", "selected_logprobs", "token_objective", "row_gradient"}
    launchers = {"row_statistics", "row_loss", "anchor_rows", "products_gradient", "anchored_products", "group_advantages_of"}
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

    for name in ("check_products", "check_rows", "check_logits", "check_tokens"):
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
    """0, and 1 for a failed check or a section that raises; the others run all the same, and all is written."""

    def fine(bench: Bench, section: Section) -> None:
        section.rows.append({"device": "none"})

    def failing(bench: Bench, section: Section) -> None:
        section.failures.append("a check failed")

    def raising(bench: Bench, section: Section) -> None:
        raise RuntimeError("planted")

    for second, status in ((None, 0), (failing, 1), (raising, 1)):
        sections = dict.fromkeys(gpu_acceptance.SECTIONS, lambda bench, section: None)
        sections |= {"header": fine} | ({} if second is None else {"correctness": second})
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
