"""What the harness of `make compat-dynamo` plays itself: engines' streams, a network that loses frames, and a
subscriber that sees frames."""

import random
import time

import pytest
import zmq

from tests.compat.reader import Frame, Reader, apply, arrived
from tests.compat.relay import Relay
from tests.compat.streams import EngineStream, cleared, removed, stored

BATCHES = 200
READ_S = 0.5
JOIN_S = 5.0


def await_subscribed(
    stream: EngineStream, reader: Reader, endpoint: str
) -> "tuple[zmq.Socket[bytes], list[Frame]]":
    """A subscription through which frames come, and those that came so far."""
    socket = reader.subscribe(endpoint)
    until_s = time.monotonic() + JOIN_S
    while time.monotonic() < until_s:
        stream.publish([])
        if first := list(arrived(socket, 0.05)):
            return socket, first
    pytest.fail("no frame came")


def test_a_stream_is_numbered_from_0_and_replayed_from_where_one_asks() -> None:
    with EngineStream("kv@10.0.0.1:8000@m", rank=3) as stream, Reader() as reader:
        for at in range(5):
            assert stream.publish([stored([2**40 + at], None, [1, 2], 2)]) == at
        replay = reader.replay(stream.replay, 2)
        assert replay.ended
        assert [frame.seq for frame in replay.frames] == [2, 3, 4]
        assert {frame.topic for frame in replay.frames} == {b"kv@10.0.0.1:8000@m"}
        assert replay.frames[0].events()[0]["block_hashes"] == [2**40 + 2]
        assert reader.replay(stream.replay, 99).frames == ()
        stream.restart()
        fresh = reader.replay(stream.replay, 0)
        assert fresh.ended
        assert fresh.frames == (), "nothing of the life before"
        assert stream.publish([cleared()]) == 0


def test_a_relay_loses_frames_and_no_replay() -> None:
    with EngineStream() as stream, Reader() as reader:
        with Relay([stream.endpoint], random.Random(1), 0.0) as relay:
            socket, before = await_subscribed(stream, reader, relay.endpoint)
            relay.loss = 0.3
            first = max(frame.seq for frame in before) + 1
            sent = [stream.publish([removed([2**40])]) for _ in range(BATCHES)]
            seen = [frame.seq for frame in arrived(socket, READ_S) if frame.seq >= first]
            assert 0 < relay.lost < BATCHES
        assert set(seen) < set(sent)
        assert seen == sorted(seen)
        assert [frame.seq for frame in reader.replay(stream.replay, first).frames] == sent


def test_a_subscriber_folds_batches_into_what_is_there() -> None:
    known: set[int] = set()
    with EngineStream() as stream, Reader() as reader:
        stream.publish([stored([11, 12], None, [1, 2], 1), stored([13], 12, [3], 1)])
        stream.publish([removed([12])])
        for frame in reader.replay(stream.replay, 0).frames:
            apply(known, frame)
        assert known == {11, 13}
        stream.publish([cleared(), stored([14], None, [4], 1)])
        for frame in reader.replay(stream.replay, 2).frames:
            apply(known, frame)
        assert known == {14}
