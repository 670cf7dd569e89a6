"""Reading a prompt once per group gives what reading it for every completion gives: hidden states and all gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_trainer.errors import UserError
from grpo_trainer.policy import Policy, find_model
from grpo_trainer.shared_prompt import completion_hidden
from tiny import CONFIGS, load_policy, tokenizer

PROMPTS = [list(range(3, 20)), [5], list(range(40, 70))]
COMPLETIONS = [
    [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [7], [9, 8, 7]],
    [[100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110]],
    [[50, 51], [52]],
]


def separate(policy: Policy) -> Tensor:
    """One unpadded row per completion, no cache."""
    rows = []
    for prompt, completions in zip(PROMPTS, COMPLETIONS, strict=True):
        for completion in completions:
            ids = torch.tensor([prompt + completion])
            hidden = policy.trunk(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state[0]
            rows.append(hidden[len(prompt) - 1 : -1])
    return torch.cat(rows)


def gradients(policy: Policy, hidden: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "gemma2"])
def test_equal_to_separate_rows(tmp_path: Path, kind: str) -> None:
    policy = load_policy(tmp_path, kind)
    policy.model.train()
    shared, apart = completion_hidden(policy, PROMPTS, COMPLETIONS), separate(policy)
    assert shared.shape == (12 + 1 + 3 + 11 + 2 + 1, 48)
    assert torch.allclose(shared, apart, atol=2e-5, rtol=1e-4)
    ours, theirs = gradients(policy, shared), gradients(policy, apart)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_completions_of_one_token_only(tmp_path: Path) -> None:
    policy = load_policy(tmp_path)
    assert completion_hidden(policy, [[1, 2], [3]], [[[4]], [[5], [6]]]).shape == (3, 48)


def test_a_model_with_a_soft_cap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="soft cap"):
        load_policy(tmp_path, "gemma2", scale=300.0)


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=263, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_experts=0, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        eos_token_id=256, decoder_sparse_step=1, mlp_only_layers=[0, 1, 2, 3],
    )  # fmt: skip
    Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="only attention layers can share a prompt"):
        find_model(str(tmp_path))
