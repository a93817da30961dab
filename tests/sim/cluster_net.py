"""Hosts and what goes between them: messages that are late, lost or doubled, calls that end, cut lines.

A host may be down (what reaches it is lost, what it had in mind is forgotten) or paused (what reaches it
waits and is handled when it wakes, before its own timers, as an event loop does it).
"""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from .cluster_time import Action, Entry, Heap, cancel


class Silence:
    """The type of `SILENCE`."""

    def __repr__(self) -> str:
        return "SILENCE"


SILENCE: Final = Silence()
"""The outcome of a call that got no answer in time."""

Answer = Callable[[Any], None]
Serve = Callable[[Answer], None]
Done = Callable[[Any], None]


class Host:
    """One process, or one server of the outside world."""

    def __init__(self, heap: Heap, name: str) -> None:
        self.heap = heap
        self.name = name
        self.up = True
        self.life = 1
        """Counts starts: what an earlier life had in mind never happens."""
        self.paused = False
        self._letters: list[tuple[Action, tuple[Any, ...]]] = []
        self._timers: list[tuple[Action, tuple[Any, ...]]] = []

    def after(self, delay_ms: int, action: Action, *arguments: Any) -> Entry:
        """A timer of this life."""
        return self.heap.after(delay_ms, self._ring, self.life, action, arguments)

    def receive(self, action: Action, *arguments: Any) -> None:
        """A message arrives."""
        if not self.up:
            return
        if self.paused:
            self._letters.append((action, arguments))
        else:
            action(*arguments)

    def _ring(self, life: int, action: Action, arguments: tuple[Any, ...]) -> None:
        if life != self.life or not self.up:
            return
        if self.paused:
            self._timers.append((action, arguments))
        else:
            action(*arguments)

    def down(self) -> None:
        """The host dies at once."""
        self.up = False
        self.paused = False
        self.life += 1
        self._letters.clear()
        self._timers.clear()

    def pause(self) -> None:
        """The host stands still."""
        self.paused = True

    def wake(self) -> None:
        """The host goes on where it stood: first with what was sent to it meanwhile."""
        if not self.paused:
            return
        self.paused = False
        waiting, life = [*self._letters, *self._timers], self.life
        self._letters, self._timers = [], []
        for action, arguments in waiting:
            if life == self.life:
                action(*arguments)


class Net:
    """All lines between hosts."""

    def __init__(self, heap: Heap, rng: Random) -> None:
        self.heap = heap
        self._random = rng.random
        self.lost = 0.0
        """The share of messages that get lost."""
        self.doubled = 0.0
        self.late = 0.0
        self.late_ms_max = 600
        self.cut: set[tuple[str, str]] = set()
        """(from, to): nothing gets through."""

    def heal(self) -> None:
        """Every message gets through, in time, once."""
        self.lost = self.doubled = self.late = 0.0
        self.cut.clear()

    def delay_ms(self) -> int:
        """How long one message takes."""
        if self.late and self._random() < self.late:
            return 1 + int(self._random() * self.late_ms_max)
        return 1 + int(self._random() * 3)

    def send(self, source: Host, target: Host, action: Action, *arguments: Any) -> None:
        """One message that may get lost or arrive twice."""
        self._post(source, target, action, arguments)
        if self.doubled and self._random() < self.doubled:
            self._post(source, target, action, arguments)

    def _post(self, source: Host, target: Host, action: Action, arguments: tuple[Any, ...]) -> None:
        if self.lost and self._random() < self.lost:
            return
        if (source.name, target.name) not in self.cut:
            self.heap.after(self.delay_ms(), self._arrive, source, target, action, arguments)

    def _arrive(self, source: Host, target: Host, action: Action, arguments: tuple[Any, ...]) -> None:
        if (source.name, target.name) not in self.cut:
            target.receive(action, *arguments)

    def call(self, source: Host, target: Host, serve: Serve, done: Done, timeout_ms: int) -> None:
        """`serve(answer)` at the target, and `done(result)` at the source, once: with the first answer, or
        SILENCE."""
        life = source.life
        open_calls = [done]

        def end(result: Any) -> None:
            if open_calls and life == source.life:
                cancel(timer)
                open_calls.pop()(result)

        def answer(result: Any) -> None:
            self._post(target, source, end, (result,))

        timer = source.after(timeout_ms, end, SILENCE)
        self._post(source, target, serve, (answer,))
