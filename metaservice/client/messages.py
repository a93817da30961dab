"""What the keeper is told and what it tells: plain data that a queue or a pipe carries alike."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import asdict

from metaservice.wire.schemas import StorageRef
from metaservice.wire.schemas_members import EngineEndpoints

from .config import ClientConfig


class Member(Struct, tag=True, kw_only=True):
    """For whom to send heartbeats. `registered`: under this incarnation, else it is still to be done."""

    kind: str
    id: str
    incarnation: str
    instance: str = ""
    rank: int = 0
    endpoints: dict[str, Any] | None = None
    canary: str = ""
    storages: list[str] | None = None
    heartbeat_ms: int = 1_000
    expire_ms: int = 10_000
    registered: bool = False


def engine_member(
    engine: str,
    incarnation: str,
    instance: str,
    rank: int,
    endpoints: EngineEndpoints | Mapping[str, Any] | None,
    canary: str,
) -> Member:
    """An engine to register."""
    if isinstance(endpoints, EngineEndpoints):
        endpoints = asdict(endpoints)
    return Member(
        kind="engine",
        id=engine,
        incarnation=incarnation,
        instance=instance,
        rank=rank,
        endpoints=None if endpoints is None else dict(endpoints),
        canary=canary,
    )


class KeepLease(Struct, tag=True):
    """Renew a lease of `ttl_ms` that holds until `deadline_ms`; no longer than `until_ms`."""

    lease: str
    ttl_ms: int
    deadline_ms: int
    until_ms: int


class KeepSession(Struct, tag=True):
    """Renew a write session."""

    session: str
    engine: str
    incarnation: str
    ttl_ms: int
    deadline_ms: int
    until_ms: int


class Kept(Struct, tag=True):
    """Many at once; `fresh`: and nothing else that was kept before."""

    items: list[KeepLease | KeepSession]
    fresh: bool = False


class Drop(Struct, tag=True):
    """Renew these no longer."""

    leases: list[str] = []
    sessions: list[str] = []


class Doubt(Struct, tag=True):
    """A call was told to register again: find out now."""


class Forget(Struct, tag=True):
    """No heartbeats any more; the registration expires by itself."""


class Stop(Struct, tag=True):
    """End. What was kept ends by itself."""


class Setup(Struct, tag=True, kw_only=True):
    """The first message to a keeper in another process, and again whenever it is told everything anew."""

    config: ClientConfig


Message = Member | KeepLease | KeepSession | Kept | Drop | Doubt | Forget | Stop


class Joined(Struct, tag=True, kw_only=True):
    """Registered, under this incarnation."""

    id: str
    incarnation: str
    heartbeat_ms: int
    suspect_ms: int
    expire_ms: int
    cluster: str
    epoch: int
    storage_table: list[StorageRef] = []


class Left(Struct, tag=True):
    """The registration is gone; write sessions of `incarnation` are lost. The keeper registers again."""

    id: str
    incarnation: str


class Renewed(Struct, tag=True):
    """New deadlines of leases and write sessions."""

    deadlines_ms: dict[str, int]


class Lost(Struct, tag=True):
    """These hold no longer, or are not known to hold."""

    leases: list[str] = []
    sessions: list[str] = []
    why: str = ""


class Said(Struct, tag=True):
    """A line for the log."""

    level: int
    kind: str
    text: str


Event = Joined | Left | Renewed | Lost | Said

encoder = Encoder()
message_decoder: "Decoder[Message | Setup]" = Decoder(Message | Setup)
event_decoder: "Decoder[Event]" = Decoder(Event)
setup_decoder: "Decoder[Setup]" = Decoder(Setup)
