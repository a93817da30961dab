"""Engines of a tortured cluster: they write blocks whose bytes prove themselves, look up what others wrote,
hold leases, and read the bytes as long as these are promised."""

import hashlib
import os
import random
import threading
import time
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from dataplane import open_backend
from dataplane.port import Backend, ReadRefused, WriteFailed
from dataplane.port import Place as Bytes
from metaservice.wire import schemas as wire
from metaservice.wire import schemas_members as members_wire
from tests.torture.cluster_record import Looked, Place, Position, Record
from tests.torture.cluster_speech import Answer, Caller, Routes, Unanswered

KEY_LENGTH = 16
PART = "kv"
BLOCK_BYTES = 512
TENANT, GROUP, STORAGE = "acme", "chat", "disk"
LATE_S = 90.0
"""A write is repeated so long; a cluster that takes none for longer is a fault."""
LOOKUP_S = 2.0
BEAT_EVERY_S = 2.0
PAUSE_S = 0.12
CHAIN_MAX = 6
STALE_MS = 1_000

FINGERPRINT: dict[str, Any] = {
    "model": "m",
    "revision": "r",
    "kv_dtype": "bf16",
    "block_size_tokens": 16,
    "key_length": KEY_LENGTH,
    "hash_scheme": "test",
    "hash_seed": "0",
    "groups": [{"name": "full", "kind": "full"}],
    "parts": [{"name": PART, "bytes": BLOCK_BYTES, "group": "full"}],
}


def instance_of(shard: int) -> str:
    """The instance of a shard."""
    return f"model-{shard}"


def content_of(key: bytes) -> bytes:
    """The bytes of a block: whoever knows its key knows them."""
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


@dataclass(slots=True)
class Hold:
    """Places that are to be read once more later, under a lease or the promise of a lookup without one."""

    looked: Looked
    checksums: list[int]
    cluster: str
    lease: str
    read_s: float


class Engine(threading.Thread):
    """One engine process, played by a thread. A fault of its own is a fault of the run."""

    def __init__(
        self, name: str, shard: int, routes: Routes, record: Record, root: str, promise_ms: int, lease_ms: int
    ) -> None:
        """`promise_ms`: how long bytes stay after a lookup without a lease; `lease_ms`: the longest lease."""
        super().__init__(name=name, daemon=True)
        self.shard = shard
        self.instance = instance_of(shard)
        self.halt = threading.Event()
        self.record = record
        self.acts = 0
        self._caller = Caller(routes)
        self._rng = random.Random(name)
        self._backend: Backend = open_backend("posix", {"root": root, "fsync": "none", "threads": "1"})
        self._promise_ms = promise_ms
        self._lease_ms = lease_ms
        self._incarnation = ""
        self._beat_s = 0.0
        self._requests = 0
        self._held: list[Hold] = []

    # ------------------------------------------------------------ life

    def run(self) -> None:
        """See Thread."""
        try:
            while not self.halt.is_set():
                try:
                    self._alive()
                    self._act()
                except Unanswered:
                    self.record.count(unanswered=1)
                self.acts += 1
                self.halt.wait(PAUSE_S * (0.5 + self._rng.random()))
        except Exception as error:
            self.record.wrong("faults", f"{self.name}: {error!r}")
            raise
        finally:
            self._caller.close()
            self._backend.close()

    def _alive(self) -> None:
        """Registered, and heard of lately."""
        if not self._incarnation:
            incarnation = os.urandom(8).hex()
            body = members_wire.RegisterEngineRequest(incarnation=incarnation, instance=self.instance)
            answer = self._caller.call("PUT", f"/v1/engines/{self.name}", body, 0, LATE_S)
            if not answer.ok:
                raise AssertionError(f"register: {answer.status} {answer.body!r}")
            self._incarnation = incarnation
            self._beat_s = time.monotonic()
        elif time.monotonic() - self._beat_s > BEAT_EVERY_S:
            beat = members_wire.HeartbeatRequest(incarnation=self._incarnation)
            answer = self._caller.call("POST", f"/v1/engines/{self.name}/heartbeat", beat, 0, LATE_S)
            self._beat_s = time.monotonic()
            if not answer.ok:
                self._incarnation = ""

    def _act(self) -> None:
        self._read_held()
        chance = self._rng.random()
        if chance < 0.45:
            self.write([os.urandom(KEY_LENGTH) for _ in range(self._rng.randint(1, CHAIN_MAX))])
        elif chance < 0.5:
            keys = self.record.keys_of(self.instance)
            if keys:
                self._remove([self._rng.choice(keys)])
        else:
            self._look_up()

    # ------------------------------------------------------------ writing

    def _request_id(self) -> str:
        self._requests += 1
        return f"{self._incarnation}-{self._requests}"

    def write(self, keys: list[bytes]) -> None:
        """One chain: places, bytes, finish."""
        body = wire.StartWriteRequest(
            engine=self.name,
            incarnation=self._incarnation,
            keys=keys,
            request_id=self._request_id(),
        )
        answer = self._call("POST", f"/v1/instances/{self.instance}/writes", body)
        if answer is None:
            return
        started = msgspec.msgpack.decode(answer.body, type=wire.StartWriteReply)
        for outcome, reason in zip(started.outcomes, started.reasons, strict=True):
            if outcome == wire.WriteOutcome.refused:
                self.record.count(refused=wire.RefusedReason(reason).name)
        if started.session is None:
            return
        places = {
            keys[row]: (location, generation)
            for row, (location, generation) in enumerate(
                zip(array("Q", started.locations), array("I", started.generations), strict=True)
            )
            if generation
        }
        sums = self._backend.write_many(
            [self._bytes(started.cluster, place, key) for key, place in places.items()],
            [content_of(key) for key in places],
        )
        failed = [one for one in sums if isinstance(one, WriteFailed)]
        if failed:
            # Far too slow, and swept or deleted meanwhile; or the place was used: `exists` is for the judge.
            kind = "dirty" if any(one.reason == "exists" for one in failed) else "faults"
            self.record.wrong(kind, f"{self.name}: {failed[0]}")
            return
        self._finish(started.session, places, [one for one in sums if isinstance(one, int)])

    def _finish(self, session: str, places: dict[bytes, Place], sums: list[int]) -> None:
        body = wire.FinishRequest(
            engine=self.name,
            incarnation=self._incarnation,
            locations=array("Q", [place[0] for place in places.values()]).tobytes(),
            generations=array("I", [place[1] for place in places.values()]).tobytes(),
            checksums=array("Q", sums).tobytes(),
            request_id=self._request_id(),
        )
        answer = self._call("POST", f"/v1/writes/{session}/finish", body)
        if answer is None:
            return
        finished = msgspec.msgpack.decode(answer.body, type=wire.FinishReply)
        serving = {
            key: place
            for (key, place), status in zip(places.items(), finished.status, strict=True)
            if status == wire.FinishStatus.serving
        }
        self.record.committed(self.instance, serving, Position.of(answer), known=True)

    def _remove(self, keys: list[bytes]) -> None:
        body = wire.RemoveRequest(keys=keys, engine=self.name, incarnation=self._incarnation)
        body.request_id = self._request_id()
        self._call("POST", f"/v1/instances/{self.instance}/remove", body)

    def _call(self, method: str, path: str, body: wire.Request) -> Answer | None:
        """A write's answer; None when it was refused, as it may be after a long fault."""
        try:
            answer = self._caller.call(method, path, body, self.shard, LATE_S)
        except Unanswered as error:
            self.record.wrong("faults", f"{self.name}: no answer in {LATE_S:g} s: {error}")
            raise
        self.record.answered(answer)
        if answer.ok:
            return answer
        code = answer.code
        self.record.count(refused=code)
        if code in ("reregister", "incarnation_retired"):
            self._incarnation = ""
        elif code not in ("session_expired", "session_aborted", "session_ended", "session_unknown"):
            self.record.wrong(
                "faults", f"{self.name}: {method} {path}: {answer.status} {answer.body[:300]!r}"
            )
        return None

    # ------------------------------------------------------------ reading

    def _look_up(self) -> None:
        known = self.record.keys_of(self.instance)
        if not known:
            return
        keys = self._rng.sample(known, min(len(known), self._rng.randint(1, 16)))
        chance = self._rng.random()
        lease_ms = self._rng.randint(300, self._lease_ms) if chance < 0.7 else 0
        hold = self.look_up(keys, lease_ms, STALE_MS if chance > 0.85 else None)
        if hold is None:
            return
        if self._rng.random() < 0.4:
            left_s = hold.looked.until_s - time.time()
            hold.read_s = time.time() + self._rng.random() * left_s
            self._held.append(hold)
        elif hold.lease and self._rng.random() < 0.5:
            self._release(hold)

    def look_up(self, keys: list[bytes], lease_ms: int, stale_ms: int | None = None) -> Hold | None:
        """Look up and read what is found; None when nothing is. `stale_ms`: a follower may answer. Raises
        Unanswered."""
        body = wire.LookupRequest(keys=keys, mode="each", lease_ms=lease_ms, staleness_ms_max=stale_ms)
        path = f"/v1/instances/{self.instance}/lookup"
        if stale_ms is None:
            answer = self._caller.call("POST", path, body, self.shard, LOOKUP_S)
        else:
            answer = self._ask_anyone(path, body)
        position = self.record.answered(answer)
        if position is None:
            return None
        reply = msgspec.msgpack.decode(answer.body, type=wire.LookupReply)
        places = list(zip(array("Q", reply.locations), array("I", reply.generations), strict=True))
        found = [key for key, hit in zip(keys, reply.hit, strict=True) if hit]
        stale_s = max(0, answer.staleness_ms) / 1_000
        promise_s = lease_ms / 1_000 if reply.lease else self._promise_ms / 1_000 - stale_s
        looked = Looked(
            position,
            answer.staleness_ms,
            tuple(zip(found, places, strict=True)),
            tuple(key for key, hit in zip(keys, reply.hit, strict=True) if not hit),
            answer.sent_s + promise_s,
        )
        self.record.looked(looked)
        if not found:
            return None
        hold = Hold(looked, list(array("Q", reply.checksums)), reply.cluster, reply.lease or "", 0.0)
        self._read(hold)
        return hold

    def _ask_anyone(self, path: str, body: wire.LookupRequest) -> Answer:
        """Followers may answer, too; whoever cannot sends us elsewhere, which is no answer here."""
        url = self._rng.choice(self._caller.urls)
        try:
            return self._caller.ask(url, "POST", path, body, LOOKUP_S / 2)
        except OSError as error:
            raise Unanswered(f"{url}: {error}") from error

    def _read_held(self) -> None:
        """Read what is to be read again by now, with the lease renewed or not."""
        now_s = time.time()
        due = [hold for hold in self._held if hold.read_s <= now_s]
        self._held = [hold for hold in self._held if hold.read_s > now_s]
        for hold in due:
            self._read(hold)
            if hold.lease and self._rng.random() < 0.5:
                self._renew(hold)

    def _read(self, hold: Hold) -> None:
        rows = hold.looked.rows
        wanted = [self._bytes(hold.cluster, place, key) for key, place in rows]
        read = self._backend.read_many(wanted, hold.checksums)
        now_s = time.time()
        right = 0
        for (key, place), data in zip(rows, read, strict=True):
            if isinstance(data, ReadRefused):
                if data.reason != "missing":
                    self.record.wrong("dirty", f"{self.name}: {data} of {hold.looked}")
                elif now_s < hold.looked.until_s:
                    left_ms = (hold.looked.until_s - now_s) * 1_000
                    self.record.wrong(
                        "early", f"{self.name}: {place} is gone {left_ms:.0f} ms early: {hold.looked}"
                    )
            elif data != content_of(key):
                self.record.wrong("dirty", f"{self.name}: {place} holds other bytes than {key.hex()}'s")
            else:
                right += 1
        self.record.count(reads=right)

    def _renew(self, hold: Hold) -> None:
        ttl_ms = self._rng.randint(300, self._lease_ms)
        body = wire.LeaseRenewRequest(ttl_ms=ttl_ms)
        answer = self._caller.call("POST", f"/v1/leases/{hold.lease}/renew", body, self.shard, LOOKUP_S)
        if self.record.answered(answer) is None:
            return
        reply = msgspec.msgpack.decode(answer.body, type=wire.LeaseReply)
        if reply.outcomes[0] == wire.LeaseOutcome.renewed and not array("I", reply.changed)[0]:
            with self.record.lock:
                until_s = answer.sent_s + reply.ttl_ms / 1_000
                hold.looked.until_s = max(hold.looked.until_s, until_s)
            hold.read_s = time.time() + self._rng.random() * ttl_ms / 1_000
            self._held.append(hold)

    def _release(self, hold: Hold) -> None:
        with self.record.lock:
            hold.looked.until_s = min(hold.looked.until_s, time.time())
        body = wire.LeaseReleaseRequest()
        self.record.answered(
            self._caller.call("POST", f"/v1/leases/{hold.lease}/release", body, self.shard, LOOKUP_S)
        )

    @staticmethod
    def _bytes(cluster: str, place: Place, key: bytes) -> Bytes:
        return Bytes(cluster, place[0], place[1], PART, BLOCK_BYTES, key)
