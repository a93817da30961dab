"""What must hold of a service, seen from outside, by the record of what writers were told."""

import random
import time
from array import array
from dataclasses import dataclass

from metaservice.client import Client
from metaservice.client.results import LookupResult
from metaservice.wire.schemas import LeaseOutcome, WriteOutcome
from tests.torture.ledger import SLACK_MS, Ledger, Open, Place, checksum_of
from tests.torture.writers import BLOCK_BYTES, INSTANCE, PARTS, TTL_MS_MAX, client_of, now_ms

KEYS_PER_CALL = 8_192
SCOPES = ("tenants/acme", "groups/chat", f"instances/{INSTANCE}")


class Broken(Exception):
    """The run cannot go on."""


@dataclass
class Found:
    """What lookups say of some keys."""

    places: dict[bytes, Place]
    sums: dict[bytes, tuple[int, ...]]


class Checker:
    """Asks as engine `checker`, and writes what is wrong into the ledger and the counts."""

    def __init__(self, url: str, ledger: Ledger, seed: int) -> None:
        self.client: Client = client_of(url, timeout_ms=10_000)
        self.ledger = ledger
        self.lost = 0
        self.checked = 0
        """Unfinished sessions that were looked at after their time."""
        self.not_freed = 0
        self.usage_mismatch = 0
        self.epochs: list[int] = []
        self.seen = 0
        """How many acknowledged blocks, in the order of their finishes, were found at least once."""
        self.rng = random.Random(seed)
        self.leases: dict[str, int] = {}
        """Every lease it ever got -> the epoch."""

    def begin(self) -> None:
        """Register."""
        registration = self.client.register_engine("checker", instance=INSTANCE)
        if not registration.wait_active(30_000):
            raise Broken(f"the checker cannot register: {registration.failure} {registration.detail}")

    def close(self) -> None:
        """Let go of its connections."""
        self.client.close()

    def find(self, keys: list[bytes]) -> Found:
        """Which of the keys are readable, one by one, and where."""
        found = Found({}, {})
        width = len(PARTS)
        for at in range(0, len(keys), KEYS_PER_CALL):
            looked = self.lookup(keys[at : at + KEYS_PER_CALL])
            for row, key in enumerate(looked.keys):
                found.places[key] = (looked.locations[row], looked.generations[row])
                found.sums[key] = tuple(looked.checksums[row * width : (row + 1) * width])
        return found

    def lookup(self, keys: list[bytes], lease_ms: int = 0) -> LookupResult:
        """An answered lookup: the service is up, so the first try should do."""
        looked = self.client.lookup(INSTANCE, keys, mode="each", lease_ms=lease_ms)
        if looked.failure is not None:
            raise Broken(f"a lookup failed: {looked.failure} {looked.detail}")
        return looked

    # -- what must hold at any time

    def all_found(self, sample: int | None = None) -> None:
        """I1, I2: every acknowledged finish is found, at its place, with its checksums.

        `sample`: of what was found by a check before, look at so many only.
        """
        serving = self.ledger.serving()
        keys = list(serving)
        fresh, old = keys[self.seen :], keys[: self.seen]
        if sample is not None and len(old) > sample:
            old = self.rng.sample(old, sample)
        found = self.find(old + fresh)
        self.seen = len(keys)
        for key in old + fresh:
            place, at = serving[key], found.places.get(key)
            if at is None:
                self.lost += 1
                self.ledger.wrong(f"{key.hex()} was finished at {place} and is not found")
            elif at != place:
                self.ledger.wrong(f"{key.hex()} was finished at {place} and is found at {at}")
            elif found.sums[key] != tuple(checksum_of(place, part) for part in range(len(PARTS))):
                self.ledger.wrong(f"{key.hex()} is found with the checksums of something else")

    def epoch_rose(self, epoch: int) -> None:
        """I5, D10: every life has a larger epoch than all before."""
        if self.epochs and epoch <= self.epochs[-1]:
            self.ledger.wrong(f"epoch {epoch} after {self.epochs[-1]}")
        self.epochs.append(epoch)

    def take_lease(self) -> str | None:
        """A lease over some blocks that serve, None when there are none yet."""
        keys = sorted(self.ledger.serving())[:64]
        if not keys:
            return None
        looked = self.lookup(keys, lease_ms=300)
        lease = looked.lease
        if lease is not None:
            if lease in self.leases:
                self.ledger.wrong(f"lease {lease} was given twice")
            self.leases[lease] = looked.epoch
        return lease

    def lease_is_unknown(self, lease: str) -> None:
        """B: a lease from before the restart is not held, and nobody says that it is."""
        renewed = self.client.renew_leases([lease], ttl_ms=200)
        if renewed.failure is not None or renewed.outcomes != bytes([LeaseOutcome.unknown]):
            self.ledger.wrong(f"{lease} of an earlier life: {renewed.failure} {renewed.outcomes!r}")

    # -- what must hold after deadlines

    def due_are_free(self, *, alone: bool) -> None:
        """A2: of every unfinished session whose time has passed a new start gets `write`.

        `alone`: nobody writes meanwhile; otherwise only sessions are looked at whose keys nobody else uses.
        """
        due = self.ledger.take_due(now_ms())
        self.checked += len(due)
        serving = self.ledger.serving()
        others = set() if alone else self.ledger.shared
        wanted: dict[bytes, Open] = {}
        for one in due:
            wanted.update(
                (key, one) for key in one.keys if key not in serving and key not in self.ledger.unsure
            )
        keys = [key for key in wanted if key not in others]
        for at in range(0, len(keys), KEYS_PER_CALL):
            self._are_free(keys[at : at + KEYS_PER_CALL], wanted)

    def _are_free(self, keys: list[bytes], wanted: dict[bytes, Open]) -> None:
        parents: list[bytes | None] = [None] * len(keys)
        started = self.client.start_write(INSTANCE, keys, parents=parents, ttl_ms=TTL_MS_MAX)
        if started.failure is not None:
            raise Broken(f"a start on freed keys failed: {started.failure} {started.detail}")
        held: dict[str, list[str]] = {}
        for row, outcome in enumerate(started.outcomes):
            if outcome != WriteOutcome.write:
                one = wanted[keys[row]]
                what = f"{WriteOutcome(outcome).name} ({started.reason(row)}, {started.wait_ms[row]} ms)"
                held.setdefault(f"{one.session}, due {now_ms() - one.due_ms} ms ago", []).append(what)
        if started.session is not None:
            aborted = self.client.abort(started)
            if aborted.freed != len(started.writable):
                self.ledger.wrong(
                    f"an abort freed {aborted.freed} of {len(started.writable)}: {aborted.failure}"
                )
        for session, outcomes in held.items():
            self.not_freed += 1
            self.ledger.wrong(f"{session}: {', '.join(outcomes)}")

    def settle(self) -> None:
        """With no writer left: wait for the last deadline, then everything must add up."""
        wait_ms = self.ledger.last_due_ms() + SLACK_MS + 1 - now_ms()
        if wait_ms > 0:
            time.sleep(wait_ms / 1_000)
        self.all_found()
        self.counters_equal_rows()
        self.due_are_free(alone=True)

    def counters_equal_rows(self) -> None:
        """I4: what every scope says it uses is what lookups find, block by block."""
        keys = self.ledger.all_keys()
        found = self.find(keys)
        serving = self.ledger.serving()
        for key in found.places.keys() - serving.keys() - self.ledger.unsure:
            self.ledger.wrong(f"{key.hex()} serves, and no finish of it was acknowledged")
        blocks = len(found.places)
        storages = array("Q", [0])
        for scope in SCOPES:
            self._counts(scope, blocks)
        for storage in ("s1", "s2"):
            storages.append(int(self.client.get_json(f"/v1/storages/{storage}")["usage"]["blocks"]))
        if sum(storages) != blocks:
            self.usage_mismatch += 1
            self.ledger.wrong(f"the storages hold {sum(storages)} blocks, and {blocks} are found")

    def _counts(self, scope: str, blocks: int) -> None:
        usage = self.client.get_json(f"/v1/{scope}")["usage"]
        if (usage["blocks"], usage["bytes"]) != (blocks, blocks * BLOCK_BYTES):
            self.usage_mismatch += 1
            self.ledger.wrong(
                f"{scope} uses {usage['blocks']} blocks, {usage['bytes']} bytes; {blocks} blocks are found"
            )

    def nothing_is_deleting(self, timeout_s: float) -> None:
        """I8: with a worker at work, what was freed is gone after a while."""
        deadline_s = time.monotonic() + timeout_s
        while (left := self.client.get_json("/v1/tenants/acme")["usage"]["deleting_blocks"]) > 0:
            if time.monotonic() > deadline_s:
                self.ledger.wrong(f"{left} blocks are still deleting after {timeout_s} s")
                return
            time.sleep(0.05)
