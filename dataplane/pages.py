"""An engine's KV memory, page by page, as whoever moves bytes sees it. No torch here.

A *page* is what one KV cache group keeps of one engine block on one rank. As bytes it is

    layer after layer (in the order of the layers' names, numbers in them by value),
    of each layer kv head after kv head, of each head token after token, of each token its content,

whatever the order, the strides or the padding in the engine's memory are; `LAYOUT_ID` names that order. It
belongs to the identity of what is stored: two engines share blocks only when it is the same in both.
"""

import re
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

LAYOUT_ID = "layer.head.token.content/1"
"""The order of the bytes of a page. Changes whenever the same engine memory would give other bytes."""


class PagesRefused(ValueError):
    """The engine's memory is not laid out in a way that can be copied page by page; the text says why."""


class GroupPages(Struct, frozen=True):
    """One KV cache group on this rank: its layers in page order, the size of a page, the number of pages."""

    layers: tuple[str, ...]
    page_bytes: int
    blocks: int


class Pages(Protocol):
    """Copies pages out of and into the engine's memory. Any thread may copy; `fence` and `settle` belong to
    the engine's own thread, since they speak of its stream.

    Group and block are indexes: IndexError when there is no such one. Buffers are contiguous, at least
    `page_bytes` long, and what lies behind the page in them is left alone; ValueError otherwise. When a copy
    returns it is done: the buffer may be reused, sent or freed.

    What a copier must see to: no page is copied into while the engine reads it, nor copied out after the
    engine took the block back. Nothing here can know that.
    """

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        """The groups, in the engine's order."""
        ...

    def allocate(self, size_bytes: int) -> memoryview:
        """A writable buffer from which copies are fast (pinned where the device wants it); freed when the
        last view of it is gone."""
        return memoryview(bytearray(size_bytes))

    def fence(self) -> None:
        """What the engine has asked its device for so far comes before every copy that begins after this.

        Before a page is handed over to be gathered (else it is copied before it is computed) and before one
        is handed over to be scattered (else the block's last reader may still be reading it).
        """
        ...

    def gather(self, group: int, block: int, out: memoryview) -> None:
        """Copy the page of `block` to the front of `out`."""
        ...

    def scatter(self, group: int, block: int, data: memoryview) -> None:
        """Copy the front of `data` to the page of `block`."""
        ...

    def gather_many(self, group: int, blocks: Sequence[int], outs: Sequence[memoryview]) -> None:
        """`gather` of each; a device is waited for once. As many buffers as blocks."""
        for block, out in zip(blocks, outs, strict=True):
            self.gather(group, block, out)

    def scatter_many(self, group: int, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """`scatter` of each; a device is waited for once. As many buffers as blocks."""
        for block, data in zip(blocks, datas, strict=True):
            self.scatter(group, block, data)

    def settle(self) -> None:
        """What the engine asks its device for from now on comes after every scatter that has returned."""
        ...


def page_order(layers: Sequence[str]) -> tuple[str, ...]:
    """The layers in the order in which a page holds them: by name, numbers in it by value, so that it does
    not hang on the order in which an engine happens to list them.

    >>> page_order(["m.10.attn", "m.9.attn"])
    ('m.9.attn', 'm.10.attn')
    """
    return tuple(sorted(layers, key=_by_numbers))


def _by_numbers(name: str) -> tuple[tuple[int, int, str], ...]:
    pieces = re.split(r"(\d+)", name)
    return tuple((1, int(piece), piece) if piece.isdecimal() else (0, 0, piece) for piece in pieces)
