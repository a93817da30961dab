"""Cases in which something breaks on the way: frames are lost, subscribers sleep, engines, publishers and
indexers end."""

import os
import signal
from time import monotonic, sleep

from metaservice.cli.local.process import until
from tests.compat.cases_overlay import SETTLE_S
from tests.compat.fleet import BLOCK_SIZE, Fleet
from tests.compat.judge import SPARE_RANK, CaseFailed, Judge
from tests.compat.reader import Reader, apply, arrived
from tests.compat.reference import Document, event_hash
from tests.compat.relay import Relay
from tests.compat.stage import Stage

LOSS = 0.2
FROZEN_BATCHES = 60_000
FROZEN_ENGINES = 32
FROZEN_S_MAX = 120.0
EXPIRY_S = 20.0
RESTART_S_MAX = 20.0
RESTART_ENTRIES_PER_S = 50_000
"""At least so many come back in a second, beside what it takes to begin."""
STORED_PER_S = 2_000
"""At least so many blocks are told in a second while they are stored."""
LATE_S_MAX = 3.0
SLOW_READ_S = 2.0
CONNECT_S = 0.5
"""For a subscription to reach its publisher."""
SLOW_RESTATES = 20
"""About 17 MB: more than what the kernel keeps for a subscriber, and what may wait for one."""
WINDOW_BLOCKS = 512


def write_some(fleet: Fleet, prompts: int, blocks: int = 12) -> list[Document]:
    """New prompts that are stored."""
    documents = [fleet.author.write(blocks) for _ in range(prompts)]
    for document in documents:
        fleet.write(document)
    return documents


def register_ours(stage: Stage, fleet: Fleet, endpoint: str = "") -> None:
    """Register the service's streams for all workers at the plain indexer, as it would be by hand: from the
    leader, or from `endpoint`."""
    leader = stage.site.leader
    for worker, name in fleet.workers.items():
        for number, stream in enumerate(fleet.streams(name, leader)):
            stage.site.plain.register(
                worker,
                endpoint or stream["endpoint"],
                fleet.model,
                BLOCK_SIZE,
                replay=stream["replay"],
                rank=SPARE_RANK + number,
            )


def row_13_dropped_frames(stage: Stage) -> str:
    """A fifth of all frames is lost on the way to the indexer, and stays lost."""
    with Fleet(stage.site) as fleet:
        engines = [fleet.join(), fleet.join()]
        replicas = stage.site.cluster.replicas
        sources = [fleet.streams(engines[0].name, replica)[0]["endpoint"] for replica in replicas]
        with Relay(sources, stage.chance, LOSS) as relay:
            register_ours(stage, fleet, relay.endpoint)
            fleet.register_streams(stage.site.plain)
            judge = Judge(fleet, stage.site.plain)
            documents: list[Document] = []
            for _ in range(120):
                documents += write_some(fleet, 1)
                if stage.chance.random() < 0.3:
                    fleet.compute(stage.chance.choice(engines), stage.chance.choice(documents), 6)
                if stage.chance.random() < 0.3:
                    gone = stage.chance.choice(documents).keys[8:]
                    fleet.remove(gone)
            took_s = judge.settle(documents, SETTLE_S)
            judge.hold(documents, stage.chance, 3.0)
            if not relay.lost:
                raise CaseFailed("no frame was lost: the case shows nothing")
            return (
                f"{relay.lost} frames lost, {relay.passed} passed; exact {took_s:.2f} s after the last block"
            )


def row_22_frozen_subscriber(stage: Stage) -> str:
    """The indexer is frozen while 60,000 batches are sent to it; another one beside it goes on."""
    with Fleet(stage.site) as fleet:
        for number in range(FROZEN_ENGINES):
            fleet.join(f"node-{number}")
        judge, other = Judge(fleet, stage.site.attached), Judge(fleet, stage.site.plain)
        judge.await_attached()
        register_ours(stage, fleet)
        documents = write_some(fleet, 60)
        judge.settle(documents, SETTLE_S)
        other.settle(documents, SETTLE_S)
        streams = fleet.streams(fleet.engines[0].name, stage.site.leader)
        listeners = FROZEN_ENGINES * len(streams)
        first = streams[0]["number"]
        stage.site.attached.freeze()
        try:
            began = monotonic()
            while (sent := (_number(stage, fleet) - first) * listeners) < FROZEN_BATCHES:
                if monotonic() - began > FROZEN_S_MAX:
                    raise CaseFailed(f"only {sent} batches were sent in {FROZEN_S_MAX:g} s")
                document = stage.chance.choice(documents)
                gone = [key for key in document.keys[6:] if fleet.truth.stored(key)]
                if gone:
                    fleet.remove(gone)
                else:
                    fleet.write(document)
            other_s = other.settle(documents, SETTLE_S)
        finally:
            stage.site.attached.thaw()
        took_s = judge.settle(documents, SETTLE_S)
        judge.hold(documents, stage.chance, 1.5)
        return (
            f"{sent} batches missed; exact {took_s:.2f} s after it went on; the other one {other_s:.2f} s "
            "after the last block"
        )


def _number(stage: Stage, fleet: Fleet) -> int:
    number: int = fleet.streams(fleet.engines[0].name, stage.site.leader)[0]["number"]
    return number


def row_22_slow_subscriber(stage: Stage) -> str:
    """A subscriber that does not read loses batches; nobody else does, and the replay has all of them."""
    with Fleet(stage.site) as fleet, Reader() as reader:
        fleet.join()
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        documents = write_some(fleet, 200, 64)
        judge.settle(documents, SETTLE_S)
        stream = fleet.streams(fleet.engines[0].name, stage.site.leader)[0]
        slow = reader.subscribe(stream["endpoint"], hwm=1)
        known = {event_hash(key) for key in fleet.truth.shared}
        for _ in range(SLOW_RESTATES):
            reached = _number(stage, fleet) + sum(len(one.keys) for one in documents) // WINDOW_BLOCKS
            stage.site.operator.post(f"/v1/instances/{fleet.instance}/restate", {})
            documents += write_some(fleet, 1, 64)
            for _ in until(monotonic() + SETTLE_S):
                if _number(stage, fleet) >= reached:
                    break
            judge.settle(documents[-5:], SETTLE_S)
        newest = _number(stage, fleet)
        seen = list(arrived(slow, SLOW_READ_S))
        numbers = {frame.seq for frame in seen}
        missed = [number for number in range(seen[0].seq, newest + 1) if number not in numbers]
        if not missed:
            raise CaseFailed(f"nothing of {len(seen)} batches was lost: the case shows nothing")
        for frame in seen:
            if frame.seq < missed[0]:
                apply(known, frame)
        replay = reader.replay(stream["replay"], missed[0])
        for frame in replay.frames:
            apply(known, frame)
        truth = {event_hash(key) for key in fleet.truth.shared}
        if not replay.ended or known != truth:
            wrong = len(known ^ truth)
            raise CaseFailed(
                f"after a replay of {len(replay.frames)} batches {wrong} blocks are wrong", wrong
            )
        made_good = len(replay.frames)
        return f"{len(missed)} of {newest - seen[0].seq} batches lost, made good by a replay of {made_good}"


def row_11_worker_expiry(stage: Stage) -> str:
    """An engine falls silent: what was told of it goes, and comes back when it does."""
    with Fleet(stage.site) as fleet:
        stays, goes = fleet.join(), fleet.join()
        fleet.register_streams(stage.site.attached)
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        documents = write_some(fleet, 20)
        for document in documents[:10]:
            fleet.compute(goes, document, 6)
            fleet.compute(stays, document, 3)
        judge.settle(documents, SETTLE_S)
        fleet.die(goes)
        took_s = judge.settle(documents, EXPIRY_S)
        if goes.worker in judge.attached():
            raise CaseFailed("the dead worker is still registered")
        documents += write_some(fleet, 5)
        judge.settle(documents, SETTLE_S)
        judge.hold(documents, stage.chance, 1.0)
        again = fleet.rejoin(goes)
        fleet.register_stream(stage.site.attached, again)
        back_s = judge.settle(documents, SETTLE_S)
        fleet.compute(again, documents[0], 4)
        judge.settle(documents, SETTLE_S)
        return f"gone {took_s:.1f} s after its last word, back {back_s:.2f} s after it registered again"


def publisher_killed(stage: Stage) -> str:
    """The leader's publisher is killed again and again; the replica goes on and starts another one."""
    with Fleet(stage.site) as fleet:
        fleet.join()
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        documents = write_some(fleet, 30)
        judge.settle(documents, SETTLE_S)
        took_s: list[float] = []
        for _ in range(3):
            leader = stage.site.leader
            pid = stage.site.publisher_of(leader)
            os.kill(pid, signal.SIGKILL)
            began = monotonic()
            documents += write_some(fleet, 10)
            fleet.remove(documents[0].keys[6:])
            documents.append(documents.pop(0))
            judge.settle(documents, SETTLE_S)
            took_s.append(monotonic() - began)
            if stage.site.leader is not leader:
                raise CaseFailed(
                    f"{leader.name} leads no more since its publisher was killed: {leader.status()}"
                )
            if stage.site.publisher_of(leader) == pid:
                raise CaseFailed(f"process {pid} was killed, and is still the publisher")
        return f"exact at most {max(took_s):.2f} s after the kill"


def row_24_indexer_restarted(stage: Stage) -> str:
    """The indexer is started anew and knows nothing; live events go on meanwhile."""
    with Fleet(stage.site, publication={"entries_max": 2 * stage.entries}) as fleet:
        for _ in range(4):
            fleet.join()
        fleet.register_streams(stage.site.attached)
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        blocks = 64
        documents = write_some(fleet, max(1, stage.entries // blocks), blocks)
        for document in documents[:20]:
            fleet.compute(stage.chance.choice(fleet.engines), document, 10)
        judge.settle(documents, SETTLE_S + stage.entries / STORED_PER_S)
        stage.site.attached.kill()
        stage.site.attached.start()
        began = monotonic()
        fleet.register_streams(stage.site.attached)
        documents += write_some(fleet, 3)
        count = len(fleet.workers) * sum(len(document.keys) for document in documents)
        sleep(CONNECT_S)
        for engine in fleet.engines:
            engine.stream.publish([])  # of an engine that says nothing an indexer asks nothing
        judge.settle(documents, RESTART_S_MAX + count / RESTART_ENTRIES_PER_S)
        took_s = monotonic() - began
        judge.hold(documents, stage.chance, 1.0)
        return f"{count} entries of {len(fleet.workers)} workers are back {took_s:.2f} s after the start"


def row_8_late_join(stage: Stage) -> str:
    """A subscriber that comes late sees numbers that do not begin at 0, and no event for now."""
    with Fleet(stage.site) as fleet:
        fleet.join()
        documents = write_some(fleet, 40)
        for document in documents[:10]:
            fleet.remove(document.keys[5:])
        sleep(1.0)
        register_ours(stage, fleet)
        took_s = Judge(fleet, stage.site.plain).settle(documents, LATE_S_MAX)
        return f"exact {took_s:.2f} s after it joined, without a new event"


def row_14_lost_history(stage: Stage) -> str:
    """The journal is lost and everything begins anew: subscribers have seen higher numbers than there are
    now, and have blocks that nobody has any more."""
    with Fleet(stage.site) as fleet:
        fleet.join()
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        documents = write_some(fleet, 20)
        for document in documents[:5]:
            fleet.remove(document.keys[4:])
        judge.settle(documents, SETTLE_S)
        before = _number(stage, fleet)
        stage.site.lose_journal()
        began = monotonic()
        fleet.truth.drop([key for document in documents for key in document.keys])
        fleet.found()
        fleet.await_known()
        after = _number(stage, fleet)
        fresh = write_some(fleet, 5)
        kept = documents[0]
        fleet.write(kept.upto(6))
        judge.settle([*fresh, *documents], SETTLE_S)
        took_s = monotonic() - began
        if after >= before:
            raise CaseFailed(f"numbers went from {before} to {after}: the case shows nothing")
        return f"window {before} to {after}; exact {took_s:.2f} s after the service was back"
