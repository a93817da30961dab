"""Tiny models with random weights, and a tokenizer trained here: nothing is downloaded.

`python -m tests.accept.model FOLDER` makes the one that the acceptance uses.

The weights are large and the output matrix is not the input's, so that every token of a prompt tells in what
comes out: a model that says the same whatever it read could not judge anybody's cache.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from engine_adapters.replay.sources import Library

VOCABULARY = 1_024
CONTEXT_TOKENS = 4_096
WINDOW_TOKENS = 128
"""The sliding window of the Gemma-style model: shorter than any prompt that a test uses."""
SEED = 20
RANGE = 0.3
"""Standard deviation of the weights."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": RANGE,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def make_llama(folder: Path, *, layers: int = 2, hidden: int = 128, heads: int = 4) -> Path:
    """Full attention in every layer, two KV heads (so that TP=2 has one a rank); the folder of the model."""
    config = LlamaConfig(
        **_SHAPE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=hidden // heads,
    )
    return _write(folder, LlamaForCausalLM, config)


def make_gemma(folder: Path) -> Path:
    """Three layers with a sliding window for each with full attention; the folder of the model."""
    config = Gemma3TextConfig(
        **_SHAPE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )
    return _write(folder, Gemma3ForCausalLM, config)


def make_hybrid(folder: Path) -> Path:
    """Three layers with a recurrent state for each with full attention; the folder of the model."""
    config = Qwen3NextConfig(
        **_SHAPE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    return _write(folder, Qwen3NextForCausalLM, config)


def _write(folder: Path, kind: type[PreTrainedModel], config: PretrainedConfig) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    model = kind(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "norm" not in name:
            torch.nn.init.normal_(weight, std=RANGE)
    model.save_pretrained(folder)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<s>",
        "model_max_length": CONTEXT_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def train_tokenizer() -> Tokenizer:
    """Pairs of bytes, learnt from the standard library's sources: the same on every run on one Python."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    library = Library()
    for names in library.projects.values():
        for name in names[:4]:
            yield library.text(name)


if __name__ == "__main__":
    make_llama(Path(sys.argv[1]), layers=3, hidden=192, heads=6)
