"""`LossModule` alone, and under DDP and FSDP2 in two processes, against plain autograd on the model's own logits in one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
    RobertaConfig,
)

from grpo_kernels import LossCounts, Objective
from grpo_kernels.loss_module import LossModule
from grpo_kernels.reference import reference_grpo_loss
from problems import relative
from processes import in_processes

VOCABULARY = 83
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "gemma2, soft cap": Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0),
    "phi, bias": PhiConfig(**SHAPE),
    "gpt2, absolute positions": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
OBJECTIVES = {"dapo": Objective.dapo(), "grpo": Objective.grpo(kl_coef=0.1)}
TEMPERATURE = 0.7
# Prompt and completion tokens of each sequence; the first process has sequences 0 to 2, the second 3 and 4.
LENGTHS = [(3, 9), (1, 2), (6, 4), (2, 17), (5, 5)]
SHARES = [slice(0, 3), slice(3, 5)]


@dataclass
class Batch:
    """[B, L] each, `advantages` [B]; padded on one side. `nothing`: no token counts."""

    ids: Tensor
    attention: Tensor
    completion: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, which: slice, *, left: bool = False, nothing: bool = False) -> Batch:
        sequences = [_sequence(number, *LENGTHS[number]) for number in range(*which.indices(len(LENGTHS)))]
        longest = max(len(ids) for ids, *_ in sequences)
        columns = []
        for kind in range(4):
            parts = [sequence[kind] for sequence in sequences]
            sides = [(longest - len(part), 0) if left else (0, longest - len(part)) for part in parts]
            columns.append(torch.stack([nn.functional.pad(part, side) for part, side in zip(parts, sides, strict=True)]))
        ids, completion, old, ref = columns
        attention = (ids != 0).long()
        advantages = torch.tensor([1.5, -0.7, 0.3, -1.1, 0.6])[which]
        return cls(ids, attention, completion * (not nothing), old, ref, advantages)

    def counts(self) -> LossCounts:
        return LossCounts(int(self.completion.sum()), int(self.completion.any(1).sum()))

    def arguments(self) -> dict[str, Any]:
        return {
            "input_ids": self.ids, "attention_mask": self.attention, "completion_mask": self.completion, "old_logprobs": self.old,
            "ref_logprobs": self.ref, "advantages": self.advantages, "temperature": TEMPERATURE,
        }  # fmt: skip


def _sequence(number: int, prompt: int, completion: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(number)
    ids = torch.randint(1, VOCABULARY, (prompt + completion,), generator=g)
    counts = (torch.arange(prompt + completion) >= prompt).long()
    near = torch.full((prompt + completion,), -torch.tensor(VOCABULARY).log().item())  # of a model that knows nothing
    return ids, counts, near + 0.2 * torch.randn(len(ids), generator=g), near + 0.2 * torch.randn(len(ids), generator=g)


def _model(kind: str) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4.0)
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
    return model.eval()  # without dropout


def _positions(attention: Tensor) -> Tensor:
    return (attention.cumsum(1) - 1).clamp(min=0)


def _reference(model: nn.Module, batch: Batch, objective: Objective, counts: LossCounts) -> tuple[Tensor, Tensor]:
    """(loss, logprobs [B, L]) from the model's own logits, by the specification."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attention, position_ids=_positions(batch.attention)).logits
    distribution = torch.log_softmax(logits[:, :-1].flatten(0, 1) / TEMPERATURE, -1)
    logprobs = distribution.gather(1, batch.ids[:, 1:].reshape(-1, 1))[:, 0]
    rows, length = batch.ids[:, 1:].shape
    sequence_of_row = torch.arange(rows).repeat_interleave(length)
    loss = reference_grpo_loss(
        logprobs, -(distribution.exp() * distribution).sum(-1), batch.advantages[sequence_of_row], objective=objective,
        sequence_of_row=sequence_of_row, mask=batch.completion[:, 1:].flatten() != 0, tokens=counts.tokens, sequences=counts.sequences,
        old_logprobs=batch.old[:, 1:].flatten(), ref_logprobs=batch.ref[:, 1:].flatten(),
    )  # fmt: skip
    return loss, nn.functional.pad(logprobs.view(rows, length), (1, 0)) * batch.completion


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By the model's own names; of a sharded model the whole ones."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


@cache
def _expected(kind: str, objective: str, sequences: int = len(LENGTHS)) -> tuple[float, dict[str, Tensor | None]]:
    """(loss, gradients) of one process on the whole batch."""
    model, batch = _model(kind), Batch.of(slice(sequences))
    loss, _ = _reference(model, batch, OBJECTIVES[objective], batch.counts())
    loss.backward()
    return float(loss.detach()), _gradients(model)


def _check_gradients(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, exact in expected.items():
        grad = got[name]
        if exact is None:
            assert grad is None, name
        else:
            assert grad is not None, name
            # The key's bias in attention has a gradient of exactly zero, and of rounding errors in practice.
            assert relative(grad, exact) < tolerance or float(torch.maximum(grad.abs(), exact.abs()).max()) < 1e-7, name


# ---------------------------------------------------------------------------------------------------- several processes


@dataclass(frozen=True)
class Case:
    kind: str
    objective: str
    wrapper: str
    micro_batches: int = 1
    nothing_on_second: bool = False
    ddp: tuple[tuple[str, bool], ...] = ()

    def __str__(self) -> str:
        parts = [self.kind, self.objective, self.wrapper, *(name for name, _ in self.ddp)]
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return ", ".join(parts + (["nothing counts on one process"] if self.nothing_on_second else []))


CASES = [
    Case("llama", "dapo", "ddp"),
    Case("llama, tied", "grpo", "ddp"),
    Case("qwen2", "grpo", "ddp", ddp=(("find_unused_parameters", True),)),
    Case("qwen2, tied", "dapo", "ddp", ddp=(("static_graph", True),)),
    Case("llama, tied", "dapo", "ddp", micro_batches=2),
    Case("llama", "grpo", "ddp", nothing_on_second=True),
    Case("llama", "grpo", "fsdp2"),
    Case("llama, tied", "dapo", "fsdp2"),
    Case("qwen2", "dapo", "fsdp2", micro_batches=2),
    Case("qwen2, tied", "grpo", "fsdp2, one unit"),
    Case("llama, tied", "dapo", "fsdp2", nothing_on_second=True),
    Case("llama", "grpo", "fsdp2, bfloat16"),
]


def _wrapped(case: Case, model: nn.Module, objective: Objective) -> nn.Module:
    module = LossModule(model, objective=objective, data_parallel_size=dist.get_world_size())
    if case.wrapper == "ddp":
        return DistributedDataParallel(module, **dict(case.ddp))
    dtype = torch.bfloat16 if "bfloat16" in case.wrapper else None
    if case.wrapper != "fsdp2, one unit":
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    return fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False))


def _pieces(case: Case, rank: int) -> list[Batch]:
    share = SHARES[rank]
    bounds = [share.start, share.stop] if case.micro_batches == 1 else [share.start, share.start + 1, share.stop]
    nothing = case.nothing_on_second and rank == 1
    return [Batch.of(slice(a, b), left=rank == 1, nothing=nothing) for a, b in pairwise(bounds)]


def _step(case: Case, module: nn.Module, pieces: list[Batch], counts: LossCounts) -> float:
    """One optimiser step's backward passes; gradients are exchanged in the last."""
    total = 0.0
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        if case.wrapper != "ddp":
            module.set_requires_gradient_sync(last)
        with module.no_sync() if case.wrapper == "ddp" and not last else nullcontext():
            result = module(**piece.arguments(), counts=counts)
            result.loss.backward()
        total += float(result.loss.detach())
    return total


def _train(case: Case) -> tuple[float, dict[str, Tensor | None]]:
    """(loss, gradients) of one process; of the second of two steps, since some hooks are set up in the first."""
    model = _model(case.kind)
    module = _wrapped(case, model, OBJECTIVES[case.objective])
    pieces = _pieces(case, dist.get_rank())
    counts = sum((piece.counts() for piece in pieces), LossCounts(0, 0)).all_reduce()
    with torch.no_grad():  # an evaluation before the first step
        module(**pieces[0].arguments(), counts=counts)
    for _ in range(2):
        module.zero_grad()
        loss = _step(case, module, pieces, counts)
    return loss, _gradients(model)


def _work() -> dict[str, tuple[float, dict[str, Tensor | None]]]:
    answers = {str(case): _train(case) for case in CASES}
    # What LossModule is there to prevent: the loss of the module inside of the wrapper.
    model = _model("llama")
    inside = _wrapped(CASES[0], model, Objective.dapo()).module
    inside(**Batch.of(SHARES[dist.get_rank()]).arguments(), counts=Batch.of(slice(5)).counts()).loss.backward()
    sharded_inside = _model("qwen2")
    module = LossModule(sharded_inside, objective=Objective.dapo())
    fully_shard(sharded_inside)
    with pytest.raises(TypeError, match="head is a shard here"):
        module(**Batch.of(slice(3)).arguments())
    return answers | {"hooks not armed": (0.0, _gradients(model))}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[float, dict[str, Tensor | None]]]]:
    return in_processes(2, _work)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_process(case: Case, ranks: list[dict[str, tuple[float, dict[str, Tensor | None]]]]) -> None:
    (loss, first), (other_loss, second) = (answers[str(case)] for answers in ranks)
    expected_loss, expected = _expected(case.kind, case.objective, 3 if case.nothing_on_second else len(LENGTHS))
    tolerance = 5e-2 if "bfloat16" in case.wrapper else 1e-5
    assert (loss + other_loss) / 2 == pytest.approx(expected_loss, rel=tolerance)
    assert all(torch.equal(first[name], second[name]) for name in expected)
    _check_gradients(first, expected, tolerance)


def test_gradients_differ_where_the_hooks_are_not_armed(ranks: list[dict[str, tuple[float, dict[str, Tensor | None]]]]) -> None:
    """That the tests above can fail."""
    first, second = (answers["hooks not armed"][1] for answers in ranks)
    assert all(relative(first[name], second[name]) > 1e-2 for name in first)


# ---------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_result_is_that_of_the_models_own_logits(kind: str, left: bool) -> None:
    model, batch = _model(kind), Batch.of(slice(5), left=left)
    loss, logprobs = _reference(model, batch, OBJECTIVES["grpo"], batch.counts())
    loss.backward()
    expected = _gradients(model)
    model.zero_grad()
    result = LossModule(model, objective=OBJECTIVES["grpo"])(**batch.arguments())
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float((result.logprobs - logprobs.detach()).abs().max()) < 2e-5
    assert torch.equal(result.computed, batch.completion != 0)
    _check_gradients(_gradients(model), expected)


def test_logprobs_of_one_call_are_old_logprobs_of_the_next() -> None:
    module, batch = LossModule(_model("llama"), objective=Objective.dapo()), Batch.of(slice(5))
    arguments = batch.arguments() | {"old_logprobs": None}
    with torch.no_grad():
        first = module(**arguments)
    assert not first.loss.requires_grad
    second = module(**(arguments | {"old_logprobs": first.logprobs}))
    assert second.ratio[batch.completion != 0] == pytest.approx(1.0, abs=1e-5)
    assert float(second.loss.detach()) == pytest.approx(float(first.loss), abs=1e-5)


def test_without_advantages_it_gives_log_probabilities_alone() -> None:
    module, batch = LossModule(_model("llama"), objective=Objective.dapo(kl_coef=0.1), data_parallel_size=2), Batch.of(slice(5))
    arguments = batch.arguments() | {"advantages": None, "counts": None, "ref_logprobs": None, "old_logprobs": None}
    with torch.no_grad():
        tokens = module(**arguments)
    loss = LossModule(module.model, objective=Objective.dapo(entropy_coef=0.1))(**(batch.arguments() | {"old_logprobs": None}))
    assert torch.equal(tokens.logprobs, loss.logprobs)
    assert torch.equal(tokens.entropy, loss.entropy)
    assert float(tokens.logprobs.abs().max()) > 1


def test_values_per_token_belong_to_their_tokens() -> None:
    module, batch = LossModule(_model("llama"), objective=Objective.dapo()), Batch.of(slice(5))
    arguments = batch.arguments()
    generator = torch.Generator().manual_seed(0)
    at = (2, 7)
    advantages = torch.zeros(batch.ids.shape)
    advantages[at] = 1.0
    heats = torch.rand(batch.ids.shape, generator=generator) + 0.5
    result = module(**(arguments | {"advantages": advantages, "temperature": heats}))
    assert result.computed.nonzero().tolist() == [list(at)]
    alone = module(**(arguments | {"temperature": float(heats[at])}))
    assert float(result.logprobs[at]) == pytest.approx(float(alone.logprobs[at]), abs=1e-5)


def test_nothing_counts_gives_zero_gradients() -> None:
    model = _model("llama, tied")
    result = LossModule(model, objective=OBJECTIVES["grpo"])(**Batch.of(slice(3), nothing=True).arguments())
    assert float(result.loss.detach()) == 0.0
    result.loss.backward()
    grads = _gradients(model)
    assert all(grad is not None and not grad.any() for grad in grads.values())


def _called_with(data_parallel_size: int = 1, **changes: Any) -> None:
    module = LossModule(_model("llama"), objective=Objective.dapo(), data_parallel_size=data_parallel_size)
    module(**(Batch.of(slice(3)).arguments() | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_mask": torch.ones_like(Batch.of(slice(3)).ids)}, "completion_mask is 1 at position 0"),
        ({"completion_mask": Batch.of(slice(3)).completion.float()}, "completion_mask has .*dtype torch.float32"),
        ({"completion_mask": Batch.of(slice(3)).completion[:, 1:]}, "completion_mask has shape"),
        ({"input_ids": Batch.of(slice(3)).ids[0]}, "input_ids has shape"),
        ({"old_logprobs": torch.zeros(3)}, "old_logprobs has shape"),
        ({"old_logprobs": Batch.of(slice(3)).old.bfloat16()}, "old_logprobs has dtype torch.bfloat16.*cast_forward_inputs=False"),
        ({"advantages": torch.zeros(2)}, "advantages has shape"),
        ({"data_parallel_size": 2}, "counts is None with data_parallel_size 2"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
    ],
)
def test_bad_batches_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _called_with(**changes)


_ROBERTA = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CohereConfig(**SHAPE, logit_scale=0.25), "config.logit_scale = 0.25"),
        (GraniteConfig(**SHAPE, logits_scaling=8.0), "config.logits_scaling = 8.0"),
        (RobertaConfig(**_ROBERTA, is_decoder=True), "outside of its decoder and its head"),  # a layer before the head
    ],
    ids=["cohere", "granite", "roberta"],
)
def test_logits_that_are_more_than_a_head_are_refused(config: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LossModule(AutoModelForCausalLM.from_config(config), objective=Objective.dapo())


def test_granite_without_a_scale_is_accepted() -> None:
    LossModule(AutoModelForCausalLM.from_config(GraniteConfig(**SHAPE, logits_scaling=1.0)), objective=Objective.dapo())


def test_head_with_a_forward_of_its_own_is_refused() -> None:
    class Quantised(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).round()

    model = _model("llama")
    model.set_output_embeddings(Quantised(32, VOCABULARY, bias=False))
    with pytest.raises(TypeError, match="head is a Quantised"):
        LossModule(model, objective=Objective.dapo())


# ---------------------------------------------------------------------------------------------------- adapters


def _adapted(kind: str, **settings: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed; adapters are tested where it is")
    torch.manual_seed(4)
    return peft.get_peft_model(_model(kind), peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **settings)).eval()


@pytest.mark.parametrize("kind", ["llama", "llama, tied"])
def test_lora_with_a_trained_copy_of_the_head(kind: str) -> None:
    """peft's modules_to_save: the active copy is read and trained, the original one with the adapter off."""
    model, batch = _adapted(kind, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]), Batch.of(slice(5))
    head = model.get_base_model().lm_head
    with torch.no_grad():
        head.modules_to_save["default"].weight.mul_(1.3)
    module = LossModule(model, objective=OBJECTIVES["grpo"])
    loss, logprobs = _reference(model, batch, OBJECTIVES["grpo"], batch.counts())
    loss.backward()
    expected = _gradients(model)
    model.zero_grad()
    result = module(**batch.arguments())
    result.loss.backward()
    assert float((result.logprobs - logprobs.detach()).abs().max()) < 2e-5
    assert expected["base_model.model.lm_head.modules_to_save.default.weight"] is not None
    assert expected.get("base_model.model.lm_head.original_module.weight") is None
    _check_gradients(_gradients(model), expected)
    with model.disable_adapter(), torch.no_grad():
        _, off = _reference(model, batch, OBJECTIVES["grpo"], batch.counts())
        assert float((module(**batch.arguments()).logprobs - off.detach()).abs().max()) < 2e-5
    assert float((off - logprobs.detach()).abs().max()) > 1e-2


def test_lora_on_the_layers_leaves_the_frozen_head_alone() -> None:
    model, batch = _adapted("qwen2", target_modules=["v_proj"]), Batch.of(slice(5))
    LossModule(model, objective=Objective.dapo())(**batch.arguments()).loss.backward()
    assert {"lora_" in name for name, grad in _gradients(model).items() if grad is not None} == {True}


def test_lora_on_the_head_is_refused() -> None:
    with pytest.raises(TypeError, match="Leave lm_head out of the LoRA targets"):
        LossModule(_adapted("llama", target_modules=["q_proj", "lm_head"]), objective=Objective.dapo())


def test_prompt_tuning_is_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; adapters are tested where it is")
    model = peft.get_peft_model(_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(TypeError, match="learned prompt"):
        LossModule(model, objective=Objective.dapo())
