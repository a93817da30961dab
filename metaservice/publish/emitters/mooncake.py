"""Object keys in a shared pool, for Dynamo's embedded router beside SGLang (`--shared-cache-type hicache`).

`[now in ms, [{event_type, object_key, tenant_id}...], rank]`: whole milliseconds, or the router drops the
message. A block is two objects a tensor-parallel rank, or one with MLA; the router asks for all of them by
the SHA-256 that SGLang makes of a page and all before it. So only blocks that are named so are told: any
other would fill its table (a million keys, then it forgets all) and never be asked for.

It takes a missed message for a reason to forget everything and asks for no replay, so restating heals it. It
does not count: what is stored is told as that alone, however often.
"""

from collections.abc import Iterator, Sequence

from msgspec import Raw, Struct

from metaservice.core.windows import EXTERNAL, Gone, Run
from metaservice.publish.emitters.base import Events, WindowEmitter
from metaservice.publish.emitters.port import EVENT_BLOCKS_MAX, Stream
from metaservice.publish.hashes import page_key
from metaservice.wire.tokens import token_count

TENANT = "default"


class ObjectEvent(Struct, frozen=True):
    """All that the router reads of an event."""

    event_type: str
    object_key: str
    tenant_id: str = TENANT


class MooncakeEmitter(WindowEmitter):
    """`tensor_parallel` is how many ranks write a block, 0 for a model with MLA. `prefix` is what SGLang puts
    before its keys: the backend's tag and the served model's name ("-" for "/"), joined by "_"; "" for
    nothing.
    """

    name = "mooncake"

    def __init__(self, tensor_parallel: int = 1, prefix: str = "") -> None:
        super().__init__()
        self._before = f"{prefix}_" if prefix else ""
        self._after = tuple(f"_{rank}_{half}" for rank in range(tensor_parallel) for half in "kv") or ("__k",)

    def payload(self, stream: Stream, events: Sequence[Raw], now_ms: int) -> bytes:
        return self._encode((now_ms, events, stream.rank))

    def stored(self, stream: Stream, run: Run) -> Iterator[Events]:
        if run.medium != EXTERNAL:
            return
        good = self._pages(stream, run)
        yield from self._pieces("stored", run.keys[: good * run.key_length], run.key_length)

    def removed(self, stream: Stream, gone: Gone) -> Iterator[Events]:
        if gone.medium != EXTERNAL:
            return
        if gone.key_length != stream.key_length:
            self.invalid["key_length"] += len(gone.keys) // max(gone.key_length, 1)
            return
        yield from self._pieces("removed", gone.keys, gone.key_length)

    def _pieces(self, event_type: str, keys: bytes, key_length: int) -> Iterator[Events]:
        step = key_length * EVENT_BLOCKS_MAX
        for first in range(0, len(keys), step):
            names = keys[first : first + step].hex("_", -key_length).split("_")
            yield [
                ObjectEvent(event_type, f"{self._before}{name}{after}")
                for name in names
                for after in self._after
            ]

    def _pages(self, stream: Stream, run: Run) -> int:
        """How many blocks of the run are named as SGLang names a page, from the first on."""
        count = len(run.tokens)
        if run.key_length != stream.key_length or len(run.keys) != count * run.key_length:
            self.invalid["key_length" if run.key_length != stream.key_length else "columns"] += count
            return 0
        if wrong := "salt" if run.salt else "adapter" if run.lora or stream.lora else "":
            self.invalid[wrong] += count
            return 0
        before = run.parent or b""
        for at, packed in enumerate(run.tokens):
            key = run.keys[at * run.key_length : (at + 1) * run.key_length]
            if not _fits(packed, stream.block_size_tokens) or page_key(before, packed) != key:
                self.invalid["not_a_page"] += count - at
                return at
            before = key
        return count


def _fits(packed: bytes, block_size_tokens: int) -> bool:
    try:
        return token_count(packed) == block_size_tokens
    except ValueError:
        return False
