"""`ucm-meta events` on a real service over real sockets, and on streams that do not hold."""

import json
import struct
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from metaservice.cli.events_read import SILENT_S
from metaservice.telemetry.events import HELP
from tests.functional.cli_house import ROOT, Ran, ucm_meta
from tests.functional.events_service import (
    MODEL,
    EventsService,
    Prompt,
    Refused,
    eventually,
    free_ports,
    running,
)
from tests.unit.indexer_house import FakeIndexer

FIRST = 2**20
POD = "10.0.0.1:8000"


@pytest.fixture(scope="module")
def indexer() -> Iterator[FakeIndexer]:
    server = FakeIndexer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, indexer: FakeIndexer) -> Iterator[EventsService]:
    folder = tmp_path_factory.mktemp("events")
    rows = f"dynamo-indexer url={indexer.url} poll_ms=200"
    with running(folder, events_attachments=rows) as service:
        eventually(lambda: answers(service), "the publisher answers", within_s=30)
        service.furnish()
        service.engine("e-m1", address=POD, worker_id=7)
        service.stream()
        for seed in range(3):
            service.write(Prompt(seed, 5))
        yield service


def answers(service: EventsService) -> bool:
    try:
        service.streams()
    except Refused:
        return False
    return True


def events(service: EventsService, *words: str) -> Ran:
    return ucm_meta("events", *words, "--url", service.process.url)


def rows(ran: Ran) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_replay_from_0_is_all_that_is_announced(service: EventsService) -> None:
    ran = events(service, "replay", "--tokens")
    assert ran.returncode == 0, ran.stderr
    stored = {
        (row["medium"], one): row
        for row in rows(ran)
        if row["type"] == "BlockStored"
        for one in row["block_hashes"]
    }
    assert {one for _, one in stored} == {one for seed in range(3) for one in Prompt(seed, 5).hashes}
    assert {row["topic"] for row in stored.values()} == {f"kv@pool@{MODEL}"}
    numbers = [row["seq"] for row in rows(ran)]
    assert numbers == sorted(numbers)
    assert numbers[-1] > FIRST
    assert all(isinstance(row["token_ids"], list) for row in stored.values())


def test_replay_of_a_range_is_that_range(service: EventsService) -> None:
    ran = events(service, "replay", "--from", str(FIRST), "--to", str(FIRST + 2))
    assert {row["seq"] for row in rows(ran)} <= {FIRST, FIRST + 1, FIRST + 2}


@pytest.mark.slow
def test_tail_prints_events_as_they_come(service: EventsService) -> None:
    wrote = threading.Timer(1.5, lambda: service.write(Prompt(77, 2)))
    wrote.start()
    ran = events(service, "tail", "--seconds", "4")
    wrote.join()
    assert ran.returncode == 0, ran.stderr
    (last,) = [row for row in rows(ran) if row["type"] == "BlockStored"]
    assert last["block_hashes"] == Prompt(77, 2).hashes
    assert last["token_ids"] == 32
    assert last["seq"] > FIRST


def test_tail_prints_heartbeats_when_asked_to(service: EventsService) -> None:
    ran = events(service, "tail", "--beats", "--count", "4", "--seconds", "10")
    beats = [row for row in rows(ran) if row["type"] != "reset"]
    assert {row["type"] for row in beats} == {"heartbeat"}
    assert beats[1]["seq"] == beats[0]["seq"] + 1


def test_streams_that_hold_are_verified(service: EventsService) -> None:
    ran = events(service, "verify", "--seconds", "2")
    report = rows(ran)[-1]
    assert (ran.returncode, report["ok"], report["problems"]) == (0, True, []), ran.stderr
    assert report["streams"] == 1
    assert report["announced"] >= 15
    assert report["heartbeats"] >= 1
    assert report["mismatched"] == report["gaps"] == 0
    assert report["longest_silence_ms"] < 3_000


def test_row_11_the_service_attaches_dynamos_indexer_and_takes_away_who_is_gone(
    service: EventsService, indexer: FakeIndexer
) -> None:
    eventually(lambda: 7 in indexer.workers, "the engine is registered")
    (endpoint,) = indexer.ranks()[7].values()
    assert endpoint == service.streams()[0]["endpoint"]
    service.ask("DELETE", "/v1/engines/e-m1?incarnation=i1")
    eventually(lambda: 7 not in indexer.workers, "it is gone there too", within_s=5)
    service.engine("e-m1", life="i2", address=POD, worker_id=7)
    eventually(lambda: 7 in indexer.workers, "it is back")
    attached = service.ask("GET", "/v1/events")["attachments"]
    assert [(one["kind"], one["target"], one["ok"]) for one in attached] == [
        ("dynamo-indexer", indexer.url, True)
    ]
    eventually(lambda: service.metric("ucm_meta_events_attachment_reached") == 1.0, "the metric says so")


def test_attach_registers_once_and_takes_away(service: EventsService) -> None:
    once = FakeIndexer()
    ran = events(service, "attach", "dynamo-indexer", "--indexer", once.url)
    assert ran.returncode == 0, ran.stderr
    assert once.ranks() == {7: {1000: service.streams()[0]["endpoint"]}}
    assert "register worker 7 rank 1000" in ran.stdout
    again = events(service, "attach", "dynamo-indexer", "--indexer", once.url)
    assert "nothing to do" in again.stdout
    ran = events(service, "attach", "dynamo-indexer", "--indexer", once.url, "--remove")
    assert ran.returncode == 0, ran.stderr
    assert once.workers == {}
    once.close()


def test_attach_says_what_the_indexer_refuses(service: EventsService) -> None:
    once = FakeIndexer()
    other = {"instance_id": 1, "endpoint": "tcp://h:1", "model_name": MODEL, "block_size": 64}
    once.answer("/register", other)
    ran = events(service, "attach", "dynamo-indexer", "--indexer", once.url)
    assert ran.returncode == 1
    assert "block_size mismatch" in ran.stdout
    once.close()
    assert events(service, "attach", "dynamo-indexer", "--indexer", "http://127.0.0.1:9").returncode == 2


def test_row_25_settings_for_llm_d_weigh_the_pool_less_than_the_gpu(service: EventsService) -> None:
    """And hold as many entries of a block as there are pods and tiers: fewer, and entries of the pool push
    out those of the GPU."""
    yaml = pytest.importorskip("yaml")
    for number in range(15):
        service.engine(f"pod-{number}", address=f"10.0.1.{number}:8000")
    ran = events(service, "attach", "llm-d")
    assert ran.returncode == 0, ran.stderr
    plugin, ours = ran.stdout.split("# 2. this service")
    (settings,) = yaml.safe_load(plugin)
    parameters = settings["parameters"]
    weights = {one["name"]: one["weight"] for one in parameters["indexerConfig"]["kvCacheBackendConfigs"]}
    assert weights.keys() == {"gpu", "cpu", "storage", "external"}
    assert all(weights[tier] < weights["gpu"] for tier in ("cpu", "storage", "external"))
    size = parameters["indexerConfig"]["kvBlockIndexConfig"]["inMemoryConfig"]["podCacheSize"]
    assert size >= 3 * 15
    assert parameters["kvEventsConfig"]["zmqEndpoint"] == "tcp://*:5557"
    assert parameters["kvEventsConfig"]["topicFilter"] == "kv@"
    assert parameters["tokenProcessorConfig"]["blockSize"] == 16
    assert "llm-d endpoint=tcp://PICKER:5557" in ours
    assert "pod-3: 10.0.1.3:8000" in ours


def test_an_engine_without_an_address_is_named(service: EventsService) -> None:
    service.engine("nowhere")
    assert "nowhere: NONE" in events(service, "attach", "llm-d").stdout


@pytest.mark.parametrize("consumer", ["dynamo-frontend", "select-service", "mooncake", "generic"])
def test_every_consumer_has_its_settings(service: EventsService, consumer: str) -> None:
    ran = events(service, "attach", consumer)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    if consumer in ("mooncake", "generic"):
        assert service.streams()[0]["endpoint"] in ran.stdout


def test_the_subscriber_of_the_documentation_knows_all_that_is_announced(service: EventsService) -> None:
    text = (ROOT / "docs" / "routers.md").read_text()
    code = text[text.index("    import itertools, msgspec, zmq") : text.index("One for each stream,")]
    view = service.streams()[0]
    code = textwrap.dedent(code).replace("while True:", "for _ in range(4):")
    for documented, real in (
        ("tcp://meta-2:20000", view["endpoint"]),
        ("tcp://meta-2:20001", view["replay"]),
    ):
        assert documented in code
        code = code.replace(documented, real)
    for documented in ("tcp://meta-1:20000", "tcp://meta-1:20001"):
        code = code.replace(documented, f"tcp://127.0.0.1:{free_ports(1)}")  # this replica is away
    names: dict[str, Any] = {}
    exec(code, names)
    assert {one for _, one in names["blocks"]} >= {one for seed in range(3) for one in Prompt(seed, 5).hashes}


def test_every_metric_of_events_is_described(service: EventsService) -> None:
    service.ask("GET", "/v1/events")
    lines = service.http.get("/metrics").text.splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# HELP ucm_meta_events_")}
    assert len(names) > 50
    assert {name.removeprefix("ucm_meta_events_") for name in names} <= HELP.keys()


def test_what_cannot_be_read_is_said() -> None:
    ran = ucm_meta("events", "verify", "--url", "http://127.0.0.1:9")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "http://127.0.0.1:9" in ran.stderr
    assert ucm_meta("events", "verify", "--endpoint", "tcp://127.0.0.1:9").returncode == 2
    silent = ucm_meta("events", "replay", "--endpoint", "tcp://127.0.0.1:9")
    assert silent.returncode == 2
    assert "does not end its replay" in silent.stderr


def test_keys_are_made_for_their_owner_only(tmp_path: Path) -> None:
    ran = ucm_meta("events", "keys", str(tmp_path), "server")
    public, path = ran.stdout.split()
    assert len(public) == 40
    assert Path(path).stat().st_mode & 0o077 == 0


# --- streams that do not hold --------------------------------------------------------------------------

Event = dict[str, Any]
Batches = list[list[Event]]
HASH = 2**40


def stored(*numbers: int, parent: int | None = None, **other: Any) -> Event:
    hashes = [HASH + number for number in numbers]
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if parent is None else HASH + parent,
        "token_ids": list(range(4 * len(hashes))),
        "block_size": 4,
        "lora_id": None,
        "medium": "EXTERNAL",
        "lora_name": None,
    }
    return event | other


def removed(*numbers: int) -> Event:
    return {"type": "BlockRemoved", "block_hashes": [HASH + n for n in numbers], "medium": "EXTERNAL"}


class Liar:
    """A stream by hand: batches by number. `skip`: numbers never published; `replayed`: what a replay from 0
    says instead."""

    def __init__(
        self,
        batches: list[list[Event]],
        *,
        skip: tuple[int, ...] = (),
        replayed: list[list[Event]] | None = None,
    ) -> None:
        self._batches = batches
        self._replayed = batches if replayed is None else replayed
        self._skip = skip
        self._sent = 1
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (self._pub, self._router)]
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._open:
            if self._router.poll(30):
                peer, _, start = self._router.recv_multipart()
                first = struct.unpack(">Q", start)[0]
                told = self._replayed if first == 0 else self._batches
                for number in range(first, min(self._sent, len(told))):
                    self._router.send_multipart([peer, b"", *self._frames(number, told[number])])
                self._router.send_multipart([peer, b"", b"", b"\xff" * 8, b""])
            number = self._sent
            if number not in self._skip:
                events = self._batches[number] if number < len(self._batches) else []
                self._pub.send_multipart(self._frames(number, events))
            self._sent += 1
        self._context.destroy(linger=0)

    def _frames(self, number: int, events: list[Event]) -> list[bytes]:
        return [b"kv@pool@m", struct.pack(">Q", number), msgspec.msgpack.encode([1.0, events, 0])]

    def close(self) -> None:
        self._open = False
        self._thread.join()


GOOD = [[stored(1, 2)], [stored(3, parent=2)], [removed(3)], [removed(1, 2), stored(1, 2)]]


def verified(liar: Liar) -> tuple[int, dict[str, Any]]:
    try:
        ran = ucm_meta(
            "events", "verify", "--endpoint", liar.endpoint, "--replay", liar.replay, "--seconds", "0.8"
        )
    finally:
        liar.close()
    return ran.returncode, json.loads(ran.stdout.splitlines()[-1])


def test_a_stream_by_hand_that_holds() -> None:
    status, report = verified(Liar(GOOD))
    assert (status, report["faults"], report["announced"]) == (0, {}, 2)


def test_row_13_what_was_dropped_is_replayed() -> None:
    batches = [*GOOD, *[[]] * 3, [stored(9)]]
    status, report = verified(Liar(batches, skip=(6, 7)))
    assert (status, report["announced"]) == (0, 3), report
    assert report["gaps"] >= 1


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (stored(1), "repeated"),
        (stored(7, parent=6), "orphan"),
        (stored(5, 5), "schema"),
        (stored(5, token_ids=[1, 2, 3]), "schema"),
        (stored(5, token_ids=[1, 2, 3, 2**32]), "schema"),
        (stored(5, medium="FS"), "schema"),
        (stored(5, block_hashes=[7]), "schema"),
        (stored(5, block_hashes=[b"12345678"]), "schema"),
        (stored(5, locality="REMOTE"), "schema"),
        ({"type": "AllBlocksCleared"}, "schema"),
        ({"type": "Novelty"}, "schema"),
    ],
)  # fmt: skip
def test_row_28_an_event_that_some_router_chokes_on_is_a_fault(event: Event, fault: str) -> None:
    status, report = verified(Liar([*GOOD, [event]]))
    assert status == 1
    assert report["faults"].keys() == {fault}


def test_a_replay_that_tells_another_story_is_a_fault() -> None:
    """The stream forgets block 3, the replay does not."""
    late = [*GOOD, *[[]] * 8, [removed(1)]]
    replayed: Batches = [*GOOD, *[[]] * 9]
    status, report = verified(Liar(late, replayed=replayed))
    assert (status, report["faults"], report["mismatched"]) == (1, {"differs": 1}, 1)


@pytest.mark.slow
def test_a_replay_that_never_ends_is_unreadable() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    ran = ucm_meta("events", "replay", "--endpoint", f"tcp://127.0.0.1:{port}")
    context.destroy(linger=0)
    assert ran.returncode == 2
    assert "does not end" in ran.stderr


@pytest.mark.slow
def test_a_stream_that_comes_late_is_read_all_the_same() -> None:
    """Nobody was there when it was subscribed to."""
    port = free_ports(1)
    context = zmq.Context()

    def publish() -> None:
        socket = context.socket(zmq.PUB)
        socket.bind(f"tcp://127.0.0.1:{port}")
        for number in range(40):
            frames = [b"kv@pool@m", struct.pack(">Q", number), msgspec.msgpack.encode([1.0, [stored(1)], 0])]
            socket.send_multipart(frames)
            time.sleep(0.1)

    late = threading.Timer(SILENT_S + 0.5, publish)
    late.start()
    ran = ucm_meta(
        "events", "tail", "--endpoint", f"tcp://127.0.0.1:{port}", "--count", "2", "--seconds", "9"
    )
    late.join()
    context.destroy(linger=0)
    assert [row["type"] for row in rows(ran)] == ["BlockStored"] * 2
