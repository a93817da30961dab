"""The oracle: the rules of the service once more, written to be obviously right and not fast.

It is told each command together with the machine's reply. Where the rules leave one answer it must be that
one; where they leave a choice (slots, session numbers, victims) it must be legal, and the model follows it.
It shares the vocabulary of the core (commands, replies, codes) and none of its code.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from metaservice.core.commands import Announce, Command, Restate
from metaservice.core.model import Limits
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Done

from .passing import Passing
from .rows import Memory, Refuse, State, Violation


class Observed(NamedTuple):
    """What a step did that its reply does not say, read from its events."""

    seq: int
    events: int = 0
    victims: tuple[int, ...] = ()
    """Locations evicted for room or watermarks."""
    retired: tuple[int, ...] = ()
    """Locations that left with their instance."""
    instances_gone: tuple[str, ...] = ()


class Model(Passing):
    """See the module."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.past: list[tuple[int, State]] = [(0, self.state.copy())]
        """(seq, the state after it), from the durable one on."""

    def step(self, command: Command, now_ms: int, reply: Any, observed: Observed) -> None:
        """Check a reply and follow it. Raises Violation."""
        self.seq = observed.seq
        self.changed_state = observed.events > 0
        self.victims = list(observed.victims)
        self.evicted = len(observed.victims)
        self.retired = list(observed.retired)
        self.unwritten = []
        self.instances_gone = set(observed.instances_gone)
        self.end_leases(now_ms)
        try:
            HANDLERS[type(command).__name__](self, command, now_ms, reply)
        except Refuse as refuse:
            if not isinstance(reply, Rejection):
                raise Violation(f"{refuse.codes}: had to be refused and was answered {reply}") from None
            if reply.code not in refuse.codes:
                raise Violation(f"refused as {reply.code!r}, the rules say {refuse.codes}") from None
            if observed.events:
                raise Violation(f"refused as {reply.code!r} and changed something") from None
            return
        if isinstance(reply, Rejection):
            raise Violation(f"refused: {reply}")
        if self.victims or self.retired:
            raise Violation(f"went without a reason: {self.victims}{self.retired}")
        if observed.events:
            self.past.append((observed.seq, self.state.copy()))

    def at(self, seq: int) -> State:
        """The rows as they were after that seq, which is not before the durable one of the last time."""
        return next(state for known, state in reversed(self.past) if known <= seq)

    def on_announce(self, command: Announce, now_ms: int, reply: object) -> None:
        """Says nothing of blocks; `announced.Judge` looks at what routers are told."""
        self.agree("reply", Done(), reply)

    def on_restate(self, command: Restate, now_ms: int, reply: object) -> None:
        """Of an instance that is announced, or of all."""
        if command.instance:
            row = self.state.instances.get(command.instance)
            if row is None:
                raise Refuse("instance_unknown")
            if row.publication is None:
                raise Refuse("not_published")
        self.agree("reply", Done(), reply)

    def mark_durable(self, seq: int) -> None:
        """Everything up to `seq` is durable."""
        self.durable = seq
        while len(self.past) > 1 and self.past[1][0] <= seq:
            del self.past[0]

    def crash(self) -> None:
        """Only what is durable is left."""
        seq, state = self.past[0]
        if seq > self.durable:
            raise Violation("a crash has nothing durable to go back to")
        self.state = state.copy()
        self.past = [(seq, state)]
        self.memory = Memory()


def _handlers() -> dict[str, Callable[..., None]]:
    """Command name -> the method that knows its rules: `StartWrite` -> `on_start_write`."""
    handlers = {}
    for name in dir(Model):
        if name.startswith("on_"):
            handlers["".join(word.capitalize() for word in name[3:].split("_"))] = getattr(Model, name)
    return handlers


HANDLERS = _handlers()
