"""Decisions about the pools of volatile storages: whose they are, and when they are gone.

A pool is the memory of one worker in one life. It begins when the worker registers and ends when the worker
leaves, expires, starts anew or no longer names the storage; nobody else gets the storage before. An
incarnation has one pool of a storage at most: what was told of an earlier one must never be found in a later
one.

A pool goes before its worker does and comes after it, so that a journal may end after any event.
"""

from collections.abc import Container, Iterator

from .commands import RegisterWorker
from .events import PoolChanged
from .rejections import Rejection
from .state import State


def refuse(state: State, command: RegisterWorker) -> Rejection | None:
    """Why the worker cannot have the pools of the volatile storages that it names."""
    for row, name in enumerate(command.storages):
        storage = state.storages[name]
        if not storage.volatile:
            continue
        pool = storage.pool
        if pool is not None and pool.worker != command.worker:
            return Rejection(
                "storage_owned",
                f"worker {pool.worker!r} holds the bytes of storage {name!r} and is alive",
                f"storages[{row}]",
                {"worker": pool.worker},
            )
        if command.incarnation in storage.spent:
            return Rejection(
                "incarnation_retired",
                f"this incarnation's pool of storage {name!r} is gone: start with a new one",
                "incarnation",
            )
    return None


def ended(
    state: State, worker: str, now_ms: int, incarnation: str = "", storages: Container[str] = ()
) -> list[PoolChanged]:
    """The worker's pools are gone, but for those of `storages` that this incarnation of it has already."""
    return [
        PoolChanged(now_ms, name, "", "")
        for name, storage in state.storages.items()
        if (pool := storage.pool) is not None
        and pool.worker == worker
        and (pool.incarnation != incarnation or name not in storages)
    ]


def begun(state: State, command: RegisterWorker, now_ms: int) -> list[PoolChanged]:
    """The pools that the worker gets by its registration, which was not refused."""
    return [
        PoolChanged(now_ms, name, command.worker, command.incarnation)
        for name in command.storages
        if (storage := state.storages[name]).volatile
        and (storage.pool is None or storage.pool.incarnation != command.incarnation)
    ]


def orphans(state: State, now_ms: int) -> Iterator[PoolChanged]:
    """Volatile storages with locations and no pool: a release that knew no pools left them."""
    for name, storage in state.storages.items():
        if storage.volatile and storage.pool is None and storage.usage.blocks + storage.usage.deleting_blocks:
            yield PoolChanged(now_ms, name, "", "")
