"""A service with room for blocks, and brokers of engines beside it."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import enumerate as threads
from typing import Any

from engine_adapters.vllm.broker import Answer, Broker
from engine_adapters.vllm.settings import Settings
from metaservice.client import Client, ClientConfig
from tests.functional.client_service import Service, eventually
from tests.unit.namespace_house import PARTS, make_namespace

FLAGS = (
    *("--heartbeat-ms", "200", "--suspect-ms", "800", "--expire-ms", "2000"),
    *("--lease-ms-max", "5000", "--reclaim-delay-ms", "0", "--late-write-ms", "0"),
    *("--log-level", "warning"),
)


def furnish(service: Service, root: Path) -> None:
    """A tenant, a storage in a folder that exists, one in a folder that does not, and a group of each."""
    root.mkdir(exist_ok=True)
    with Client(ClientConfig(url=service.url)) as client:
        client.put_tenant("t")
        client.put_storage("here", "posix", {"root": str(root)})
        client.put_storage("nowhere", "posix", {"root": str(root / "not-mounted")})
        client.put_group("g", "t", ["here"])
        client.put_group("far", "t", ["nowhere"])


def settings_for(url: str, engine: str = "e", **changes: Any) -> Settings:
    fields = {"url": url, "group": "g", "engine": engine, "lease_ms": 3_000, "lookup_wait_ms": 1_000}
    return Settings(**{**fields, **changes})


@contextmanager
def broker_at(url: str, engine: str = "e", namespace: Any = None, **changes: Any) -> Iterator[Broker]:
    """A broker that has begun; closed at the end, after which none of its threads lives."""
    before = set(threads())
    broker = Broker(settings_for(url, engine, **changes), namespace or make_namespace(), PARTS)
    broker.start()
    try:
        yield broker
    finally:
        broker.close()
        left = [one.name for one in set(threads()) - before if one.name.startswith("ucm-")]
        assert left == [], f"threads that did not end: {left}"


def ready(broker: Broker, within_ms: int = 10_000) -> Broker:
    assert broker.wait_ready(within_ms), (broker.refused, broker.counters())
    return broker


def answered(broker: Broker, ticket: str, within_s: float = 10.0) -> Answer:
    """The answer, waited for."""
    until = time.monotonic() + within_s
    while (answer := broker.answer(ticket)) is None:
        assert time.monotonic() < until, "no answer"
        time.sleep(0.002)
    return answer


def looked_up(broker: Broker, keys: list[bytes], ticket: str = "r#1", instance: str | None = None) -> Answer:
    """Ask, and wait for the answer."""
    broker.ask(ticket, broker.instance_of() or "" if instance is None else instance, keys)
    return answered(broker, ticket)


def store(service: Service, broker: Broker, keys: list[bytes], instance: str | None = None) -> None:
    """Write a chain of blocks as the broker's engine."""
    identity = broker.identity
    assert identity is not None
    with service.client() as client:
        client.act_as(identity.engine, identity.incarnation)
        started = client.start_write(instance or identity.instance, keys)
        assert (started.failure, len(started.writable)) == (None, len(keys)), started.detail
        sums = range(len(keys) * len(PARTS))
        finished = client.finish(started, started.locations, started.generations, checksums=sums)
        assert (finished.failure, finished.published) == (None, len(keys)), finished.detail


def metric(service: Service, name: str) -> float:
    """A number of the service's metrics, all labels added up."""
    with service.client() as client:
        text = client.get_text("/metrics")
    return sum(float(value) for value in re.findall(rf"^ucm_meta_{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))


def no_leases(service: Service, broker: Broker) -> None:
    """Neither side has a lease left, soon."""
    eventually(lambda: broker.leases_open() == 0 and metric(service, "leases_held") == 0)


def lost(service: Service, folder: Path, root: Path) -> None:
    """The service starts again with nothing, but for what an operator sets up."""
    service.kill()
    shutil.rmtree(folder / "data")
    service.start()
    furnish(service, root)


def cpu_ms(call: Callable[[], Any], times: int = 1) -> float:
    """CPU that a call costs the thread that makes it, on average."""
    begun = time.thread_time_ns()
    for _ in range(times):
        call()
    return (time.thread_time_ns() - begun) / times / 1e6
