"""How long a shard was away, as a client sees it: one prober a shard writes a block, and looks it up with a
lease, again and again, each in a thread of its own, and remembers when that went well."""

import os
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from metaservice.wire import schemas as wire
from metaservice.wire import schemas_members as members_wire
from tests.torture.cluster_load import KEY_LENGTH, instance_of
from tests.torture.cluster_record import Looked, Record
from tests.torture.cluster_speech import Caller, Routes, Unanswered

PAUSE_S = 0.15
TRY_S = 0.4
CALL_S = 1.5
LEASE_MS = 500
PROBE = b"probe"
"""How keys begin that have no bytes anywhere."""


class Prober:
    """Probes one shard. What it was told is part of the record too."""

    def __init__(self, shard: int, routes: Routes, record: Record) -> None:
        self.shard = shard
        self.halt = threading.Event()
        self.writes: list[tuple[float, float]] = []
        """(asked, answered) of each probe that went well."""
        self.lookups: list[tuple[float, float]] = []
        self._name = f"probe-{shard}"
        self._record = record
        self._writer = Caller(routes, TRY_S)
        self._reader = Caller(routes, TRY_S)
        self._threads = [
            threading.Thread(target=self._run, args=(self._write, self.writes, self._writer), daemon=True),
            threading.Thread(target=self._run, args=(self._look_up, self.lookups, self._reader), daemon=True),
        ]
        self._instance = instance_of(shard)
        self._incarnation = ""
        self._requests = 0
        self._key = PROBE + bytes(KEY_LENGTH - len(PROBE))
        self._beat_s = 0.0

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for the end, after `halt`."""
        for thread in self._threads:
            thread.join()

    def _run(self, probe: Callable[[], bool], times: list[tuple[float, float]], caller: Caller) -> None:
        try:
            while not self.halt.is_set():
                began_s = time.time()
                try:
                    well = probe()
                except Unanswered:
                    well = False
                if well:
                    times.append((began_s, time.time()))
                self.halt.wait(PAUSE_S)
        except Exception as error:
            self._record.wrong("faults", f"{self._name}: {error!r}")
            raise
        finally:
            caller.close()

    def _write(self) -> bool:
        if not self._incarnation or time.monotonic() - self._beat_s > 2.0:
            self._alive()
        self._requests += 1
        key = PROBE + os.urandom(KEY_LENGTH - len(PROBE))
        start = wire.StartWriteRequest(
            engine=self._name, incarnation=self._incarnation, keys=[key], request_id=f"s{self._requests}"
        )
        answer = self._writer.call(
            "POST", f"/v1/instances/{self._instance}/writes", start, self.shard, CALL_S
        )
        if self._record.answered(answer) is None:
            if answer.code in ("reregister", "incarnation_retired"):
                self._incarnation = ""
            return False
        started = msgspec.msgpack.decode(answer.body, type=wire.StartWriteReply)
        if started.session is None:
            return False
        finish = wire.FinishRequest(
            engine=self._name,
            incarnation=self._incarnation,
            locations=started.locations,
            generations=started.generations,
            checksums=array("Q", [1]).tobytes(),
            request_id=f"f{self._requests}",
        )
        answer = self._writer.call("POST", f"/v1/writes/{started.session}/finish", finish, self.shard, CALL_S)
        position = self._record.answered(answer)
        if position is None:
            return False
        reply = msgspec.msgpack.decode(answer.body, type=wire.FinishReply)
        if reply.status[0] == wire.FinishStatus.serving:
            place = (array("Q", started.locations)[0], array("I", started.generations)[0])
            self._record.committed(self._instance, {key: place}, position, known=False)
            self._key = key
        return True

    def _alive(self) -> None:
        """The catalogue may be away while the shard is not: the next probe tries again."""
        if self._incarnation:
            self._beat_s = time.monotonic()
            beat = members_wire.HeartbeatRequest(incarnation=self._incarnation)
            try:
                answer = self._writer.call("POST", f"/v1/engines/{self._name}/heartbeat", beat, 0, CALL_S)
            except Unanswered:
                return
            if not answer.ok:
                self._incarnation = ""
        if not self._incarnation:
            incarnation = os.urandom(8).hex()
            body = members_wire.RegisterEngineRequest(incarnation=incarnation, instance=self._instance)
            if self._writer.call("PUT", f"/v1/engines/{self._name}", body, 0, CALL_S).ok:
                self._incarnation, self._beat_s = incarnation, time.monotonic()

    def _look_up(self) -> bool:
        keys = [self._key]
        body = wire.LookupRequest(keys=keys, mode="each", lease_ms=LEASE_MS)
        answer = self._reader.call("POST", f"/v1/instances/{self._instance}/lookup", body, self.shard, CALL_S)
        position = self._record.answered(answer)
        if position is None:
            return False
        reply = msgspec.msgpack.decode(answer.body, type=wire.LookupReply)
        places = zip(array("Q", reply.locations), array("I", reply.generations), strict=True)
        rows = tuple((keys[0], place) for place in places)
        self._record.looked(
            Looked(position, -1, rows, () if rows else tuple(keys), answer.sent_s + LEASE_MS / 1_000)
        )
        return True


@dataclass(slots=True)
class Window:
    """A time after a fault, until the next one. `shards`: those whose leader or journal it hit. `writes_s`,
    `lookups_s`: from when on each may be expected to come back: the fault itself, or, when everything was
    cut, its end."""

    what: str
    began_s: float
    shards: tuple[int, ...]
    writes_s: float = 0.0
    lookups_s: float = 0.0
    end_s: float = 0.0
    lookups_on_s: float = 0.0
    """Until when lookups must go on all the same; 0: they need not."""
    planned: bool = False
    away_s: dict[int, float] = field(default_factory=dict)
    """By shard, the longest time without a probe of either kind that went well."""
    stopped_s: float = 0.0
    """The longest time without a lookup while they had to go on."""
    worst: str = ""
    """The longest of them, in words."""

    def judge(self, probers: Sequence[Prober]) -> None:
        """Fill in what was away."""
        longest = -1.0
        self.stopped_s = 0.0
        for prober in probers:
            if self.lookups_on_s:
                gap = gap_s(prober.lookups, self.began_s, self.lookups_on_s)
                self.stopped_s = max(self.stopped_s, gap)
            gaps = {
                "writes": gap_s(prober.writes, self.writes_s or self.began_s, self.end_s),
                "lookups": gap_s(prober.lookups, self.lookups_s or self.began_s, self.end_s),
            }
            self.away_s[prober.shard] = max(gaps.values())
            if self.away_s[prober.shard] > longest:
                longest = self.away_s[prober.shard]
                told = " and ".join(f"{kind} {gap:.2f} s" for kind, gap in gaps.items())
                self.worst = f"shard {prober.shard} away for {longest:.2f} s ({told})"


def gap_s(probes: Sequence[tuple[float, float]], began_s: float, end_s: float) -> float:
    """The longest time within `began_s` to `end_s` without an answer to a probe that was asked in it."""
    longest, last = 0.0, began_s
    for asked, answered in probes:
        if asked >= began_s and answered <= end_s:
            longest, last = max(longest, answered - last), answered
    return max(longest, end_s - last)


def median(values: Sequence[float]) -> float:
    """0 without any."""
    return statistics.median(values) if values else 0.0
