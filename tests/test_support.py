"""Log-probabilities over what a sampler with top-k or top-p could draw (P16: TRL #6789)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossCounts, Objective, linear_grpo_loss, linear_logprobs, selected_logprobs, support_pass
from grpo_kernels.reference import reference_grpo_loss
from problems import Problem, leaves, make, relative


def top_k(logits: Tensor, k: int) -> Tensor:
    return logits.topk(k, 1).indices


def top_p(logits: Tensor, p: float) -> Tensor:
    """[n, K] ids, -1 beyond the smallest set of at least probability p."""
    probabilities, ids = torch.softmax(logits, 1).sort(1, descending=True)
    outside = probabilities.cumsum(1) - probabilities >= p
    return torch.where(outside, -1, ids)[:, : int((~outside).sum(1).max())]


def masked(logits: Tensor, support: Tensor, targets: Tensor) -> Tensor:
    """The logits with what is not in the support at minus infinity."""
    keep = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool)
    keep.scatter_(1, torch.where(support >= 0, support, logits.shape[1]), True)
    keep = keep[:, :-1].scatter(1, targets[:, None], True)
    return logits.masked_fill(~keep, -torch.inf)


def exact(p: Problem, support: Tensor) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """Leaves in float64, log-probabilities and entropies over the support."""
    hidden, weight, bias = tensors = leaves(p, torch.float64)
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    if p.softcap is not None:
        logits = p.softcap * torch.tanh(logits / p.softcap)
    logits = logits / (p.temperature[:, None] if isinstance(p.temperature, Tensor) else p.temperature)
    distribution = torch.log_softmax(masked(logits, support, p.targets), -1)
    logprobs = distribution.gather(1, p.targets[:, None])[:, 0]
    return list(tensors), logprobs, -(distribution.exp() * distribution.clamp(min=-1e30)).sum(-1)


@pytest.mark.parametrize("how", ["top_k", "top_p"])
def test_p16_the_ratio_to_the_sampler_is_1_over_its_support(how: str) -> None:
    """Over the whole vocabulary the ratio is the kept mass instead, 0.9 here for top-k and 0.8 and more for top-p."""
    p = make(400, 16, 500, masked=0.0)
    logits = p.hidden @ p.weight.t()
    support = top_k(logits, 20) if how == "top_k" else top_p(logits, 0.8)
    sampler = torch.log_softmax(masked(logits, support, support[:, 0]), -1)
    drawn = torch.multinomial(sampler.exp(), 1, generator=torch.Generator().manual_seed(0))
    sampled = sampler.gather(1, drawn)[:, 0]
    whole = (linear_logprobs(p.hidden, p.weight, drawn[:, 0]).logprobs - sampled).exp()
    ours = (linear_logprobs(p.hidden, p.weight, drawn[:, 0], support=support).logprobs - sampled).exp()
    assert 0.5 < float(whole.mean()) < 0.97
    assert float((whole < 0.9).float().mean()) > 0.2
    assert float((ours - 1).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": True}, {"softcap": 4.0}, {"bias": True, "softcap": 4.0, "temperature": torch.linspace(0.5, 1.5, 60)}],
)
def test_gradients_against_float64(settings: dict[str, Any]) -> None:
    p = make(60, 33, 203, **settings)
    support = top_p(p.hidden @ p.weight.t(), 0.7)
    hidden, weight, bias = leaves(p)
    tokens = linear_logprobs(
        hidden, weight, p.targets, support=support, mask=p.mask, bias=bias, softcap=p.softcap, temperature=p.temperature
    )
    g = torch.Generator().manual_seed(1)
    upstream = torch.randn(2, 60, generator=g) * p.mask
    (tokens.logprobs * upstream[0] + tokens.entropy * upstream[1]).sum().backward()
    tensors, logprobs, entropy = exact(p, support)
    (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()
    assert float((tokens.logprobs - logprobs).detach()[p.mask].abs().max()) < 2e-5
    assert float((tokens.entropy - entropy).detach()[p.mask].abs().max()) < 2e-5
    for mine, theirs in zip((hidden, weight, bias), tensors, strict=True):
        if mine is not None and theirs is not None:
            assert relative(mine.grad, theirs.grad) < 1e-6


@pytest.mark.parametrize("objective", [Objective.dapo(), Objective.gspo(clip_low=0.1, clip_high=0.1), Objective.grpo(entropy_coef=0.1)])
def test_the_loss_over_a_support(monkeypatch: pytest.MonkeyPatch, objective: Objective) -> None:
    monkeypatch.setattr(support_pass, "_WORKSPACE_BYTES", 4 * 16 * 21 * 7)  # seven rows at a time
    p = make(60, 16, 203, objective=objective)
    support = top_k(p.hidden @ p.weight.t(), 20)
    hidden, weight, _ = leaves(p)
    tensors, logprobs, entropy = exact(p, support)
    old = logprobs.detach().float() + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(2))
    result = linear_grpo_loss(
        hidden, weight, p.targets, p.advantages, objective=objective, cu_seqlens=p.cu_seqlens, old_logprobs=old, mask=p.mask,
        support=support,
    )  # fmt: skip
    result.loss.backward()
    counts = LossCounts.of(p.mask, p.sequence_of_row)
    loss = reference_grpo_loss(
        logprobs, entropy, p.advantages.double(), objective=objective, sequence_of_row=p.sequence_of_row, mask=p.mask,
        tokens=counts.tokens, sequences=counts.sequences, old_logprobs=old.double(),
    )  # fmt: skip
    loss.backward()
    assert float(result.loss.detach()) == pytest.approx(float(loss.detach()), abs=1e-6)
    assert relative(hidden.grad, tensors[0].grad) < 2e-6
    assert relative(weight.grad, tensors[1].grad) < 2e-6


def test_what_is_not_in_the_support_may_be_anything() -> None:
    p = make(6, 8, 40, masked=0.0)
    targets = torch.where(p.targets == 0, 1, p.targets)
    support = torch.stack([(targets + 1) % 39 + 1, torch.full((6,), -1)], 1)
    poisoned = p.weight.clone()
    poisoned[0] = float("nan")
    gradients = []
    for weight in (p.weight, poisoned):
        hidden = p.hidden.clone().requires_grad_()
        linear_logprobs(hidden, weight, targets, support=support).logprobs.sum().backward()
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)
    assert torch.isfinite(gradients[0]).all()


def test_an_impossible_target() -> None:
    p = make(6, 8, 40, masked=0.0)
    bias = torch.zeros(40)
    bias[p.targets[0]] = -torch.inf
    others = (p.targets[:, None] + torch.arange(1, 4)) % 40
    for support in (None, others):
        assert linear_logprobs(p.hidden, p.weight, p.targets, bias=bias, support=support).logprobs[0] == -torch.inf


def test_mixed_dtypes() -> None:
    p = make(30, 8, 40, masked=0.0)
    hidden, weight, bias = (
        p.hidden.bfloat16().requires_grad_(),
        p.weight.clone().requires_grad_(),
        torch.zeros(40).double().requires_grad_(),
    )
    support = top_k(p.hidden @ p.weight.t(), 5)
    linear_logprobs(hidden, weight, p.targets, support=support, bias=bias).logprobs.sum().backward()
    whole = linear_logprobs(hidden, weight.half(), p.targets, support=support).logprobs
    assert whole.dtype == torch.float32
    assert [t.grad.dtype for t in (hidden, weight, bias)] == [torch.bfloat16, torch.float32, torch.float64]


def test_a_support_of_the_whole_vocabulary_is_no_support() -> None:
    p = make(30, 8, 40, masked=0.0)
    every = torch.arange(40).expand(30, 40)
    ours = linear_logprobs(p.hidden, p.weight, p.targets, support=every)
    whole = linear_logprobs(p.hidden, p.weight, p.targets)
    assert torch.allclose(ours.logprobs, whole.logprobs, atol=1e-5)
    assert torch.allclose(ours.entropy, whole.entropy, atol=1e-5)


def test_a_support_of_the_target_alone_is_certainty() -> None:
    p = make(30, 8, 40, masked=0.0)
    hidden, weight, _ = leaves(p)
    for support in (p.targets[:, None], torch.full((30, 3), -1)):
        tokens = linear_logprobs(hidden, weight, p.targets, support=support)
        assert torch.equal(tokens.logprobs.detach(), torch.zeros(30))
        assert torch.equal(tokens.entropy.detach(), torch.zeros(30))
        (gradient,) = torch.autograd.grad(tokens.logprobs.sum() + tokens.entropy.sum(), hidden)
        assert torch.equal(gradient, torch.zeros(30, 8))


def test_logits_take_a_support_as_minus_infinity() -> None:
    p = make(30, 8, 40, masked=0.0)
    logits = p.hidden @ p.weight.t()
    support = top_k(logits, 5)
    from_logits = selected_logprobs(masked(logits, support, p.targets), p.targets)
    assert torch.allclose(from_logits.logprobs, linear_logprobs(p.hidden, p.weight, p.targets, support=support).logprobs, atol=1e-5)


def test_under_torch_compile() -> None:
    p = make(30, 8, 40)
    support = top_k(p.hidden @ p.weight.t(), 5)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        tokens = linear_logprobs(hidden, weight, p.targets, support=support)
        result = linear_grpo_loss(hidden, weight, p.targets, p.advantages, objective=OBJECTIVE, support=support)
        return result.loss + tokens.logprobs.mean() + tokens.entropy.mean()

    hidden, weight, _ = leaves(p)
    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, weight), (hidden, weight))
    for a, b in zip(compiled, expected, strict=True):
        assert relative(a, b) < 1e-7


OBJECTIVE = Objective.dapo()


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (torch.zeros(4, 2), "support has shape \\(4, 2\\) and dtype torch.float32"),
        (torch.zeros(3, 2, dtype=torch.long), "support has shape \\(3, 2\\)"),
        (torch.zeros(4, 0, dtype=torch.long), "support has shape \\(4, 0\\)"),
        (torch.tensor([[0, 1], [1, 20], [1, 2], [1, 2]]), "support holds 20 at row 1; ids must be in \\[0, 20\\)"),
        (torch.tensor([[0, 1], [1, 2], [2, 2], [1, 2]]), "support holds a token twice at row 2"),
    ],
)
def test_bad_supports_are_named(support: Tensor, message: str) -> None:
    p = make(4, 8, 20)
    with pytest.raises(ValueError, match=message):
        linear_logprobs(p.hidden, p.weight, p.targets, support=support)
