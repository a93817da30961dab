"""Cases in which the leader is killed while routers listen."""

import threading
from time import monotonic, sleep

from tests.compat.cases_failures import write_some
from tests.compat.cases_overlay import SETTLE_S
from tests.compat.fleet import Fleet
from tests.compat.judge import CaseFailed, Judge
from tests.compat.reader import Asker, Reader
from tests.compat.reference import Document
from tests.compat.stage import Stage

FAILOVERS = 5
STREAM_S = 1.0
"""How long is written before each kill."""
END_SHARE = 0.99
END_WITHIN_MS = 100.0
"""Nobody waits longer for the next part of an answer in so many answers; the rest is for a machine that has
something else to do as well, and far from the forever that a consumer would wait."""
END_WITHIN_MS_MAX = 1_000.0


class Writing:
    """Prompts that are stored one after the other, in a thread, until it is told to stop. Whatever is under
    way when the leader dies is finished at the next one."""

    def __init__(self, fleet: Fleet) -> None:
        self.documents: list[Document] = []
        self._fleet = fleet
        self._stopping = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writing", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.documents += write_some(self._fleet, 1, 6)
        except BaseException as error:
            self._failed = error

    def last_one(self) -> None:
        """The one under way is the last."""
        self._stopping.set()

    def stop(self) -> list[Document]:
        """All that was stored. Raises what it failed with."""
        self.last_one()
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        return self.documents


def leader_killed(stage: Stage) -> str:
    """kill -9 of the leader in the middle of its stream, five times; each time the other replica goes on."""
    with Fleet(stage.site) as fleet:
        engines = [fleet.join() for _ in range(3)]
        fleet.register_streams(stage.site.attached)
        judge = Judge(fleet, stage.site.attached)
        judge.await_attached()
        documents = write_some(fleet, 40)
        for document in documents[:20]:
            fleet.compute(stage.chance.choice(engines), document, 6)
        judge.settle(documents, SETTLE_S)
        took_s = []
        for _ in range(FAILOVERS):
            writing = Writing(fleet)
            sleep(STREAM_S * (0.5 + stage.chance.random()))
            _, led_s = stage.site.kill_leader(then=writing.last_one)
            recent = writing.stop()
            victim = stage.chance.choice(documents)
            gone = [key for key in victim.keys[3:] if fleet.truth.stored(key)]
            if gone:
                fleet.remove(gone)
            judge.settle([*recent[-20:], victim, *stage.chance.sample(documents, 20)], SETTLE_S)
            took_s.append(monotonic() - led_s)
            documents += recent
            judge.settle(documents, SETTLE_S)
            stage.site.revive()
        judge.hold(documents, stage.chance, 2.0)
        stage.recoveries_s += took_s
        listed = ", ".join(f"{one:.2f}" for one in took_s)
        return f"{len(documents)} prompts; exact {listed} s after the new lease"


def rows_1_9_26_replays(stage: Stage) -> str:
    """Replays of leader and standby have the same bytes, and every answer ends at once, also while nobody
    leads."""
    with Fleet(stage.site) as fleet, Reader() as reader:
        engine = fleet.join()
        documents = write_some(fleet, 30)
        leader, standby = stage.site.leader, stage.site.standby
        here, there = (fleet.streams(engine.name, one)[0] for one in (leader, standby))
        start = here["number"] - 20
        sleep(0.5)
        ours = reader.replay(here["replay"], start)
        theirs = reader.replay(there["replay"], start)
        common = {frame.seq: frame for frame in ours.frames} if ours.ended else {}
        same = [frame for frame in theirs.frames if frame.seq in common]
        if not theirs.ended or len(same) < 20:
            raise CaseFailed(
                f"replays of {len(ours.frames)} and {len(theirs.frames)} frames: {len(same)} common"
            )
        if any(common[frame.seq] != frame for frame in same):
            raise CaseFailed("leader and standby replay other bytes under the same number")
        if any(frame.topic != here["topic"].encode() for frame in same):
            raise CaseFailed("a replayed frame has another topic")
        asker = Asker(reader, there["replay"])
        waits: list[float] = []
        frames = 0

        def ask() -> None:
            nonlocal frames
            for begin in (0, start, 2**63):
                answer = asker.replay(begin)
                if not answer.ended:
                    raise CaseFailed(f"a replay from {begin} at {standby.name} did not end")
                waits.append(answer.quiet_ms)
                frames += len(answer.frames)

        ask()
        leader.crash()
        while stage.site.cluster.leader(0) is None:
            ask()
        ask()
        stage.site.revive()
        waits.sort()
        most, slowest = waits[int(END_SHARE * (len(waits) - 1))], waits[-1]
        Judge(fleet, stage.site.attached).settle(documents, SETTLE_S)
        if most >= END_WITHIN_MS or slowest >= END_WITHIN_MS_MAX:
            raise CaseFailed(
                f"{END_SHARE:.0%} of the answers came within {most:.0f} ms, all in {slowest:.0f} ms"
            )
        return (
            f"{len(same)} batches alike; {len(waits)} replays through a failover, {frames} batches; the "
            f"longest wait in one was {slowest:.0f} ms, in {END_SHARE:.0%} of them {most:.0f} ms"
        )
