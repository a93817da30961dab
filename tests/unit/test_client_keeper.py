"""Background renewal: heartbeats, leases and write sessions, in a thread and in a process of its own."""

import time
from collections.abc import Callable
from itertools import pairwise
from threading import Event, Thread

import msgspec
import pytest

from metaservice.client import Client, ClientConfig, Registration
from metaservice.client.config import Keepalive
from tests.unit.client_keepers import KEYS, Forgetful, Leases, client_for, eventually, got, join, named
from tests.unit.client_peers import Request, answer_to, good, http, peer, problem, resetting

modes = pytest.mark.parametrize("mode", ["thread", "process"])
either = pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
"""Both work alike here; the second one takes longer to start."""


@modes
def test_heartbeats_go_on_without_any_call_and_with_jitter(mode: Keepalive) -> None:
    """C1, C2: an engine that only sits there stays registered."""
    with peer(good) as one, client_for(one) as client:
        registration = client.register_engine("e", keepalive=mode)
        assert registration.active and registration.heartbeat_ms == 100
        eventually(lambda: len(got(one, "heartbeat")) >= 12)
        beats = got(one, "heartbeat")
    assert {beat.fields["incarnation"] for beat in beats} == {registration.incarnation}
    gaps_ms = [(b.at_s - a.at_s) * 1_000 for a, b in pairwise(beats)]
    assert min(gaps_ms) > 60
    assert sorted(gaps_ms)[len(gaps_ms) // 2] < 160
    assert len({round(gap / 2) for gap in gaps_ms}) > 3, f"no jitter: {gaps_ms}"
    assert len({beat.connection for beat in beats}) == 1
    assert registration.lost == 0


@modes
def test_b3_leases_are_renewed_together_and_kept_until_released(mode: Keepalive) -> None:
    service = Leases()
    with peer(service) as one, client_for(one) as client:
        join(client, one, mode)
        leases = [client.lookup("i", KEYS, lease_ms=500, renew=True).lease or "" for _ in range(50)]
        began = time.monotonic()
        time.sleep(1.2)
        assert service.broken == []
        assert all(client.held(lease) for lease in leases)
        renewals = got(one, "renew")
        kept_s = time.monotonic() - began
        released = client.release(leases[:49])
        assert released.failure is None
        assert not client.held(leases[0])
        time.sleep(0.1)
        before = len(got(one, "renew"))
        time.sleep(0.4)
        later = got(one, "renew")[before:]
    assert {lease for request in later for lease in named(request)} == {leases[49]}
    rounds = kept_s / (0.4 * 0.8 * 0.5)
    assert len(renewals) <= 3 * rounds, "many leases, few calls"
    assert max(len(named(request)) for request in renewals) >= 10


@either
def test_write_sessions_are_renewed_until_finished(mode: Keepalive) -> None:
    def short(request: Request) -> None:
        fields = answer_to(request)
        if request.verb == "writes":
            fields["ttl_ms"] = 300
        request.send(http(msgspec.msgpack.encode(fields)))

    with peer(short) as one, client_for(one) as client:
        client.register_engine("e", keepalive=mode)
        write = client.start_write("i", KEYS, ttl_ms=300, renew=True)
        assert write.session is not None
        eventually(lambda: len(got(one, "renew")) >= 4)
        assert client.held(write.session)
        assert {request.fields["incarnation"] for request in got(one, "renew")} == {write.incarnation}
        client.finish(write, write.locations, write.generations, checksums=[0] * 16)
        assert not client.held(write.session)
        time.sleep(0.1)
        before = len(got(one, "renew"))
        time.sleep(0.4)
        assert len(got(one, "renew")) == before


@modes
def test_c1_unknown_engine_registers_again_under_a_new_incarnation(mode: Keepalive) -> None:
    service = Forgetful()
    told: list[tuple[str, bool]] = []

    def lost(registration: Registration) -> None:
        told.append((registration.incarnation, registration.active))

    with peer(service) as one, client_for(one) as client:
        registration = client.register_engine("e", instance="i", rank=3, keepalive=mode, on_lost=lost)
        first = registration.incarnation
        write = client.start_write("i", KEYS, renew=True)
        assert write.session is not None and client.held(write.session)
        service.known.clear()
        eventually(lambda: registration.lost == 1 and registration.active)
        assert registration.wait_active(1_000)
        assert registration.incarnation != first
        assert told == [(first, False)]
        assert not client.held(write.session), "sessions of the old incarnation are lost"
        again = client.start_write("i", KEYS)
        assert (again.failure, again.incarnation) == (None, registration.incarnation)
        puts = got(one, "e")
        assert [put.fields["instance"] for put in puts] == ["i", "i"]
        assert [put.fields["rank"] for put in puts] == [3, 3]
        late = client.finish(write, write.locations, write.generations, checksums=[0] * 16)
        assert late.failure is None
        assert got(one, "finish")[-1].fields["incarnation"] == first, "it is said under the old name"


@either
def test_c1_a_refused_call_starts_it_before_the_next_heartbeat(mode: Keepalive) -> None:
    service = Forgetful()

    def rarely(request: Request) -> None:
        if request.verb == "e":
            service.known.add(request.fields["incarnation"])
            fields = {**answer_to(request), "heartbeat_ms": 60_000, "expire_ms": 600_000}
            request.send(http(msgspec.msgpack.encode(fields)))
        else:
            service(request)

    with peer(rarely) as one, client_for(one) as client:
        registration = client.register_engine("e", keepalive=mode)
        service.known.clear()
        assert client.start_write("i", KEYS).failure == "rejected:reregister"
        eventually(lambda: registration.lost == 1 and registration.active)
        assert client.start_write("i", KEYS).failure is None


def test_c1_without_keepalive_the_owner_is_told_and_registers_itself() -> None:
    service = Forgetful()
    told = Event()
    with peer(service) as one, client_for(one) as client:
        registration = client.register_engine("e", keepalive=None, on_lost=lambda _: told.set())
        assert client.heartbeat().status == "active"
        service.known.clear()
        assert client.heartbeat().failure == "rejected:reregister"
        assert told.is_set() and not registration.active
        assert client.start_write("i", KEYS).failure == "not_registered"
        assert client.lookup("i", KEYS, lease_ms=100).hits == 8, "lookups need no registration"
        assert client.register_engine("e", keepalive=None).active
        assert client.start_write("i", KEYS).failure is None


@pytest.mark.slow
def test_c4_two_processes_under_one_id_do_not_fight_at_full_speed() -> None:
    """The fenced one registers again, and fences the other: each time later, and it is said."""
    current = ""

    def last_wins(request: Request) -> None:
        nonlocal current
        if request.verb == "e":
            current = request.fields["incarnation"]
            good(request)
        elif request.verb == "heartbeat" and request.fields["incarnation"] != current:
            request.send(problem(409, "reregister"))
        else:
            good(request)

    with peer(last_wins) as one, client_for(one) as first, client_for(one) as second:
        registrations = [first.register_engine("e"), second.register_engine("e")]
        time.sleep(2.5)
        puts = got(one, "e")
        assert all(registration.lost for registration in registrations)
        assert len(puts) < 16
        gaps = [b.at_s - a.at_s for a, b in pairwise(puts)]
        assert max(gaps[-3:]) > 2 * max(gaps[:3]), gaps


@either
def test_service_that_is_not_there_yet_is_registered_with_later(
    mode: Keepalive, free_port: Callable[[], int]
) -> None:
    port = free_port()
    with Client(ClientConfig(url=f"http://127.0.0.1:{port}", timeout_ms=500)) as client:
        registration = client.register_engine("e", keepalive=mode)
        assert (registration.active, registration.failure) == (False, "refused_connection")
        assert client.start_write("i", KEYS).failure == "not_registered"
        time.sleep(0.3)
        with peer(good, port) as one:
            assert registration.wait_active(10_000)
            assert registration.failure is None
            eventually(lambda: len(got(one, "heartbeat")) >= 2)
            eventually(lambda: client.start_write("i", KEYS).failure is None)


@pytest.mark.slow
def test_refused_registration_is_tried_again_with_pauses() -> None:
    def refusing(request: Request) -> None:
        if len(request.peer.requests) < 4:
            request.send(problem(404, "instance_unknown"))
        else:
            good(request)

    with peer(refusing) as one, client_for(one) as client:
        registration = client.register_engine("e")
        assert registration.failure == "rejected:instance_unknown"
        assert registration.wait_active(20_000)


@either
def test_lost_leases_are_known_as_lost(mode: Keepalive) -> None:
    service = Leases()
    with peer(service) as one, client_for(one) as client:
        join(client, one, mode)
        lease = client.lookup("i", KEYS, lease_ms=400, renew=True).lease or ""
        other = client.lookup("i", KEYS, lease_ms=400, renew=True).lease or ""
        service.deadlines_s[lease] = 0
        eventually(lambda: not client.held(lease))
        eventually(lambda: len(got(one, "renew")) > 3)
        assert client.held(other)


def test_leases_are_lost_in_time_when_nobody_answers() -> None:
    sick = Event()

    def behave(request: Request) -> None:
        if sick.is_set():
            resetting(request)
        else:
            good(request)

    with peer(behave) as one, client_for(one) as client:
        lease = client.lookup("i", KEYS, lease_ms=500, renew=True).lease or ""
        time.sleep(0.7)
        assert client.held(lease)
        sick.set()
        ended = time.monotonic()
        eventually(lambda: not client.held(lease), 2.0)
        assert time.monotonic() - ended < 0.6, "held no longer than the service promised"


def test_b4_what_the_engine_forgot_is_not_renewed_for_ever() -> None:
    service = Leases()
    with peer(service) as one, client_for(one, keep_ms_max=700) as client:
        lease = client.lookup("i", KEYS, lease_ms=400, renew=True).lease or ""
        eventually(lambda: not client.held(lease), 3.0)
        assert time.monotonic() > service.deadlines_s[lease] - 0.05  # two clocks of two sides
        count = len(got(one, "renew"))
        time.sleep(0.4)
        assert len(got(one, "renew")) == count


def test_c5_thread_keeper_goes_on_beside_a_busy_python_thread() -> None:
    service = Leases()
    with peer(service) as one, client_for(one) as client:
        registration = client.register_engine("e", keepalive="thread")
        lease = client.lookup("i", KEYS, lease_ms=1_000, renew=True).lease or ""
        busy_until = time.monotonic() + 1.5
        n = 0
        while time.monotonic() < busy_until:
            n += sum(i * i for i in range(1_000))
        beats = got(one, "heartbeat")
        assert client.held(lease)
        assert service.broken == []
        assert max(b.at_s - a.at_s for a, b in pairwise(beats)) < registration.expire_ms / 1_000


def test_leaving_on_purpose_stops_heartbeats() -> None:
    def behave(request: Request) -> None:
        if request.line.startswith("DELETE"):
            request.send(http(msgspec.msgpack.encode({"id": "e"})))
        else:
            good(request)

    with peer(behave) as one, client_for(one) as client:
        registration = client.register_engine("e")
        eventually(lambda: len(got(one, "heartbeat")) >= 2)
        assert client.deregister().failure is None
        time.sleep(0.05)
        count = len(got(one, "heartbeat"))
        time.sleep(0.4)
        assert len(got(one, "heartbeat")) == count
        assert not registration.active
        assert client.start_write("i", KEYS).failure == "not_registered"
        assert client.deregister().failure == "not_registered"
    left = [request.line for request in one.requests if request.line.startswith("DELETE")]
    assert left == [f"DELETE /v1/engines/e?incarnation={registration.incarnation} HTTP/1.1"]


def test_callback_that_fails_does_not_stop_the_keeper(caplog: pytest.LogCaptureFixture) -> None:
    service = Forgetful()

    def bad(_: Registration) -> None:
        raise RuntimeError("the owner's fault")

    with peer(service) as one, client_for(one) as client:
        registration = client.register_engine("e", on_lost=bad)
        service.known.clear()
        eventually(lambda: registration.lost == 1 and registration.active)
    assert "the owner's fault" in caplog.text


@pytest.mark.slow
def test_posting_from_many_threads_loses_nothing() -> None:
    service = Leases()
    with peer(service) as one, client_for(one, timeout_ms=10_000) as client:
        leases: list[str] = []

        def engine() -> None:
            for _ in range(25):
                leases.append(client.lookup("i", KEYS, lease_ms=1_500, renew=True).lease or "")

        threads = [Thread(target=engine) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(2)
        assert len(set(leases)) == 200
        assert service.broken == []
        assert all(client.held(lease) for lease in leases)
