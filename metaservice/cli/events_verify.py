"""`ucm-meta events verify`: whether the streams hold what they promise.

Each is followed from its beginning by way of a replay, as a router would: numbers are contiguous, every event
is one that all routers can read, what is missing is brought by replays. In the end the blocks that are
announced by that account have to be those of a fresh replay, and those that every other replica replays.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from metaservice.cli.events_read import END, EventsUnreadable, Message, Streams
from metaservice.cli.events_state import Judge, State

SETTLE_S = 5.0
"""By then a stream must have come as far as a replay of it."""
RECENT = 100_000
"""Batches that are kept to bring a replay as far as the stream."""
LOOK_MS = 100


class Verifier:
    """Follows streams. `silence_ms_max`: without a batch for so long a stream does not hold."""

    def __init__(self, streams: Streams, silence_ms_max: int) -> None:
        self._streams = streams
        self._silence_ms_max = silence_ms_max
        self._judge = Judge()
        self._states = [State(place.name, self._judge, shared=not place.node) for place in streams.places]
        self._recent: list[deque[Message]] = [deque(maxlen=RECENT) for _ in streams.places]
        self._heard_s = [time.monotonic()] * len(streams.places)
        self._silent_s = [0.0] * len(streams.places)
        self._replay_s = 0.0
        self._gaps = self._replays = self._stale = self._mismatched = self._resets = 0

    def run(self, seconds: float) -> dict[str, Any]:
        """What was found. `ok`: everything holds. Raises EventsUnreadable."""
        for at, state in enumerate(self._states):
            self._catch_up(at, state, 0)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._follow()
        for at in range(len(self._states)):
            self._compare(at)
        for at, place in enumerate(self._streams.places):
            if self._silent_s[at] * 1_000 > self._silence_ms_max:
                text = f"{place.name}: nothing for {self._silent_s[at]:.1f} s; a heartbeat is due each second"
                self._judge.problem("silent", text)
        return self._report()

    def _follow(self) -> None:
        for at, message in self._streams.live(LOOK_MS):
            self._take(at, message)
        now_s = time.monotonic()
        for at, heard_s in enumerate(self._heard_s):
            self._silent_s[at] = max(self._silent_s[at], now_s - heard_s)

    def _take(self, at: int, message: Message) -> None:
        state = self._states[at]
        self._heard_s[at] = time.monotonic()
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
            self._catch_up(at, state, state.number + 1)
            if state.is_old(message):
                return
        self._recent[at].append(message)
        state.take(message)

    def _catch_up(self, at: int, state: State, start: int) -> None:
        """Take what was missed, from whoever answers."""
        place = self._streams.places[at]
        failure = ""
        for endpoint in place.replays:
            try:
                for message in self._replayed(endpoint, max(start, state.number + 1)):
                    self._recent[at].append(message)
                    state.take(message)
            except EventsUnreadable as error:
                failure = str(error)
            else:
                return
        raise EventsUnreadable(failure or f"{place.name} has no replays")

    def _replayed(self, endpoint: str, start: int) -> Iterator[Message]:
        self._replays += 1
        begun_s = time.monotonic()
        before = start - 1
        for message in self._streams.replay(endpoint, start):
            if message.number <= before:
                self._judge.problem("order", f"{endpoint}: {message.number} is replayed after {before}")
            before = message.number
            yield message
        self._replay_s = max(self._replay_s, time.monotonic() - begun_s)

    def _compare(self, at: int) -> None:
        """The stream against a fresh replay from each replica."""
        place = self._streams.places[at]
        for endpoint in place.replays:
            fresh = State(f"{place.name} replayed by {endpoint}", self._judge, shared=not place.node)
            try:
                for message in self._replayed(endpoint, 0):
                    fresh.take(message)
            except EventsUnreadable as error:
                self._judge.problem("unanswered", str(error))
                continue
            self._level(at, fresh)
            live = self._states[at]
            if fresh.number != live.number:
                self._judge.problem("number", f"{fresh.name} ends at {fresh.number}, it is at {live.number}")
            elif missing := live.blocks ^ fresh.blocks:
                self._mismatched += len(missing)
                text = (
                    f"{fresh.name} differs in {len(missing)} of {len(live.blocks)} blocks at {fresh.number}"
                )
                self._judge.problem("differs", text)

    def _level(self, at: int, fresh: State) -> None:
        """Bring both to one number: a replay is from before the newest batch, or from after it."""
        until_s = time.monotonic() + SETTLE_S
        while self._states[at].number < fresh.number and time.monotonic() < until_s:
            self._follow()
        for message in self._recent[at]:
            if fresh.follows(message):
                fresh.take(message)

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
            "mismatched": self._mismatched,
            "longest_silence_ms": round(1_000 * max(self._silent_s)),
            "longest_replay_ms": round(1_000 * self._replay_s),
            "faults": dict(self._judge.counts),
            "problems": self._judge.problems,
        }
