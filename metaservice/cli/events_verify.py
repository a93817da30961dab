"""`ucm-meta events verify`: whether the streams hold what they promise.

Each is followed from its beginning by way of a replay, as a router would: numbers are contiguous, every event
is one that all routers can read, what is missing is brought by replays. In the end the blocks that are
announced by that account have to be those of a fresh replay, and those that every other replica replays.

It has to be right when replicas come and go, which is when it is asked: what we did not look at is not called
silent, who is away is asked last, and who is a moment behind is not the last to be asked.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from metaservice.cli.events_read import CONNECT_MS, END, Desk, EventsUnreadable, Message, Streams
from metaservice.cli.events_state import Judge, State

SETTLE_S = 5.0
"""By then some replica must replay what was missed, and a stream be as far as a replay of it."""
ANSWER_MS = 1_000
"""A replica that is asked for what was missed, and says nothing for so long, is asked last from then on."""
AGAIN_MS = 50
"""Pause before all replicas are asked once more."""
RECENT = 100_000
"""Batches that are kept to bring a replay as far as the stream."""
LOOK_MS = 100


class Verifier:
    """Follows streams. `silence_ms_max`: without a batch for so long a stream does not hold. `offered`: the
    replay endpoints that replicas offer now; one that is away is no fault of the streams."""

    def __init__(self, streams: Streams, silence_ms_max: int, offered: Callable[[], Collection[str]]) -> None:
        self._streams = streams
        self._silence_s_max = silence_ms_max / 1_000
        self._offered = offered
        self._judge = Judge()
        self._states = [State(place.name, self._judge, shared=not place.node) for place in streams.places]
        self._recent: list[deque[Message]] = [deque(maxlen=RECENT) for _ in streams.places]
        self._away: set[str] = set()
        """Replicas that did not answer the last time."""
        self._lost: set[int] = set()
        """Streams of which something was missed that nobody has: waited for once, and no more."""
        self._unanswered: list[str] = []
        self._replay_s = 0.0
        self._gaps = self._replays = self._stale = self._mismatched = self._resets = 0

    def run(self, seconds: float) -> dict[str, Any]:
        """What was found. `ok`: everything holds. Raises EventsUnreadable when nobody replays a stream."""
        for at in range(len(self._states)):
            failure = self._catch_up(at, 0)
            if failure:
                raise EventsUnreadable(failure)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._follow()
        self._away.clear()
        missing = [(at, desk) for at in range(len(self._states)) for desk in self._compared(at)]
        self._absent(missing)
        for at, place in enumerate(self._streams.places):
            longest_s = self._streams.longest_silence_s[at]
            if longest_s > self._silence_s_max:
                text = f"{place.name}: nothing for {longest_s:.1f} s; a heartbeat is due each second"
                self._judge.problem("silent", text)
        return self._report()

    def _follow(self) -> None:
        for at, message in self._streams.live(LOOK_MS):
            self._take(at, message)

    def _take(self, at: int, message: Message) -> None:
        state = self._states[at]
        if message.number == END:
            self._resets += 1
            state.blocks.clear()
            state.number = -1
            self._recent[at].clear()
            return
        if state.is_old(message):
            self._stale += 1
            return
        if not state.follows(message):
            self._gaps += state.number >= 0  # after a reset it begins anew, which is no gap
            failure = self._catch_up(at, message.number)
            if state.is_old(message):
                return
            if failure:
                self._lost.add(at)
                self._judge.problem(
                    "lost", f"{failure}; {state.number + 1} to {message.number - 1} are missing"
                )
        self._recent[at].append(message)
        state.take(message)

    def _catch_up(self, at: int, number: int) -> str:
        """Take what was missed before batch `number`, from whoever has it: one replica may be away, and
        another a moment behind. What went wrong, when nobody has it."""
        state = self._states[at]
        name = self._streams.places[at].name
        until_s = time.monotonic() + (0 if at in self._lost else SETTLE_S)
        while True:
            failure = f"{name}: no replica replays what was missed"
            for desk in self._desks(at):
                try:
                    for message in self._replayed(desk, state.number + 1, ANSWER_MS):
                        self._recent[at].append(message)
                        state.take(message)
                except EventsUnreadable as error:
                    failure = f"{name}: {error}"
                else:
                    if state.number + 1 >= number:
                        return ""
            if time.monotonic() > until_s:
                return failure
            time.sleep(AGAIN_MS / 1_000)

    def _desks(self, at: int) -> list[Desk]:
        """Whom to ask: those who answered last time before those who did not."""
        return sorted(self._streams.places[at].replays, key=lambda desk: desk.replica in self._away)

    def _replayed(self, desk: Desk, start: int, answer_ms: int) -> Iterator[Message]:
        self._replays += 1
        begun_s = time.monotonic()
        before = start - 1
        try:
            for message in self._streams.replay(desk.endpoint, start, answer_ms):
                if message.number <= before:
                    text = f"{desk.endpoint}: {message.number} is replayed after {before}"
                    self._judge.problem("order", text)
                before = message.number
                yield message
        except EventsUnreadable:
            self._away.add(desk.replica)
            raise
        self._away.discard(desk.replica)
        self._replay_s = max(self._replay_s, time.monotonic() - begun_s)

    def _compared(self, at: int) -> Iterator[Desk]:
        """The stream against a fresh replay from each replica. Those that did not answer."""
        for desk in self._streams.places[at].replays:
            if desk.replica in self._away or not self._compare(at, desk):
                yield desk

    def _compare(self, at: int, desk: Desk) -> bool:
        place = self._streams.places[at]
        fresh = State(f"{place.name} replayed by {desk.endpoint}", self._judge, shared=not place.node)
        try:
            for message in self._replayed(desk, 0, CONNECT_MS):
                fresh.take(message)
        except EventsUnreadable:
            return False
        self._level(at, fresh)
        live = self._states[at]
        if fresh.number != live.number:
            if self._streams.silence_s[at] <= self._silence_s_max:  # else that is what there is to say
                self._judge.problem("number", f"{fresh.name} ends at {fresh.number}, it is at {live.number}")
        elif missing := live.blocks ^ fresh.blocks:
            self._mismatched += len(missing)
            text = f"{fresh.name} differs in {len(missing)} of {len(live.blocks)} blocks at {fresh.number}"
            self._judge.problem("differs", text)
        return True

    def _level(self, at: int, fresh: State) -> None:
        """Bring both to one number: a replay is from before the newest batch, or from after it. A stream that
        may be silent for some more time is waited for: its next leader comes."""
        until_s = time.monotonic() + max(SETTLE_S, self._silence_s_max)
        while self._states[at].number < fresh.number and time.monotonic() < until_s:
            if self._streams.silence_s[at] > self._silence_s_max:
                break
            self._follow()
        for message in self._recent[at]:
            if fresh.follows(message):
                fresh.take(message)

    def _absent(self, missing: list[tuple[int, Desk]]) -> None:
        """Who does not answer replays is told; it is a fault where its replica says that it does."""
        offered = self._offered() if missing else ()
        self._unanswered = [desk.endpoint for _, desk in missing]
        asked_again: set[str] = set()
        for at, desk in missing:
            if desk.endpoint not in offered:
                continue
            if desk.replica in asked_again or not self._compare(at, desk):
                asked_again.add(desk.replica)
                self._judge.problem("unanswered", f"{desk.endpoint} does not answer replays")

    def _report(self) -> dict[str, Any]:
        states = self._states
        return {
            "ok": not self._judge.faults,
            "streams": len(states),
            "batches": sum(state.batches for state in states),
            "events": sum(state.events for state in states),
            "heartbeats": sum(state.heartbeats for state in states),
            "announced": sum(len(state.blocks) for state in states),
            "gaps": self._gaps,
            "replays": self._replays,
            "resets": self._resets,
            "stale": self._stale,
            "unanswered": self._unanswered,
            "mismatched": self._mismatched,
            "longest_silence_ms": round(1_000 * max(self._streams.longest_silence_s)),
            "longest_replay_ms": round(1_000 * self._replay_s),
            "faults": dict(self._judge.counts),
            "problems": self._judge.problems,
        }
