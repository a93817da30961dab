"""The SDK of connectors, workers, the CLI and other programs: every failure becomes a miss, in time."""

from .aio import AsyncClient
from .client import Client
from .config import ClientConfig
from .errors import ClientError
from .holder import Registration
from .results import (
    AbortResult,
    ClusterResult,
    ConfirmResult,
    DeleteTask,
    FinishResult,
    HeartbeatResult,
    LeasesResult,
    LeaveResult,
    LookupResult,
    PlaceRef,
    Places,
    RemoveResult,
    RenewResult,
    SwitchResult,
    TasksResult,
    UnknownResult,
    WriteResult,
)

__all__ = [
    "AbortResult",
    "AsyncClient",
    "Client",
    "ClientConfig",
    "ClientError",
    "ClusterResult",
    "ConfirmResult",
    "DeleteTask",
    "FinishResult",
    "HeartbeatResult",
    "LeasesResult",
    "LeaveResult",
    "LookupResult",
    "PlaceRef",
    "Places",
    "Registration",
    "RemoveResult",
    "RenewResult",
    "SwitchResult",
    "TasksResult",
    "UnknownResult",
    "WriteResult",
]
