"""How anybody calls the cluster: by the leader it knows, else by whoever answers; again with the same
request until it is answered or too late."""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from metaservice.core import commands as cmd
from metaservice.core.rejections import Rejection
from metaservice.core.replies import Finished, Started

from .cluster_net import Host
from .cluster_replica import Replica, Request
from .cluster_seat import Answered, Elsewhere
from .cluster_time import Entry, cancel
from .rows import Violation

if TYPE_CHECKING:
    from .cluster_world import World

TRY_MS = 220
PAUSE_MS = 35
AGAIN = ("reregister", "instance_unknown", "worker_unknown", "storage_unknown")
"""What a data shard says that has not heard yet of what the caller has from the catalogue."""

Outcome = Callable[["Answered | None", int], None]
"""The answer, None for none in time; and when the try that was answered had been sent (true time)."""


class Caller(Host):
    """A client process."""

    def __init__(self, world: "World", name: str, rng: Random) -> None:
        super().__init__(world.heap, name)
        self.world = world
        self.rng = rng
        self.leaders: dict[int, str] = {}
        self.serial = 0
        self.commands = 0

    def fresh_name(self, prefix: str) -> str:
        """A name that this caller never used before."""
        self.serial += 1
        return f"{prefix}{self.name}.{self.serial}"

    def ask(self, shard: int, command: cmd.Command, done: Outcome, patience_ms: int = 2_500) -> None:
        """Call until answered; `done` hears of it once."""
        if self.up:
            self.commands += 1
            Ask(self, shard, command, done, self.heap.now_ms + patience_ms)


class Ask:
    """One call with its tries."""

    __slots__ = (
        "answers", "caller", "command", "deadline_ms", "done", "forward", "shard", "timer", "tries",
    )  # fmt: skip

    def __init__(
        self, caller: Caller, shard: int, command: cmd.Command, done: Outcome, deadline_ms: int
    ) -> None:
        self.caller = caller
        self.shard = shard
        self.command = command
        self.done: Outcome | None = done
        self.deadline_ms = deadline_ms
        self.forward = caller.rng.random() < 0.3
        self.tries = 0
        self.timer: Entry = [0, 0, None, ()]
        self.answers: list[Any] = []
        self._try()

    def _try(self) -> None:
        caller, world = self.caller, self.caller.world
        if self.done is None:
            return
        if caller.heap.now_ms >= self.deadline_ms:
            self._end(None, 0)
            return
        self.tries += 1
        name = caller.leaders.get(self.shard)
        target = world.replicas[name if name else caller.rng.choice(world.names)]
        number, sent_ms = self.tries, caller.heap.now_ms

        def answer(result: Any) -> None:
            world.net.send(target, caller, self._got, result, number, sent_ms)

        request = Request(self.shard, self.command, answer, forward=self.forward)
        world.net.send(caller, target, target.request, request)
        self.timer = caller.after(TRY_MS, self._silent, number, target)

    def _silent(self, number: int, target: Replica) -> None:
        if number == self.tries and self.done is not None:
            if self.caller.leaders.get(self.shard) == target.name:
                del self.caller.leaders[self.shard]
            self._try()

    def _got(self, result: Any, number: int, sent_ms: int) -> None:
        if isinstance(result, Answered):
            self._answered(result, sent_ms)
        elif number == self.tries and self.done is not None:
            self.tries += 1  # the timer of this try means nothing any more
            hint = result.leader if isinstance(result, Elsewhere) else ""
            if hint and hint != self.caller.leaders.get(self.shard):
                self.caller.leaders[self.shard] = hint
                self._try()
            else:
                self.caller.leaders.pop(self.shard, None)
                self.caller.after(PAUSE_MS * min(self.tries, 6), self._try)

    def _answered(self, result: Answered, sent_ms: int) -> None:
        reply = result.reply
        if not self.forward:
            self.caller.leaders[self.shard] = result.replica
        if isinstance(reply, Rejection):
            if self.done is not None and self.shard and reply.code in AGAIN:
                self.tries += 1
                self.caller.after(4 * PAUSE_MS, self._try)
                return
        elif telling(reply):
            self.answers.append(reply)
            if not same(self.answers[0], reply):
                raise Violation(f"I7: {self.command} was answered {self.answers[0]} and {reply}")
        self._end(result, sent_ms)

    def _end(self, result: Answered | None, sent_ms: int) -> None:
        if self.done is not None:
            cancel(self.timer)
            done, self.done = self.done, None
            done(result, sent_ms)


def same(one: Any, other: Any) -> bool:
    """Whether two answers are the same; of a start one may have come when the pool of its places was gone."""
    if isinstance(one, Started) and isinstance(other, Started) and one.pools != other.pools:
        pools = zip(sorted(one.pools.items()), sorted(other.pools.items()), strict=True)
        if any(first[0] != second[0] or (first[1] and second[1]) for first, second in pools):
            return False
        return bool(replace(one, pools=other.pools) == other)
    return bool(one == other)


def telling(reply: Any) -> bool:
    """Whether the answer is one that the journal remembers."""
    if isinstance(reply, Started):
        return reply.session is not None
    return isinstance(reply, Finished) and reply.published > 0
