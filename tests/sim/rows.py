"""The naive model's memory: plain rows in plain dicts, no counter, no index. What is no row is recomputed."""

from typing import Any, NamedTuple

from metaservice.core.commands import PutGroup, PutStorage
from metaservice.core.model import (
    AttentionGroup,
    Fingerprint,
    GroupKind,
    LocationState,
    Part,
    Publication,
    Quota,
    SessionState,
    SwitchMode,
    SwitchScope,
)

PENDING, SERVING, FREED, REMOVED = "pending", "serving", "freed", "removed"


class Violation(AssertionError):
    """The machine did what the rules do not allow."""


class Refuse(Exception):
    """The rules refuse the command with one of these codes."""

    def __init__(self, *codes: str) -> None:
        super().__init__(*codes)
        self.codes = codes


class InstanceRow(NamedTuple):
    """A registered instance."""

    group: str
    fingerprint: Fingerprint
    quota: Quota
    retiring: bool = False
    publication: Publication | None = None

    @property
    def primary(self) -> str:
        """The attention group whose blocks the others hang on: the first full one, else the first."""
        return self.first(GroupKind.full) or self.fingerprint.groups[0].name

    def first(self, kind: GroupKind) -> str | None:
        """The name of the first attention group of that kind."""
        return next((group.name for group in self.fingerprint.groups if group.kind == kind), None)

    def attention(self, name: str) -> AttentionGroup | None:
        """The attention group of that name."""
        return next((group for group in self.fingerprint.groups if group.name == name), None)

    def parts(self, group: str) -> tuple[Part, ...]:
        """The parts of every block of an attention group."""
        return tuple(part for part in self.fingerprint.parts if part.group == group)

    def block_bytes(self, group: str) -> int:
        """The size of one block of an attention group."""
        return sum(part.bytes for part in self.parts(group))


class Member(NamedTuple):
    """An engine or worker; `expired_ms` is when it was silent for too long, 0 while it is not."""

    incarnation: str
    of: Any = None
    retired: tuple[str, ...] = ()
    expired_ms: int = 0


class Copy(NamedTuple):
    """One copy of one block; `parts` holds the checksum of each part that is in, None for one that is not."""

    instance: str
    group: str
    key: bytes
    parent: bytes | None
    storage: str
    location: int
    generation: int
    state: LocationState
    session: int
    size_bytes: int
    parts: tuple[int | None, ...]
    seq: int = 0
    """Of the event that brought it into its state."""
    not_before_ms: int = 0
    tokens: bytes = b""
    """Packed ids, as its writer sent them; b"": routers are not told of it."""
    lora: str = ""
    salt: str = ""

    @property
    def live(self) -> bool:
        """Whether the key still names this copy."""
        return self.state <= LocationState.serving  # what is gone is no copy


class SessionRow(NamedTuple):
    """A write session: what was written under it and what became of each location."""

    instance: str
    group: str
    engine: str
    incarnation: str
    ttl_ms: int
    deadline_ms: int
    state: SessionState
    rows: dict[int, tuple[int, str]]
    """location -> (generation, pending | serving | freed | removed). Replaced, never changed in place."""
    freed: int = 0

    @property
    def open(self) -> list[int]:
        """Locations that nothing was decided of yet."""
        return [location for location, (_, status) in self.rows.items() if status == PENDING]


class Lease(NamedTuple):
    """A read lease: the deadline of each (location, generation), and the serial number it was given."""

    rows: dict[int, tuple[int, int]]
    """location -> (generation, deadline_ms)"""
    state: str = "held"
    lost: frozenset[int] = frozenset()
    """Locations that went with their pool while they were held."""


class TaskRow(NamedTuple):
    """A deletion task: who holds it until when, and its answer once confirmed."""

    worker: str
    places: tuple[tuple[int, int], ...]
    """(location, generation)"""
    deadline_ms: int
    open: bool = True
    answer: Any = None


class State:
    """What the journal must bring back. All values are immutable: `copy` is a snapshot."""

    def __init__(self) -> None:
        self.tenants: dict[str, Quota] = {}
        self.storages: dict[str, PutStorage] = {}
        self.groups: dict[str, PutGroup] = {}
        self.instances: dict[str, InstanceRow] = {}
        self.switches: dict[tuple[SwitchScope, str], SwitchMode] = {}
        self.engines: dict[str, Member] = {}
        self.workers: dict[str, Member] = {}
        self.pools: dict[str, tuple[str, str]] = {}
        """volatile storage -> the worker that holds its bytes, and in which incarnation"""
        self.spent: dict[str, tuple[str, ...]] = {}
        """storage -> the incarnations whose pools are gone"""
        self.copies: dict[int, Copy] = {}
        self.generations: dict[int, int] = {}
        self.sessions: dict[int, SessionRow] = {}
        self.answers: dict[tuple[str, str], Any] = {}
        """(client, request id) -> its first answer"""
        self.epoch = 0
        self.took_over_ms = 0

    def copy(self) -> "State":
        """A snapshot of all rows."""
        other = State.__new__(State)
        for name, value in vars(self).items():
            setattr(other, name, dict(value) if isinstance(value, dict) else value)
        return other


class Memory:
    """What a leader knows and its successor does not."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.answers: dict[tuple[str, str], Any] = {}
        """(client, request id) of a write that changed nothing -> its first answer"""
        self.asked: dict[tuple[str, str], Any] = {}
        """(engine, request id) of a lookup -> its reply"""
        self.used_ms: dict[int, int] = {}
        """location -> when its block, or one that needed it then, was last used"""
        self.own_ms: dict[int, int] = {}
        """location -> the same, counting only its own use and that of blocks that went before it"""
        self.seen_ms: dict[tuple[str, str], int] = {}
        self.tasks: dict[str, TaskRow] = {}
        self.stuck: set[int] = set()
        """Locations whose deletion was handed out and not confirmed in time"""
        self.retry_ms: dict[int, int] = {}
        """location -> when it is offered again, after a worker could not delete it"""
