"""Windows for tests of emitters: chains of blocks, and what is said of parts of them."""

from collections.abc import Iterable
from hashlib import sha256
from itertools import chain
from typing import Any

import msgspec

from metaservice.core.windows import EXTERNAL, Gone, Run, Window
from metaservice.publish.emitters import Stream
from metaservice.wire.tokens import pack_tokens

KEY_LENGTH = 32
BLOCK = 4
NOW_MS = 1_764_460_800_250


def stream(**changes: Any) -> Stream:
    """The pool's stream of instance `i`, or one that differs from it."""
    plain = Stream(
        channel=0,
        instance="i",
        model="m",
        node="",
        rank=0,
        block_size_tokens=BLOCK,
        key_length=KEY_LENGTH,
        hash_of="tail64",
        lora="",
        topic=b"kv@pool@m",
    )
    return msgspec.structs.replace(plain, **changes)


class Chain:
    """A prompt's blocks: `ids` by blocks of `size`, each named by all before it."""

    def __init__(
        self, ids: list[int], size: int = BLOCK, salt: str = "", lora: str = "", seed: bytes = b""
    ) -> None:
        self.ids = ids
        self.size = size
        self.salt = salt
        self.lora = lora
        self.tokens = [pack_tokens(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size)]
        self.keys: list[bytes] = []
        key = sha256(seed + f"{lora}/{salt}".encode()).digest()
        for packed in self.tokens:
            key = sha256(key + packed).digest()
            self.keys.append(key)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def hashes(self) -> list[int]:
        """The blocks' event hashes, by their tails."""
        return [int.from_bytes(key[-8:], "big") for key in self.keys]

    def run(self, first: int = 0, last: int | None = None, **changes: Any) -> Run:
        """The blocks from `first` to before `last`, in the pool."""
        plain = Run(
            instance="i",
            medium=EXTERNAL,
            node="",
            lora=self.lora,
            salt=self.salt,
            parent=self.keys[first - 1] if first else None,
            key_length=KEY_LENGTH,
            keys=b"".join(self.keys[first:last]),
            tokens=self.tokens[first:last],
        )
        return msgspec.structs.replace(plain, **changes)

    def gone(self, first: int = 0, last: int | None = None, **changes: Any) -> Gone:
        """That they are no longer there."""
        plain = Gone("i", EXTERNAL, "", KEY_LENGTH, b"".join(self.keys[first:last]))
        return msgspec.structs.replace(plain, **changes)


def prompt(first: int, blocks: int, size: int = BLOCK) -> list[int]:
    """Ids that no prompt with another `first` (multiples of 10,000) has."""
    return list(range(first, first + blocks * size))


def window(number: int = 2**20, **parts: Any) -> Window:
    """A window with these parts, the others empty."""
    said: dict[str, Any] = {"stored": [], "restated": [], "removed": [], "again": []} | parts
    return Window(shard=0, seq=7, number=number, now_ms=NOW_MS, **said)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    """One list of what is in all of them."""
    return list(chain.from_iterable(lists))


def decode(payload: bytes) -> Any:
    """The payload as any msgpack reader sees it."""
    return msgspec.msgpack.decode(payload)


def frames(stream: Stream, number: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    """The message as it is sent."""
    return stream.topic, number.to_bytes(8, "big"), payload
