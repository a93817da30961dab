"""Engines and a worker that go on whatever the service does: each call is repeated until it is answered."""

import hashlib
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from metaservice.client import Client, ClientConfig
from metaservice.client.results import FinishResult, WriteResult
from metaservice.wire.schemas import FinishStatus, WriteOutcome
from tests.torture.ledger import Ledger, Place, checksum_of

KEY_LENGTH = 16
PARTS = ("tp0", "tp1")
PART_BYTES = 4_096
BLOCK_BYTES = PART_BYTES * len(PARTS)
INSTANCE = "m1"
TTL_MS_MIN, TTL_MS_MAX = 1_000, 1_800
SHARED_CHAINS = 40
LATE_S = 60.0
"""A call that is not answered for so long is a violation: the service is back within seconds."""

SETTINGS: dict[str, object] = {
    "lease_ms_max": 1_000,
    "reclaim_delay_ms": 50,
    "late_write_ms": 100,
    "task_ttl_ms": 2_000,
}
"""Short times, so that deadlines pass within a run."""

FINGERPRINT: dict[str, Any] = {
    "model": "tiny-llm",
    "revision": "r1",
    "kv_dtype": "bf16",
    "block_size_tokens": 16,
    "key_length": KEY_LENGTH,
    "hash_scheme": "sha256",
    "hash_seed": "7",
    "parts": [{"name": part, "bytes": PART_BYTES} for part in PARTS],
}

PASSING = frozenset(
    {
        "timeout",
        "refused_connection",
        "connection_lost",
        "protocol",
        "overloaded",
        "breaker_open",
        "not_registered",
        "rejected:not_ready",
        "rejected:overloaded",
        "rejected:journal_unavailable",
    }
)
"""Failures after which the same call is sent again."""

R = TypeVar("R")


def now_ms() -> int:
    """Monotonic."""
    return time.monotonic_ns() // 1_000_000


def client_of(url: str, timeout_ms: int = 2_000) -> Client:
    """A client that calls again at once, however often it failed: its pauses are tested elsewhere."""
    return Client(ClientConfig(url=url, timeout_ms=timeout_ms, breaker_failures=10**9, breaker_slow_ms=10**9))


def furnish(client: Client) -> None:
    """A tenant, two storages, a group, an instance."""
    client.put_tenant("acme")
    for storage in ("s1", "s2"):
        client.put_storage(storage, "posix", {"root": f"/{storage}"})
    client.put_group("chat", "acme", ["s1", "s2"])
    client.put_instance(INSTANCE, "chat", FINGERPRINT)


def chain_of(name: str, count: int) -> list[bytes]:
    """The keys of a chain, each named by all before it."""
    keys: list[bytes] = []
    last = name.encode()
    for _ in range(count):
        last = hashlib.sha256(last).digest()[:KEY_LENGTH]
        keys.append(last)
    return keys


class Actor(threading.Thread, ABC):
    """A thread that acts until told to stop; a fault of its own is a problem of the run."""

    def __init__(self, name: str, url: str, ledger: Ledger) -> None:
        super().__init__(name=name, daemon=True)
        self.client = client_of(url)
        self.ledger = ledger
        self.halt = threading.Event()
        self.acts = 0
        self.repeats = 0
        """Calls that had to be sent again."""

    def run(self) -> None:
        """See Thread."""
        try:
            self.begin()
            while not self.halt.is_set():
                self.act()
                self.acts += 1
        except Exception as error:
            self.ledger.wrong(f"{self.name} failed: {error!r}")
            raise
        finally:
            self.client.close()

    def begin(self) -> None:
        """Register."""

    @abstractmethod
    def act(self) -> None:
        """One thing it does."""

    def stop(self) -> None:
        """Stop after what it does now; a problem when that does not end."""
        self.halt.set()
        self.join(LATE_S + 5)
        if self.is_alive():
            self.ledger.wrong(f"{self.name} got no answer to its last call")

    def until_answered(self, call: Callable[[str], R], what: str) -> R:
        """Send the same request again, with the same id, until the answer is one that counts."""
        deadline_s = time.monotonic() + LATE_S
        request_id = f"{self.name}-{self.acts}-{what}"
        while True:
            result = call(request_id)
            failure = result.failure  # type: ignore[attr-defined]
            if failure not in PASSING:
                return result
            if time.monotonic() > deadline_s:
                self.ledger.wrong(f"{self.name}: {what} is not answered for {LATE_S} s, but {failure}")
                return result
            self.repeats += 1
            time.sleep(0.02)


class Writer(Actor):
    """One engine: writes chains, some that others write too, and ends its sessions in every way there is."""

    def __init__(self, number: int, url: str, ledger: Ledger, seed: int) -> None:
        super().__init__(f"e{number}", url, ledger)
        self.rng = random.Random(f"{seed}-{number}")
        self.seed = seed

    def begin(self) -> None:
        """See Actor."""
        self.client.register_engine(self.name, instance=INSTANCE).wait_active(int(LATE_S * 1_000))

    def act(self) -> None:
        """One write session."""
        rng = self.rng
        shared = rng.random() < 0.15
        if shared:
            keys = chain_of(f"{self.seed}-shared-{rng.randrange(SHARED_CHAINS)}", rng.randint(1, 6))
        else:
            keys = chain_of(f"{self.seed}-{self.name}-{self.acts}", rng.randint(1, 24))
        ttl_ms = rng.randint(TTL_MS_MIN, TTL_MS_MAX)
        serving_before = self.ledger.asked(keys, shared=shared)
        started = self.until_answered(
            lambda id: self.client.start_write(INSTANCE, keys, ttl_ms=ttl_ms, request_id=id), "start"
        )
        if started.failure is not None:
            self.ledger.wrong(f"{self.name}: a start was refused with {started.failure}: {started.detail}")
            return
        self.check_rows(started, shared)
        places = {
            keys[row]: (started.locations[row], started.generations[row])
            for row, outcome in enumerate(started.outcomes)
            if outcome == WriteOutcome.write
        }
        if started.session is not None:
            self.ledger.placed(started.session, places, serving_before)
            self.end(started, places)
        time.sleep(rng.random() * 0.02)

    def check_rows(self, started: WriteResult, shared: bool) -> None:
        """What no start may answer."""
        for row, outcome in enumerate(started.outcomes):
            if outcome == WriteOutcome.refused:
                self.ledger.wrong(f"{self.name}: refused with {started.reason(row)}, and nothing is short")
            if outcome == WriteOutcome.in_progress and started.wait_ms[row] > TTL_MS_MAX:
                self.ledger.wrong(f"{self.name}: in progress for {started.wait_ms[row]} ms more")
            if not shared and outcome != WriteOutcome.write:
                self.ledger.wrong(
                    f"{self.name}: {WriteOutcome(outcome).name} for a key that nobody else uses"
                )

    def end(self, started: WriteResult, places: dict[bytes, Place]) -> None:
        """Finish whole, in parts or with a failure; abort; or go away."""
        act = self.rng.random()
        if act < 0.12:
            self.left(started, places)
        elif act < 0.20:
            self.abort(started, places)
        elif act < 0.32:
            self.finish_in_parts(started, places)
        elif act < 0.42:
            self.finish(started, places, lost=self.rng.choice(list(places)))
        else:
            if act < 0.50:
                self.until_answered(lambda id: self.client.renew_write(started, ttl_ms=TTL_MS_MAX), "renew")
            self.finish(started, places)

    def left(self, started: WriteResult, places: dict[bytes, Place], ttl_ms: int = 0) -> None:
        assert started.session is not None
        self.ledger.left(started.session, list(places), ttl_ms or started.ttl_ms, now_ms())

    def abort(self, started: WriteResult, places: dict[bytes, Place]) -> None:
        result = self.until_answered(lambda id: self.client.abort(started, request_id=id), "abort")
        if result.failure is not None or result.freed != len(places):
            self.over(started, places, f"abort: {result.failure} freed {result.freed} of {len(places)}")
        else:
            self.left(started, places, ttl_ms=1)  # free at once

    def finish(self, started: WriteResult, places: dict[bytes, Place], lost: bytes | None = None) -> None:
        """Finish all parts in one call; those of block `lost` failed."""
        ok = [key != lost for key in places for _ in PARTS]
        sums = [checksum_of(place, part) for place in places.values() for part in range(len(PARTS))]
        result = self.finish_call(started, places, list(PARTS), ok, sums, "finish")
        if result.failure is not None:
            self.over(started, places, f"finish: {result.failure}")
            return
        served = {key: place for key, place in places.items() if key != lost}
        expected = bytes(FinishStatus.freed if key == lost else FinishStatus.serving for key in places)
        if result.status != expected:
            self.ledger.wrong(f"{self.name}: finish answered {result.status!r}, expected {expected!r}")
        self.ledger.published(served)
        if lost is not None:
            self.left(started, {lost: places[lost]}, ttl_ms=1)
        if self.rng.random() < 0.2:
            again = self.finish_call(started, places, list(PARTS), ok, sums, "finish")
            if (again.failure, again.status, again.published) != (None, result.status, result.published):
                self.ledger.wrong(f"{self.name}: a repeated finish got {again}, first {result}")

    def finish_in_parts(self, started: WriteResult, places: dict[bytes, Place]) -> None:
        """One call a rank, the second one a little later."""
        for number, part in enumerate(PARTS):
            sums = [checksum_of(place, number) for place in places.values()]
            result = self.finish_call(started, places, [part], [True] * len(places), sums, f"finish-{part}")
            if result.failure is not None:
                self.over(started, places, f"finish of {part}: {result.failure}")
                return
            time.sleep(self.rng.random() * 0.02)
        if set(result.status) != {FinishStatus.serving}:
            self.ledger.wrong(f"{self.name}: the last part is in, and the answer is {result.status!r}")
        self.ledger.published(places)

    def finish_call(
        self,
        started: WriteResult,
        places: dict[bytes, Place],
        parts: list[str],
        ok: list[bool],
        sums: list[int],
        what: str,
    ) -> FinishResult:
        locations = [place[0] for place in places.values()]
        generations = [place[1] for place in places.values()]
        return self.until_answered(
            lambda id: self.client.finish(
                started, locations, generations, parts=parts, ok=ok, checksums=sums, request_id=id
            ),
            what,
        )

    def over(self, started: WriteResult, places: dict[bytes, Place], why: str) -> None:
        """The session is over before it was ended: right when its time had passed; its blocks are free."""
        if "rejected:session_expired" in why:
            self.left(started, places, ttl_ms=1)
        elif "reregister" in why or "session_aborted" in why:
            self.ledger.doubted(list(places))
        else:
            self.ledger.doubted(list(places))
            self.ledger.wrong(f"{self.name}: {why}")


class Deleter(Actor):
    """A worker that confirms deletions, so that slots are used again."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        super().__init__("w1", url, ledger)

    def begin(self) -> None:
        """See Actor."""
        self.client.register_worker(self.name, ["s1", "s2"]).wait_active(int(LATE_S * 1_000))

    def act(self) -> None:
        """Take what there is, confirm it; a lost confirmation comes again as another task."""
        taken = self.client.take_tasks(limit=500, wait_ms=100)
        for task in taken.tasks:
            self.client.confirm_task(task)
        if taken.failure is not None:
            time.sleep(0.05)
