"""A namespace like an engine's, and the same with one field changed."""

from typing import Any

from msgspec.structs import replace

from engine_adapters.namespace import Namespace, Part

PARTS = (Part("tp0", 64), Part("tp1", 64))
KEY_LENGTH = 32


def make_namespace(**changes: Any) -> Namespace:
    """A small model's on two ranks."""
    fields: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "connector_version": "1.2.3",
        "tenant": "acme",
        "salt": "s3cret",
        "model": "LlamaForCausalLM:0123",
        "revision": "main@abc",
        "weight_version": "7",
        "model_config": "c0ffee",
        "dtype": "bfloat16",
        "quantization": "awq",
        "rope": '{"rope_theta":10000.0}',
        "kv_dtype": "bfloat16",
        "kv_scales": "checkpoint",
        "layout": "LBHNC",
        "kv_format": "cpu:CPU_ATTN/amx",
        "block_size_tokens": 32,
        "hash_algorithm": "sha256",
        "hash_seed": "seed",
        "key_length": KEY_LENGTH,
        "canary": "ab" * 32,
        "tp": 2,
        "kv_heads": 4,
        "layers": 2,
        "groups": "full heads=2",
    }
    return Namespace(**{**fields, **changes})


def changed(namespace: Namespace, field: str) -> Namespace:
    """Another value in one field: the smallest change that has a meaning."""
    value = getattr(namespace, field)
    if field == "connector_version":
        return replace(namespace, connector_version="1.3.0")
    if isinstance(value, int):
        return replace(namespace, **{field: value + 1})
    return replace(namespace, **{field: f"{value}x"})
