"""How an engine's KV cache lies, as far as saving and loading whole blocks needs it, or why it cannot.

The rule is strict: what is not known to be right is refused at start. vLLM 0.32 runs a connector that
mistakes a state-space group for attention without any error, and only its output is wrong.

Nothing of vLLM is imported here: its objects are handed in and are known by their full names.
"""

from typing import Any, Literal

import msgspec

from dataplane.pages import page_order
from engine_adapters.namespace import Part

SPECS = "vllm.v1.kv_cache_interface"
FULL = f"{SPECS}.FullAttentionSpec"
WINDOW = f"{SPECS}.SlidingWindowSpec"
KINDS = {
    "MLAAttentionSpec": "multi-head latent attention",
    "SlidingWindowMLASpec": "multi-head latent attention",
    "HiddenStateCacheSpec": "cached hidden states",
    "MambaSpec": "state-space (Mamba) layers, whose state is no run of tokens",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "SinkFullAttentionSpec": "attention with cached sinks",
    "EncoderOnlyAttentionSpec": "encoder layers",
    "CrossAttentionSpec": "cross attention",
    "RSWASpec": "reference sliding windows",
    "CircularBufferSpec": "circular buffers",
    "HiSparseHotSpec": "HiSparse",
    "HiSparseResidentSpec": "HiSparse",
    "UniformTypeKVCacheSpecs": "layers of different sizes in one group",
}
"""Specs of vLLM that are refused -> what they are. A spec that is not here is refused by its name."""

QUANT_MODES = {0: "", 1: "fp8"}
"""Of vLLM's KVQuantMode: not quantised, and 8 bits with one scale a layer, which is a weight. In all other
modes scales lie among, or beside, the values."""


class LayoutRefused(ValueError):
    """The engine cannot share its blocks: the message is the reason, for whoever started it."""


class GroupLayout(msgspec.Struct, frozen=True):
    """One KV cache group.

    `window_blocks`: how many blocks before a block's boundary the next token needs (`window` only; 0 of a
    window of one token). `page_bytes`: of one block in one layer, without padding. `layers`: their names in
    the order in which their pages follow each other in a part.
    """

    kind: Literal["full", "window"]
    window_blocks: int
    page_bytes: int
    layers: tuple[str, ...]
    spec: str
    """What the engine says of it, in words that are compared."""

    @property
    def part_bytes(self) -> int:
        """What one rank holds of one block in this group."""
        return self.page_bytes * len(self.layers)


class Layout(msgspec.Struct, frozen=True):
    """The whole cache: every group has blocks of `block_size_tokens`, and so has the block hash."""

    block_size_tokens: int
    tp: int
    groups: tuple[GroupLayout, ...]
    quant_mode: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of all ranks and groups, rank by rank."""
        return tuple(part for rank in range(self.tp) for part in self.rank_parts(rank))

    @property
    def layer_groups(self) -> tuple[tuple[str, ...], ...]:
        """The layers of each group."""
        return tuple(group.layers for group in self.groups)

    def parts_of(self, rank: int) -> tuple[str, ...]:
        """The names of one rank's parts, group by group."""
        return tuple(part.name for part in self.rank_parts(rank))

    def rank_parts(self, rank: int) -> tuple[Part, ...]:
        """One rank's, group by group: `tp<rank>`, with several groups `g<group>.tp<rank>`."""
        names = [f"g{number}-" for number in range(len(self.groups))] if len(self.groups) > 1 else [""]
        return tuple(
            Part(f"{name}tp{rank}", group.part_bytes) for name, group in zip(names, self.groups, strict=True)
        )


def layout_of(vllm_config: Any, kv_cache_config: Any) -> Layout:
    """The layout of a VllmConfig's engine with this KVCacheConfig. Raises LayoutRefused with the reason.

    The scheduler's and the workers' configurations give the same.
    """
    _check_engine(vllm_config)
    block_size = kv_cache_config.hash_block_size
    if not isinstance(block_size, int) or block_size < 1:
        raise LayoutRefused("vLLM did not say how many tokens a block hash covers (hash_block_size)")
    if kv_cache_config.cache_hit_alignment_tokens not in (None, block_size):
        raise LayoutRefused(
            f"prefixes end at every {kv_cache_config.cache_hit_alignment_tokens} tokens, and blocks are"
            f" hashed every {block_size}; unset prefix_match_unit"
        )
    if not kv_cache_config.kv_cache_groups:
        raise LayoutRefused("the model has no KV cache")
    groups = tuple(
        _group(number, group, block_size) for number, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    _check_layers(kv_cache_config, groups)
    _check_precision(kv_cache_config)
    modes = {int(group.kv_cache_spec.kv_quant_mode) for group in kv_cache_config.kv_cache_groups}
    quantised = sorted(QUANT_MODES[mode] for mode in modes if mode)
    return Layout(block_size, vllm_config.parallel_config.tensor_parallel_size, groups, ",".join(quantised))


def window_blocks(window_tokens: int, block_size_tokens: int) -> int:
    """Blocks before a boundary that the next token attends to: itself and `window_tokens - 1` before it."""
    return -(-(window_tokens - 1) // block_size_tokens)


def _check_engine(vllm_config: Any) -> None:
    """What of the engine's settings cannot be, whatever its model."""
    parallel = vllm_config.parallel_config
    for setting, why in (
        ("pipeline_parallel_size", "stages hold other layers"),
        ("prefill_context_parallel_size", "ranks hold other tokens"),
        ("decode_context_parallel_size", "ranks hold other tokens"),
    ):
        if getattr(parallel, setting) != 1:
            raise LayoutRefused(f"{setting} is {getattr(parallel, setting)}: {why}; only 1 is handled")
    for setting, what in (
        ("speculative_config", "speculative decoding: blocks may hold tokens that are taken back"),
        ("diffusion_config", "diffusion: blocks change until they are accepted"),
        ("engram_config", "engram memory, which no block hash covers"),
    ):
        if getattr(vllm_config, setting) is not None:
            raise LayoutRefused(f"{what} ({setting})")
    attention = vllm_config.attention_config
    if attention.use_non_causal:
        raise LayoutRefused("non-causal attention: a block depends on tokens after it (use_non_causal)")
    if attention.hisparse_config is not None:
        raise LayoutRefused("HiSparse keeps parts of the cache elsewhere (hisparse_config)")
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise LayoutRefused(
            "prefix caching is off (enable_prefix_caching); vLLM also turns it off for models whose blocks"
            " cannot be used again"
        )
    if cache.kv_sharing_fast_prefill:
        raise LayoutRefused("layers skip tokens of the prompt (kv_sharing_fast_prefill)")
    if vllm_config.kv_transfer_config is not None and vllm_config.kv_transfer_config.enable_permute_local_kv:
        raise LayoutRefused("the cache is permuted for another connector (enable_permute_local_kv)")


def _group(number: int, group: Any, block_size: int) -> GroupLayout:
    spec = group.kv_cache_spec
    where = f"KV cache group {number}"
    kind = f"{type(spec).__module__}.{type(spec).__qualname__}"
    if kind not in (FULL, WINDOW):
        name = type(spec).__qualname__
        raise LayoutRefused(f"{where}: {KINDS.get(name, 'an unknown kind')} ({kind})")
    role = getattr(group.role, "value", group.role)
    if group.is_eagle_group or group.host_resident or not group.enable_kv_transfer or role != "default":
        raise LayoutRefused(f"{where} is not the engine's plain cache (role {role})")
    if spec.block_size != block_size:
        raise LayoutRefused(
            f"{where} has blocks of {spec.block_size} tokens, and the block hash covers {block_size}"
        )
    if spec.tokens_per_state != 1:
        raise LayoutRefused(f"{where} keeps a state for {spec.tokens_per_state} tokens")
    if int(spec.kv_quant_mode) not in QUANT_MODES:
        raise LayoutRefused(f"{where}: KV quantisation {spec.kv_quant_mode!r} keeps scales with the values")
    if spec.page_size_padded is not None:
        raise LayoutRefused(f"{where} has padded pages ({spec.page_size_padded} bytes)")
    if not spec.prefix_cacheable:
        raise LayoutRefused(f"{where} cannot be reused by prefix")
    window = _window(where, spec, kind)
    return GroupLayout(
        "window" if window else "full",
        window_blocks(window, block_size) if window else 0,
        spec.page_size_bytes,
        page_order(group.layer_names),
        _words(spec, window),
    )


def _window(where: str, spec: Any, kind: str) -> int:
    """The sliding window in tokens; 0: all tokens are kept."""
    if kind == FULL:
        if spec.non_causal:
            raise LayoutRefused(f"{where} is not causal: a block depends on tokens after it")
        if spec.attention_chunk_size is not None:
            raise LayoutRefused(f"{where} has {KINDS['ChunkedLocalAttentionSpec']}")
        return 0
    if spec.extra_retained_tokens:
        raise LayoutRefused(f"{where} keeps {spec.extra_retained_tokens} tokens more than its window")
    if spec.sliding_window < 1:
        raise LayoutRefused(f"{where} has a window of {spec.sliding_window} tokens")
    return int(spec.sliding_window)


def _words(spec: Any, window: int) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    words = {
        "heads": spec.num_kv_heads,
        "slots": spec.num_heads,
        "head": spec.head_size,
        "head_v": spec.head_size_v,
        "state": spec.state_content_size_bytes,
        "states": spec.num_states,
        "dtype": dtype,
        "quant": QUANT_MODES[int(spec.kv_quant_mode)] or "none",
    }
    kind = f"window={window}" if window else "full"
    return " ".join([kind, *(f"{name}={value}" for name, value in words.items())])


def _check_precision(kv_cache_config: Any) -> None:
    """All groups have one precision. With several vLLM zeroes blocks that it gives out anew, and its second
    model runner does so before it says whose they were: what is just being saved of them would be zeros."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    found = sorted({f"{spec.dtype}/{int(spec.kv_quant_mode)}" for spec in specs})
    if len(found) > 1:
        raise LayoutRefused(f"KV cache groups of different precisions: {', '.join(found)}")


def _check_layers(kv_cache_config: Any, groups: tuple[GroupLayout, ...]) -> None:
    """Each layer has its own pages, and no pages are without a layer."""
    owned = [layer for group in groups for layer in group.layers]
    placed = [layer for tensor in kv_cache_config.kv_cache_tensors for layer in tensor.layers]
    if len(set(owned)) != len(owned) or sorted(owned) != sorted(placed):
        odd = sorted(set(owned).symmetric_difference(placed)) or sorted(owned)
        raise LayoutRefused(f"layers share pages, or have none: {', '.join(odd[:4])}")
    if not all(group.layers for group in groups):
        raise LayoutRefused("a KV cache group has no layers")
