"""The doors for routers: who subscribes to too much, asks for too much, sends what nobody should send."""

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import zmq

from tests.functional.events_reader import Reader, dealer
from tests.functional.events_service import EventsService
from tests.security.events_house import MIB, furnished, same_publisher, unharmed

pytestmark = pytest.mark.security


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EventsService, Reader]]:
    with furnished(tmp_path_factory.mktemp("doors")) as house:
        yield house


def made(kind: int, endpoint: str) -> "zmq.Socket[bytes]":
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    one = context.socket(kind)
    one.setsockopt(zmq.LINGER, 0)
    one.connect(endpoint)
    return one


def address(endpoint: str) -> tuple[str, int]:
    parts = urlsplit(endpoint)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def test_subscriptions_by_the_thousand_hurt_nobody(house: tuple[EventsService, Reader]) -> None:
    service, reader = house
    view = service.stream("m1")
    with same_publisher(service):
        greedy = made(zmq.SUB, view["endpoint"])
        for number in range(20_000):
            greedy.subscribe(f"topic-{number}".encode())
        unharmed(service, reader, "m1")
        for number in range(20_000):
            greedy.unsubscribe(f"topic-{number}".encode())
        greedy.close()
        unharmed(service, reader, "m1")


def test_coming_and_going_does_not_fill_the_journal(house: tuple[EventsService, Reader]) -> None:
    """Each who joins is to see a batch soon; many of them see the same one."""
    service, reader = house
    view = service.stream("m1")
    reader.beats(1)
    first, began_s = reader.seq or 0, time.monotonic()
    with same_publisher(service):
        for _ in range(300):
            one = made(zmq.SUB, view["endpoint"])
            one.subscribe(os.urandom(8))
            one.close()
        reader.drain(1.0)
    made_windows = (reader.seq or 0) - first
    assert made_windows < 30 * (time.monotonic() - began_s) + 10
    unharmed(service, reader, "m1")


def subscriber(endpoint: str) -> socket.socket:
    """A connection that has shaken hands as a ZMTP 3.0 subscriber, and may send any frame. (libzmq's own
    client dies of a topic of some mebibytes before it sends it.)"""
    raw = socket.create_connection(address(endpoint), 5)
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    greeting = b""
    while len(greeting) < 64:
        piece = raw.recv(64 - len(greeting))
        assert piece, "no greeting"
        greeting += piece
    ready = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"SUB"
    raw.sendall(bytes((4, len(ready))) + ready)
    return raw


def frame(body: bytes) -> bytes:
    """A long frame with this body."""
    return b"\x02" + len(body).to_bytes(8, "big") + body


@pytest.mark.parametrize("size", [300, 64 * 1024, 4 * MIB])
def test_a_topic_of_any_size_hurts_nobody(house: tuple[EventsService, Reader], size: int) -> None:
    """Topics lie in a tree as deep as they are long, and both subscribing and leaving walk it."""
    service, reader = house
    view = service.stream("m1")
    with same_publisher(service, 128 * MIB):
        for _ in range(8):
            greedy = [subscriber(view["endpoint"]) for _ in range(3)]
            topic = os.urandom(size)
            for one in greedy:
                with suppress(OSError):
                    one.sendall(frame(b"\x01" + topic))
                    one.sendall(frame(b"\x00" + topic))
                    one.sendall(frame(b"\x01" + topic[::-1]))
            unharmed(service, reader, "m1")
            for one in greedy:
                one.close()
        unharmed(service, reader, "m1")


def test_a_frame_that_never_ends_takes_no_memory(house: tuple[EventsService, Reader]) -> None:
    """It says that it has 2**62 bytes."""
    service, reader = house
    for door in ("endpoint", "replay"):
        view = service.stream("m1")
        with same_publisher(service):
            many = []
            for _ in range(20):
                raw = subscriber(view[door])
                with suppress(OSError):
                    raw.sendall(b"\x02" + (2**62).to_bytes(8, "big") + bytes(MIB))
                    raw.sendall(b"\x02" + (2**30).to_bytes(8, "big") + bytes(MIB))
                many.append(raw)
            unharmed(service, reader, "m1")
            for raw in many:
                raw.close()


def test_what_a_subscriber_sends_is_ignored(house: tuple[EventsService, Reader]) -> None:
    """An XSUB socket can send anything upstream."""
    service, reader = house
    view = service.stream("m1")
    with same_publisher(service):
        mouth = made(zmq.XSUB, view["endpoint"])
        for frame in (b"", b"\x00", b"\x01", b"\x02hello", b"\xff" * 1_000, os.urandom(100_000)):
            for _ in range(200):
                mouth.send(frame)
        mouth.send_multipart([b"\x01a", b"b", b"c"] * 50)
        with suppress(zmq.Again):
            for _ in range(8):
                mouth.send(bytes(16 * MIB), zmq.NOBLOCK)
        time.sleep(0.5)
        unharmed(service, reader, "m1")
        mouth.close()


@pytest.mark.parametrize("door", ["endpoint", "replay"])
def test_bytes_that_are_no_zmtp_are_hung_up_on(house: tuple[EventsService, Reader], door: str) -> None:
    service, reader = house
    where = address(service.stream("m1")[door])
    chance = random.Random(1)
    with same_publisher(service):
        for _ in range(60):
            with socket.create_connection(where, 5) as raw, suppress(OSError):
                raw.sendall(chance.randbytes(chance.randrange(1, 3_000)))
        for _ in range(20):
            with socket.create_connection(where, 5) as raw, suppress(OSError):
                raw.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00" + chance.randbytes(500))
        with socket.create_connection(where, 5) as raw, suppress(OSError):
            raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1_000)
        idle = [socket.create_connection(where, 5) for _ in range(200)]
        unharmed(service, reader, "m1")
        for one in idle:
            one.close()
        unharmed(service, reader, "m1")


def test_replay_requests_by_the_thousand_are_answered_or_dropped(
    house: tuple[EventsService, Reader],
) -> None:
    """One who asks and asks and never reads costs others nothing."""
    service, reader = house
    view = service.stream("m1")
    with same_publisher(service):
        greedy = [made(zmq.DEALER, view["replay"]) for _ in range(10)]
        for one in greedy:
            one.setsockopt(zmq.RCVHWM, 1)
            for _ in range(500):
                with suppress(zmq.Again):
                    one.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
        began_s = time.monotonic()
        assert reader.replayed(0)
        assert time.monotonic() - began_s < 3.0, "somebody else has to wait for them"
        unharmed(service, reader, "m1")
        for one in greedy:
            one.close()
    unharmed(service, reader, "m1")


def test_replay_requests_of_any_shape_are_left_alone(house: tuple[EventsService, Reader]) -> None:
    service, reader = house
    view = service.stream("m1")
    chance = random.Random(2)
    with same_publisher(service):
        for _ in range(300):
            asker = dealer(view["replay"])
            frames = [
                chance.randbytes(chance.choice((0, 0, 7, 8, 9, 1_000))) for _ in range(chance.randrange(1, 9))
            ]
            asker.send_multipart(frames)
            asker.close(20)
        for kind in (zmq.REQ, zmq.ROUTER, zmq.PAIR, zmq.SUB, zmq.PUSH):
            one = made(kind, view["replay"])
            with suppress(zmq.ZMQError):
                one.send(bytes(8), zmq.NOBLOCK)
            one.close()
        asker = dealer(view["replay"])
        with suppress(zmq.Again):
            for _ in range(8):
                asker.send_multipart([b"", bytes(16 * MIB)], zmq.NOBLOCK)
        time.sleep(0.5)
        asker.close()
        assert reader.replayed(0)
        unharmed(service, reader, "m1")


def test_an_identity_that_somebody_has_already_gets_nobody_else_s_answer(
    house: tuple[EventsService, Reader],
) -> None:
    service, reader = house
    view = service.stream("m1")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    twins = []
    for _ in range(2):
        one = context.socket(zmq.DEALER)
        one.setsockopt(zmq.LINGER, 0)
        one.setsockopt(zmq.ROUTING_ID, b"router-7")
        one.connect(view["replay"])
        twins.append(one)
    time.sleep(0.1)
    for one in twins:
        one.send_multipart([b"", (2**63).to_bytes(8, "big")])
    time.sleep(0.5)
    unharmed(service, reader, "m1")
    for one in twins:
        one.close()
