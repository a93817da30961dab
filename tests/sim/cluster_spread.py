"""What the shards of one replica need of each other, as `replica/spread.py` does it: the catalogue comes to
the data shards that are led here, and their errands go to whoever leads the catalogue."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from metaservice.core import commands as cmd
from metaservice.core.events import Event
from metaservice.core.replies import Settled
from metaservice.replica.feed import CatalogueLog

from .cluster_net import Answer
from .cluster_setting import TIMEOUT_MS

if TYPE_CHECKING:
    from .cluster_replica import Replica
    from .cluster_seat import Seat

FEED_MS = 400
ERRAND_MS = 100
WAIT_MS = 20
"""Between two looks whether the catalogue has come."""
WAITS_MAX = 15
SHORT_WAIT_MS = 200


class Spread:
    """See the module."""

    def __init__(self, replica: "Replica") -> None:
        self._replica = replica
        self._world = replica.world
        self._log = CatalogueLog()
        self._telling: dict[int, list[Callable[[], None]]] = {}
        """Shard whose errands are on their way -> who waits for their end."""

    def start(self) -> None:
        """The loops of a replica's life."""
        self._feed_again()
        for seat in self._replica.seats:
            self._replica.after(ERRAND_MS, self._errands_again, seat)

    # ------------------------------------------------------------ the catalogue comes

    def applied(self, events: Sequence[Event], seq: int) -> None:
        """The catalogue says something new, up to this seq."""
        if self._log.add(events, seq):
            self._feed()

    def restarted(self) -> None:
        """The catalogue's state was built anew."""
        self._log.restart(self._replica.seats[0].applied_seq)

    def _feed_again(self) -> None:
        self._feed()
        self._replica.after(FEED_MS, self._feed_again)

    def _feed(self) -> None:
        for seat in self._replica.seats[1:]:
            if seat.leading:
                self.feed(seat)

    def feed(self, seat: "Seat") -> None:
        """See `replica.feed.feed`."""
        assert seat.pipeline is not None
        version, log = seat.pipeline.machine.state.catalogue_version, self._log
        if version >= log.seq and version:
            return
        news = log.since(version) if version else None
        if news:
            events = tuple(event for _, event in news)
            seat.ask(cmd.TakeCatalogue(since=version, version=news[-1][0], events=events), _heard)
        elif news is None:
            catalogue = self._replica.seats[0]
            if catalogue.settled and catalogue.applied_seq > version:
                assert catalogue.machine is not None
                seat.ask(cmd.SyncCatalogue(view=catalogue.machine.catalogue_view()), _heard)

    # ------------------------------------------------------------ errands go

    def _errands_again(self, seat: "Seat") -> None:
        if seat.leading and seat.shard not in self._telling:
            self._tell(seat)
        self._replica.after(3 * ERRAND_MS if self._world.closing else ERRAND_MS, self._errands_again, seat)

    def ask_for_room(self, seat: "Seat", then: Callable[[], None]) -> None:
        """Run the errands of a shard now, and go on when they are done, or after a while."""
        waiting = [then]

        def go_on() -> None:
            if waiting:
                waiting.pop()()

        self._replica.after(SHORT_WAIT_MS, go_on)
        if seat.shard in self._telling:
            self._telling[seat.shard].append(lambda: self.ask_for_room(seat, go_on) if waiting else None)
        else:
            self._tell(seat, go_on)

    def _tell(self, seat: "Seat", *then: Callable[[], None]) -> None:
        pipeline = seat.pipeline
        errands = None if pipeline is None else pipeline.machine.errands(seat.time.now_ms())
        if errands is None:
            for each in then:
                each()
            return
        self._telling[seat.shard] = list(then)
        command = cmd.Settle(errands=errands)
        catalogue = self._replica.seats[0]

        def done(result: Any) -> None:
            settled = getattr(result, "reply", None)
            if isinstance(settled, Settled):
                self._settled(seat, settled, WAITS_MAX)
            else:
                self._end(seat)

        if catalogue.leading:
            catalogue.ask(command, done)
            return
        target = self._world.replicas.get(self._replica.leader(0))
        if target is None or target is self._replica:
            self._end(seat)
            return

        def serve(answer: Answer) -> None:
            target.seats[0].ask(command, answer)

        self._world.net.call(self._replica, target, serve, done, 3 * TIMEOUT_MS)

    def _settled(self, seat: "Seat", settled: Settled, waits: int) -> None:
        pipeline = seat.pipeline
        if pipeline is None or not seat.leading:
            self._end(seat)
        elif seat.shard and settled.version > pipeline.machine.state.catalogue_version and waits:
            self._replica.seats[0].hint()
            self.feed(seat)
            self._replica.after(WAIT_MS, self._settled, seat, settled, waits - 1)
        else:
            seat.ask(cmd.GiveBudget(settled=settled), lambda _: self._end(seat))

    def _end(self, seat: "Seat") -> None:
        for each in self._telling.pop(seat.shard, ()):
            each()


def _heard(_: Any) -> None:
    """Whatever becomes of it, the next look goes on from there."""
