"""What the worker daemon needs of the service, and the one check that stands before every deletion."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from metaservice.client.results import (
    ClusterResult,
    ConfirmResult,
    DeleteTask,
    LeaveResult,
    TasksResult,
    UnknownResult,
)
from metaservice.wire.schemas import StorageRef


class Registered(Protocol):
    """A worker's registration as the client keeps it up: it registers again by itself when the service asks
    for it."""

    @property
    def active(self) -> bool:
        """Whether the service knows us under `incarnation` now, as far as we know."""

    @property
    def incarnation(self) -> str: ...

    @property
    def lost(self) -> int:
        """How often a registration was lost; between two equal readings it was one and the same."""

    @property
    def cluster(self) -> str: ...

    @property
    def storage_table(self) -> list[StorageRef]: ...

    @property
    def failure(self) -> str | None:
        """Why the last try to register failed."""


class Service(Protocol):
    """The calls of a worker; `metaservice.client.Client` is one. None raises: a result says its `failure`."""

    def register_worker(self, worker: str, storages: Sequence[str]) -> Registered: ...

    def deregister(self) -> LeaveResult: ...

    def cluster(self) -> ClusterResult: ...

    def take_tasks(self, *, limit: int, wait_ms: int, shard: int | None) -> TasksResult: ...

    def confirm_task(self, task: DeleteTask, *, ok: Sequence[bool] | None = None) -> ConfirmResult: ...

    def unknown_places(
        self, storage: str, locations: Sequence[int], generations: Sequence[int]
    ) -> UnknownResult: ...


class Standing(NamedTuple):
    """Under which registration, and for which cluster, something was begun."""

    cluster: str
    incarnation: str
    lost: int


class Guard:
    """Says whether this worker may delete at all, and for which cluster.

    The first cluster that registers it is its cluster as long as it lives. A service with an empty or foreign
    journal at the same address (wiped, restored elsewhere, misrouted) would call every byte an orphan and
    must not be believed.
    """

    def __init__(self, registration: Registered, cluster: str | None) -> None:
        self._registration = registration
        self.cluster = cluster
        """The cluster this worker belongs to; None until one registered it."""

    def standing(self) -> Standing | None:
        """The current registration, or None when nothing may be deleted now."""
        registration = self._registration
        standing = Standing(registration.cluster, registration.incarnation, registration.lost)
        if not registration.active or not standing.cluster:
            return None
        if self.cluster is None:
            self.cluster = standing.cluster
        return standing if standing.cluster == self.cluster else None

    def holds(self, standing: Standing) -> bool:
        """Whether `standing` is still the current one: no other service can have answered since it was
        taken."""
        return self.standing() == standing

    def trouble(self) -> str:
        """For people: why there is no standing."""
        registration = self._registration
        if registration.active and registration.cluster != self.cluster:
            return f"the service is cluster {registration.cluster!r}, this worker belongs to {self.cluster!r}"
        return f"not registered ({registration.failure or 'no answer yet'})"
