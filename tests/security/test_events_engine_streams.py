"""Engines' streams are dialled by the service: whatever comes from there must not hurt it."""

import random
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.functional.events_engine import CLEARED, EngineStream, removed, stored
from tests.functional.events_reader import END, Reader
from tests.functional.events_service import EventsService, Prompt, eventually
from tests.security.events_house import MIB, furnished, same_publisher, unharmed

pytestmark = pytest.mark.security


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EventsService, Reader]]:
    with furnished(tmp_path_factory.mktemp("engines")) as house:
        yield house


@pytest.fixture
def engine(house: tuple[EventsService, Reader]) -> Iterator[EngineStream]:
    """A stream that the service follows."""
    service, _ = house
    with EngineStream() as stream:
        service.engine("bad", "m1", events=stream.endpoint, replay=stream.replay)

        def heard() -> bool:
            stream.publish()
            return followed(service)

        eventually(heard, "it is heard")
        yield stream
    service.ask("DELETE", "/v1/engines/bad?incarnation=i1")


def followed(service: EventsService) -> bool:
    views = service.ask("GET", "/v1/events")["engines"]
    return any(view["engine"] == "bad" and view["state"] == "following" for view in views)


def gpu(service: EventsService, prompt: Prompt) -> int:
    """Blocks of a prompt in the engine's memory, as routers are answered."""
    body = {"keys": prompt.keys, "lora": prompt.lora}
    rows = service.ask("POST", "/v1/instances/m1/route", body)["engines"]
    return max((row["tiers"]["gpu"] for row in rows if row["engine"] == "bad"), default=0)


def still_heard(service: EventsService, engine: EngineStream, seed: int) -> None:
    """A good event after all that is taken."""
    prompt = Prompt(seed, 3)
    engine.publish(stored(prompt))
    eventually(lambda: gpu(service, prompt) == 3, "a good event is taken")


DEEP = b"\x91" * 5_000 + b"\xc0"
ODD_PAYLOADS: dict[str, bytes] = {
    "empty": b"",
    "nothing": b"\xc0",
    "text": b"hello",
    "map": msgspec.msgpack.encode({"a": 1}),
    "one element": msgspec.msgpack.encode([1.0]),
    "nine elements": msgspec.msgpack.encode([1.0, [], 0, 0, 0, 0, 0, 0, 0]),
    "events that are text": msgspec.msgpack.encode([1.0, "BlockStored", 0]),
    "no time": msgspec.msgpack.encode([None, [], 0]),
    "infinite time": msgspec.msgpack.encode([float("inf"), [], 0]),
    "not a time": msgspec.msgpack.encode([float("nan"), [], 0]),
    "deep": DEEP,
    "deep in an event": b"\x93\x01\x91" + DEEP + b"\x00",
    "an array that says it has 2**32 elements": b"\xdd\xff\xff\xff\xff",
    "a text that says it has 2**32 bytes": b"\x93\x01\xdb\xff\xff\xff\xff",
    "a map that says it has 2**32 keys": b"\x93\x01\x91\xdf\xff\xff\xff\xff\x00",
    "an extension": b"\x93\x01\xc7\x05\x01hello\x00",
    "not UTF-8": b"\x93\x01\x91\xa3\xff\xfe\xfd\x00",
}


@pytest.mark.parametrize("what", ODD_PAYLOADS)
def test_payloads_that_are_no_batch_are_passed_over(
    house: tuple[EventsService, Reader], engine: EngineStream, what: str
) -> None:
    service, reader = house
    with same_publisher(service):
        engine.send(ODD_PAYLOADS[what])
        still_heard(service, engine, 1000 + list(ODD_PAYLOADS).index(what))
    unharmed(service, reader, "m1")


def odd_events() -> dict[str, Any]:
    """Events with something wrong about them."""
    good = stored(Prompt(1100, 2))
    return {
        "no type": {"block_hashes": [1]},
        "a type that is a number": {**good, "type": 7},
        "an unknown type": {**good, "type": "BlockStolen"},
        "hashes that are text": {**good, "block_hashes": "abc"},
        "hashes that are null": {**good, "block_hashes": None},
        "negative hashes": {**good, "block_hashes": [-1, -2]},
        "hashes of 300 bytes": {**good, "block_hashes": [bytes(300), b"\x01" * 300]},
        "hashes that are fractions": {**good, "block_hashes": [1.5, 2.5]},
        "a hundred thousand hashes": {**good, "block_hashes": [*range(2**40, 2**40 + 100_000)]},
        "token ids of 64 bits": {**good, "token_ids": [2**64 - 1] * 32},
        "negative token ids": {**good, "token_ids": [-1] * 32},
        "token ids that are lists": {**good, "token_ids": [[1]] * 32},
        "a million token ids": {**good, "token_ids": [1] * 1_000_000},
        "block size 0": {**good, "block_size": 0},
        "block size -1": {**good, "block_size": -1},
        "block size 2**63": {**good, "block_size": 2**63},
        "its own parent": {**good, "parent_block_hash": good["block_hashes"][0]},
        "a parent that is a list": {**good, "parent_block_hash": [1]},
        "an adapter of a mebibyte": {**good, "lora_name": "x" * MIB},
        "a medium that is a list": {**good, "medium": ["GPU"]},
        "a medium nobody knows": {**good, "medium": "MOON"},
        "extra keys without end": {**good, "extra_keys": [[["x"] * 1_000] * 100] * 2},
        "an array of nothing": [],
        "an array of another": ["BlockStored"],
        "an array of wrong kinds": ["BlockStored", 1, 2, 3, 4, 5],
        "removed nothing": removed([]),
        "removed text": {"type": "BlockRemoved", "block_hashes": ["a"], "medium": "GPU"},
        "a number": 5,
        "null": None,
    }


@pytest.mark.parametrize("what", odd_events())
def test_an_odd_event_does_not_spoil_the_next_batch(
    house: tuple[EventsService, Reader], engine: EngineStream, what: str
) -> None:
    service, reader = house
    names = list(odd_events())
    with same_publisher(service):
        engine.publish(odd_events()[what])
        still_heard(service, engine, 1200 + names.index(what))
    unharmed(service, reader, "m1")


@pytest.mark.slow
def test_events_without_end_are_bounded(house: tuple[EventsService, Reader], engine: EngineStream) -> None:
    """A million blocks of one engine, cleared now and then; the service answers meanwhile."""
    service, reader = house
    chance = random.Random(3)
    with same_publisher(service, 400 * MIB):
        ends_s = time.monotonic() + 3
        slowest_s = 0.0
        while time.monotonic() < ends_s:
            for _ in range(20):
                hashes = [chance.getrandbits(63) | 2**40 for _ in range(512)]
                tokens = [chance.getrandbits(17)] * (512 * 16)
                event = {**stored(Prompt(1, 1)), "block_hashes": hashes, "token_ids": tokens}
                engine.publish(event)
            began_s = time.monotonic()
            service.lookup(Prompt(1300, 2), "m1")
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert slowest_s < 1.0, "lookups do not wait for engines' events"
        engine.publish(CLEARED)
        eventually(lambda: followed(service), "it is still followed", 20.0)
    unharmed(service, reader, "m1")


def test_orphans_without_end_are_bounded(house: tuple[EventsService, Reader], engine: EngineStream) -> None:
    """Blocks whose parents never come are not kept for ever."""
    service, reader = house
    chance = random.Random(4)
    with same_publisher(service, 300 * MIB):
        for _ in range(400):
            hashes = [chance.getrandbits(63) | 2**40 for _ in range(256)]
            event = {
                **stored(Prompt(1, 1)),
                "block_hashes": hashes,
                "parent_block_hash": chance.getrandbits(63) | 2**41,
                "token_ids": [1] * (256 * 16),
            }
            engine.publish(event)
        still_heard(service, engine, 1400)
    unharmed(service, reader, "m1")


def test_wild_numbers_do_not_stop_the_stream(
    house: tuple[EventsService, Reader], engine: EngineStream
) -> None:
    service, reader = house
    payload = msgspec.msgpack.encode([1.0, [], 0])
    with same_publisher(service):
        for number in (2**64 - 1, 2**63, 0, 5, 2**40, 1, 2**64 - 2):
            engine.frames([b"", struct.pack(">Q", number), payload])
        for frames in (
            [b""],
            [b"", b""],
            [b"", b"1234", payload],
            [b"t"] * 7,
            [b"", END, b""],
            [b"x" * MIB, bytes(8), b""],
        ):
            engine.frames(frames)
        engine.restart()
        prompt = Prompt(1500, 3)

        def heard() -> bool:
            engine.publish(stored(prompt))
            time.sleep(0.05)
            return gpu(service, prompt) == 3

        eventually(heard, "it goes on", 20.0)
    unharmed(service, reader, "m1")


@pytest.mark.slow
def test_a_replay_that_never_ends_is_given_up(house: tuple[EventsService, Reader]) -> None:
    service, reader = house
    with EngineStream(replays=False) as engine:
        service.engine("bad", "m1", events=engine.endpoint, replay=engine.replay)
        prompt = Prompt(1501, 3)

        def heard() -> bool:
            engine.publish(stored(prompt))
            engine.number += 3
            time.sleep(0.1)
            return gpu(service, prompt) == 3

        with same_publisher(service):
            eventually(heard, "what is live counts", 20.0)
        unharmed(service, reader, "m1")
    service.ask("DELETE", "/v1/engines/bad?incarnation=i1")


@pytest.mark.parametrize(
    "endpoint",
    [
        "inproc://zeromq.zap.01",
        "ipc:///tmp/ucm-test-socket",
        "ipc://@abstract",
        "file:///etc/passwd",
        "udp://127.0.0.1:5000",
        "pgm://eth0;239.192.1.1:5555",
        "vmci://*:5555",
        "ws://127.0.0.1:80",
        "tcp://*:5557",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:5557;tcp://127.0.0.1:5558",
        "tcp://a\nb:5557",
        "127.0.0.1:5557",
        "x" * 10_000,
    ],
)
def test_endpoints_that_are_no_other_machine_s_are_never_dialled(
    house: tuple[EventsService, Reader], endpoint: str
) -> None:
    """Refused, or registered and shown as nothing that could be followed."""
    service, reader = house
    with same_publisher(service):
        body = {"incarnation": "i1", "instance": "m1", "endpoints": {"events": endpoint, "replay": endpoint}}
        reply = service.http.put("/v1/engines/odd", json=body)
        assert reply.status_code in (200, 201, 422), reply.text
        if reply.status_code != 422:
            time.sleep(0.3)
            views = service.ask("GET", "/v1/events")["engines"]
            states = [view["state"] for view in views if view["engine"] == "odd"]
            assert states in (["none"], []), states
            service.ask("DELETE", "/v1/engines/odd?incarnation=i1")
        unharmed(service, reader, "m1")
