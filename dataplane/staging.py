"""`Pages` over the tensors of an engine: one code path for cpu, cuda and npu.

Where a group's layers lie in one storage at one stride, they are seen as one tensor `[blocks, layers, heads,
tokens, content]`, and a page is one strided copy; where not, each run of layers that does is. (Selecting the
pages of a stacked tensor and transposing them, which reads better, is eight times slower.)

Bytes are moved as whole words whatever the element type is, so every type comes back bit for bit.

On a device, copies run on streams of our own, beside the engine's: events order the two, and the thread that
copies waits for its own copies only.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from dataplane.pages import GroupPages, Pages, PagesRefused, page_order

log = logging.getLogger("dataplane.staging")

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
HOST_WORDS_MAX = 32_767
"""On cpu a page is copied in pieces of at most so many words: for a larger copy torch would start a team of
threads for whichever thread of ours copies, in the middle of the engine's forward."""


class TorchPages(Pages):
    """Pages of an engine whose layers' KV memory is `kv_caches`.

    `kv_caches` has, for each layer, a tensor `[blocks * k, heads, tokens / k, content]` of any strides with
    the content of a token in one piece; `k` is in how many kernel blocks an attention kernel splits a block.
    `groups` are the layers of each KV cache group, in any order; `blocks` is how many blocks the engine has.

    Raises PagesRefused when a layer is missing or its tensor is not like that.
    """

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], groups: Sequence[Sequence[str]], blocks: int
    ) -> None:
        if not groups or not all(groups):
            raise PagesRefused("a KV cache group has no layers")
        missing = [name for group in groups for name in group if name not in kv_caches]
        if missing:
            raise PagesRefused(f"no KV memory was given for {', '.join(missing)}")
        for name in {name for group in groups for name in group}:
            if not isinstance(kv_caches[name], torch.Tensor):
                raise PagesRefused(f"the KV memory of {name} is no tensor: {type(kv_caches[name]).__name__}")
        devices = {kv_caches[name].device for group in groups for name in group}
        if len(devices) > 1:
            raise PagesRefused(f"the layers lie on several devices: {sorted(map(str, devices))}")
        self._device = devices.pop()
        self._copies = copies_of(self._device)
        orders = [page_order(group) for group in groups]
        piece_words = HOST_WORDS_MAX if self._device.type == "cpu" else None
        self._groups = [_Group([kv_caches[name] for name in order], blocks, piece_words) for order in orders]
        self._described = tuple(
            GroupPages(order, group.page_bytes, blocks)
            for order, group in zip(orders, self._groups, strict=True)
        )

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        return self._described

    def allocate(self, size_bytes: int) -> memoryview:
        if self._device.type != "cpu":
            try:
                return memoryview(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy())
            except RuntimeError as error:
                log.warning("no pinned memory, copies will be slower: %s", error)
        return memoryview(torch.empty(size_bytes, dtype=torch.uint8).numpy())

    def fence(self) -> None:
        self._copies.fence()

    def gather(self, group: int, block: int, out: memoryview) -> None:
        self.gather_many(group, (block,), (out,))

    def scatter(self, group: int, block: int, data: memoryview) -> None:
        self.scatter_many(group, (block,), (data,))

    def gather_many(self, group: int, blocks: Sequence[int], outs: Sequence[memoryview]) -> None:
        pages = self._group(group)
        hosts = [pages.host(block, out) for block, out in zip(blocks, outs, strict=True)]
        with self._copies.outward():
            for block, host in zip(blocks, hosts, strict=True):
                for piece in pages.pieces:
                    host.as_strided(piece.shape, piece.dense, piece.first).copy_(
                        piece.words.select(0, block), non_blocking=True
                    )

    def scatter_many(self, group: int, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        pages = self._group(group)
        hosts = [
            pages.host(block, memoryview(bytearray(data)) if data.readonly else data)  # torch only writes
            for block, data in zip(blocks, datas, strict=True)
        ]
        with self._copies.inward():
            for block, host in zip(blocks, hosts, strict=True):
                for piece in pages.pieces:
                    piece.words.select(0, block).copy_(
                        host.as_strided(piece.shape, piece.dense, piece.first), non_blocking=True
                    )

    def settle(self) -> None:
        """Nothing is left to do: every copy was waited for by the thread that made it."""

    def _group(self, group: int) -> "_Group":
        if not 0 <= group < len(self._groups):
            raise IndexError(f"there is no KV cache group {group}, only {len(self._groups)}")
        return self._groups[group]


class _Piece(NamedTuple):
    """Words of each block that one copy moves: a block's have `shape`, and lies in the page from word
    `first` on, with the strides `dense`."""

    words: torch.Tensor
    shape: tuple[int, ...]
    dense: tuple[int, ...]
    first: int


class _Group:
    """The pages of one group: the pieces that a page is copied in."""

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int, piece_words: int | None) -> None:
        layers = [_bytes_of(cache, blocks) for cache in caches]
        self.blocks = blocks
        self.page_bytes = sum(layer[0].numel() for layer in layers)
        runs = [_as_one(run) for run in _runs(layers)]
        word = math.gcd(8, *(size for run in runs for size in _granules(run)))
        self._dtype = WORDS[word]
        self.pieces: list[_Piece] = []
        first = 0
        for run in runs:
            words = run.view(self._dtype)
            for piece in _split(words, piece_words):
                shape = tuple(piece.shape[1:])
                self.pieces.append(_Piece(piece, shape, _dense(shape), first))
                first += math.prod(shape)
        self._page_words = first

    def host(self, block: int, buffer: memoryview) -> torch.Tensor:
        """The words of the buffer's front, once block and buffer are found right."""
        if not 0 <= block < self.blocks:
            raise IndexError(f"there is no block {block}, only {self.blocks}")
        if buffer.nbytes < self.page_bytes or not buffer.c_contiguous:
            raise ValueError(
                f"a contiguous buffer of {self.page_bytes} bytes is wanted, this has {buffer.nbytes}"
            )
        return torch.frombuffer(buffer, dtype=self._dtype, count=self._page_words)


def _bytes_of(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """A layer's memory as bytes `[blocks, heads, (kernel blocks,) tokens, content]`."""
    shape, strides = tuple(cache.shape), cache.stride()
    if cache.ndim < 2 or blocks < 1 or shape[0] % blocks or not cache.numel():
        raise PagesRefused(f"KV memory of shape {list(shape)} does not hold {blocks} blocks")
    if strides[-1] != 1:
        raise PagesRefused(f"the content of a token is not in one piece: strides {list(strides)}")
    parts = shape[0] // blocks
    seen = cache.detach().view(torch.uint8)
    if parts == 1:
        return seen
    if cache.ndim != 4:
        raise PagesRefused(f"kernel blocks of shape {list(shape)} cannot be put together to {blocks} blocks")
    # A page does not show how a kernel splits it: tokens of a head follow each other over kernel blocks.
    return seen.unflatten(0, (blocks, parts)).transpose(1, 2)


def _runs(layers: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours that lie in one storage at one stride, together."""
    run = [layers[0]]
    for layer in layers[1:]:
        last = run[-1]
        step = layer.storage_offset() - last.storage_offset()
        alike = (
            layer.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
            and layer.shape == last.shape
            and layer.stride() == last.stride()
            and step > 0
            and (len(run) == 1 or step == last.storage_offset() - run[-2].storage_offset())
        )
        if alike:
            run.append(layer)
        else:
            yield run
            run = [layer]
    yield run


def _as_one(run: Sequence[torch.Tensor]) -> torch.Tensor:
    """A run of layers as one tensor `[blocks, layers, ...]` over the same memory."""
    head = run[0]
    step = run[1].storage_offset() - head.storage_offset() if len(run) > 1 else head.numel()
    return head.as_strided(
        (head.shape[0], len(run), *head.shape[1:]),
        (head.stride(0), step, *head.stride()[1:]),
        head.storage_offset(),
    )


def _granules(run: torch.Tensor) -> list[int]:
    """What the size of a word must divide, in bytes, for the run to be seen as words."""
    steps = [stride for size, stride in zip(run.shape[:-1], run.stride()[:-1], strict=True) if size > 1]
    return [run.storage_offset(), run.data_ptr(), run.shape[-1], *steps]


def _split(words: torch.Tensor, piece_words: int | None) -> Iterator[torch.Tensor]:
    """The same memory in pieces of at most `piece_words` words a block, in page order."""
    if piece_words is None or words[0].numel() <= piece_words:
        yield words
        return
    axis = next(axis for axis in range(1, words.ndim) if words.shape[axis] > 1)
    each = words[0].numel() // words.shape[axis]
    for part in words.split(max(1, piece_words // each), dim=axis):
        yield from _split(part, piece_words)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Copies(Protocol):
    """How copies are ordered with what the engine does on its device."""

    def fence(self) -> None:
        """See `Pages.fence`."""
        ...

    def outward(self) -> Any:
        """A context: copies out of the engine's memory are begun in it, and done when it is left."""
        ...

    def inward(self) -> Any:
        """A context: copies into the engine's memory are begun in it, and done when it is left."""
        ...


class HostCopies:
    """On cpu an engine has done what it was asked to when the asking returns, and so has a copy."""

    def fence(self) -> None:
        """There is no stream."""

    @contextmanager
    def outward(self) -> Iterator[None]:
        """Copies block."""
        yield

    inward = outward


class StreamCopies:
    """On a device: a stream for each direction, which waits for the last fence.

    `module` is torch.cuda, torch.npu or another of that shape.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module = device, module
        self._out = module.Stream(device=device)
        self._in = module.Stream(device=device)
        self._fenced: Any = None

    def fence(self) -> None:
        """Mark this point of the engine's stream, which is the calling thread's current one."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        self._fenced = event

    def outward(self) -> Any:
        """Copies on the one stream."""
        return self._on(self._out)

    def inward(self) -> Any:
        """Copies on the other."""
        return self._on(self._in)

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        with self._module.stream(stream):
            fenced = self._fenced
            if fenced is not None:
                stream.wait_event(fenced)
            try:
                yield
            finally:  # also of copies begun before one failed: their buffers are about to be reused
                done = self._module.Event()
                done.record(stream)
                done.synchronize()


def copies_of(device: torch.device) -> Copies:
    """The right kind for a device."""
    if device.type == "cpu":
        return HostCopies()
    return StreamCopies(device, torch.get_device_module(device))
