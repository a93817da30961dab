"""The SDK of connectors, workers, the CLI and other programs: every failure becomes a miss, in time."""

from .aio import AsyncClient
from .client import Client
from .config import ClientConfig
from .errors import ClientError
from .holder import Registration
from .reporter import CacheReporter, ReporterStats
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
from .router_results import EventsResult, ReportResult, RestateResult, RouteResult

__all__ = [
    "AbortResult",
    "AsyncClient",
    "CacheReporter",
    "Client",
    "ClientConfig",
    "ClientError",
    "ClusterResult",
    "ConfirmResult",
    "DeleteTask",
    "EventsResult",
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
    "ReportResult",
    "ReporterStats",
    "RestateResult",
    "RouteResult",
    "SwitchResult",
    "TasksResult",
    "UnknownResult",
    "WriteResult",
]
