"""The rows of a loss: checked, dropped where they cannot move the weights, and joined with the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.objective import Objective, top_entropy_threshold
from grpo_kernels.packing import LossCounts, RowLayout
from grpo_kernels.token_batch import TokenBatch, TokenLoss

# Of an objective, tokens and their shares: `Objective.evaluate` and share * d loss / d logp, [n], in one launch (see `one_launch`).
Evaluator = Callable[[Objective, TokenBatch, Tensor], tuple[TokenLoss, Tensor]]


@dataclass(frozen=True)
class LossInputs:
    """What a caller gives beside the log-probabilities or what they are made of; see `linear_grpo_loss`."""

    objective: Objective
    advantages: Tensor
    cu_seqlens: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    mask: Tensor | None = None
    counts: LossCounts | None = None
    sequence_lengths: Tensor | None = None
    entropy_threshold: float | None = None

    def check(self) -> None:
        objective = self.objective
        if not isinstance(objective, Objective):
            raise TypeError(f"objective is {objective!r}; it must be an Objective, such as Objective.dapo()")
        if not isinstance(self.counts, LossCounts | None):
            raise TypeError(f"counts is {self.counts!r}; it must be LossCounts(tokens=..., sequences=...)")
        for name in ("advantages", "cu_seqlens", "old_logprobs", "ref_logprobs", "rollout_logprobs", "mask", "sequence_lengths"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and not (value is None and name != "advantages"):
                raise TypeError(f"{name} is a {type(value).__name__}; it must be a tensor")
        if self.entropy_threshold is not None and objective.top_entropy == 1.0:
            raise ValueError(f"entropy_threshold is {self.entropy_threshold}, but objective.top_entropy is 1: every token is kept")
        threshold = self.entropy_threshold
        if threshold is not None and not (isinstance(threshold, Real) and threshold == threshold):
            raise ValueError(f"entropy_threshold is {threshold!r}; it must be None or a number of nats")
        if objective.kl_coef and self.ref_logprobs is None:
            raise ValueError(f"objective.kl_coef is {objective.kl_coef}, but ref_logprobs is None; give them, or set kl_coef to 0")
        if objective.rollout_correction is not None and self.rollout_logprobs is None:
            raise ValueError("objective.rollout_correction is set, but rollout_logprobs is None; give them, or leave the correction out")


@dataclass(frozen=True)
class LossRows:
    """The rows of a call that can move the weights, and what the loss needs to know of each but its log-probability.

    `index` [n] int64 are their places in the flattened input, in order; the other tensors are [n] and aligned with them, but for `lengths`
    [sequences] and the `counted` ones, of all rows that count. `objective` is without its rollout correction where that is in
    `policy_weight` already; `rollout_ratio` is then its ratio. `shares` and `bonus`, float64, weigh a token's loss and its entropy.
    `evaluator`: in place of torch, see `one_launch`.
    """

    objective: Objective
    layout: RowLayout
    counted: Tensor
    counted_ratio: Tensor
    counted_weight: Tensor
    index: Tensor
    advantages: Tensor
    old: Tensor | None
    ref: Tensor | None
    rollout: Tensor | None
    sequence_of_row: Tensor
    lengths: Tensor
    shares: Tensor
    policy_weight: Tensor
    rollout_ratio: Tensor
    bonus: Tensor
    entropy_threshold: Tensor | None
    picks_by_entropy: bool
    evaluator: Evaluator | None = None

    @classmethod
    def of(cls, targets: Tensor, inputs: LossInputs) -> LossRows:
        """Checks everything that has a value per row or per sequence; `targets` says the shape and the device.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        inputs.check()
        objective, counts = inputs.objective, inputs.counts
        layout = RowLayout.of(targets.shape, targets.device, inputs.mask, inputs.cu_seqlens)
        _check_sequences(objective, layout, inputs.sequence_lengths)

        def per_row(name: str) -> Tensor | None:
            values = getattr(inputs, name)
            return None if values is None else layout.per_row(name, values)[counted]

        counted = layout.mask.nonzero()[:, 0]
        advantages = layout.per_row("advantages", inputs.advantages, per_sequence=True)[counted]
        lengths = layout.lengths(inputs.sequence_lengths)
        counts = layout.counts() if counts is None else counts
        every = cls(
            objective=objective,
            layout=layout,
            counted=counted,
            counted_ratio=torch.ones_like(advantages),
            counted_weight=torch.ones_like(advantages),
            index=counted,
            advantages=advantages,
            old=per_row("old_logprobs"),
            ref=per_row("ref_logprobs"),
            rollout=per_row("rollout_logprobs"),
            sequence_of_row=layout.sequence_of_row[counted],
            lengths=lengths.clamp(min=1).double(),
            shares=objective.token_shares(layout.mask, layout.sequence_of_row, lengths, counts)[counted],
            policy_weight=torch.ones_like(advantages),
            rollout_ratio=torch.ones_like(advantages),
            bonus=torch.full_like(advantages, objective.entropy_coef / max(counts.tokens, 1), dtype=torch.float64),
            entropy_threshold=_scalar(inputs.entropy_threshold, counted.device),
            picks_by_entropy=objective.top_entropy < 1.0 and inputs.entropy_threshold is None,
        )
        return every._corrected()._that_move()

    def _corrected(self) -> LossRows:
        """With the rollout correction as a known weight, where it does not wait for the current log-probabilities."""
        correction = self.objective.rollout_correction
        if correction is None or self.old is None or self.objective.policy_loss == "vespo":  # vespo has it inside of its own weight
            return self
        ratio = correction.ratio(self.batch(self.old, torch.zeros_like(self.old)))
        weight = correction.weight(ratio)
        return replace(
            self, objective=replace(self.objective, rollout_correction=None), rollout_ratio=ratio, policy_weight=weight,
            counted_ratio=ratio, counted_weight=weight,
        )  # fmt: skip

    def _that_move(self) -> LossRows:
        if self.objective.moves_without_advantage or self.picks_by_entropy:
            return self
        moves = (self.advantages != 0) & (self.policy_weight != 0)
        if self.couples_tokens:  # a sequence's ratio needs all of its tokens
            some = torch.zeros(self.lengths.numel(), dtype=torch.bool, device=moves.device)
            some[self.sequence_of_row[moves]] = True
            moves = some[self.sequence_of_row]
        return self if bool(moves.all()) else self.take(moves.nonzero()[:, 0])

    def take(self, at: Tensor | slice) -> LossRows:
        names = ("index", "advantages", "old", "ref", "rollout", "sequence_of_row", "shares", "policy_weight", "rollout_ratio", "bonus")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value[at] for name, value in values.items() if value is not None})

    def picked(self, entropy: Tensor) -> LossRows:
        """With the entropy threshold of these rows, where it was not given; `entropy` is [n]."""
        if not self.picks_by_entropy:
            return self
        threshold = top_entropy_threshold(entropy, fraction=self.objective.top_entropy)
        return replace(self, entropy_threshold=_scalar(threshold, entropy.device))

    def one_launch(self, computes: Callable[[Objective], bool], evaluator: Evaluator) -> LossRows:
        """With a float32 kernel for the objective, where it `computes` this one: in torch it is a hundred small launches per chunk."""
        tensors = (self.advantages, self.old, self.ref, self.policy_weight)
        single = all(t is None or t.dtype == torch.float32 for t in tensors)
        return replace(self, evaluator=evaluator) if single and computes(self.objective) else self

    @property
    def couples_tokens(self) -> bool:
        return bool(self.objective.looks_at_sequences)

    @property
    def slopes_are_known(self) -> bool:
        """Whether no d loss / d logp depends on the current log-probabilities: the ratio is 1, and nothing else is compared with them."""
        objective = self.objective
        compares = objective.kl_coef or self.rollout is not None or objective.top_entropy < 1.0 or callable(objective.policy_loss)
        return self.old is None and not compares

    def batch(self, logprobs: Tensor, entropy: Tensor) -> TokenBatch:
        """Of these rows with their current log-probabilities and entropies, [n]."""
        if callable(self.objective.policy_loss):
            entropy = entropy.clone()  # a user's function may write to what it is given
        return TokenBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach().clone() if self.old is None else self.old,
            ref_logprobs=self.ref,
            rollout_logprobs=self.rollout,
            advantages=self.advantages,
            entropy=entropy,
            sequence_of_row=self.sequence_of_row,
            lengths=self.lengths,
            policy_weight=self.policy_weight,
            entropy_threshold=self.entropy_threshold,
            whole_sequences=self.couples_tokens,
        )

    def moves(self) -> Tensor:
        """Whether each row of the input is one of these, bool in the caller's shape."""
        return self._scatter(torch.ones_like(self.index, dtype=torch.bool))

    def fields(self, logprobs: Tensor, entropy: Tensor, tokens: TokenLoss) -> dict[str, Tensor]:
        """Those of `GRPOLoss` but `loss`, in the caller's shape."""
        dtype = logprobs.dtype
        return {
            "logprobs": self._scatter(logprobs.detach()),
            "entropy": self._scatter(entropy.detach()),
            "ratio": self._scatter(tokens.ratio.to(dtype)),
            "kl": self._scatter(tokens.kl.to(dtype)),
            "clipped_low": self._scatter(tokens.clipped_low),
            "clipped_high": self._scatter(tokens.clipped_high),
            "rollout_ratio": self._scatter(tokens.rollout_ratio.to(dtype), self.counted_ratio.to(dtype)),
            "policy_weight": self._scatter(tokens.policy_weight.to(dtype), self.counted_weight.to(dtype)),
            "computed": self.moves(),
        }

    def _scatter(self, values: Tensor, counted: Tensor | None = None) -> Tensor:
        """`values` [n] at their rows, `counted` at the others that count, 0 elsewhere."""
        flat = torch.zeros(self.layout.shape.numel(), dtype=values.dtype, device=values.device)
        if counted is not None:
            flat[self.counted] = counted
        flat[self.index] = values
        return flat.view(self.layout.shape)

    def value(self, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, TokenLoss]:
        """The loss of these rows, a scalar summed in float64, and what it is made of."""
        batch = self.batch(logprobs, entropy.detach())
        tokens = self.evaluator(self.objective, batch, self.shares)[0] if self.evaluator else self.objective.evaluate(batch)
        return self.total(tokens, entropy).to(logprobs.dtype), self.with_correction(tokens)

    def total(self, tokens: TokenLoss, entropy: Tensor) -> Tensor:
        """The loss, a float64 scalar."""
        return (tokens.loss * self.shares).sum() - (entropy * self.bonus).sum()

    def with_correction(self, tokens: TokenLoss) -> TokenLoss:
        """With the ratio of the rollout correction that is in `policy_weight` already."""
        return replace(tokens, rollout_ratio=self.rollout_ratio * tokens.rollout_ratio)

    def slopes(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """d loss / d logp [n]; by autograd on [n] numbers, in torch: the objective's mathematics stand in one place only."""
        if self.evaluator:
            return self.evaluator(self.objective, self.batch(logprobs, entropy), self.shares)[1]
        # Clones, because tensors made under inference_mode may not take part in a gradient.
        with torch.inference_mode(False), torch.enable_grad():
            variable = logprobs.clone().detach().requires_grad_()
            clones: dict[str, Any] = {name: t.clone() for name, t in self.__dict__.items() if isinstance(t, Tensor)}
            rows = replace(self, **clones)
            tokens = rows.objective.evaluate(rows.batch(variable, entropy.clone()))
            total = (tokens.loss * rows.shares).sum()
            if not total.requires_grad:  # a user's policy_loss that does not depend on the log-probabilities
                return torch.zeros_like(variable)
            (slopes,) = torch.autograd.grad(total, variable, materialize_grads=True)
        return slopes


def _scalar(value: float | None, device: torch.device) -> Tensor | None:
    return None if value is None else torch.tensor(value, dtype=torch.float64, device=device)


def _check_sequences(objective: Objective, layout: RowLayout, sequence_lengths: Tensor | None) -> None:
    reasons = objective.looks_at_sequences
    averages = ["aggregation 'sequence'"] if objective.aggregation == "sequence" else []
    if layout.sequences is None and (reasons or averages):
        raise ValueError(
            f"{(reasons + averages)[0]} needs the boundaries of packed rows: give cu_seqlens, or padded rows [batch, length, H]"
        )
    if sequence_lengths is not None and reasons:
        raise ValueError(f"sequence_lengths is given, but {reasons[0]} needs every token of a sequence in one call; do not cut sequences")
