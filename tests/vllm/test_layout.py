"""Which KV caches of vLLM are handled, exactly how they lie, and why the others are refused."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
)
from vllm.v1.worker.utils import allocate_kv_cache

from engine_adapters.namespace import Part
from engine_adapters.vllm.layout import FULL, KINDS, SPECS, WINDOW, LayoutRefused, layout_of, window_blocks
from tests.vllm.config_house import (
    BLOCK,
    cache_configs,
    engine_config,
    full,
    gemma_specs,
    llama_specs,
    window,
)

pytestmark = pytest.mark.vllm


def one_group(spec: KVCacheSpec, **changes: Any) -> KVCacheConfig:
    """A cache of one group with one layer."""
    group = KVCacheGroupSpec(["layer"], spec, **changes)
    return KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[KVCacheTensor(size=1, layers=["layer"], layer_stride=1, block_stride=1)],
        kv_cache_groups=[group],
        kv_cache_layout="LBHNC",
        hash_block_size=BLOCK,
        cache_hit_alignment_tokens=BLOCK,
    )


def reason(kv_cache_config: KVCacheConfig, change: Callable[[Any], None] = lambda config: None) -> str:
    config = engine_config()
    change(config)
    with pytest.raises(LayoutRefused) as caught:
        layout_of(config, kv_cache_config)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_llama_has_one_group_and_a_part_a_rank(ranks: int) -> None:
    config = engine_config()
    config.parallel_config.tensor_parallel_size = ranks
    scheduler, workers = cache_configs(config, llama_specs(), ranks)
    layouts = [layout_of(config, one) for one in (scheduler, *workers)]
    assert all(one == layouts[0] for one in layouts), "the scheduler and its workers see different caches"
    (group,) = layouts[0].groups
    assert (group.kind, group.window_blocks, layouts[0].block_size_tokens) == ("full", 0, BLOCK)
    assert group.page_bytes == 2 * BLOCK * 2 * 32 * 2
    assert layouts[0].parts == tuple(Part(f"tp{rank}", 2 * group.page_bytes) for rank in range(ranks))
    assert layouts[0].parts_of(ranks - 1) == (f"tp{ranks - 1}",)


def test_windows_and_full_attention_have_parts_of_their_own() -> None:
    config = engine_config("gemma")
    scheduler, workers = cache_configs(config, gemma_specs())
    layout = layout_of(config, scheduler)
    assert layout == layout_of(config, workers[0]) and len(layout.groups) > 1
    assert sorted({group.kind for group in layout.groups}) == ["full", "window"]
    assert {group.window_blocks for group in layout.groups} == {0, 4}
    assert sorted(name for names in layout.layer_groups for name in names) == sorted(gemma_specs())
    assert layout.parts_of(0) == tuple(f"g{number}-tp0" for number in range(len(layout.groups)))
    assert len({len(group.layers) for group in layout.groups}) > 1, "no group of another size was tried"
    assert [part.bytes for part in layout.parts] == [
        group.page_bytes * len(group.layers) for group in layout.groups
    ]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
def test_sizes_are_those_of_the_real_tensors(kind: str, order: str) -> None:
    config = engine_config(kind)
    config.cache_config.kv_cache_layout = order
    scheduler, _ = cache_configs(config, gemma_specs() if kind == "gemma" else llama_specs())
    layout = layout_of(config, scheduler)
    caches = allocate_kv_cache(scheduler, torch.device("cpu"), KVCacheLayout[order])
    assert set(caches) == {name for group in layout.groups for name in group.layers}
    for group, part in zip(layout.groups, layout.rank_parts(0), strict=True):
        pages = [caches[name][0] for name in group.layers]
        assert all(page.numel() * page.element_size() == group.page_bytes for page in pages)
        assert part.bytes == sum(page.numel() * page.element_size() for page in pages)


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 34, 64, 65, 66, 97, 128, 129])
def test_a_window_needs_what_vllm_requires_for_a_hit(tokens: int) -> None:
    """With one block less vLLM's own manager finds no hit, and of one more it frees the first."""
    spec = window(tokens)
    needed = window_blocks(tokens, BLOCK)
    total = 6
    hashes = [BlockHash(bytes([number]) * 32) for number in range(total)]

    def found(last: int) -> int:
        pool = BlockPool(num_gpu_blocks=total + 1, enable_caching=True, hash_block_size=BLOCK)
        for number in range(total - last, total):
            block = pool.blocks[number + 1]
            key = make_block_hash_with_group_id(hashes[number], 0)
            block.set_block_hash(key)
            pool.cached_block_hash_to_block.insert(key, block)
        tokens_found: int = SlidingWindowManager.find_longest_cache_hit(
            block_hashes=hashes,
            max_length=total * BLOCK,
            kv_cache_group_ids=[0],
            block_pool=pool,
            kv_cache_spec=spec,
            drop_eagle_block=False,
            alignment_tokens=BLOCK,
        )[1]
        return tokens_found

    # a window of one token needs no block; vLLM's search then still asks for one
    assert found(max(needed, 1)) == total * BLOCK
    if needed:
        assert found(needed - 1) == 0
    manager = object.__new__(SlidingWindowManager)
    manager.sliding_window, manager.extra_retained_tokens = tokens, 0
    kept = total - manager.get_num_skipped_tokens(total * BLOCK) // BLOCK
    assert kept == needed


def specs_of_vllm() -> list[type]:
    found: list[type] = []
    todo: list[type] = [KVCacheSpec]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == interface.__name__]


def test_every_kind_that_vllm_has_is_handled_or_known_to_be_refused() -> None:
    handled = {FULL, WINDOW}
    for kind in specs_of_vllm():
        name = kind.__qualname__
        if f"{SPECS}.{name}" not in handled and name not in ("KVCacheSpec", "AttentionSpec"):
            assert name in KINDS, f"vLLM has a new kind of KV cache: {name}"


ATTENTION: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}


class Unheard(interface.FullAttentionSpec):
    """A kind that a plugin registered: it is a FullAttentionSpec to every isinstance()."""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (interface.MLAAttentionSpec(**{**ATTENTION, "num_kv_heads": 1}), "multi-head latent"),
        (interface.SlidingWindowMLASpec(**ATTENTION, sliding_window=64), "multi-head latent"),
        (interface.HiddenStateCacheSpec(**{**ATTENTION, "num_kv_heads": 1}), "hidden states"),
        (interface.MambaSpec(BLOCK, shapes=((2, 2),), dtypes=(torch.float32,)), "Mamba"),
        (interface.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64), "chunked local"),
        (interface.SinkFullAttentionSpec(**ATTENTION, sink_len=4), "sinks"),
        (interface.EncoderOnlyAttentionSpec(**ATTENTION), "encoder"),
        (interface.CrossAttentionSpec(**ATTENTION), "cross attention"),
        (interface.RSWASpec(**ATTENTION, rswa_window=64), "reference sliding"),
        (interface.CircularBufferSpec(**ATTENTION), "circular"),
        (interface.HiSparseHotSpec(block_size=BLOCK, page_size=64, blocks_per_request=1), "HiSparse"),
        (interface.UniformTypeKVCacheSpecs(BLOCK, kv_cache_specs={"layer": full()}), "different sizes"),
        (Unheard(**ATTENTION), "unknown kind"),
        (full(attention_chunk_size=64), "chunked local"),
        (full(non_causal=True), "not causal"),
        (full(block_size=64), "blocks of 64 tokens"),
        (full(page_size_padded=1 << 16), "padded"),
        (full(tokens_per_state=2), "a state for 2"),
        (full(tokens_per_state=Fraction(1, 2)), "a state for 1/2"),
        (full(kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD), "keeps scales"),
        (full(kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD), "keeps scales"),
        (full(kv_quant_mode=KVQuantMode.NVFP4), "keeps scales"),
        (window(extra_retained_tokens=3), "more than its window"),
        (window(0), "window of 0"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__qualname__,
)
def test_row25_a_group_that_is_not_plain_attention_is_refused(spec: KVCacheSpec, words: str) -> None:
    """Never silently wrong: vLLM itself runs a connector on such groups without a word."""
    assert words in reason(one_group(spec))


def test_row25_one_odd_group_among_good_ones_is_refused() -> None:
    mixed = one_group(full())
    mamba = interface.MambaSpec(BLOCK, shapes=((2, 2),), dtypes=(torch.float32,))
    mixed.kv_cache_groups.append(KVCacheGroupSpec(["other"], mamba))
    assert "KV cache group 1" in reason(mixed) and "Mamba" in reason(mixed)


def test_groups_of_two_precisions_are_refused_just_where_vllm_zeroes_blocks() -> None:
    """Its second model runner zeroes a preempted request's blocks before it tells the connector of it."""
    mixed = one_group(full())
    mixed.kv_cache_tensors[0].layers.append("other")
    mixed.kv_cache_groups.append(KVCacheGroupSpec(["other"], window(64)))
    assert not mixed.needs_kv_cache_zeroing
    layout_of(engine_config(), mixed)
    mixed.kv_cache_groups[1] = KVCacheGroupSpec(["other"], window(64, dtype=torch.float32))
    assert mixed.needs_kv_cache_zeroing
    assert "different precisions" in reason(mixed)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_eagle_group": True},
        {"host_resident": True},
        {"enable_kv_transfer": False},
        {"role": KVCacheGroupRole.HISPARSE_INDEXER},
    ],
)
def test_a_group_with_another_role_is_refused(changes: dict[str, Any]) -> None:
    assert "not the engine's plain cache" in reason(one_group(full(), **changes))


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Set one field of the engine's configuration."""
    *way, last = path.split(".")

    def change(config: Any) -> None:
        for name in way:
            config = getattr(config, name)
        object.__setattr__(config, last, value)

    return change


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size is 2"),
        ("parallel_config.prefill_context_parallel_size", 2, "prefill_context_parallel_size is 2"),
        ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size is 2"),
        ("speculative_config", object(), "speculative decoding"),
        ("diffusion_config", object(), "diffusion"),
        ("engram_config", object(), "engram"),
        ("attention_config.use_non_causal", True, "non-causal"),
        ("attention_config.hisparse_config", object(), "HiSparse"),
        ("cache_config.enable_prefix_caching", False, "prefix caching is off"),
        ("cache_config.kv_sharing_fast_prefill", True, "skip tokens"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_by_its_setting(path: str, value: Any, words: str) -> None:
    assert words in reason(one_group(full()), put(path, value))


def without_sizes(config: KVCacheConfig) -> None:
    config.hash_block_size = None


def finer_hits(config: KVCacheConfig) -> None:
    config.cache_hit_alignment_tokens = 2 * BLOCK


def no_groups(config: KVCacheConfig) -> None:
    config.kv_cache_groups = []


def shared_pages(config: KVCacheConfig) -> None:
    config.kv_cache_groups[0].layer_names.append("reader")


def twice(config: KVCacheConfig) -> None:
    config.kv_cache_groups.append(KVCacheGroupSpec(["layer"], full()))


def no_layers(config: KVCacheConfig) -> None:
    config.kv_cache_groups.append(KVCacheGroupSpec([], full()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_sizes, "hash_block_size"),
        (finer_hits, "prefix_match_unit"),
        (no_groups, "no KV cache"),
        (shared_pages, "reader"),
        (twice, "layer"),
        (no_layers, "has no layers"),
    ],
)
def test_a_cache_that_does_not_add_up_is_refused(change: Callable[[KVCacheConfig], None], words: str) -> None:
    config = one_group(full())
    layout_of(engine_config(), config)
    change(config)
    assert words in reason(config)


def test_block_sizes_that_differ_between_groups_are_refused() -> None:
    config = engine_config("gemma")
    specs: dict[str, KVCacheSpec] = {"a": full(), "b": window(block_size=2 * BLOCK, num_kv_heads=1)}
    scheduler, workers = cache_configs(config, specs)
    for one in (scheduler, *workers):
        with pytest.raises(LayoutRefused, match="tokens"):
            layout_of(config, one)


def test_a_model_whose_windows_are_kept_whole_is_one_full_group() -> None:
    """Without the hybrid manager vLLM keeps all blocks of window layers: more than needed is never wrong."""
    config = engine_config("gemma")
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    scheduler, _ = cache_configs(config, gemma_specs())
    (group,) = layout_of(config, scheduler).groups
    assert (group.kind, group.window_blocks, len(group.layers)) == ("full", 0, 11)
