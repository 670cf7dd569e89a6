"""Tiny random models with a byte-level tokenizer, made on the spot: real transformers folders, no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from grpo_trainer.policy import Policy, find_model

EOS = 256
VOCABULARY = 263  # a prime, and more than the tokenizer knows: real models pad theirs too
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "bos_token_id": None,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "llama_tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16),
    "mistral_window": MistralConfig(**_SHAPE, sliding_window=7),
    "gemma2": Gemma2Config(**_SHAPE, head_dim=16),
}


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)} | {"<eos>": EOS}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


def write_model(folder: Path, kind: str = "llama", seed: int = 0, scale: float = 1.0) -> Path:
    """`scale` widens the head, so that the distribution is not uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def load_policy(folder: Path, kind: str = "llama", scale: float = 10.0) -> Policy:
    return Policy.load(find_model(str(write_model(folder, kind, scale=scale))), torch.device("cpu"), "float32")
