"""Events to the bytes of one batch and back: msgpack of a tagged union inside the frame of `frame`."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from metaservice.core.events import Event
from metaservice.journal.errors import CorruptBatch
from metaservice.journal.frame import seal, unseal

E = TypeVar("E")


class BatchCodec(Generic[E]):
    """The codec of one union of `msgspec.Struct(array_like=True, tag=...)` types.

    Adding a field at the end of an event, or a new event, keeps old batches readable. Any other change of a
    body needs a new `frame.BODY_VERSION`, or an old journal would be read as something that it is not.
    """

    def __init__(self, event_union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[E]] = msgspec.msgpack.Decoder(list[event_union])

    def encode(self, events: Sequence[E]) -> bytes:
        """One batch. ValueError when there is no event, or the batch would pass `frame.BATCH_BYTES_MAX`."""
        if not events:
            raise ValueError("a batch holds one event at least")
        return seal(self._encoder.encode(events))

    def decode(self, payload: bytes) -> list[E]:
        """The events of one batch, in order. Raises CorruptBatch or UnsupportedVersion, and nothing else."""
        body = unseal(payload)
        try:
            events = self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # The checksum holds, so these bytes were written as they are, by a vocabulary that is not ours.
            raise CorruptBatch(f"its body is whole but does not hold known events ({error})") from error
        if not events:
            raise CorruptBatch("it holds no event")
        return events


_EVENTS: BatchCodec[Event] = BatchCodec(Event)


def encode_batch(events: Sequence[Event]) -> bytes:
    """`events` as the payload of one append; see `BatchCodec.encode`."""
    return _EVENTS.encode(events)


def decode_batch(payload: bytes) -> list[Event]:
    """The events of one payload; see `BatchCodec.decode`."""
    return _EVENTS.decode(payload)
