"""What vLLM's configuration says of the bytes of a block: the Namespace of one engine.

The scheduler's process does not know everything: which attention backend packs the pages is decided where the
layers are. So each worker describes itself too, vLLM carries that to the scheduler's side once at start
(`get_handshake_metadata`), and `agreed` holds all descriptions against each other.
"""

import os
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core import kv_cache_utils

from engine_adapters.namespace import Namespace
from engine_adapters.namespace.canary import canary
from engine_adapters.namespace.contents import ContentsRefused, model_path
from engine_adapters.vllm.layout import Layout, LayoutRefused, layout_of
from engine_adapters.vllm.settings import Settings
from metaservice import __version__

HASHES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
"""vLLM's block hashes -> bytes of a key."""

NOT_SHARED = frozenset({"canary", "hash_seed", "weight_version"})
"""What only the scheduler's side decides: workers hash no blocks, and a version may change meanwhile."""

CPU_INSTRUCTIONS = "vllm.v1.attention.backends.cpu_attn._get_attn_isa"

_NO_MEANING = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
_ROPE = (
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)
_ROPE_PLAIN = frozenset({"default", "linear"})
"""Kinds of RoPE that do not look at how long the engine lets sequences become."""
_DIGEST_LENGTH = 32


def describe(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, *, weight_version: str = ""
) -> Namespace:
    """The namespace as this process sees it. `agreed` makes the engine's of all processes'.

    `kv_format` is empty in a process without the model's layers. Reads the model's folder: a second for the
    largest. Raises LayoutRefused with the reason when the layout or the namespace cannot be.
    """
    layout = layout_of(vllm_config, kv_cache_config)
    model_config, cache = vllm_config.model_config, vllm_config.cache_config
    model, revision = _model(vllm_config, settings, weight_version)
    seed, root = _root(cache.prefix_caching_hash_algo)
    try:
        return Namespace(
            engine="vllm",
            engine_version=vllm.__version__,
            connector_version=__version__,
            tenant=settings.tenant,
            salt=settings.salt,
            model=model,
            revision=revision,
            weight_version=weight_version,
            model_config=_digest(_configuration(vllm_config)),
            dtype=str(model_config.dtype).removeprefix("torch."),
            quantization=str(model_config.quantization or ""),
            rope=_rope(model_config),
            kv_dtype=_kv_dtype(vllm_config, kv_cache_config),
            # scales of 8-bit pages are weights: the checkpoint has them, and the model's digest covers them
            kv_scales="checkpoint" if layout.quant_mode else "",
            layout=str(kv_cache_config.kv_cache_layout or ""),
            kv_format=kv_format(vllm_config, layout),
            block_size_tokens=layout.block_size_tokens,
            hash_algorithm=cache.prefix_caching_hash_algo,
            hash_seed=seed,
            key_length=HASHES[cache.prefix_caching_hash_algo],
            canary=canary(_hasher(cache.prefix_caching_hash_algo), root),
            tp=layout.tp,
            pp=vllm_config.parallel_config.pipeline_parallel_size,
            cp=vllm_config.parallel_config.prefill_context_parallel_size,
            dcp=vllm_config.parallel_config.decode_context_parallel_size,
            kv_heads=model_config.get_total_num_kv_heads(),
            layers=sum(len(group.layers) for group in layout.groups),
            groups="; ".join(
                f"{group.spec} layers={len(group.layers)}:{_digest(group.layers)[:8]}"
                for group in layout.groups
            ),
        )
    except ValueError as error:
        raise LayoutRefused(str(error)) from None


def agreed(own: Namespace, told: Mapping[int, Namespace]) -> Namespace:
    """The engine's namespace: the scheduler's own, with what only its workers know, by TP rank.

    Raises LayoutRefused naming the field and the rank where two differ, or what no worker told.
    """
    if sorted(told) != list(range(own.tp)):
        raise LayoutRefused(f"{own.tp} ranks have to describe their caches, and {sorted(told)} did")
    full = msgspec.structs.replace(own, kv_format=told[0].kv_format)
    if not full.kv_format:
        raise LayoutRefused("no attention layers were found, so nobody knows who packs the cache's pages")
    for rank, other in told.items():
        for field in Namespace.__struct_fields__:
            have, want = getattr(other, field), getattr(full, field)
            if field not in NOT_SHARED and have != want:
                raise LayoutRefused(f"{field} is {have!r} in rank {rank} and {want!r} in the scheduler")
    return full


def hash_holds(namespace: Namespace) -> bool:
    """Whether vLLM names blocks as the canary says, now that its hash is set up: true before it is."""
    root = getattr(kv_cache_utils, "NONE_HASH", None)
    return root is None or canary(_hasher(namespace.hash_algorithm), root) == namespace.canary


def kv_format(vllm_config: Any, layout: Layout) -> str:
    """Who packs the pages, group by group: platform, attention backend, and on CPUs the instruction set.

    Empty where the layers are not in this process. Raises LayoutRefused when a group has several backends.
    """
    formats = []
    for number, group in enumerate(layout.groups):
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(group.layers))
        if not layers:
            return ""
        names = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
        if len(names) != 1 or len(layers) != len(group.layers):
            raise LayoutRefused(f"KV cache group {number} has layers of {', '.join(names)}")
        formats.append(names[0] + _instructions(names[0], vllm_config, layout, next(iter(layers.values()))))
    return f"{current_platform.device_name}:{','.join(formats)}"


def _instructions(backend: str, vllm_config: Any, layout: Layout, layer: Any) -> str:
    """On CPUs the kernels order a page's bytes as their instruction set likes them."""
    if backend != "CPU_ATTN":
        return ""
    isa = resolve_obj_by_qualname(CPU_INSTRUCTIONS)(
        vllm_config.model_config.dtype, layout.block_size_tokens, layer.head_size, layer.kv_cache_dtype
    )
    return f"/{isa}"


def _model(vllm_config: Any, settings: Settings, version: str) -> tuple[str, str]:
    """The model's id and revision: what lies in its folder, or its name on a hub at one commit."""
    model_config = vllm_config.model_config
    kind = "+".join(model_config.architectures)
    if vllm_config.load_config.load_format == "dummy":
        return f"{kind}:dummy", settings.revision
    source = model_config.model_weights or model_config.model
    revision = settings.revision or str(model_config.revision or "")
    path = Path(source)
    if path.exists():
        try:
            return f"{kind}:{model_path(path)}", settings.revision
        except (ContentsRefused, OSError) as error:
            raise LayoutRefused(f"the model cannot be told from others: {error}") from None
    commit = str(getattr(model_config.hf_config, "_commit_hash", None) or "")
    if not (commit or settings.revision or version):
        raise LayoutRefused(
            f"nobody knows which version of {source!r} this is: set revision or weight_version in"
            " kv_connector_extra_config"
        )
    return source, "@".join(word for word in (revision, commit) if word)


def _root(algorithm: str) -> tuple[str, bytes]:
    """A digest of the hash's seed, and what stands for the parent of a first block, as vLLM will have it.

    vLLM sets it up after its connector; `hash_holds` compares later.
    """
    if algorithm not in HASHES:
        raise LayoutRefused(f"prefix_caching_hash_algo {algorithm!r} is unknown")
    if algorithm.startswith("xxhash") and os.getenv("PYTHONHASHSEED") is None:
        raise LayoutRefused(
            f"prefix_caching_hash_algo {algorithm!r} takes a random seed in each process, so no two engines"
            " would name a block alike; set PYTHONHASHSEED to one value for all, or use sha256"
        )
    function = get_hash_fn_by_name(algorithm)
    seed = kv_cache_utils.resolve_none_hash_seed(function)
    root: bytes = function(seed)
    return sha256(seed.encode()).hexdigest()[:_DIGEST_LENGTH], root


def _hasher(algorithm: str) -> Any:
    function = get_hash_fn_by_name(algorithm)

    def block_hash(parent: bytes, tokens: Any, extra: Any) -> bytes:
        key: bytes = kv_cache_utils.hash_block_tokens(function, parent, tokens, extra)
        return key

    return block_hash


def _configuration(vllm_config: Any) -> Any:
    """The model as the engine runs it: its configuration with overrides, and what else changes its values."""
    model_config = vllm_config.model_config
    multimodal = model_config.multimodal_config
    return {
        "hf": model_config.hf_config.to_dict(),
        "quantization": model_config.quantization_config,
        "disable_sliding_window": model_config.disable_sliding_window,
        "model_impl": model_config.model_impl,
        "classes": model_config.model_class_overrides,
        "code_revision": model_config.code_revision,
        "convert": model_config.convert,
        "multimodal": multimodal.mm_processor_kwargs if multimodal is not None else None,
        "additional": vllm_config.additional_config,
    }


def _rope(model_config: Any) -> str:
    text = model_config.hf_text_config
    rope = {name: value for name in _ROPE if (value := getattr(text, name, None)) is not None}
    kinds = set(_kinds_of_rope(rope))
    if not kinds <= _ROPE_PLAIN:
        rope["max_model_len"] = model_config.max_model_len
    return _json(rope)


def _kinds_of_rope(rope: Any) -> list[str]:
    """All RoPE kinds named anywhere in the parameters; some models have one for each kind of layer."""
    if not isinstance(rope, dict):
        return []
    own = [str(rope[name]) for name in ("rope_type", "type") if name in rope]
    return own + [kind for value in rope.values() for kind in _kinds_of_rope(value)]


def _kv_dtype(vllm_config: Any, kv_cache_config: Any) -> str:
    dtypes = {
        str(group.kv_cache_spec.dtype).removeprefix("torch.") for group in kv_cache_config.kv_cache_groups
    }
    quantised = any(int(group.kv_cache_spec.kv_quant_mode) for group in kv_cache_config.kv_cache_groups)
    kinds = "+".join(sorted(dtypes))
    return f"{vllm_config.cache_config.cache_dtype}:{kinds}" if quantised else kinds


def _digest(value: Any) -> str:
    return sha256(_json(value).encode()).hexdigest()[:_DIGEST_LENGTH]


def _json(value: Any) -> str:
    return msgspec.json.encode(_plain(value), order="sorted").decode()


def _plain(value: Any) -> Any:
    """As JSON can say it, and equal in every process: no memory addresses, no order of sets."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items() if name not in _NO_MEANING}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(_json(each) for each in value)
    if isinstance(value, torch.dtype | Path):
        return str(value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(vars(value))
    raise LayoutRefused(f"a {type(value).__qualname__} in the model's configuration cannot be compared")
