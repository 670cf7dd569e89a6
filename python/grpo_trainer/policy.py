"""The model that is trained: found, checked, loaded, and split into trunk and head."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_trainer.errors import UserError
from grpo_trainer.smollm2 import smollm2_folder


@dataclass(frozen=True)
class ModelSource:
    """A model that exists, its weights not yet loaded: enough to encode prompts and check their lengths."""

    name: str
    location: str
    tokenizer: Any
    config: Any

    @property
    def context_length(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    def encode(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """Token ids of a prompt: messages through the chat template, a string as it is."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if self.tokenizer.chat_template is None:
            # Base models: the messages' text alone is the most neutral reading.
            return list(self.tokenizer.encode("\n".join(message["content"] for message in prompt)))
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def find_model(name: str) -> ModelSource:
    """`name` is smollm2-135m, a local folder, or a hub name.

    Raises:
        UserError: no such folder or model, or one that cannot be read as a causal language model.
    """
    from transformers import AutoConfig, AutoTokenizer

    location = str(smollm2_folder()) if name == "smollm2-135m" else os.path.expanduser(name)
    folder = Path(location)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"model is {name!r}; that folder holds no config.json, so it is not a transformers model")
    elif location.startswith((".", "/", "~")) or location.count("/") != 1:
        raise UserError(f"model is {name!r}; there is no such folder (allowed: a local folder, a hub name like org/name, or smollm2-135m)")
    try:
        config = AutoConfig.from_pretrained(location)
        tokenizer = AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        what = "that folder" if folder.is_dir() else "no such folder here, and the model hub"
        raise UserError(f"model is {name!r}; {what} gives no model: {reason}") from error
    source = ModelSource(name, location, tokenizer, config)
    _refuse_recurrent_layers(source)
    return source


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but torch sees no NVIDIA GPU here; use device=cpu or device=auto (grpo doctor says more)")
    return torch.device(name)


class Policy:
    """A causal language model as trunk (tokens to hidden states) and head (hidden states to logits, one weight matrix).

    `eos_ids` is every id that ends a completion.
    """

    def __init__(self, source: ModelSource, model: Any, device: torch.device) -> None:
        self.source = source
        self.model = model.to(device)
        self.device = device
        self.trunk: nn.Module = model.base_model
        _repair_generation_config(model)
        self.eos_ids = _eos_ids(source, model)
        _check_head(self)

    @classmethod
    def load(cls, source: ModelSource, device: torch.device, dtype: str, *, location: str | None = None) -> Policy:
        """`location` overrides the source's, to load weights from a checkpoint of the same model."""
        from transformers import AutoModelForCausalLM

        folder = location or source.location
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        except Exception as error:  # a damaged file, a missing shard, an unknown architecture: types differ
            raise UserError(f"the weights in {folder} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
        return cls(source, model.eval(), device)

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def frozen(self) -> Policy:
        """Without gradients, for a reference."""
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        return self

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.source.tokenizer.save_pretrained(folder)


def _eos_ids(source: ModelSource, model: Any) -> frozenset[int]:
    """The generation config's, else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = source.tokenizer.eos_token_id
    if ids is None:
        raise UserError(f"model {source.name!r} names no end-of-sequence token, so no completion could ever end")
    return frozenset([ids] if isinstance(ids, int) else ids)


def _repair_generation_config(model: Any) -> None:
    """Some published models pair sampling settings with do_sample=false, which transformers loads with a warning and refuses to save.

    Sampling settings are ours, not the file's; only the token ids in it matter here.
    """
    from transformers import GenerationConfig

    given = model.generation_config
    try:
        given.validate(strict=True)
    except ValueError:
        model.generation_config = GenerationConfig(
            bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
        )


def _refuse_recurrent_layers(source: ModelSource) -> None:
    """Only attention layers keep a cache whose rows can be handed to several completions; a recurrent state cannot."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    for layer in DynamicCache(config=source.config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UserError(
                f"model {source.name!r} has layers with a {type(layer).__name__}; "
                "only attention layers can share a prompt among completions (Llama, Qwen2, Qwen3, Mistral, ...)"
            )


@torch.no_grad()
def _check_head(policy: Policy) -> None:
    """Refuses a model whose logits are more than `hidden W^T`: a soft cap, a scale or a bias would be left out silently."""
    head = policy.model.get_output_embeddings()
    if head is None or policy.trunk is policy.model:
        raise UserError(f"model {policy.source.name!r} has no language-model head that can be told apart from its trunk")
    weight = policy.head_weight
    ids = torch.arange(1, 9, device=policy.device)[None] % weight.shape[0]
    hidden = policy.trunk(input_ids=ids).last_hidden_state
    expected = policy.model(input_ids=ids).logits.float()
    error = float((hidden.float() @ weight.float().t() - expected).norm() / expected.norm())
    # Half-precision heads round their logits; a bias is then looked for by name, for a small one would pass as rounding.
    exact = weight.dtype == torch.float32
    if not error < (1e-3 if exact else 3e-2) or getattr(head, "bias", None) is not None:
        raise UserError(
            f"model {policy.source.name!r} does more to its logits than hidden x weight (a soft cap, a scale or a bias), "
            "which the fused loss of this version does not compute; use a model with a plain head, such as Llama, Qwen2, Qwen3 or Mistral"
        )


def set_threads(threads: int) -> None:
    if threads > (os.cpu_count() or 1):
        raise UserError(f"threads is {threads}; this machine has {os.cpu_count()} cores, and threads that wait for each other spin")
    if threads:
        torch.set_num_threads(threads)
