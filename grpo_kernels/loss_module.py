"""`LossModule`: the loss inside a module's forward, for data-parallel training of a whole causal language model."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from grpo_kernels.linear_logprobs import TokenLogprobs, linear_logprobs
from grpo_kernels.linear_loss import GRPOLoss, linear_grpo_loss
from grpo_kernels.objective import Objective
from grpo_kernels.packing import LossCounts

# What wrappers look for tensors in: FSDP2 of older torch and DDP's static graph find none in a dataclass that is not registered, and
# then never arm the hook on the loss, so that gradients stay unreduced without an error.
for _result in (GRPOLoss, TokenLogprobs):
    pytree.register_pytree_node(
        _result,
        lambda result: ([getattr(result, field.name) for field in fields(result)], type(result)),
        lambda values, result_type: result_type(*values),
    )

# Settings under which a model's logits are not those of hidden state and head alone (Cohere, Granite, Falcon-H1, MuseGlimmer, MiniCPM3,
# RecurrentGemma, xLSTM). Some multiply and some divide by a setting of the same name, so none is applied.
_CHANGES_LOGITS = re.compile(r"(logits?|lm_head|output|mup_width)_\w*(scal|multipl)\w*|(output_)?logits?_soft_?cap\w*")


class LossModule(nn.Module):
    """A causal language model with the GRPO loss in its forward: what DDP or FSDP2 is to wrap, in place of the model.

    These average gradients over processes by hooks that only the wrapped module's own forward arms. A loss made from `model`'s parts
    outside of it leaves every process with gradients of its own.

        module = DistributedDataParallel(LossModule(model, objective=Objective.dapo(), data_parallel_size=dist.get_world_size()))
        mask = completion_mask != 0
        counts = LossCounts(int(mask.sum()), int(mask.any(1).sum())).all_reduce()  # summed over the step's batches, then processes
        module(input_ids, mask, advantages, attention_mask=attention_mask, counts=counts).loss.backward()

    With FSDP2, call `fully_shard` on the layers and then on the LossModule; on neither the model nor its head. In mixed precision the
    LossModule's own policy needs `cast_forward_inputs=False`, or old log-probabilities would reach the loss in bf16.

    Args:
        model: as in transformers: `get_output_embeddings()` is the head, and `base_model`, `get_decoder()` or `model` what returns hidden
            states as `.last_hidden_state`; or such a model in peft's wrapper. Tied embeddings, a bias and `config.final_logit_softcapping`
            (Gemma 2) are honoured, and so are adapters anywhere but on the head, and peft's `modules_to_save=["lm_head"]`.
        objective: see `Objective`.
        data_parallel_size: processes that gradients are averaged over. With `counts` of all of them each process's loss is a share of
            one sum, so `.loss` is multiplied by this number, and the averaged gradient is that of the sum.

    Raises:
        TypeError, ValueError: for a model whose logits are more than head(hidden state), which would be ignored silently: LoRA or another
            adapter on the head, a quantised head, prompt tuning, parameters outside of decoder and head, a scale of the logits.

    Source: TRL #3260, #7245, #5282 (hooks never armed), #4612 (LoRA on the head ignored).
    """

    def __init__(self, model: nn.Module, *, objective: Objective, data_parallel_size: int = 1) -> None:
        super().__init__()
        if not isinstance(objective, Objective):
            raise TypeError(f"objective is {objective!r}; it must be an Objective, such as Objective.dapo()")
        if not isinstance(data_parallel_size, int) or isinstance(data_parallel_size, bool) or data_parallel_size < 1:
            raise ValueError(f"data_parallel_size is {data_parallel_size!r}; it must be an integer of at least 1")
        self.model = model
        self.objective = objective
        self.data_parallel_size = data_parallel_size
        _check_model(model)
        self._softcap = getattr(_text_config(model), "final_logit_softcapping", None)

    def forward(
        self,
        input_ids: Tensor,
        completion_mask: Tensor,
        advantages: Tensor | None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
        counts: LossCounts | None = None,
        temperature: float | Tensor = 1.0,
        entropy_threshold: float | None = None,
    ) -> GRPOLoss | TokenLogprobs:
        """The loss of one padded batch. Position t of every [B, L] tensor, given or returned, is about the token `input_ids[:, t]`.

        The hidden state at t - 1 predicts that token; the shift is made here. So `result.logprobs` of one call is what a later one takes
        as `old_logprobs`. All processes must call it, one without tokens that count with any batch and a mask of zeros: its gradients
        are then zeros, and the others do not wait for it forever.

        Args:
            input_ids: [B, L] integer, prompts and completions; padded on either side.
            completion_mask: [B, L] bool or integer, 1 at the tokens to learn; 0 at t = 0, which nothing predicts.
            advantages: [B], or [B, L]. None: only log-probabilities and entropies, as an old or reference pass needs them.
            attention_mask: [B, L], 0 at padding. Needed for padding on the left; on the right a causal model never looks at it.
            position_ids: [B, L]; None: counted from each sequence's first token that `attention_mask` keeps.
            old_logprobs, ref_logprobs, rollout_logprobs: [B, L], see `linear_grpo_loss`; free to hold anything where masked.
            counts: of the whole optimiser step, all processes; see `LossCounts.all_reduce`. None: of this batch alone.
            temperature: one number, or [B, L].
            entropy_threshold: see `linear_grpo_loss`; with several processes or micro-batches, the one of the whole step.

        Returns:
            GRPOLoss, its fields [B, L] and its `loss` times `data_parallel_size`; without `advantages` TokenLogprobs, [B, L].

        Raises:
            ValueError, TypeError: naming the argument; also without `counts` where `data_parallel_size` is above 1, for log-probabilities,
                advantages or temperatures in half precision, and for a head that is a shard here.
        """
        self._check_batch(input_ids, completion_mask, advantages, counts)
        _check_precision(
            advantages=advantages, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, rollout_logprobs=rollout_logprobs,
            temperature=temperature,
        )  # fmt: skip
        head = _head(_causal_lm(self.model))
        hidden = self._hidden(input_ids, attention_mask, position_ids)
        if advantages is None:
            tokens = linear_logprobs(
                hidden, head.weight, _next(input_ids), mask=_next(completion_mask), bias=head.bias, temperature=_next(temperature),
                softcap=self._softcap,
            )  # fmt: skip
            return TokenLogprobs(tokens.logprobs.roll(1, 1), tokens.entropy.roll(1, 1))
        result = linear_grpo_loss(
            hidden,
            head.weight,
            _next(input_ids),
            _next(advantages),
            objective=self.objective,
            old_logprobs=_next(old_logprobs),
            ref_logprobs=_next(ref_logprobs),
            rollout_logprobs=_next(rollout_logprobs),
            mask=_next(completion_mask),
            counts=counts,
            bias=head.bias,
            temperature=_next(temperature),
            softcap=self._softcap,
            entropy_threshold=entropy_threshold,
        )
        # The last row predicts nothing and holds zeros, which is what position 0 gets.
        rows = {field.name: getattr(result, field.name).roll(1, 1) for field in fields(result) if field.name != "loss"}
        return replace(result, loss=result.loss * self.data_parallel_size, **rows)

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """[B, L, H] from the decoder."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        # Models count positions from column 0: right for padding on the right, and then left to them, for not all take positions.
        if position_ids is None and attention_mask is not None and bool((attention_mask[:, 0] == 0).any()):
            inputs["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        output = _decoder(_causal_lm(self.model))(**{name: value for name, value in inputs.items() if value is not None})
        hidden = getattr(output, "last_hidden_state", None)
        if not isinstance(hidden, Tensor):
            raise TypeError(
                f"the model's decoder returned {type(output).__name__} without last_hidden_state; LossModule needs hidden states"
            )
        return hidden

    def _check_batch(self, input_ids: Tensor, completion_mask: Tensor, advantages: Tensor | None, counts: LossCounts | None) -> None:
        for name, tensor in (("input_ids", input_ids), ("completion_mask", completion_mask)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be [B, L]")
        if completion_mask.shape != input_ids.shape or completion_mask.is_floating_point():
            raise ValueError(
                f"completion_mask has shape {tuple(completion_mask.shape)} and dtype {completion_mask.dtype}; "
                f"it must be bool or integer of input_ids' shape {tuple(input_ids.shape)}"
            )
        if bool(completion_mask[:, :1].any()):
            raise ValueError("completion_mask is 1 at position 0; no hidden state predicts a sequence's first token")
        if counts is None and self.data_parallel_size > 1 and advantages is not None:
            raise ValueError(
                f"counts is None with data_parallel_size {self.data_parallel_size}; give the LossCounts of all processes (all_reduce), "
                "or leave data_parallel_size at 1 for an average of each process's own loss"
            )


def _check_precision(**values: Any) -> None:
    """bf16 rounds a log-probability of -10 by up to 0.03, and a ratio with it by 3 %. FSDP2's mixed precision does that to all inputs."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name} has dtype {value.dtype}; it must be float32 or float64. Where FSDP2 cast it, call fully_shard(loss_module) with "
                "MixedPrecisionPolicy(..., cast_forward_inputs=False)"
            )


def _next(values: Any) -> Any:
    """[B, L] about tokens to [B, L] about the rows that predict them; the last column is masked. Numbers and [B] stay as they are."""
    return values.roll(-1, 1) if isinstance(values, Tensor) and values.dim() == 2 else values


def _causal_lm(model: nn.Module) -> Any:
    """Without peft's wrapper. Adapters inside of the layers stay where they are."""
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def _decoder(causal_lm: Any) -> nn.Module:
    for found in (getattr(causal_lm, "base_model", None), _called(causal_lm, "get_decoder"), getattr(causal_lm, "model", None)):
        if isinstance(found, nn.Module) and found is not causal_lm:
            return found
    raise TypeError(f"{type(causal_lm).__name__} has no decoder: no base_model, get_decoder() or model that returns hidden states")


def _head(causal_lm: Any) -> nn.Linear:
    """The head's layer whose weights are in use now: of peft's `modules_to_save` the active copy.

    Raises:
        TypeError: where it is more, or less, than a linear layer with whole weights.
    """
    head = _called(causal_lm, "get_output_embeddings")
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        active = [] if head.disable_adapters else [name for name in head.active_adapters if name in copies]
        head = copies[active[0]] if active else head.original_module
    # A subclass with a forward of its own, such as a quantised layer, computes something else from its weight.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise TypeError(
            f"the model's head is a {type(head).__name__}; it must be a plain nn.Linear, since only its weight and bias are read and an "
            'adapter on it would be silently ignored. Leave lm_head out of the LoRA targets, or train it by modules_to_save=["lm_head"]. '
            "Wrap the LossModule in DDP or FSDP, not the model inside of it"
        )
    if hasattr(head.weight, "placements"):
        raise TypeError(
            "the model's head is a shard here: it, or the model, was given to fully_shard or split by tensor parallelism, whose hooks this "
            "module passes by. Call fully_shard on the layers and the LossModule only"
        )
    return head


def _called(module: Any, name: str) -> Any:
    method = getattr(module, name, None)
    return method() if callable(method) else None


def _text_config(model: nn.Module) -> Any:
    config = getattr(_causal_lm(model), "config", None)
    return _called(config, "get_text_config") or config


def _check_model(model: nn.Module) -> None:
    """See LossModule's Raises."""
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
        raise TypeError("model is tuned by a learned prompt, which peft adds outside of the decoder; it would be silently ignored")
    causal_lm = _causal_lm(model)
    _head(causal_lm)
    name = type(causal_lm).__name__
    used = {id(parameter) for part in (_decoder(causal_lm), causal_lm.get_output_embeddings()) for parameter in part.parameters()}
    for parameter_name, parameter in causal_lm.named_parameters():
        if id(parameter) not in used:
            raise TypeError(f"{name} has {parameter_name} outside of its decoder and its head, which would be silently ignored")
    for setting, value in getattr(_text_config(model), "__dict__", {}).items():
        if _CHANGES_LOGITS.fullmatch(setting) and value not in (None, 1):
            raise ValueError(f"{name} changes its logits by config.{setting} = {value}, which LossModule does not compute")
