"""The client with the real service: repeats, leases, heartbeats, degradation and restarts."""

import asyncio
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from metaservice.client import AsyncClient, Client, ClientConfig, ClientError
from metaservice.wire.schemas import FinishStatus, RemoveOutcome, WriteOutcome
from tests.functional.client_service import (
    FINGERPRINT,
    PARTS,
    Service,
    eventually,
    new_keys,
    relay,
    write,
)

EXPIRE_MS = 2_000
FLAGS = (
    *("--heartbeat-ms", "200", "--suspect-ms", "800", "--expire-ms", str(EXPIRE_MS)),
    *("--lease-ms-max", "2000", "--reclaim-delay-ms", "0", "--late-write-ms", "0"),
    *("--log-level", "warning"),
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Service]:
    one = Service(tmp_path_factory.mktemp("service"), free_port(), *FLAGS)
    one.start()
    one.set_up()
    yield one
    one.stop()


def hold_the_interpreter_lock(seconds: int) -> None:
    """What a long C call of a careless extension does: no other Python thread runs meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)


def test_blocks_go_round(service: Service) -> None:
    keys = new_keys(20)
    with service.client() as client:
        assert client.register_engine("round", instance="i", keepalive=None).active
        assert (client.lookup("i", keys).hits, client.lookup("i", keys).cut) == (0, "miss")
        write(client, keys[:16])
        found = client.lookup("i", keys, lease_ms=1_000)
        assert (found.failure, found.hits, found.cut, found.cut_at) == (None, 16, "miss", 16)
        assert found.place(3, "tp1").checksum == 7
        assert 0 < found.lease_left_ms() <= 1_000
        again = client.start_write("i", keys)
        assert list(again.outcomes) == [WriteOutcome.present] * 16 + [WriteOutcome.write] * 4
        assert again.writable == [16, 17, 18, 19]
        half = client.finish(
            again, again.locations[16:18], again.generations[16:18], parts=["tp0"], checksums=[1, 2]
        )
        assert (list(half.status), half.open) == ([FinishStatus.pending] * 2, 4)
        assert client.renew_write(again, ttl_ms=60_000).ttl_ms == 60_000
        assert client.abort(again).freed == 4
        assert client.lookup("i", keys, limit=4).cut == "limit"
        assert client.lookup("i", keys[4:8], parent=keys[3]).hits == 4
        assert client.lookup("i", [keys[2], keys[19], keys[5]], mode="each").hit == b"\1\0\1"
        windowed = client.lookup("i", keys, mode="window", window_blocks=2)
        assert (windowed.failure, windowed.hits) == ("rejected:mode_not_applicable", 0)
        assert list(client.remove("i", [keys[15]]).outcomes) == [RemoveOutcome.waiting_for_lease]
        assert client.release(found.lease or "").held()
        assert client.lookup("i", keys).hits == 15
        assert client.deregister().failure is None


async def test_blocks_go_round_in_an_event_loop(service: Service) -> None:
    async with AsyncClient(ClientConfig(url=service.url, timeout_ms=5_000)) as client:
        await client.register_engine("round-async", keepalive="thread")

        async def engine() -> int:
            keys = new_keys(8)
            started = await client.start_write("i", keys)
            await client.finish(started, started.locations, started.generations, checksums=[0] * 8 * PARTS)
            found = await client.lookup("i", keys, lease_ms=500)
            assert (await client.release(found.lease or "")).held()
            return found.hits

        assert await asyncio.gather(*(engine() for _ in range(50))) == [8] * 50


def test_operators_get_exceptions_with_codes(service: Service) -> None:
    with service.client() as client:
        with pytest.raises(ClientError) as caught:
            client.put_instance("i", "g", {**FINGERPRINT, "kv_dtype": "fp8"})
        assert (caught.value.code, caught.value.status) == ("fingerprint_mismatch", 409)
        assert "kv_dtype" in caught.value.field
        with pytest.raises(ClientError, match="tenant_unknown"):
            client.put_group("g2", "nobody", ["s"])
        with pytest.raises(ClientError, match="invalid_request"):
            client.get_json("/v1/in stances")
        assert client.get_json("/v1/instances/i")["id"] == "i"
        assert "# TYPE" in client.get_text("/metrics")
        client.put_tenant("t2", bytes_max=10, blocks_max=2)
        client.delete("/v1/tenants/t2")
        with pytest.raises(ClientError, match="tenant_unknown"):
            client.get_json("/v1/tenants/t2")


def test_a7_answer_lost_on_the_way_is_asked_for_again_with_the_same_id(service: Service) -> None:
    """The service did it, the connection died before the answer: the repeat inside the call gets the
    first answer."""
    lost: list[bytes] = []

    def lose(number: int, request: bytes) -> bool:
        if number == 1 or b"/engines/" in request or request in lost:
            return False
        lost.append(request)
        return True

    keys = new_keys(4)
    with relay(service.port, lose) as url, Client(ClientConfig(url=url, timeout_ms=5_000)) as client:
        client.register_engine("loser", keepalive=None)
        started = client.start_write("i", keys)
        assert (started.failure, len(started.writable)) == (None, 4), "not `in_progress` by its own first try"
        assert len(lost) == 1
        client.lookup("i", keys)
        finished = client.finish(started, started.locations, started.generations, checksums=[0] * 4 * PARTS)
        assert (finished.failure, finished.published) == (None, 4)
        assert len(lost) >= 2
        assert client.lookup("i", keys).hits == 4


def test_i7_repeat_by_the_caller_gets_the_first_answer(service: Service) -> None:
    """On a new connection the client does not repeat by itself; the caller can, with the result's
    request id."""
    losing = True

    def lose(number: int, request: bytes) -> bool:
        return losing and b"/engines/" not in request

    keys = new_keys(4)
    config = ClientConfig(timeout_ms=5_000, idle_ms_max=1)
    with relay(service.port, lose) as url, Client(replace(config, url=url)) as client:
        client.register_engine("again", keepalive=None)
        time.sleep(0.01)
        first = client.start_write("i", keys)
        assert (first.failure, first.writable) == ("connection_lost", [])
        losing = False
        second = client.start_write("i", keys, request_id=first.request_id)
        assert len(second.writable) == 4
        third = client.start_write("i", keys, request_id=first.request_id)
        assert (third.session, third.locations) == (second.session, second.locations)
        other = client.start_write("i", keys)
        assert set(other.outcomes) == {WriteOutcome.in_progress}
        assert 0 < min(other.wait_ms) <= 30_000


def test_b1_reader_slower_than_its_lease_is_told_to_throw_away(service: Service) -> None:
    keys, others = new_keys(3), new_keys(40)
    with service.client() as client, service.client() as worker:
        client.register_engine("slow-reader", keepalive="thread")
        worker.register_worker("w", ["s"], keepalive="thread")
        write(client, keys)
        found = client.lookup("i", keys, lease_ms=200)
        used = set(zip(found.locations, found.generations, strict=True))
        time.sleep(0.4)
        assert found.lease_left_ms() == 0
        assert client.remove("i", keys).removed == 3

        def gone() -> bool:
            for task in worker.take_tasks(wait_ms=500).tasks:
                worker.confirm_task(task)
                used.difference_update(zip(task.locations, task.generations, strict=True))
            return not used

        eventually(gone, 15)
        write(client, others)
        told = client.release(found.lease or "")
        assert told.failure is None
        assert not told.held(), "data read under it must be thrown away"
        assert told.changed[0] == 3
        assert worker.unknown_places("s", found.locations, found.generations).unknown == b"\1\1\1"


def test_b3_half_of_a_large_lease_is_renewed_in_one_call(service: Service) -> None:
    keys = new_keys(7_000)
    with service.client(timeout_ms=10_000) as client:
        client.register_engine("many", keepalive="thread")
        write(client, keys)
        found = client.lookup("i", keys, lease_ms=2_000)
        assert found.hits == 7_000
        half = client.renew_leases([found.lease or ""], ttl_ms=2_000, locations=found.locations[:3_500])
        assert (half.failure, half.held()) == (None, True)


def test_b5_releasing_twice_is_harmless(service: Service) -> None:
    keys = new_keys(2)
    with service.client() as client:
        client.register_engine("twice", keepalive=None)
        write(client, keys)
        leases = [client.lookup("i", keys, lease_ms=1_000).lease or "" for _ in range(2)]
        assert [client.release(leases[0]).held() for _ in range(3)] == [True] * 3
        assert client.renew_leases([leases[1]], ttl_ms=1_000).held(), "the other's lease is untouched"


def test_b7_owner_removes_what_it_leases_in_one_call(service: Service) -> None:
    keys = new_keys(2)
    with service.client() as client:
        client.register_engine("owner", keepalive=None)
        write(client, keys)
        mine = client.lookup("i", keys, lease_ms=1_000).lease
        assert list(client.remove("i", keys, lease=mine).outcomes) == [RemoveOutcome.removed] * 2


@pytest.mark.slow
def test_c1_engine_that_only_sends_heartbeats_stays(service: Service) -> None:
    with service.client() as client:
        registration = client.register_engine("idle", instance="i", keepalive="thread")
        time.sleep(3 * EXPIRE_MS / 1_000)
        assert registration.lost == 0
        assert client.heartbeat().status == "active"
        assert client.start_write("i", new_keys(1)).failure is None


def test_c1_expired_engine_is_told_to_register_again_and_does(service: Service) -> None:
    with service.client() as client:
        registration = client.register_engine("sleepy", keepalive=None)
        time.sleep(EXPIRE_MS / 1_000 + 0.5)
        began = time.monotonic()
        assert client.start_write("i", new_keys(1)).failure == "rejected:reregister"
        assert time.monotonic() - began < 1
        assert (registration.active, registration.lost) == (False, 1)
        client.register_engine("sleepy", keepalive=None)
        assert client.start_write("i", new_keys(1)).failure is None


def test_c4_second_process_under_one_id_fences_the_first(service: Service) -> None:
    with service.client() as first, service.client() as second:
        first.register_engine("same", keepalive=None)
        started = first.start_write("i", new_keys(2))
        second.register_engine("same", keepalive=None)
        late = first.finish(started, started.locations, started.generations, checksums=[0] * 2 * PARTS)
        assert late.published == 0
        assert (late.failure or "").startswith("rejected:")
        assert first.heartbeat().failure == "rejected:reregister"
        assert second.heartbeat().status == "active"


def test_c5_process_keeper_outlives_a_long_hold_of_the_interpreter_lock(service: Service) -> None:
    """Busy for 3 s where engines expire after 2 s, leases and write sessions after 1.5 s."""
    keys = new_keys(4)
    with service.client() as client:
        registration = client.register_engine("busy", keepalive="process")
        write(client, keys[:2])
        time.sleep(1)  # for the child to start
        started = client.start_write("i", keys[2:], parent=keys[1], ttl_ms=1_500, renew=True)
        found = client.lookup("i", keys[:2], lease_ms=1_500, renew=True)
        assert found.lease and started.session
        hold_the_interpreter_lock(3)
        assert client.release(found.lease).held()
        finished = client.finish(started, started.locations, started.generations, checksums=[0] * 2 * PARTS)
        assert (finished.failure, finished.published) == (None, 2)
        assert (registration.active, registration.lost) == (True, 0)


@pytest.mark.slow
def test_c5_without_it_the_engine_would_expire(service: Service) -> None:
    """The control: with a thread the same hold loses the registration; it comes back under another
    incarnation."""
    with service.client() as client:
        registration = client.register_engine("held", keepalive="thread")
        first = registration.incarnation
        hold_the_interpreter_lock(3)
        eventually(lambda: registration.lost == 1 and registration.active)
        assert registration.incarnation != first
        eventually(lambda: client.start_write("i", new_keys(1)).failure is None)


def test_c6_many_engines_start_at_once(service: Service) -> None:
    clients = [service.client(timeout_ms=10_000) for _ in range(64)]
    try:
        with ThreadPoolExecutor(64) as pool:
            registrations = list(
                pool.map(lambda pair: pair[1].register_engine(f"herd-{pair[0]}"), enumerate(clients))
            )
        time.sleep(1.2 * EXPIRE_MS / 1_000)
        assert [registration.failure for registration in registrations] == [None] * 64
        assert [registration.lost for registration in registrations] == [0] * 64
        assert {client.heartbeat().status for client in clients} == {"active"}
    finally:
        for client in clients:
            client.close()


def test_h3_switch_between_lookup_and_lease_gives_an_honest_zero(service: Service) -> None:
    keys = new_keys(64)
    with service.client() as client:
        client.register_engine("h3", keepalive=None)
        write(client, keys)
        promised = client.lookup("i", keys)
        assert promised.hits == 64
        client.set_switch("instance", "i", "bypass", reason="test")
        try:
            leased = client.lookup("i", keys, lease_ms=1_000)
            assert (leased.failure, leased.hits, leased.lease, leased.cut) == (None, 0, None, "switch")
            assert leased.switch is not None
            assert (leased.switch.scope, leased.switch.id, leased.switch.mode) == ("instance", "i", "bypass")
            assert (list(leased.places()), len(leased.locations), list(leased.keys)) == ([], 0, [])
            refused = client.start_write("i", new_keys(1))
            assert (refused.session, refused.reason(0)) == (None, "switch")
        finally:
            client.set_switch("instance", "i", "normal")
        assert client.lookup("i", keys, lease_ms=1_000).hits == 64


def test_h4_all_ranks_of_one_lookup_agree(service: Service) -> None:
    """A block with one rank's part missing is no hit for anybody, and one lease covers all parts."""
    keys = new_keys(6)
    with service.client() as client:
        client.register_engine("ranks", keepalive=None)
        started = client.start_write("i", keys)
        client.finish(started, started.locations, started.generations, parts=["tp0"], checksums=[1] * 6)
        client.finish(
            started, started.locations[:4], started.generations[:4], parts=["tp1"], checksums=[2] * 4
        )
        found = client.lookup("i", keys, lease_ms=1_000)
        assert found.hits == 4
        ranks = [[(place.location, place.key) for place in found.places(part)] for part in ("tp0", "tp1")]
        assert ranks[0] == ranks[1]
        assert len(ranks[0]) == 4
        assert [{place.checksum for place in found.places(part)} for part in (0, 1)] == [{1}, {2}]


def test_h5_limit_and_miss_are_told_apart(service: Service) -> None:
    keys = new_keys(8)
    with service.client() as client:
        client.register_engine("h5", keepalive=None)
        write(client, keys[:6])
        cuts = [client.lookup("i", keys, limit=limit).cut for limit in (None, 4)]
        assert cuts == ["miss", "limit"]


def test_h1_engine_finishes_every_request_while_the_service_is_killed(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The engine never waits longer than its deadline and never fails; when the service is back its hits
    are back."""
    one = Service(tmp_path, free_port(), *FLAGS)
    one.start()
    one.set_up()
    timeout_ms = 200
    config = ClientConfig(
        url=one.url, timeout_ms=timeout_ms, breaker_pause_ms_min=100, breaker_pause_ms_max=500
    )
    keys = new_keys(16)
    took_s: list[float] = []
    with Client(config) as client:
        registration = client.register_engine("h1", instance="i", keepalive="thread")
        write(client, keys, "i")

        def request() -> int:
            """Look up, load what hits, write the rest: as a connector does, asking nothing about failures."""
            began = time.monotonic()
            found = client.lookup("i", keys, lease_ms=500)
            loaded = [place.key for place in found.places()]
            missing = keys[len(loaded) :]
            started = client.start_write("i", missing, parent=loaded[-1] if loaded else None)
            rows = started.writable
            client.finish(
                started,
                [started.locations[row] for row in rows],
                [started.generations[row] for row in rows],
                checksums=[0] * len(rows) * PARTS,
            )
            if found.lease:
                client.release(found.lease)
            took_s.append(time.monotonic() - began)
            return found.hits

        assert [request() for _ in range(20)] == [16] * 20
        one.kill()
        assert {request() for _ in range(200)} == {0}
        one.start()
        eventually(lambda: request() == 16)
        assert [request() for _ in range(20)] == [16] * 20
        eventually(lambda: registration.active and client.heartbeat().failure is None)
    one.stop()
    assert max(took_s) < 4 * timeout_ms / 1_000 + 0.3, "four calls, each with its deadline"
    assert statistics.median(took_s[25:200]) < 0.005, "the breaker stopped paying"


def test_leases_of_a_dead_service_are_known_as_lost_and_writes_go_on_after_a_restart(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    one = Service(tmp_path, free_port(), *FLAGS)
    one.start()
    one.set_up()
    keys = new_keys(4)
    with one.client(timeout_ms=500) as client:
        client.register_engine("restart", keepalive="thread")
        write(client, keys)
        lease = client.lookup("i", keys, lease_ms=1_500, renew=True).lease or ""
        session = client.start_write("i", new_keys(2), ttl_ms=10_000, renew=True)
        assert client.held(lease) and session.session is not None
        one.kill()
        one.start()
        eventually(lambda: not client.held(lease), 5)
        assert client.held(session.session), "write sessions are in the journal"
        eventually(lambda: client.lookup("i", keys, lease_ms=500).hits == 4)
        finished = client.finish(session, session.locations, session.generations, checksums=[0] * 2 * PARTS)
        assert (finished.failure, finished.published) == (None, 2)
    one.stop()
