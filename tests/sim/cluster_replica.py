"""One replica: a process with its clocks, its seat for every shard, and the loop that renews its lease."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from metaservice.core import commands as cmd
from metaservice.core.events import Event
from metaservice.leadership.port import Report, View
from metaservice.replica.role import Action, Facts, Judge, Role, Timing

from .cluster_net import SILENCE, Answer, Host
from .cluster_seat import Elsewhere, Seat, Unavailable
from .cluster_setting import MARGIN_MS, POLL_MS, RENEW_MS, TIMEOUT_MS, TTL_MS
from .cluster_spread import Spread
from .cluster_time import Clock

if TYPE_CHECKING:
    from .cluster_world import World

JUDGE_MS = 130
TIMING = Timing(successor_s=0.2, rank_s=0.1, stall_s=0.6, settle_s=1.0)


class Request:
    """What a client sends: once, twice or late. Forwarded once at most."""

    __slots__ = ("answer", "command", "forward", "shard", "staleness_ms_max")

    def __init__(
        self,
        shard: int,
        command: cmd.Command,
        answer: Answer,
        *,
        forward: bool = False,
        staleness_ms_max: int | None = None,
    ) -> None:
        self.shard = shard
        self.command = command
        self.answer = answer
        self.forward = forward
        self.staleness_ms_max = staleness_ms_max
        """A lookup that followers may answer, when they are no staler; None: the leader only."""


class Replica(Host):
    """See the module."""

    def __init__(self, world: "World", name: str, clock: Clock) -> None:
        super().__init__(world.heap, name)
        self.world = world
        self.clock = clock
        self.poll_ms = POLL_MS
        self.view: View | None = None
        self.seats: list[Seat] = []
        self.spread = Spread(self)
        self._viewed_ms = 0
        self._renewed_ms = 0
        """Before the last renewal that got through was sent, by our own clock."""
        self._acquiring: set[int] = set()

    @property
    def incarnation(self) -> str:
        """This life, as the elector knows it."""
        return f"{self.name}/{self.life}"

    def start(self) -> None:
        """A new process."""
        self.up = True
        self.view = None
        self._viewed_ms = self._renewed_ms = 0
        self._acquiring = set()
        self.seats = []
        self.world.started(self)
        self.seats = [Seat(self, shard) for shard in range(self.world.shards)]
        self.spread = Spread(self)
        self._keep_renewing()
        self._judge()
        if self.world.shards > 1:
            self.spread.start()

    # ------------------------------------------------------------ the lease

    def _keep_renewing(self) -> None:
        self._renew()
        self.after(RENEW_MS, self._keep_renewing)

    def _renew(self) -> None:
        sent_ms = self.clock.mono_ms
        report = Report(
            {seat.shard: seat.tail.applied_seq for seat in self.seats if seat.tail is not None},
            all(seat.journal_ok for seat in self.seats),
            all(seat.warm or seat.pipeline is not None for seat in self.seats),
        )
        elector, life = self.world.elector, self.incarnation
        self.world.net.call(
            self,
            elector,
            lambda answer: answer(elector.renew(life, self.name, report)),
            lambda result: self._renewed(result, sent_ms),
            TIMEOUT_MS,
        )

    def _renewed(self, result: Any, sent_ms: int) -> None:
        if result is SILENCE or sent_ms < self._renewed_ms:
            return
        assert isinstance(result, View)
        self.view, self._viewed_ms, self._renewed_ms = result, self.clock.mono_ms, sent_ms
        for seat in self.seats:
            holder = result.holders.get(seat.shard)
            if holder is not None and holder.replica == self.name:
                seat.lease_until_ms = sent_ms + TTL_MS - MARGIN_MS
            elif seat.shard not in self._acquiring:
                seat.lease_until_ms = 0
        self._decide()

    def _judge(self) -> None:
        self._decide()
        self.after(JUDGE_MS, self._judge)

    def _decide(self) -> None:
        now_ms = self.clock.mono_ms
        view = self.view if now_ms - self._viewed_ms < TTL_MS else None
        for seat in self.seats:
            stalled_ms = now_ms - seat.stalled_since_ms if seat.stalled_since_ms is not None else 0
            decision = self.world.judge(self, seat.shard).decide(
                Facts(
                    now_s=now_ms / 1000,
                    role=seat.role,
                    lease_until_s=seat.lease_until_ms / 1000,
                    view=view,
                    warm=seat.warm,
                    journal_ok=seat.journal_ok,
                    stalled_s=stalled_ms / 1000,
                    hand_to=self.world.asked(self, seat.shard),
                )
            )
            if decision.action is Action.CAMPAIGN and seat.shard not in self._acquiring:
                self._acquire(seat)
            elif decision.action is Action.DEMOTE:
                seat.let_go(decision.sentence)
                self.resign(seat.shard, "")
            elif decision.action is Action.HAND_OVER and seat.handing is None:
                self.world.tell(f"{self.name}: hands shard {seat.shard} over: {decision.sentence}")
                seat.hand_over(decision.successor)

    def _acquire(self, seat: Seat) -> None:
        self._acquiring.add(seat.shard)
        renewed_ms = self._renewed_ms
        elector, life = self.world.elector, self.incarnation
        self.world.net.call(
            self,
            elector,
            lambda answer: answer(elector.acquire(life, seat.shard)),
            lambda result: self._acquired(result, seat, renewed_ms),
            TIMEOUT_MS,
        )

    def _acquired(self, result: Any, seat: Seat, renewed_ms: int) -> None:
        self._acquiring.discard(seat.shard)
        if result is True and seat.role is Role.FOLLOWER and seat.warm:
            seat.lease_until_ms = renewed_ms + TTL_MS - MARGIN_MS
            self.world.tell(f"{self.name}: acquired shard {seat.shard}")
            seat.acquired()

    def resign(self, shard: int, successor: str) -> None:
        """Let go of a shard at the elector. What was seen before says no longer who leads."""
        self.view = None
        elector, life = self.world.elector, self.incarnation
        self.world.net.send(self, elector, elector.resign, life, shard, successor)
        self.after(5, self._renew)

    def leader(self, shard: int) -> str:
        """Who leads, as far as we know; "" for nobody."""
        holder = self.view.holders.get(shard) if self.view is not None else None
        return holder.replica if holder is not None else ""

    # ------------------------------------------------------------ callers

    def request(self, request: Request) -> None:
        """A request arrives."""
        seat = self.seats[request.shard]
        if request.staleness_ms_max is not None and isinstance(request.command, cmd.Lookup):
            seat.look(request.command, request.staleness_ms_max, request.answer)
        elif seat.leading or not request.forward:
            seat.ask(request.command, request.answer)
        else:
            self._forward(request)

    def _forward(self, request: Request) -> None:
        """Once, to whoever leads; the answer goes back the same way."""
        target = self.world.replicas.get(self.leader(request.shard))
        if target is None or target is self:
            request.answer(Elsewhere(""))
            return
        net, back = self.world.net, request.answer

        def serve(answer: Answer) -> None:
            target.request(Request(request.shard, request.command, answer))

        def done(result: Any) -> None:
            back(Unavailable("the leader did not answer") if result is SILENCE else result)

        net.call(self, target, serve, done, 2 * TIMEOUT_MS)

    def hint(self, shard: int) -> None:
        """The database says that there is something new."""
        self.seats[shard].hint()

    # ------------------------------------------------------------ the catalogue

    def rebuilt(self, shard: int) -> None:
        """A shard's state begins anew."""
        if shard == 0 and len(self.seats) == self.world.shards > 1:
            self.spread.restarted()

    def followed(self, shard: int, events: Sequence[Event], seq: int) -> None:
        """A shard's state moved on by durable events that end at `seq`."""
        if shard == 0 and self.world.shards > 1:
            self.spread.applied(events, seq)


def judges(name: str, shards: int, spread: bool) -> list[Judge]:
    """The judges of one replica."""
    return [Judge(shard, name, TIMING, spread=spread) for shard in range(shards)]
