"""The connector's worker side with a real service and a real storage: what one engine stores another loads,
for one rank and for two, over restarts of the service and of the engine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_adapters.vllm.orders import Identity
from engine_adapters.vllm.rank import RankParts
from metaservice.client import Client, ClientConfig, LookupResult
from metaservice.wire.schemas import WriteOutcome
from tests.functional.client_service import Service
from tests.unit.vllm_memory_service import PAGE_BYTES, key_of
from tests.unit.vllm_worker_house import Gate, Rank, eventually, load_order, save_order, settings_with, step

INSTANCES = {"one": ["tp0"], "two": ["tp0", "tp1"], "hybrid": ["g0-tp0", "g1-tp0"]}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "kv").mkdir()
    service = Service(folder, free_port())
    service.start()
    try:
        with Client(ClientConfig(url=service.url)) as client:
            client.put_tenant("t")
            client.put_storage("s", "posix", {"root": str(folder / "kv")})
            client.put_group("g", "t", ["s"])
            for instance, parts in INSTANCES.items():
                client.put_instance(
                    instance,
                    "g",
                    {
                        "model": "m", "revision": "r", "kv_dtype": "bf16", "block_size_tokens": 16,
                        "key_length": 32, "hash_scheme": "sha256", "hash_seed": "0",
                        "groups": [{"name": "full", "kind": "full"}],
                        "parts": [{"name": part, "bytes": PAGE_BYTES, "group": "full"} for part in parts],
                    },
                )  # fmt: skip
        yield service
    finally:
        service.stop()


class House:
    """An engine: its registration, and its ranks."""

    def __init__(self, service: Service, instance: str, engine: str, **changes: Any) -> None:
        self.instance = instance
        self.scheduler = service.client()
        registered = self.scheduler.register_engine(engine, instance=instance)
        assert registered.active, registered.detail
        self.identity = Identity(instance, engine, registered.incarnation)
        parts = INSTANCES[instance]
        world = 2 if instance == "two" else 1
        groups = len(parts) // world
        settings = settings_with(url=service.url, timeout_ms=2_000, **changes)
        self.ranks = [
            Rank(
                settings,
                RankParts(rank, world, tuple(parts[rank * groups : (rank + 1) * groups])),
                Client(settings.client()),
            )
            for rank in range(world)
        ]
        self.groups = groups

    def save(self, name: str, numbers: range, **more: Any) -> list[bytes]:
        """Compute and save; blocks are numbered from 1."""
        order = save_order(
            name, numbers, range(1, len(numbers) + 1), groups=self.groups, instance=self.instance, **more
        )
        for rank in self.ranks:
            rank.step(step(identity=self.identity, saves=(rank.compute(order),)))
        return order.keys

    def lookup(self, keys: list[bytes]) -> LookupResult:
        return self.scheduler.lookup(self.instance, keys, lease_ms=5_000)

    def load(self, found: LookupResult, first: int, ticket: str) -> None:
        order = load_order(
            found, range(first, first + found.hits), request=ticket, ticket=ticket, groups=self.groups
        )
        for rank in self.ranks:
            results = rank.step(step(identity=self.identity, loads=(order,)))
            if not results.received:
                rank.received(ticket)

    def close(self) -> None:
        for rank in self.ranks:
            rank.side.shutdown()
        self.scheduler.close()


@contextmanager
def engine(service: Service, instance: str, name: str, **changes: Any) -> Iterator[House]:
    house = House(service, instance, name, **changes)
    try:
        yield house
    finally:
        house.close()


@pytest.mark.parametrize("instance", INSTANCES)
def test_what_one_engine_stores_another_loads(service: Service, instance: str) -> None:
    numbers = range(100, 140)
    with engine(service, instance, f"{instance}-a") as a, engine(service, instance, f"{instance}-b") as b:
        keys = a.save("s1", numbers)
        for rank in a.ranks:
            assert rank.saves_over(1)[0].dropped == 0
        published = {key for rank in a.ranks for one in rank.saved for key in one.published}
        assert published == set(keys)
        found = b.lookup(keys)
        assert found.hits == len(keys)
        b.load(found, 20, "r#1")
        for rank in b.ranks:
            assert rank.loaded[0].blocks == len(keys)
            for group in range(b.groups):
                assert all(rank.right(keys, range(20, 20 + len(keys)), group))
        assert found.lease is not None and b.scheduler.release(found.lease).held()
        b.save("s2", numbers)
        for rank in b.ranks:
            assert rank.saves_over(1)[0].present == tuple(keys)


def test_row3_a_rank_whose_bytes_are_gone_says_which(service: Service) -> None:
    with engine(service, "two", "two-c") as one:
        keys = one.save("s1", range(200, 205))
        for rank in one.ranks:
            rank.saves_over(1)
        found = one.lookup(keys)
        ref = found.place(2, "tp1")
        root = Path(ref.storage.options["root"])
        (path,) = root.rglob(f"{ref.location:016x}-{ref.generation}.tp1")
        path.unlink()
        one.load(found, 20, "r#1")
        assert [rank.loaded[0].blocks for rank in one.ranks] == [5, 2]
        assert one.ranks[1].loaded[0].bad == (key_of(202),)
        assert one.ranks[1].side.load_errors() == {22, 23, 24}


def test_row17_a_save_that_one_rank_gives_up_is_nobodys(service: Service) -> None:
    with engine(service, "two", "two-d") as one:
        gate = Gate()
        one.ranks[1].pages.before_gather = gate
        one.save("s0", range(290, 291), request="other")
        keys = one.save("s1", range(300, 310))
        one.ranks[0].saves_over(2)
        one.ranks[1].side.preempted(step(identity=one.identity, preempted=("r",)))
        gate.open()
        assert one.ranks[1].saves_over(2)[0].reason == "preempted"

        def free_again() -> bool:
            started = one.scheduler.start_write("two", keys)
            if started.session is not None:
                one.scheduler.abort(started)
            return started.outcomes == bytes([WriteOutcome.write]) * len(keys)

        eventually(free_again)
        assert one.lookup(keys).hits == 0


def test_row23_a_fenced_incarnation_publishes_nothing(service: Service) -> None:
    with engine(service, "one", "one-e") as old:
        gate = Gate()
        old.ranks[0].mover.before_write = gate
        keys = old.save("s1", range(400, 404))
        assert gate.reached.wait(5)
        with service.client() as other:
            assert other.register_engine("one-e", instance="one", keepalive=None).active
            gate.open()
            (saved,) = old.ranks[0].saves_over(1)
            assert (saved.published, saved.reason) == ((), "finish_failed")
            assert old.ranks[0].counts["finish_failures"] == 1
            assert other.lookup("one", keys).hits == 0


def test_the_service_comes_back_and_saves_go_on(service: Service) -> None:
    """Killed between start and finish: the finish is asked again, and what was copied is not lost."""
    with engine(service, "one", "one-f") as one:
        (rank,) = one.ranks
        gate = Gate()
        rank.mover.before_write = gate
        keys = one.save("s1", range(500, 504))
        assert gate.reached.wait(5)
        service.kill()
        gate.open()
        began = time.monotonic()
        one.save("s2", range(510, 512), request="q")
        assert time.monotonic() - began < 0.5, "no step waits for the service"
        eventually(lambda: sorted(rank.gathered) == ["s1", "s2"])
        service.start()
        saved = {one.save: one for one in rank.saves_over(2)}
        assert saved["s1"].published == tuple(keys), saved
        assert len(saved["s2"].published) == 2, saved
        assert one.lookup(keys).hits == 4
