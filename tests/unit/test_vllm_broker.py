"""The broker of an engine's scheduler beside services that are old, full, slow, or lie."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Condition, Event
from typing import Any

import msgspec
import pytest

from dataplane.port import OpenFailed
from engine_adapters.vllm import watching
from engine_adapters.vllm.broker import Answer, Broker
from engine_adapters.vllm.openings import Openings
from engine_adapters.vllm.settings import Settings
from engine_adapters.vllm.watching import Watching
from metaservice.client import ClientConfig
from metaservice.wire.schemas import SwitchRef
from tests.unit import client_peers
from tests.unit.client_peers import Request, answer_to, http, peer, problem
from tests.unit.namespace_house import PARTS, make_namespace

KEYS = [bytes([n]) * 32 for n in range(1, 9)]
Fault = Callable[[Request], None]


class FakeService:
    """Knows every block, and answers as told: `fault` takes over the requests of these verbs."""

    def __init__(self, fault: Fault | None = None, *verbs: str) -> None:
        self.mode = "normal"
        self.has_switch_route = True
        self.full = False
        self.fault = fault
        self.verbs = verbs
        self._changed = Condition()

    def set_mode(self, mode: str) -> None:
        with self._changed:
            self.mode = mode
            self._changed.notify_all()

    def __call__(self, request: Request) -> None:
        if self.fault is not None and request.verb in self.verbs:
            self.fault(request)
        elif request.verb == "switch":
            self._switch(request)
        elif request.line.startswith("GET /v1/instances/"):
            request.send(problem(404, "instance_unknown"))
        elif request.line.startswith("PUT /v1/instances/"):
            request.send(http(b"{}", 201, "application/json"))
        elif request.line.startswith("DELETE"):
            request.send(http(msgspec.msgpack.encode({"id": request.verb})))
        else:
            fields = answer_to(request)
            if request.verb == "lookup" and self.mode == "bypass":
                fields = client_peers.looked(len(request.fields["keys"]), 0, cut="switch", switch=self.held())
            request.send(http(msgspec.msgpack.encode(fields)))

    def held(self) -> dict[str, str] | None:
        return None if self.mode == "normal" else {"scope": "group", "id": "g", "mode": self.mode}

    def _switch(self, request: Request) -> None:
        if not self.has_switch_route:
            request.send(problem(404, "not_found"))
            return
        query = dict(pair.split("=") for pair in request.line.split(" ")[1].split("?")[1].split("&"))
        with self._changed:
            if not self.full:
                self._changed.wait_for(lambda: self.mode != query["known"], int(query["wait_ms"]) / 1_000)
            answer = {"mode": self.mode, "switch": self.held()}
        if self.fault is not None and "switch" in self.verbs:
            self.fault(request)  # it went wrong while somebody waited
        else:
            request.send(http(msgspec.msgpack.encode(answer)))


def opens(kind: str, options: Mapping[str, str]) -> object:
    return object()


@contextmanager
def broker_at(url: str, **changes: Any) -> Iterator[Broker]:
    fields = {"url": url, "group": "g", "engine": "e", "lookup_wait_ms": 400, "timeout_ms": 400}
    broker = Broker(Settings(**{**fields, **changes}), make_namespace(), PARTS, openings=Openings(opens))
    broker.start()
    try:
        yield broker
    finally:
        broker.close()


def until(check: Callable[[], object], within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def looked_up(broker: Broker, ticket: str = "r#1") -> Answer:
    broker.ask(ticket, broker.instance_of() or "", KEYS)
    until(lambda: broker.answer(ticket) is not None)
    answer = broker.answer(ticket)
    assert answer is not None
    return answer


# ---------------------------------------------------------------- services that are not well


FAULTS = [
    client_peers.silent,
    client_peers.trickling,
    client_peers.resetting,
    client_peers.cut_off,
    client_peers.half_closed,
    client_peers.overloaded,
    client_peers.html,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_lookup_that_goes_wrong_is_a_miss_in_time(fault: Fault) -> None:
    service = FakeService(fault, "lookup")
    with peer(service) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        begun = time.monotonic()
        answer = looked_up(broker)
        assert (answer.hits, answer.found.hits, answer.found.lease) == (0, 0, None)
        assert answer.failure is not None
        assert time.monotonic() - begun < 2
        assert broker.leases_open() == 0
        failures = [name for name in broker.counters() if name.startswith("lookup_failures_")]
        assert failures == [f"lookup_failures_{answer.failure.removeprefix('rejected:')}"]


@pytest.mark.parametrize(
    "lie",
    [
        {"hits": 9},
        {"hits": 7},
        {"asked": 9},
        {"checksums": b""},
        {"locations": b"\xff" * 64},
        {"storages": b"\1\0" * 8},
        {"storage_table": [{"name": "../x", "kind": "posix", "options": {}}]},
        {"lease": "r/../x"},
        {"lease": None},
        {"parts": []},
        {"cluster": "a/b"},
        {"mode": "each"},
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_is_a_miss(lie: dict[str, Any]) -> None:
    def lies(request: Request) -> None:
        request.send(http(msgspec.msgpack.encode({**answer_to(request), **lie})))

    with peer(FakeService(lies, "lookup")) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        answer = looked_up(broker)
        assert (answer.hits, answer.failure) == (0, "protocol")
        assert broker.leases_open() == 0


def test_leases_that_cannot_be_released_are_tried_again_until_they_are() -> None:
    service = FakeService(client_peers.resetting, "release")
    with peer(service) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        assert looked_up(broker).hits == 8
        broker.release("r#1")
        until(lambda: sum(request.verb == "release" for request in one.requests) >= 2)
        assert broker.leases_open() == 1
        service.verbs = ()
        until(lambda: broker.leases_open() == 0)


def test_leases_are_given_up_when_the_service_cannot_hold_them_any_more() -> None:
    service = FakeService(client_peers.resetting, "release", "renew")
    with peer(service) as one, broker_at(one.url, lease_ms=200, timeout_ms=200) as broker:
        assert broker.wait_ready(5_000)
        looked_up(broker)
        broker.release("r#1")
        until(lambda: broker.leases_open() == 0)
        looked_up(broker, "r#2")
        until(lambda: broker.leases_open() == 0)
        assert not broker.held("r#2"), "it was not renewed"
        assert broker.counters()["leases_ran_out"] == 2


def test_questions_that_wait_too_long_are_not_asked() -> None:
    """Two at a time, each as long as its scheduler waits: the rest has no time left and asks nobody."""
    with peer(FakeService(client_peers.silent, "lookup")) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        instance = broker.instance_of() or ""
        for number in range(200):
            broker.ask(f"r{number}", instance, KEYS)
        until(lambda: all(broker.answer(f"r{number}") for number in range(200)))
        assert sum(request.verb == "lookup" for request in one.requests) <= 4
        answers = [broker.answer(f"r{number}") for number in range(200)]
        assert "late" in {answer.failure for answer in answers if answer is not None}


def test_row_23_an_answer_that_was_on_its_way_when_the_weights_changed_is_worthless() -> None:
    go_on = Event()

    def late(request: Request) -> None:
        go_on.wait(5)
        request.send(http(msgspec.msgpack.encode(answer_to(request))))

    service = FakeService(late, "lookup")
    with peer(service) as one, broker_at(one.url, lookup_wait_ms=5_000, timeout_ms=5_000) as broker:
        assert broker.wait_ready(5_000)
        broker.ask("r#1", broker.instance_of() or "", KEYS)
        until(lambda: any(request.verb == "lookup" for request in one.requests))
        broker.renew_namespace(make_namespace(weight_version="8"))
        go_on.set()
        until(lambda: broker.counters().get("late_answers"))
        answer = broker.answer("r#1")
        assert answer is not None and (answer.hits, answer.failure) == (0, "renewed")
        until(lambda: broker.leases_open() == 0)
        assert any(request.verb == "release" for request in one.requests)


def test_the_namespace_may_change_before_the_start() -> None:
    with peer(FakeService()) as one:
        broker = Broker(Settings(url=one.url, group="g", engine="e"), make_namespace(), PARTS)
        other = make_namespace(weight_version="8")
        broker.renew_namespace(other)
        broker.start()
        assert broker.wait_ready(5_000)
        assert broker.instance_of() == other.instance_id("vllm")
        broker.close()


def test_a_prompt_longer_than_a_lookup_may_be_is_looked_up_in_part() -> None:
    keys = [number.to_bytes(32, "big") for number in range(20_000)]
    with peer(FakeService()) as one, broker_at(one.url, lookup_wait_ms=5_000, timeout_ms=5_000) as broker:
        assert broker.wait_ready(5_000)
        broker.ask("r#1", broker.instance_of() or "", keys)
        until(lambda: broker.answer("r#1"))
        answer = broker.answer("r#1")
        assert answer is not None and (answer.hits, answer.failure) == (16_384, None)


def test_the_trace_of_a_request_goes_with_its_lookup() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with peer(FakeService()) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        broker.ask("r#1", broker.instance_of() or "", KEYS, trace)
        until(lambda: broker.answer("r#1"))
        (lookup,) = [request for request in one.requests if request.verb == "lookup"]
        assert lookup.header("traceparent") == trace


def test_hits_end_before_the_first_storage_that_cannot_be_opened_here() -> None:
    def mixed(request: Request) -> None:
        table = [{"name": name, "kind": kind, "options": {}} for name, kind in (("s", "posix"), ("p", "shm"))]
        fields = {
            **answer_to(request),
            "storage_table": table,
            "storages": b"\0\0" * 5 + b"\1\0" + b"\0\0" * 2,
        }
        request.send(http(msgspec.msgpack.encode(fields)))

    def opens_posix(kind: str, options: Mapping[str, str]) -> object:
        if kind != "posix":
            raise OpenFailed("pool", "of another host")
        return object()

    with peer(FakeService(mixed, "lookup")) as one:
        broker = Broker(
            Settings(url=one.url, group="g", engine="e"),
            make_namespace(),
            PARTS,
            openings=Openings(opens_posix),
        )
        broker.start()
        assert broker.wait_ready(5_000)
        answer = looked_up(broker)
        assert (answer.hits, answer.cut, answer.tier) == (5, "storage", "posix")
        found = answer.found
        assert (found.hits, found.cut_at, len(found.keys), len(found.locations)) == (5, 5, 5, 5)
        assert (len(found.storages), len(found.generations), len(found.checksums)) == (5, 5, 10)
        assert found.place(4, "tp1").checksum == 9
        assert broker.leases_open() == 1
        broker.close()
        assert broker.leases_open() == 0


# ---------------------------------------------------------------- switches


def test_an_old_service_tells_of_switches_in_its_lookups() -> None:
    """Its word holds for a moment; then the next lookup is let out, so that the end of a bypass is heard."""
    service = FakeService()
    service.has_switch_route = False
    with peer(service) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        assert looked_up(broker).hits == 8 and broker.switch == "normal"
        service.mode = "bypass"
        assert looked_up(broker, "r#2").cut == "switch"
        assert broker.switch == "bypass"
        asked = sum(request.verb == "lookup" for request in one.requests)
        assert looked_up(broker, "r#3").cut == "switch"
        assert sum(request.verb == "lookup" for request in one.requests) == asked, "nobody was asked"
        service.mode = "normal"
        until(lambda: broker.switch == "normal")
        assert looked_up(broker, "r#4").hits == 8
        assert sum(request.verb == "switch" for request in one.requests) == 1, "it is not asked over and over"


def test_a_service_with_too_many_polls_is_not_asked_in_a_loop() -> None:
    service = FakeService()
    service.full = True
    with peer(service) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        time.sleep(1.5)
        assert sum(request.verb == "switch" for request in one.requests) <= 6
        service.set_mode("bypass")
        until(lambda: broker.switch == "bypass")


def test_a_change_is_heard_without_asking_again() -> None:
    service = FakeService()
    with peer(service) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        until(lambda: sum(request.verb == "switch" for request in one.requests) >= 2)
        took = []
        for mode in ("bypass", "normal", "read_only", "normal", "bypass"):
            begun = time.perf_counter()
            service.set_mode(mode)
            while broker.switch != mode:
                assert time.perf_counter() - begun < 5
                time.sleep(0.0005)
            took.append(time.perf_counter() - begun)
        assert sorted(took)[2] < 0.05, took


@pytest.mark.parametrize("fault", [client_peers.resetting, client_peers.html], ids=["resets", "lies"])
def test_a_bypass_is_held_for_a_moment_while_nothing_is_heard_and_not_for_ever(fault: Fault) -> None:
    service = FakeService()
    with peer(service) as one, broker_at(one.url) as broker:
        assert broker.wait_ready(5_000)
        service.set_mode("bypass")
        until(lambda: broker.switch == "bypass")
        service.fault, service.verbs = fault, ("switch",)
        service.set_mode("normal")
        time.sleep(0.3)
        assert broker.switch == "bypass"
        until(lambda: broker.switch == "normal", watching.HEARD_MS * 3 / 1_000)


def test_the_switch_of_one_storage_is_not_the_engines() -> None:
    watch = Watching(ClientConfig(), lambda: None, lambda: None)
    watch.heard(SwitchRef(scope="storage", id="s", mode="bypass"))
    assert watch.mode == "normal"
    watch.heard(SwitchRef(scope="group", id="g", mode="read_only"))
    assert watch.mode == "read_only"
    watch.heard(None)
    assert watch.mode == "normal"
    watch.close()
