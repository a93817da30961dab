"""The scenes of the acceptance, in order: each asks what it has to ask, and says what it saw."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from dataplane.backends.posix_layout import path_of
from dataplane.port import Place
from engine_adapters.vllm.audit import PageEntry
from metaservice.client import LookupResult
from tests.accept import audit, ledger
from tests.accept.documents import DOCUMENT_TOKENS, Request
from tests.accept.fleet import Fleet, Row
from tests.accept.ledger import Verdict
from tests.accept.messages import BLOCK_SIZE_TOKENS, EngineOptions, Job
from tests.accept.plan import Plan
from tests.accept.site import DISK, Site

ENGINES = ("engine-1", "engine-2", "engine-3")
VICTIM = "engine-2"
SPOILED = "engine-spoiled"
CONTEXT_TOKENS = 2_048
KV_BLOCKS = 288
"""Of an engine: five or six prompts fit. It has to ask others for what it read a while ago."""

KILL_TIMEOUT_S = 60.0
HEARD_S = 1.0
"""How long engines may take to hear of a switch, many times over."""
BACK_TIMEOUT_S = 30.0
OUTAGE_S = 10.0
OUTAGE_EVERY_S = 0.4
LEADER_EVERY_S = 0.25
"""From the leader's kill on requests come no faster: a fleet that hurried through all of them while nobody
leads, or waited until somebody does, would say nothing."""
LEASES_GONE_S = 3.0
"""A good deal less than a lease lasts: what is left then was not given back."""

Note = Callable[[str], None]


class Stage(Struct):
    """What all scenes share."""

    site: Site
    fleet: Fleet
    plan: Plan
    model: Path
    note: Note
    baseline: dict[str, list[int]] = {}
    shown: list[Verdict] = []
    killed: set[str] = set()
    """Incarnations of engines that were killed."""

    def options(self, name: str, *, spoiled: bool = False) -> EngineOptions:
        """Of one engine."""
        return EngineOptions(
            model=str(self.model),
            connector=self.site.connector(name, save=not spoiled),
            connector_module="tests.accept.spoiled" if spoiled else "engine_adapters.vllm.connector",
            connector_class="SpoiledConnector" if spoiled else "UcmConnector",
            arguments={"max_model_len": CONTEXT_TOKENS, "num_gpu_blocks_override": KV_BLOCKS},
        )

    def say(self, rows: Sequence[Row], what: str) -> None:
        """Progress."""
        wrong = len(ledger.wrong(rows, self.baseline))
        self.note(f"{what}: {len(rows)} requests, hit rate {ledger.hit_rate(rows):.3f}, {wrong} wrong")

    def show(self, passed: bool, what: str) -> None:
        """Something that has to be so."""
        self.shown.append((passed, what))
        self.note(("ok    " if passed else "FAILED ") + what)


def baseline(stage: Stage, fleet: Fleet) -> None:
    """What every prompt's answer is without a connector, and that batching does not change it."""
    requests = list(stage.plan)
    rows = fleet.serve("baseline", requests, in_flight=8)
    stage.baseline = {row.request.id: list(row.answer.tokens) for row in rows}
    again = fleet.serve("baseline", requests[::12], in_flight=1)
    changed = ledger.wrong(again, stage.baseline)
    stage.show(
        not changed and len(stage.baseline) == len(requests),
        f"baseline without a connector: {len(rows)} prompts; {len(again)} of them say the same alone",
    )


def oracle(stage: Stage) -> bool:
    """Whether loading wrong pages changes every output: else the outputs prove nothing."""
    fleet, asked = stage.fleet, stage.plan.oracle
    fleet.serve("oracle", asked, ENGINES[0])
    _settled(stage)
    rows = fleet.serve("spoiled", asked, SPOILED, in_flight=1)
    fleet.rows = [row for row in fleet.rows if row.phase != "spoiled"]  # wrong on purpose
    changed = len(ledger.wrong(rows, stage.baseline))
    loaded = sum(row.loaded > 0 for row in rows)
    stage.note(
        f"oracle: {loaded} of {len(asked)} prompts with corrupted KV loaded, {changed} outputs changed"
    )
    return loaded == changed == len(asked)


def first_tokens(stage: Stage) -> tuple[list[float], list[float]]:
    """Times to the first token, ms, of prompts that nobody has seen, and of prompts with a hit."""
    fleet, plan = stage.fleet, stage.plan
    cold = fleet.serve("ttft", plan.ttft_cold, ENGINES[0], in_flight=1)
    _settled(stage)
    hit = fleet.serve("ttft", plan.ttft_hit, VICTIM, in_flight=1)
    stage.show(
        all(row.possible - row.local == row.loaded for row in hit),
        f"{len(hit)} prompts found what another engine had computed: {sum(row.loaded for row in hit)} blocks",
    )
    return [row.answer.first_ms for row in cold], [row.answer.first_ms for row in hit]


def steady(stage: Stage) -> None:
    """Nothing happens, once every document has been seen."""
    stage.fleet.serve("warm", stage.plan.warm)
    _settled(stage)
    stage.say(stage.fleet.serve("steady", stage.plan.steady), "steady")


class WriterKill:
    """Gives one engine something to write, and kills it in the middle of that: it is stopped first, and the
    kill is done when its records show blocks that it has begun to store and not finished."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._path = stage.site.audit_of(VICTIM)
        self._size = self._seen = self._path.stat().st_size
        self.unfinished = 0

    def __call__(self, fleet: Fleet) -> None:
        """Look, and strike."""
        if VICTIM not in fleet.engines or (size := self._path.stat().st_size) == self._seen:
            return
        self._seen = size
        engine = fleet.engines[VICTIM]
        engine.freeze()
        unfinished = self._unfinished()
        if unfinished:
            fleet.kill(VICTIM)
            self.unfinished = len(unfinished)
            self._stage.killed |= {entry.incarnation for entry in unfinished}
        else:
            engine.thaw()

    def _unfinished(self) -> list[PageEntry]:
        """Pages that were copied since this was made, and were not published yet."""
        with self._path.open("rb") as file:
            file.seek(self._size)
            *lines, _ = file.read().split(b"\n")
        entries = list(audit.parsed(lines))
        done = {entry.key for entry in entries if entry.what in ("published", "loaded")}
        return [entry for entry in entries if entry.what == "copied" and entry.key not in done]


def kill_engine(stage: Stage) -> None:
    """SIGKILL to an engine while it writes; the others go on."""
    fleet, plan = stage.fleet, stage.plan
    strike = WriterKill(stage)
    fleet.serve("engine-kill", plan.engine_kill, VICTIM, in_flight=1, tick=strike)
    stage.show(strike.unfinished > 0, f"an engine was killed with {strike.unfinished} pages half stored")
    rows = fleet.serve("after-engine-kill", plan.after_engine_kill)
    stage.say(rows, "after the engine's kill, the other two")


def kill_leader(stage: Stage) -> None:
    """SIGKILL to the replica that leads the engines' instance; it comes back after a while."""
    leader = stage.site.leader()
    leader.crash()
    stage.note(f"{leader.name}, which led the engines' instance, was killed")
    rows = stage.fleet.serve(
        "after-leader-kill", stage.plan.after_leader_kill, every_s=LEADER_EVERY_S, at_s={3.0: leader.launch}
    )
    stage.say(rows, f"after the leader's kill, {stage.site.leader().name} leads")


def restart(stage: Stage) -> None:
    """The killed engine comes back, and finds what others and it have stored."""
    fleet = stage.fleet
    fleet.await_ready(VICTIM)
    rows = fleet.serve("restarted", stage.plan.after_restart, VICTIM)
    loaded = sum(row.loaded for row in rows)
    stage.show(loaded > 0, f"the engine that was started again loaded {loaded} blocks")
    stage.say(rows, "the engine that was started again, alone")


def bypass(stage: Stage) -> None:
    """While the switch says so nothing is loaded; then it is again."""
    fleet = stage.fleet
    with stage.site.operator() as operator:
        operator.set_switch("cluster", "", "bypass", reason="acceptance")
        time.sleep(HEARD_S)
        fleet.forget(*ENGINES)
        before = fleet.loaded(*ENGINES)
        fleet.serve("bypassed", stage.plan.bypassed)
        loaded = fleet.loaded(*ENGINES) - before
        stage.show(loaded == 0, f"{loaded:.0f} blocks loaded while bypassed (0 allowed)")
        operator.set_switch("cluster", "", "normal", reason="acceptance")
    time.sleep(HEARD_S)
    fleet.forget(*ENGINES)
    rows = fleet.serve("unbypassed", stage.plan.unbypassed)
    loaded = sum(row.loaded for row in rows)
    stage.show(loaded > 0, f"{loaded} blocks loaded when no longer bypassed")


def outage(stage: Stage) -> None:
    """The whole service hangs, then it is gone, then it comes back; engines go on all the time."""
    fleet, replicas = stage.fleet, stage.site.cluster.replicas

    def hang() -> None:
        for replica in replicas:
            replica.freeze()

    def end() -> None:
        for replica in replicas:
            replica.crash()

    def begin() -> None:
        for replica in replicas:
            replica.launch()

    rows = fleet.serve(
        "outage",
        stage.plan.outage,
        every_s=OUTAGE_EVERY_S,
        until_s=OUTAGE_S,
        at_s={0.0: hang, OUTAGE_S / 2: end, OUTAGE_S: begin},
    )
    slowest_s = max(row.waited_s for row in rows)
    stage.show(
        len(rows) >= OUTAGE_S / OUTAGE_EVERY_S / 2,
        f"{len(rows)} requests answered without the service, the slowest after {slowest_s:.1f} s",
    )
    stage.site.cluster.await_ready()
    began_s = time.monotonic()
    asked = iter(stage.plan.after_outage)
    rows = []
    while not any(row.loaded for row in rows) and time.monotonic() < began_s + BACK_TIMEOUT_S:
        fleet.forget(*ENGINES)
        request = next(asked, None)
        if request is None:
            break
        rows += fleet.serve("after-outage", [request])
        time.sleep(0.0 if rows[-1].loaded else BACK_TIMEOUT_S / len(stage.plan.after_outage))
    rows += fleet.serve("after-outage", asked)
    loaded = sum(row.loaded for row in rows)
    stage.show(loaded > 0, f"the service is back, and engines load from it again: {loaded} blocks")


def damage(stage: Stage) -> None:
    """A stored block is corrupted, another one cut short: refused, computed anew, and right."""
    asked = iter(stage.plan.damage)
    for what, hurt in (("corrupted", _corrupt), ("cut short", _cut_short)):
        done = any(_damaged(stage, request, what, hurt) for request in asked)
        stage.show(done, f"a stored block was {what}")


def _damaged(stage: Stage, request: Request, what: str, hurt: Callable[[Path], None]) -> bool:
    """Damage a block of the request's document, and ask; False: none of it lies on the disk."""
    fleet, name = stage.fleet, ENGINES[2]
    asked = [row for row in fleet.rows if row.request.document == request.document]
    keys = [bytes.fromhex(key) for key in asked[-1].answer.keys[: DOCUMENT_TOKENS // BLOCK_SIZE_TOKENS]]
    instance, _ = stage.site.instance()
    with stage.site.operator() as operator:
        found = operator.lookup(instance, keys)
    at = _on_disk(found)
    if at is None:
        return False
    hurt(Path(path_of(str(stage.site.disk), Place.of(found.place(at)))))
    fleet.forget(name)
    (row,) = fleet.serve("damage", [request], name)
    stage.show(
        row.loaded == at and not ledger.wrong([row], stage.baseline),
        f"block {at} of {found.hits} {what}: {row.loaded} loaded, the rest computed anew, with right tokens",
    )
    return True


def _on_disk(found: LookupResult) -> int | None:
    """A block in the middle that lies on the disk."""
    for row in range(found.hits // 2, found.hits):
        if found.storage_table[found.storages[row]].name == DISK:
            return row
    return None


def _corrupt(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1_000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1_000)


def _settled(stage: Stage) -> None:
    """Returns when engines have stored what they had to store."""
    deadline_s = time.monotonic() + LEASES_GONE_S
    while stage.site.gauge("sessions_open") and time.monotonic() < deadline_s:
        time.sleep(0.05)


def leases_left(stage: Stage) -> int:
    """Read leases that are still held when nobody reads."""
    deadline_s = time.monotonic() + LEASES_GONE_S
    while (left := stage.site.gauge("leases_held")) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def steps_ms(stage: Stage) -> tuple[list[float], list[float]]:
    """What the connector added to idle steps and to others, as each engine's own clock says."""
    idle, busy = [], []
    for name in stage.fleet.engines:
        counts = stage.fleet.do(name, Job(op="counts")).counts
        idle += counts.idle_ms
        busy += counts.step_ms
    return idle, busy
