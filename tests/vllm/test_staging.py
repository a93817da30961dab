"""Pages over real tensors, laid out as vLLM lays them out, against a slow reading of the same memory."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from dataplane import staging
from dataplane.pages import PagesRefused, page_order
from dataplane.staging import StreamCopies, TorchPages

LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(11)]  # ten follows nine, not one
BLOCKS = 7
CHANCE = random.Random(20)
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
]


@dataclass
class Memory:
    """An engine's memory, full of every bit pattern (NaNs, negative zeros, denormals)."""

    caches: dict[str, torch.Tensor]
    groups: list[list[str]]
    blocks: int

    def pages(self) -> TorchPages:
        return TorchPages(self.caches, self.groups, self.blocks)

    def page(self, group: int, block: int) -> bytes:
        """Layer, head, token, content, one after the other."""
        whole = bytearray()
        for name in sorted(self.groups[group], key=lambda name: int(name.split(".")[2])):
            cache = self.caches[name]
            parts = cache.shape[0] // self.blocks
            kernel_blocks = cache[block * parts : (block + 1) * parts]
            for head in range(cache.shape[1]):
                for kernel_block in kernel_blocks:
                    whole += kernel_block[head].contiguous().view(torch.uint8).numpy().tobytes()
        return bytes(whole)

    def raw(self) -> bytes:
        """Every byte of the storages, padding too."""
        storages = {c.untyped_storage().data_ptr(): c.untyped_storage() for c in self.caches.values()}
        empty = (torch.empty(0, dtype=torch.uint8) for _ in storages)
        return b"".join(e.set_(s).numpy().tobytes() for e, s in zip(empty, storages.values(), strict=True))


def engine_memory(
    layout: KVCacheLayout = KVCacheLayout.LBHNC,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kernel_block: int | None = None,
    padding_bytes: int = 0,
    listed: list[str] | None = None,
    windows: bool = False,
    head_size: int = 8,
) -> Memory:
    """What vLLM makes: one allocation, one view a layer. With `windows` a second group of the same layers'
    number lies over the first one's bytes, as in models with two kinds of attention."""
    shape: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": head_size, "dtype": dtype}
    page = FullAttentionSpec(**shape).page_size_bytes
    if padding_bytes:
        shape["page_size_padded"] = page + padding_bytes
    names = listed or LAYERS
    groups = [KVCacheGroupSpec(names, FullAttentionSpec(**shape))]
    if windows:
        later = [f"model.layers.{20 + n}.self_attn.attn" for n in range(len(names))]
        groups.append(KVCacheGroupSpec(later, SlidingWindowSpec(**shape, sliding_window=64)))
    spec = groups[0].kv_cache_spec
    whole = spec.page_size_bytes * len(names)
    fixed = (None, whole if layout.is_block_outermost else None, None, None, None)
    layer_stride, block_stride, *_ = compute_layout_strides(
        spec, BLOCKS, len(names), layout, fixed_strides=fixed
    )
    config = KVCacheConfig(
        BLOCKS,
        [
            KVCacheTensor(
                size=whole * BLOCKS,
                layers=group.layer_names,
                layer_stride=layer_stride,
                block_stride=block_stride,
            )
            for group in groups
        ],
        groups,
    )
    kernel_blocks = [kernel_block or 32] * len(groups)
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, kernel_blocks)
    scramble(next(iter(caches.values())))
    return Memory(caches, [group.layer_names for group in groups], BLOCKS)


def scramble(cache: torch.Tensor) -> None:
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    raw.random_(0, 256)


def blank(pages: TorchPages, group: int = 0) -> memoryview:
    return pages.allocate(pages.groups[group].page_bytes)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_is_the_same_bytes_in_every_layout(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    memory = engine_memory(layout, dtype)
    pages = memory.pages()
    for block in range(BLOCKS):
        out = blank(pages)
        pages.gather(0, block, out)
        assert bytes(out) == memory.page(0, block)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_put_back_changes_that_page_and_no_other_byte(
    layout: KVCacheLayout, dtype: torch.dtype
) -> None:
    memory = engine_memory(layout, dtype)
    pages = memory.pages()
    before, others = memory.raw(), [memory.page(0, block) for block in range(BLOCKS)]
    page = CHANCE.randbytes(pages.groups[0].page_bytes)
    pages.scatter(0, 3, memoryview(bytearray(page)))
    assert memory.page(0, 3) == page
    assert [memory.page(0, block) for block in range(BLOCKS) if block != 3] == others[:3] + others[4:]
    pages.scatter(0, 3, memoryview(others[3]))  # which cannot be written to: still no complaint
    assert memory.raw() == before


@pytest.mark.parametrize("kernel_block", [4, 8, 16])
def test_a_page_does_not_show_how_a_kernel_splits_blocks(kernel_block: int) -> None:
    split = engine_memory(kernel_block=kernel_block)
    assert split.caches[LAYERS[0]].shape[0] == BLOCKS * 32 // kernel_block
    pages, whole = split.pages(), engine_memory().pages()
    page = CHANCE.randbytes(pages.groups[0].page_bytes)
    for at, block in ((pages, 2), (whole, 5)):
        at.scatter(0, block, memoryview(bytearray(page)))
    assert split.page(0, 2) == page
    outs = [blank(pages), blank(whole)]
    pages.gather(0, 2, outs[0])
    whole.gather(0, 5, outs[1])
    assert bytes(outs[0]) == bytes(outs[1]) == page


def test_kernel_blocks_hold_what_the_block_as_a_whole_would() -> None:
    """Token t of a page is token t of the block, whichever kernel block keeps it."""
    split = engine_memory(dtype=torch.int8, kernel_block=8, head_size=1, listed=LAYERS[:1])
    cache = split.caches[LAYERS[0]]
    for part in range(4):
        for token in range(8):
            cache[4 * 1 + part, :, token, :] = part * 8 + token
    out = blank(split.pages())
    split.pages().gather(0, 1, out)
    assert bytes(out) == bytes(token for _head in range(2) for token in range(32) for _kv in range(2))


@pytest.mark.parametrize("padding_bytes", [2, 8, 64])
def test_padding_between_pages_is_neither_copied_nor_touched(padding_bytes: int) -> None:
    memory, plain = engine_memory(padding_bytes=padding_bytes), engine_memory()
    pages = memory.pages()
    assert pages.groups[0].page_bytes == plain.pages().groups[0].page_bytes
    out = blank(pages)
    pages.gather(0, 6, out)
    assert bytes(out) == memory.page(0, 6)
    before = memory.raw()
    pages.scatter(0, 6, memoryview(bytearray(len(out))))
    changed = sum(a != b for a, b in zip(before, memory.raw(), strict=True))
    assert changed == sum(byte != 0 for byte in out)


def test_groups_over_the_same_bytes_have_pages_of_their_own() -> None:
    memory = engine_memory(windows=True)
    pages = memory.pages()
    assert [len(group.layers) for group in pages.groups] == [11, 11]
    out = blank(pages, 1)
    pages.gather(1, 4, out)
    assert bytes(out) == memory.page(1, 4)


def test_the_order_of_layers_is_that_of_their_numbers_however_they_are_listed() -> None:
    shuffled = CHANCE.sample(LAYERS, len(LAYERS))
    memory = engine_memory(listed=shuffled)
    pages = memory.pages()
    assert pages.groups[0].layers == tuple(LAYERS) == page_order(shuffled)
    out = blank(pages)
    pages.gather(0, 1, out)
    assert bytes(out) == memory.page(0, 1)


def test_layers_in_memories_of_their_own_of_different_sizes_and_oddly_placed() -> None:
    def layer(tokens: int, content: int, offset: int) -> torch.Tensor:
        size = BLOCKS * 3 * tokens * content
        return torch.randint(0, 256, (size + offset,), dtype=torch.uint8)[offset:].view(
            BLOCKS, 3, tokens, content
        )

    caches = {LAYERS[0]: layer(4, 10, 0), LAYERS[1]: layer(4, 10, 3), LAYERS[2]: layer(5, 7, 1)}
    memory = Memory(caches, [LAYERS[:3]], BLOCKS)
    pages = memory.pages()
    buffer = memoryview(bytearray(b"\xee" * (pages.groups[0].page_bytes + 8)))
    pages.gather(0, 2, buffer[1:-4])  # of a size and at an address no word likes
    assert bytes(buffer[1:-7]) == memory.page(0, 2)
    assert bytes(buffer[:1]) + bytes(buffer[-7:]) == b"\xee" * 8
    pages.scatter(0, 3, buffer[1:])
    assert memory.page(0, 3) == memory.page(0, 2)


def test_a_buffer_at_an_odd_address_takes_whole_words() -> None:
    memory = engine_memory()
    pages = memory.pages()
    buffer = memoryview(bytearray(pages.groups[0].page_bytes + 3))
    pages.gather(0, 2, buffer[3:])
    assert bytes(buffer[3:]) == memory.page(0, 2)
    pages.scatter(0, 5, buffer[3:])
    assert memory.page(0, 5) == memory.page(0, 2)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_large_pages_are_copied_in_pieces_that_start_no_threads(
    layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "HOST_WORDS_MAX", 37)
    memory = engine_memory(layout)
    pages = memory.pages()
    pieces = pages._groups[0].pieces
    assert len(pieces) > len(LAYERS) and max(piece.words[0].numel() for piece in pieces) <= 37
    out = blank(pages)
    pages.gather(0, 2, out)
    assert bytes(out) == memory.page(0, 2)
    pages.scatter(0, 4, out)
    assert memory.page(0, 4) == bytes(out)


def test_layers_at_one_stride_are_one_copy_a_page() -> None:
    for layout in KVCacheLayout:
        assert len(engine_memory(layout).pages()._groups[0].pieces) == 1


def test_many_pages_at_once_and_from_many_threads() -> None:
    memory = engine_memory(windows=False)
    pages = memory.pages()
    want = [memory.page(0, block) for block in range(BLOCKS)]

    def gather(seed: int) -> bool:
        blocks = random.Random(seed).sample(range(BLOCKS), 5)
        outs = [blank(pages) for _ in blocks]
        pages.gather_many(0, blocks, outs)
        pages.scatter_many(0, blocks, outs)  # what is there already
        return [bytes(out) for out in outs] == [want[block] for block in blocks]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(gather, range(60)))
    assert [memory.page(0, block) for block in range(BLOCKS)] == want


def test_what_cannot_be_a_page_is_refused_before_a_byte_moves() -> None:
    memory = engine_memory()
    pages, before = memory.pages(), memory.raw()
    data = memoryview(bytearray(pages.groups[0].page_bytes))
    for group, block in ((0, -1), (0, BLOCKS), (1, 0), (-1, 0)):
        with pytest.raises(IndexError):
            pages.gather(group, block, data)
        with pytest.raises(IndexError):
            pages.scatter(group, block, data)
    for wrong in (data[:-1], memoryview(bytearray(2 * len(data)))[::2]):
        with pytest.raises(ValueError, match="contiguous buffer"):
            pages.scatter(0, 0, wrong)
    with pytest.raises(ValueError):
        pages.scatter_many(0, [0, 1], [data])
    with pytest.raises(IndexError):
        pages.scatter_many(0, [0, -1], [data, data])
    assert memory.raw() == before


def test_memory_that_cannot_be_copied_by_the_page_is_refused_by_reason() -> None:
    good = torch.zeros(BLOCKS, 2, 4, 8)
    refused: list[tuple[dict[str, Any], list[list[str]], str]] = [
        ({"a": good}, [], "no layers"),
        ({"a": good}, [[]], "no layers"),
        ({"a": good}, [["a", "b"]], "no KV memory was given for b"),
        ({"a": good[:5]}, [["a"]], "does not hold 7 blocks"),
        ({"a": good.flatten()[:1]}, [["a"]], "does not hold 7 blocks"),
        ({"a": good.transpose(2, 3)}, [["a"]], "not in one piece"),
        ({"a": [good, good]}, [["a"]], "KV memory of a is no tensor: list"),
        ({"a": torch.zeros(2 * BLOCKS, 4, 8)}, [["a"]], "cannot be put together"),
    ]
    for caches, groups, reason in refused:
        with pytest.raises(PagesRefused, match=reason):
            TorchPages(caches, groups, BLOCKS)


class Recorder:
    """Of the shape of torch.cuda: notes what is asked of it, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._streams = self._events = 0

    def Stream(self, device: torch.device) -> "Noted":
        self._streams += 1
        return Noted(self, f"s{self._streams}")

    def Event(self) -> "Event":
        self._events += 1
        return Event(self, f"e{self._events}")

    def current_stream(self, device: torch.device) -> "Noted":
        return Noted(self, "engine")

    @contextmanager
    def stream(self, stream: "Noted") -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append(f"off {stream.name}")


@dataclass
class Noted:
    recorder: Recorder
    name: str

    def wait_event(self, event: "Event") -> None:
        self.recorder.calls.append(f"{self.name} waits for {event.name}")


@dataclass
class Event:
    recorder: Recorder
    name: str

    def record(self, stream: Noted) -> None:
        self.recorder.calls.append(f"{self.name} on {stream.name}")

    def synchronize(self) -> None:
        self.recorder.calls.append(f"wait for {self.name}")


def test_on_a_device_copies_follow_the_fence_and_are_done_when_they_return() -> None:
    """The order of calls only; the same code with real streams needs a device."""
    real = torch.cuda  # the recorder has no method that the real thing lacks
    assert all(hasattr(real, name) for name in ("Stream", "Event", "current_stream", "stream"))
    assert hasattr(real.Stream, "wait_event")
    assert hasattr(real.Event, "record") and hasattr(real.Event, "synchronize")
    memory, recorder = engine_memory(), Recorder()
    pages = memory.pages()
    pages._copies = StreamCopies(torch.device("cuda"), recorder)
    pages.fence()
    out = blank(pages)
    pages.gather(0, 1, out)
    pages.scatter(0, 2, out)
    pages.settle()
    assert recorder.calls == [
        *("e1 on engine", "on s1", "s1 waits for e1", "e2 on s1", "wait for e2", "off s1"),
        *("on s2", "s2 waits for e1", "e3 on s2", "wait for e3", "off s2"),
    ]


def test_copies_begun_are_waited_for_when_one_fails() -> None:
    recorder = Recorder()
    copies = StreamCopies(torch.device("cuda"), recorder)
    with pytest.raises(RuntimeError), copies.outward():
        raise RuntimeError
    assert recorder.calls[-1] == "wait for e1"


def test_without_pinned_memory_buffers_are_pageable() -> None:
    if torch.cuda.is_available():
        pytest.skip("pinned memory exists here")
    pages = engine_memory().pages()
    pages._device = torch.device("cuda")
    buffer = pages.allocate(100)
    buffer[:] = bytes(range(100))
    assert buffer.nbytes == 100 and bytes(buffer[50:52]) == b"\x32\x33"
