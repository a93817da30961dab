"""How a worker behaves, and what it did."""

from dataclasses import dataclass, field
from threading import Lock


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """How a worker behaves. Raises ValueError naming the field that cannot be.

    `cluster`: register with no other; None takes the first that answers. `tasks_max`: locations taken at a
    time. `poll_ms`: how long one question for tasks may wait for some. `sweep_ms`: pause between two sweeps.
    `safe_age_ms`: no file younger than this is swept. It has to be longer than any answer of the service can
    be out of date: a replica's lag, a fail-over, an engine's wait between start-write and its first byte.
    `backoff_ms_max`: longest pause between tries while the service is away. `stop_ms`: what is under way at
    the end may take so long.
    """

    cluster: str | None = None
    tasks_max: int = 1024
    poll_ms: int = 1_000
    sweep_ms: int = 300_000
    safe_age_ms: int = 900_000
    backoff_ms_min: int = 100
    backoff_ms_max: int = 10_000
    stop_ms: int = 5_000

    def __post_init__(self) -> None:
        for name in ("tasks_max", "sweep_ms", "backoff_ms_min", "backoff_ms_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not positive")
        for name in ("poll_ms", "safe_age_ms", "stop_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative")


@dataclass(slots=True)
class WorkerStats:
    """What a worker did since it started. Those of sweeps are changed by one thread only, those of tasks
    under `lock`.

    By tasks: `tasks` confirmed; `deleted` files, files `absent` already, and `failed` deletions; `refused`:
    answers of a service that is not ours, for which nothing was done. By sweeps: `sweeps` that went through
    to the end; `swept` orphans, `swept_temporary` unfinished files, `sweep_failed` scans and deletions;
    `foreign` files of others that the last full sweep saw. `pools`: made for storages that this worker owns.
    """

    tasks: int = 0
    deleted: int = 0
    absent: int = 0
    failed: int = 0
    refused: int = 0
    sweeps: int = 0
    swept: int = 0
    swept_temporary: int = 0
    sweep_failed: int = 0
    foreign: int = 0
    pools: int = 0
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)
