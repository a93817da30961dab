"""Events of vLLM and SGLang as they are on the wire, read into one form.

A batch is `[time, [event...], rank]`. An event is a map with its name under `type`, or, from engines of
before mid-2026, an array that begins with its name: both may come, also in one fleet. Of an array only those
positions are believed that have what they should have.

What cannot be read is counted by reason and left out; the rest of its batch counts.
"""

from collections import Counter
from collections.abc import Iterable
from struct import Struct as Layout
from typing import Any

import msgspec
from msgspec import Raw, Struct

VLLM = "vllm"
SGLANG = "sglang"
DIALECTS = (VLLM, SGLANG)

BAD_MESSAGE = (msgspec.MsgspecError, RecursionError, ValueError, TypeError)
_OPAQUE = "opaque"
_BOTH = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_VLLM_TAIL = ("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "", "locality")
"""Fields of a stored event by position; what has no name is not read."""
_FLOAT = Layout(">d")
_FLOAT_CODE = 0xCB

Hash = int | bytes


class Stored(Struct, tag="BlockStored", gc=False):
    """Blocks that follow each other. `token_ids`: ids, or pairs of them."""

    block_hashes: list[Hash]
    block_size: int
    parent_block_hash: Hash | None = None
    token_ids: list[Any] = []
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    cache_salt: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    opaque: bool = False
    """Content depends on something that this reader does not know."""


class Removed(Struct, tag="BlockRemoved", gc=False):
    """Blocks, or one copy of each, that are gone."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(Struct, tag="AllBlocksCleared", gc=False):
    """All tiers are empty."""


Event = Stored | Removed | Cleared


class _Batch(Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared | list[Any]]
    rank: int | None = None


class _Loose(Struct, array_like=True, gc=False):
    ts: float
    events: list[Raw]
    rank: int | None = None


_BATCH = msgspec.msgpack.Decoder(_Batch)
_LOOSE = msgspec.msgpack.Decoder(_Loose)
_EVENT = msgspec.msgpack.Decoder(Stored | Removed | Cleared | list[Any])


class Batch(Struct, gc=False):
    """One message. `rank`: which data-parallel rank it is of, None when it does not say."""

    ts: float
    rank: int | None
    events: list[Event]


class DialectReader:
    """Reads what one engine sends."""

    def __init__(self, dialect: str, bad: Counter[str]) -> None:
        """What cannot be read is counted in `bad`: `batch` (nothing of it was read), `event`,
        `unknown_event`."""
        assert dialect in DIALECTS
        self._dialect = dialect
        self._bad = bad

    def read(self, payload: bytes) -> Batch | None:
        """None: this is no batch."""
        try:
            batch = _BATCH.decode(payload)
        except BAD_MESSAGE:
            return self._read_singly(payload)
        return Batch(batch.ts, batch.rank, list(self._events(batch.events)))

    def _read_singly(self, payload: bytes) -> Batch | None:
        """As `read`, with a bad event left out."""
        try:
            loose = _LOOSE.decode(payload)
        except BAD_MESSAGE:
            self._bad["batch"] += 1
            return None
        found: list[Stored | Removed | Cleared | list[Any]] = []
        for raw in loose.events:
            try:
                found.append(_EVENT.decode(raw))
            except BAD_MESSAGE as error:
                self._bad["unknown_event" if "$.type" in str(error) else "event"] += 1
        return Batch(loose.ts, loose.rank, list(self._events(found)))

    def _events(self, told: Iterable[Stored | Removed | Cleared | list[Any]]) -> Iterable[Event]:
        for event in told:
            if not isinstance(event, list):
                yield event
                continue
            try:
                yield self._from_array(event)
            except BAD_MESSAGE:
                self._bad["event"] += 1
            except LookupError:
                self._bad["unknown_event"] += 1

    def _from_array(self, fields: list[Any]) -> Event:
        """ValueError or TypeError when it is malformed, LookupError when its name is none."""
        name, *rest = fields or [None]
        match name:
            case "BlockStored":
                return self._stored(rest)
            case "BlockRemoved":
                return self._removed(rest)
            case "AllBlocksCleared":
                return Cleared()
        raise LookupError(name)

    def _stored(self, fields: list[Any]) -> Stored:
        """Positions of both dialects: hashes, parent, tokens, block size, adapter's number, medium. After
        them vLLM: adapter's name, extra keys, group, its kind, its window, locality. SGLang put other things
        there, which are not told apart: then the content is taken for one that nobody asks for."""
        if len(fields) < 4:
            raise ValueError("a field is missing")
        named = dict(
            zip(
                ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
                fields,
                strict=False,
            )
        )
        named["medium"] = fields[5] if len(fields) > 5 else None
        tail = fields[6:]
        if self._dialect == SGLANG or not _vllm_tail(tail):
            named["opaque"] = any(one is not None for one in tail)
        else:
            tail += [None] * 6
            named["lora_name"], named["extra_keys"], named["group_idx"], named["kv_cache_spec_kind"] = tail[
                :4
            ]
            named["locality"] = tail[5]
        return msgspec.convert(named, Stored, builtin_types=(bytes,))

    def _removed(self, fields: list[Any]) -> Removed:
        if not fields:
            raise ValueError("a field is missing")
        tail = [*fields[1:], None, None, None]
        if self._dialect == SGLANG or not (_is(tail[1], int) and _is(tail[2], str)):
            tail[1:] = None, None
        named = {"block_hashes": fields[0], "medium": tail[0], "group_idx": tail[1], "locality": tail[2]}
        return msgspec.convert(named, Removed, builtin_types=(bytes,))


def _vllm_tail(tail: list[Any]) -> bool:
    """Whether what is behind the medium can be what vLLM has there."""
    kinds: tuple[type, ...] = (str, list, int, str, int, str)
    return all(_is(one, kind) for one, kind in zip(tail, kinds, strict=False))


def _is(value: object, kind: type) -> bool:
    return value is None or (isinstance(value, kind) and not isinstance(value, bool))


def stamp(payload: bytes) -> float | None:
    """When a batch was made, by its engine's clock in seconds; None where it cannot be seen at once."""
    if len(payload) < 10 or payload[1] != _FLOAT_CODE:
        return None
    made: float = _FLOAT.unpack_from(payload, 2)[0]
    return made
