"""The local rollout engine against full forward passes and transformers' own greedy decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_trainer.errors import UserError
from grpo_trainer.policy import Policy
from grpo_trainer.rollout.engine import Completion
from grpo_trainer.rollout.local import LocalEngine
from tiny import EOS, load_policy

PROMPTS = [list(range(3, 20)), [5], list(range(40, 70)), [9, 9, 9]]


def full_forward(policy: Policy, prompt: list[int], completion: Completion, temperature: float) -> torch.Tensor:
    ids = torch.tensor([prompt + completion.token_ids])
    with torch.no_grad():
        logits = policy.model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3", "mistral_window"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_a_full_forward_pass(tmp_path: Path, kind: str, temperature: float) -> None:
    policy = load_policy(tmp_path, kind, scale=2.0 if kind == "llama_tied" else 10.0)
    policy.eos_ids = frozenset(range(200, 257))  # several, so that rows end at different times
    engine = LocalEngine(policy, rows=64)
    groups = engine.generate(PROMPTS, 5, temperature=temperature, max_new_tokens=25, generator=engine.generator(3))
    assert [len(group) for group in groups] == [5] * 4
    lengths = set()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            lengths.add(len(completion.token_ids))
            assert len(completion.logprobs) == len(completion.token_ids)
            expected = full_forward(policy, prompt, completion, temperature)
            assert float((torch.tensor(completion.logprobs) - expected).abs().max()) < 1e-4
            ends = [token for token in completion.token_ids if token >= 200 and token <= 256]
            if completion.finish_reason == "stop":
                assert ends == completion.token_ids[-1:]  # one end token, kept, and nothing after it
            else:
                assert not ends
                assert len(completion.token_ids) == 25
    assert len(lengths) > 3, "the test wants rows that end at different times"


def test_greedy_equals_transformers(tmp_path: Path) -> None:
    policy = load_policy(tmp_path)
    engine = LocalEngine(policy, rows=64)
    groups = engine.generate(PROMPTS, 1, temperature=0.0, max_new_tokens=20, generator=engine.generator(0))
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        ids = torch.tensor([prompt])
        theirs = policy.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=EOS)
        assert completion.token_ids == theirs[0, len(prompt) :].tolist()


def test_the_number_of_rows_at_once_changes_no_greedy_completion(tmp_path: Path) -> None:
    policy = load_policy(tmp_path)
    outcomes = []
    for rows in (1, 3, 64):
        engine = LocalEngine(policy, rows=rows)
        outcomes.append(engine.generate(PROMPTS, 2, temperature=0.0, max_new_tokens=12, generator=engine.generator(0)))
    tokens = [[c.token_ids for group in outcome for c in group] for outcome in outcomes]
    assert tokens[0] == tokens[1] == tokens[2]


def test_the_same_seed_gives_the_same_samples_and_members_of_a_group_differ(tmp_path: Path) -> None:
    engine = LocalEngine(load_policy(tmp_path), rows=64)
    runs = [engine.generate(PROMPTS, 4, temperature=1.0, max_new_tokens=12, generator=engine.generator(seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len({tuple(c.token_ids) for c in runs[0][0]}) > 1


def test_samples_follow_the_distribution(tmp_path: Path) -> None:
    policy = load_policy(tmp_path, scale=30.0)
    engine = LocalEngine(policy, rows=4000)
    (group,) = engine.generate([[5, 6]], 4000, temperature=1.3, max_new_tokens=1, generator=engine.generator(0))
    with torch.no_grad():
        expected = torch.softmax(policy.model(torch.tensor([[5, 6]])).logits[0, -1] / 1.3, -1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=expected.numel()) / 4000
    assert expected.max() > 0.05
    assert float((counts - expected).abs().max()) < 0.03


def test_training_mode_is_restored(tmp_path: Path) -> None:
    policy = load_policy(tmp_path)
    policy.model.train()
    engine = LocalEngine(policy, rows=8)
    engine.generate([[1]], 2, temperature=1.0, max_new_tokens=2, generator=engine.generator(0))
    assert policy.model.training


def test_broken_weights_are_reported(tmp_path: Path) -> None:
    policy = load_policy(tmp_path)
    with torch.no_grad():
        next(policy.trunk.parameters()).fill_(float("nan"))
    engine = LocalEngine(policy, rows=8)
    with pytest.raises(UserError, match="not finite"):
        engine.generate([[1]], 2, temperature=1.0, max_new_tokens=2, generator=engine.generator(0))
