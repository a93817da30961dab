"""vLLM's own configuration of tiny models, and of the KV caches that vLLM would make for them."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)

import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec

from tests.accept.model import make_gemma, make_llama

BLOCK = 32
MEMORY_BYTES = 1 << 22
MODELS = {"llama": make_llama, "gemma": make_gemma}
_FOLDER = tempfile.TemporaryDirectory(prefix="ucm-models-")


@cache
def model_folder(kind: str) -> Path:
    """The folder of a tiny model, made once."""
    return MODELS[kind](Path(_FOLDER.name) / kind)


@cache
def _engine_config(kind: str) -> VllmConfig:
    config = EngineArgs(
        model=str(model_folder(kind)),
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=512,
        enforce_eager=True,
        disable_hybrid_kv_cache_manager=False,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def engine_config(kind: str = "llama") -> VllmConfig:
    """The configuration of an engine, one's own to change."""
    return copy.deepcopy(_engine_config(kind))


def full(**changes: Any) -> FullAttentionSpec:
    fields = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**fields, **changes})


def window(tokens: int = 128, **changes: Any) -> SlidingWindowSpec:
    fields = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**{**fields, "sliding_window": tokens, **changes})


def cache_configs(
    config: VllmConfig, specs: dict[str, KVCacheSpec], ranks: int = 1
) -> tuple[KVCacheConfig, list[KVCacheConfig]]:
    """The scheduler's and the workers' cache configurations, as the engine's core makes them."""
    workers = get_kv_cache_configs(config, [specs] * ranks, [MEMORY_BYTES] * ranks)
    for one in workers:
        one.kv_cache_layout = config.cache_config.kv_cache_layout
    scheduler = generate_scheduler_kv_cache_config(workers)
    sizes = resolve_kv_cache_block_sizes(scheduler, config)
    for one in (scheduler, *workers):
        one.hash_block_size = sizes[1]
        one.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(scheduler, config, *sizes)
    return scheduler, workers


def llama_specs() -> dict[str, KVCacheSpec]:
    return {f"model.layers.{number}.self_attn.attn": full() for number in range(2)}


def gemma_specs() -> dict[str, KVCacheSpec]:
    """Three layers with a window for one with full attention, eleven in all: groups of different sizes."""
    return {
        f"model.layers.{number}.self_attn.attn": full() if number % 4 == 3 else window()
        for number in range(11)
    }
