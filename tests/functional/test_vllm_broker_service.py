"""The broker of an engine's scheduler with the real service: found, away, slow, restarted, switched."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from engine_adapters.vllm.broker import NO_INSTANCE, Broker
from metaservice.client import ClientError
from tests.functional.broker_house import (
    FLAGS,
    answered,
    broker_at,
    cpu_ms,
    furnish,
    looked_up,
    lost,
    metric,
    no_leases,
    ready,
    store,
)
from tests.functional.client_service import Service, eventually
from tests.unit.namespace_house import KEY_LENGTH, make_namespace

CALL_MS_MAX = 1.0
"""What a call may cost the scheduler's thread. They cost some 20 us: a slow machine fails nothing here."""


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_LENGTH) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broker")


@pytest.fixture(scope="module")
def service(folder: Path, free_port: Callable[[], int]) -> Iterator[Service]:
    one = Service(folder, free_port(), *FLAGS)
    one.start()
    furnish(one, folder / "blocks")
    yield one
    one.stop()


@contextmanager
def standing_still(service: Service) -> Iterator[None]:
    """The service does nothing: connections are taken by the kernel and never answered."""
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.process.pid, signal.SIGCONT)


@contextmanager
def slow_road(port: int, delay_s: float) -> Iterator[str]:
    """The URL of a relay on which every answer takes so long."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as far:
            while request := near.recv(1 << 20):
                far.sendall(request)
                answer = far.recv(1 << 20)
                time.sleep(delay_s)
                near.sendall(answer)

    def accept() -> None:
        with suppress(OSError):
            while True:
                Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


# ---------------------------------------------------------------- lookups and leases


def test_blocks_are_found_and_leased_until_they_are_released(service: Service) -> None:
    keys = new_keys(8)
    with broker_at(service.url, "found") as broker:
        store(service, ready(broker), keys[:6])
        answer = looked_up(broker, keys)
        assert (answer.hits, answer.cut, answer.failure, answer.tier) == (6, "miss", None, "posix")
        assert list(answer.found.keys) == keys[:6]
        assert 0 < answer.began_ns <= answer.ended_ns
        assert answer.found.place(5, "tp1").checksum == 11
        assert broker.leases_open() == 1 == metric(service, "leases_held")
        assert broker.held("r#1")
        time.sleep(3.5)
        assert broker.held("r#1"), "it is renewed while the request waits"
        assert broker.answer("r#1") is answer
        for _ in range(3):
            broker.release("r#1")
        assert broker.answer("r#1") is None and not broker.held("r#1")
        no_leases(service, broker)
        counters = broker.counters()
        assert (counters["lookup_calls"], counters["leases"], counters["leases_released"]) == (1, 1, 1)
        assert broker.counters() == {}


def test_row_11_a_request_is_one_lookup_however_often_it_is_asked_after(service: Service) -> None:
    keys = new_keys(4)
    with broker_at(service.url, "often") as broker:
        store(service, ready(broker), keys)
        before = metric(service, "lookups_total")
        for number in range(50):
            broker.ask(f"r{number}#1", broker.instance_of() or "", keys)
        for _ in range(100):
            for number in range(50):
                broker.answer(f"r{number}#1")
        assert [answered(broker, f"r{number}#1").hits for number in range(50)] == [4] * 50
        assert metric(service, "lookups_total") - before == 50
        assert broker.leases_open() == 50
        for number in range(50):
            broker.drop(f"r{number}#1")
        no_leases(service, broker)


def test_row_7_every_end_of_a_ticket_leaves_no_lease(service: Service) -> None:
    """Dropped before the answer, after it, twice, never answered for it was a miss, asked anew under the same
    ticket, and left to the end."""
    keys = new_keys(3)
    with broker_at(service.url, "ends") as broker:
        store(service, ready(broker), keys)
        instance = broker.instance_of() or ""
        for number in range(20):
            broker.ask(f"before{number}", instance, keys)
            broker.drop(f"before{number}")
        looked_up(broker, keys, "after")
        broker.drop("after")
        broker.drop("after")
        assert looked_up(broker, new_keys(2), "miss").hits == 0
        looked_up(broker, keys, "again")
        assert looked_up(broker, keys, "again").hits == 3
        broker.drop("again")
        assert looked_up(broker, [], "nothing").cut == "none"
        no_leases(service, broker)
        looked_up(broker, keys, "left")
        assert metric(service, "leases_held") == 1
    assert metric(service, "leases_held") == 0, "closing releases what is left"


def test_late_answers_are_released(service: Service) -> None:
    keys = new_keys(3)
    with broker_at(service.url, "writer") as writer:
        store(service, ready(writer), keys)
        with slow_road(service.port, 0.3) as url, broker_at(url, "late", timeout_ms=2_000) as broker:
            ready(broker)
            broker.ask("r#1", broker.instance_of() or "", keys)
            time.sleep(0.1)
            broker.drop("r#1")
            assert broker.answer("r#1") is None
            eventually(lambda: metric(service, "leases_held") == 1, 3)
            no_leases(service, broker)
            assert broker.counters()["late_answers"] == 1


def test_blocks_whose_storage_is_not_mounted_here_are_no_hits(service: Service) -> None:
    keys = new_keys(4)
    namespace = make_namespace(tenant="far")
    with broker_at(service.url, "far", namespace, group="far") as broker:
        store(service, ready(broker), keys)
        answer = looked_up(broker, keys)
        assert (answer.hits, answer.cut, answer.failure, answer.tier) == (0, "storage", None, "")
        assert broker.counters()["unreachable_blocks"] == 4
        no_leases(service, broker)


# ---------------------------------------------------------------- the service away, slow, restarted


def test_the_engine_starts_without_the_service_joins_by_itself_and_gets_over_restarts(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    service = Service(tmp_path, free_port(), *FLAGS)
    with broker_at(service.url) as broker:
        begun = time.monotonic()
        assert not broker.wait_ready(300)
        assert time.monotonic() - begun < 2
        assert (broker.identity, broker.refused, broker.instance_of()) == (None, None, None)
        assert (broker.switch, broker.instance_of(("a", "/adapter"))) == ("normal", NO_INSTANCE)
        assert looked_up(broker, new_keys(2), instance="i").failure == "not_registered"
        service.start()
        try:
            time.sleep(0.3)  # the operator has not made the group yet
            assert broker.identity is None and broker.refused is None
            furnish(service, tmp_path / "blocks")
            joined(service, broker)
            killed_and_started_again(service, broker)
            lost(service, tmp_path, tmp_path / "blocks")
            begun_anew(service, broker)
            broker.close()
        finally:
            service.stop()


def joined(service: Service, broker: Broker) -> None:
    keys = new_keys(3)
    store(service, ready(broker), keys)
    assert looked_up(broker, keys).hits == 3
    broker.release("r#1")
    no_leases(service, broker)


def killed_and_started_again(service: Service, broker: Broker) -> None:
    """What is in the journal goes on; a switch that was set meanwhile is seen."""
    keys = new_keys(3)
    store(service, broker, keys)
    assert looked_up(broker, keys, "before").hits == 3
    identity = broker.identity
    service.kill()
    broker.release("before")
    answer = looked_up(broker, keys, "meanwhile")
    assert answer.hits == 0 and answer.failure is not None
    service.start()
    with service.client() as client:
        client.set_switch("group", "g", "read_only")
        switched(broker, "read_only")
        client.set_switch("group", "g", "normal")
        switched(broker, "normal")
    eventually(lambda: looked_up(broker, keys, "after").hits == 3)
    broker.drop("after")
    assert broker.identity == identity
    no_leases(service, broker)


def begun_anew(service: Service, broker: Broker) -> None:
    """The service has lost everything: instance and engine are registered anew."""
    keys = new_keys(2)
    answer = looked_up(broker, keys, "lost")
    assert answer.hits == 0 and answer.failure is not None
    eventually(lambda: looked_up(broker, keys, "anew").failure is None, 15)
    store(service, ready(broker), keys)
    assert looked_up(broker, keys, "more").hits == 2
    broker.drop("more")
    no_leases(service, broker)


def test_row_11_a_service_that_stands_still_costs_the_scheduler_nothing(service: Service) -> None:
    keys = new_keys(64)
    with broker_at(service.url, "still", lookup_wait_ms=300, timeout_ms=300) as broker:
        store(service, ready(broker), keys)
        instance = broker.instance_of() or ""
        assert looked_up(broker, keys, "held").hits == 64
        with standing_still(service):
            took_ms = 0.0
            for number in range(100):
                ticket = f"r{number}#1"
                took_ms = max(took_ms, cpu_ms(partial(broker.ask, ticket, instance, keys)))
                took_ms = max(took_ms, cpu_ms(partial(broker.answer, ticket), 20))
                if number % 3 == 0:
                    took_ms = max(took_ms, cpu_ms(partial(broker.drop, ticket)))
            took_ms = max(took_ms, cpu_ms(lambda: broker.release("held")), cpu_ms(lambda: broker.identity))
            took_ms = max(took_ms, cpu_ms(lambda: broker.bad(instance, keys)), cpu_ms(broker.counters))
            assert took_ms < CALL_MS_MAX
            for number in range(100):
                if number % 3:
                    assert answered(broker, f"r{number}#1", 5).failure is not None
        for number in range(100):
            broker.drop(f"r{number}#1")
        eventually(lambda: looked_up(broker, keys[:1], "again").failure is None)
        broker.drop("again")
        no_leases(service, broker)


@pytest.mark.parametrize("still", [False, True], ids=["service-well", "service-still"])
def test_the_end_is_bounded_and_leaves_nothing(service: Service, still: bool) -> None:
    """With the service well nothing is left of the engine; with one that hangs it takes no longer."""
    keys = new_keys(3)
    with broker_at(service.url, f"end-{still}") as broker:
        store(service, ready(broker), keys)
        looked_up(broker, keys)
        with standing_still(service) if still else nullcontext():
            broker.ask("open", broker.instance_of() or "", keys)
            begun = time.monotonic()
            broker.close()
            assert time.monotonic() - begun < (2.5 if still else 1.5)
        broker.close()
        broker.ask("late", "i", keys)
        broker.drop("late")
        if not still:
            with service.client() as client, pytest.raises(ClientError, match="engine_unknown"):
                client.get_json("/v1/engines/end-False")
    eventually(lambda: metric(service, "leases_held") == 0)


# ---------------------------------------------------------------- switches


def switched(broker: Broker, mode: str, within_s: float = 5.0) -> float:
    """Wait until the broker says so; how long that took."""
    begun = time.perf_counter()
    while broker.switch != mode:
        assert time.perf_counter() - begun < within_s, f"{broker.switch}, not {mode}"
        time.sleep(0.0005)
    return time.perf_counter() - begun


def test_switches_are_seen_within_milliseconds(service: Service) -> None:
    took = []
    with broker_at(service.url, "switched") as broker, service.client() as client:
        ready(broker)
        for scope, id in (
            ("cluster", ""),
            ("tenant", "t"),
            ("group", "g"),
            ("instance", broker.instance_of() or ""),
        ):
            for mode in ("bypass", "read_only", "normal"):
                client.set_switch(scope, id, mode)
                took.append(switched(broker, mode))
        assert sorted(took)[len(took) // 2] < 0.05, took
        assert broker.counters()["switch_changes"] == 12


def test_under_bypass_nobody_is_asked(service: Service) -> None:
    keys = new_keys(2)
    with broker_at(service.url, "bypassed") as broker, service.client() as client:
        store(service, ready(broker), keys)
        client.set_switch("instance", broker.instance_of() or "", "bypass")
        try:
            switched(broker, "bypass")
            before = metric(service, "lookups_total")
            broker.ask("r#1", broker.instance_of() or "", keys)
            answer = broker.answer("r#1")
            assert answer is not None and (answer.hits, answer.cut, answer.failure) == (0, "switch", None)
            assert metric(service, "lookups_total") == before
        finally:
            client.set_switch("instance", broker.instance_of() or "", "normal")
        switched(broker, "normal")
        assert looked_up(broker, keys, "r#2").hits == 2


# ---------------------------------------------------------------- who the engine is


def test_row_20_an_engine_that_hashes_otherwise_is_refused_with_the_field(service: Service) -> None:
    with broker_at(service.url, "first") as one:
        ready(one)
        with broker_at(service.url, "second", make_namespace(canary="cd" * 32)) as other:
            assert not other.wait_ready(5_000)
            assert other.refused is not None and "canary" in other.refused
            assert other.identity is None
            assert looked_up(other, new_keys(1), instance="i").failure == "not_registered"


def test_another_engine_under_our_name_is_noticed(service: Service) -> None:
    """The newer one wins; the older one writes nothing until it has an incarnation of its own again."""
    with broker_at(service.url, "twin") as broker, service.client() as client:
        before = ready(broker).identity
        client.register_engine("twin", instance=broker.instance_of() or "", keepalive=None)
        eventually(lambda: broker.identity != before)
        eventually(lambda: broker.identity is not None)
        assert broker.counters()["registrations_lost"] >= 1


def test_row_23_other_weights_are_another_instance_at_once(service: Service) -> None:
    keys = new_keys(4)
    with broker_at(service.url, "trained") as broker:
        store(service, ready(broker), keys)
        before = broker.identity
        assert looked_up(broker, keys, "held").hits == 4
        broker.renew_namespace(make_namespace(weight_version="8"))
        assert broker.identity is None and broker.instance_of() is None
        held = broker.answer("held")
        assert held is not None and (held.hits, held.failure) == (0, "renewed")
        eventually(lambda: broker.identity is not None)
        after = broker.identity
        assert before is not None and after is not None
        assert after.instance != before.instance and after.incarnation != before.incarnation
        assert looked_up(broker, keys, "anew").hits == 0
        with service.client() as client:
            client.act_as(before.engine, before.incarnation)
            late = client.start_write(before.instance, new_keys(1))
            assert late.failure == "rejected:reregister", "the writer of before is fenced"
        store(service, broker, keys)
        assert looked_up(broker, keys, "again").hits == 4
        broker.drop("again")
        no_leases(service, broker)


def test_blocks_that_cannot_be_read_are_removed_for_everybody_but_not_the_whole_cache(
    service: Service,
) -> None:
    keys = new_keys(12)
    with broker_at(service.url, "reporter", bad_blocks_per_minute_max=5) as broker:
        store(service, ready(broker), keys)
        instance = broker.instance_of() or ""
        broker.bad(instance, keys[10:])
        eventually(lambda: looked_up(broker, keys, "r#1").hits == 10)
        broker.bad(instance, keys[:10])
        broker.bad(instance, keys[10:])
        eventually(lambda: looked_up(broker, keys, "r#2").hits == 0)
        broker.drop("r#1")
        broker.drop("r#2")
        counters = broker.counters()
        assert (counters["removed_blocks"], counters["removals_left"]) == (5, 7)
        no_leases(service, broker)


# ---------------------------------------------------------------- LoRA adapters


def adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def instance_of(broker: Broker, name: str, path: Path) -> str:
    eventually(lambda: broker.instance_of((name, str(path))) is not None)
    return broker.instance_of((name, str(path))) or ""


def test_row_21_adapters_are_told_apart_by_what_is_in_them(service: Service, tmp_path: Path) -> None:
    keys = new_keys(3)
    one, same = adapter(tmp_path / "one", b"w1"), adapter(tmp_path / "same", b"w1")
    other = adapter(tmp_path / "x" / "one", b"w2")
    with broker_at(service.url, "lora") as broker:
        store(service, ready(broker), keys)
        ours = instance_of(broker, "a", one)
        assert ours not in (broker.instance_of(), NO_INSTANCE)
        assert instance_of(broker, "b", same) == ours
        assert instance_of(broker, "a", other) not in (ours, broker.instance_of(), NO_INSTANCE)
        assert looked_up(broker, keys, "base", ours).hits == 0, (
            "the base model's blocks are not the adapter's"
        )
        store(service, broker, keys, ours)
        assert looked_up(broker, keys, "lora", ours).hits == 3
        assert looked_up(broker, keys, "x", instance_of(broker, "a", other)).hits == 0
        broker.drop("lora")
        no_leases(service, broker)
        broker.renew_namespace(make_namespace(weight_version="9"))
        eventually(lambda: broker.identity is not None)
        assert instance_of(broker, "a", one) not in (ours, NO_INSTANCE), "another base, another instance"


def test_row_21_an_adapter_that_changes_under_its_name_has_no_cache(service: Service, tmp_path: Path) -> None:
    keys = new_keys(2)
    path = adapter(tmp_path / "a", b"w1")
    with broker_at(service.url, "lora-changed") as broker:
        instance = instance_of(ready(broker), "a", path)
        store(service, broker, keys, instance)
        (path / "adapter_model.safetensors").write_bytes(b"w2 and more")
        answer = looked_up(broker, keys, instance=instance)
        assert (answer.hits, answer.failure) == (0, "adapter_changed")
        assert broker.instance_of(("a", str(path))) == NO_INSTANCE
        assert looked_up(broker, keys, "none", NO_INSTANCE).failure == "not_registered"
        no_leases(service, broker)


def test_an_adapter_that_cannot_be_read_has_no_cache(service: Service, tmp_path: Path) -> None:
    with broker_at(service.url, "lora-unread") as broker:
        ready(broker)
        assert instance_of(broker, "a", tmp_path / "nowhere") == NO_INSTANCE
        (tmp_path / "empty").mkdir()
        assert instance_of(broker, "b", tmp_path / "empty") == NO_INSTANCE
