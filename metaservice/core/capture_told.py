"""What a snapshot says of routers: how instances are announced, what is, and what they are to be told as
removed. Chunks of their own behind the others, left out where there is nothing of it: so a state that tells
no router anything is written as it was before there were any.
"""

from array import array
from collections import deque
from collections.abc import Iterator

import msgspec

from .index import Label, packed_slots, unpacked_slots
from .model import Endpoints, Publication
from .state import WINDOW_FIRST, State, Told

_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_TAG = "told"
CHUNK_BYTES = 8 * 1024 * 1024
"""Of token ids in a chunk, about."""


class _Told(msgspec.Struct, array_like=True, tag=_TAG):
    """Written where anything is or was announced to routers, or is to be: else the chunk is left out.
    `window`: the last one's number."""

    window: int
    tombstones: list[Told]
    instances: list[tuple[str, Publication]]
    storages: list[tuple[str, str]]
    engines: list[tuple[str, Endpoints, int, int]]
    announced: bytes
    labels: list[tuple[str, str]]
    doomed: bytes = b""


class _Untold(msgspec.Struct, array_like=True, tag="untold"):
    """Some of what went and is not told yet, in its order."""

    gone: list[Told]


class _Tokens(msgspec.Struct, array_like=True, tag="tokens"):
    """Columns of a run of slots. `label`: u32, 1 + the row in `_Told.labels`, 0 for none."""

    first: int
    tokens: list[bytes]
    label: bytes


def capture(state: State, slots_per_chunk: int) -> Iterator[bytes]:
    """The chunks, none when there is nothing to say."""
    index = state.index
    instances = [
        (id, one.publication) for id, one in sorted(state.instances.items()) if one.publication is not None
    ]
    storages = [(id, one.reach) for id, one in sorted(state.storages.items()) if one.reach]
    engines = [
        (id, one.endpoints, one.pool_channel, one.local_channel)
        for id, one in sorted(state.engines.items())
        if one.pool_channel >= 0 or one.endpoints != Endpoints()
    ]
    if state.window == WINDOW_FIRST and not (instances or storages or engines or any(index.tokens)):
        return
    labels = sorted({label for label in index.label if label is not None})
    number_of = {label: row + 1 for row, label in enumerate(labels)}
    yield _ENCODER.encode(
        _Told(
            state.window, list(state.tombstones), instances, storages, engines,
            bytes(index.announced), labels, packed_slots(state.doomed),
        )
    )  # fmt: skip
    gone = list(state.untold)
    for first in range(0, len(gone), slots_per_chunk):
        yield _ENCODER.encode(_Untold(gone[first : first + slots_per_chunk]))
    for first, end in _spans(index.tokens, slots_per_chunk):
        numbers = array("I", [number_of[one] if one is not None else 0 for one in index.label[first:end]])
        yield _ENCODER.encode(_Tokens(first, index.tokens[first:end], numbers.tobytes()))


def _spans(tokens: list[bytes], slots_max: int) -> Iterator[tuple[int, int]]:
    """All slots in runs (first, end) of at most so many, and of at most so many bytes: a chunk of a snapshot
    has a limit, and how long a block is has none."""
    first = size = 0
    for slot, packed in enumerate(tokens):
        size += len(packed)
        if slot + 1 - first >= slots_max or size >= CHUNK_BYTES:
            yield first, slot + 1
            first, size = slot + 1, 0
    if first < len(tokens):
        yield first, len(tokens)


def begins(chunk: bytes) -> bool:
    """Whether this is the first of these chunks."""
    try:
        msgspec.msgpack.decode(chunk, type=_Told)
    except msgspec.ValidationError:
        return False
    return True


def restore(state: State, chunks: list[bytes]) -> None:
    """What the chunks say, into a state that has all its slots."""
    index = state.index
    if not chunks:
        index.tokens = [b""] * len(index)
        index.label = [None] * len(index)
        index.announced = bytearray(len(index))
        return
    head = msgspec.msgpack.decode(chunks[0], type=_Told)
    state.window = head.window
    state.tombstones = deque(head.tombstones)
    state.doomed = deque(unpacked_slots(head.doomed))
    for id, publication in head.instances:
        state.instances[id].publication = publication
    for id, reach in head.storages:
        state.storages[id].reach = reach
    for id, endpoints, pool, local in head.engines:
        engine = state.engines[id]
        engine.endpoints, engine.pool_channel, engine.local_channel = endpoints, pool, local
    index.announced = bytearray(head.announced)
    labels: list[Label | None] = [None, *head.labels]
    for chunk in chunks[1:]:
        part = msgspec.msgpack.decode(chunk, type=_Untold | _Tokens)
        if isinstance(part, _Untold):
            state.untold |= dict.fromkeys(part.gone)
            continue
        assert part.first == len(index.tokens), "chunks out of order"
        index.tokens += part.tokens
        index.label += map(labels.__getitem__, array("I", part.label))
