"""The naive model's pools: what a volatile storage holds is gone with the worker that held it."""

from metaservice.core.commands import RegisterWorker
from metaservice.core.model import LocationState, SessionState

from .rows import PENDING, REMOVED, Copy, Refuse
from .writes import Writes


class Pools(Writes):
    """Follows whose the pools are."""

    def refuse_pools(self, command: RegisterWorker) -> None:
        """One worker at a time, and one pool an incarnation."""
        for name in filter(self.volatile, command.storages):
            if self.state.pools.get(name, (command.worker, ""))[0] != command.worker:
                raise Refuse("storage_owned")
            if command.incarnation in self.state.spent.get(name, ()):
                raise Refuse("incarnation_retired")

    def begin_pools(self, command: RegisterWorker, now_ms: int) -> None:
        """The worker has the pools of what it names, and no others."""
        self.end_pools(command.worker, now_ms, command.incarnation, command.storages)
        for name in filter(self.volatile, command.storages):
            self.state.pools[name] = (command.worker, command.incarnation)

    def end_pools(
        self, worker: str, now_ms: int, incarnation: str = "", storages: tuple[str, ...] = ()
    ) -> None:
        """The worker's pools are gone, but for those of these storages that the incarnation has."""
        for name, (owner, current) in list(self.state.pools.items()):
            if owner == worker and (current != incarnation or name not in storages):
                del self.state.pools[name]
                self.state.spent[name] = (*self.state.spent.get(name, ()), current)
                self.lose(name, now_ms)

    def lose(self, storage: str, now_ms: int) -> None:
        """Everything in the storage is gone at once, whoever writes, reads or deletes it."""
        copies, memory = self.state.copies, self.memory
        for location in sorted(location for location, copy in copies.items() if copy.storage == storage):
            copy = copies[location]
            if copy.state == LocationState.writing:
                self.row_removed(copy)
            if copy.live:
                self.pass_on(copy)
            for name, lease in memory.leases.items():
                generation, deadline_ms = lease.rows.get(location, (0, 0))
                if lease.state == "held" and generation == copy.generation and deadline_ms > now_ms:
                    memory.leases[name] = lease._replace(lost=lease.lost | {location})
            memory.stuck.discard(location)
            memory.retry_ms.pop(location, None)
            del copies[location]

    def row_removed(self, copy: Copy) -> None:
        """The copy is taken away from the session that writes it."""
        session = self.state.sessions[copy.session]
        rows = dict(session.rows)
        assert rows[copy.location][1] == PENDING
        rows[copy.location] = (copy.generation, REMOVED)
        session = session._replace(rows=rows)
        if not session.open:
            session = session._replace(state=SessionState.finished)
        self.state.sessions[copy.session] = session
