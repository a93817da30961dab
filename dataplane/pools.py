"""The pools of the volatile storages that this worker owns: one for each life of its registration."""

import logging
from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple

from dataplane.options import WorkerStats
from dataplane.port import Backend, OpenFailed
from dataplane.registry import Pools, open_backend, pools_of
from dataplane.service import Standing
from metaservice.wire.schemas import StorageRef

log = logging.getLogger("dataplane.worker")


class _Owned(NamedTuple):
    pools: Pools
    options: Mapping[str, str]
    cluster: str
    backend: Backend


class PoolOwner:
    """Makes a pool when the worker is registered, another when it is registered anew, and takes away those
    before.

    Each pool is called after the registration it belongs to, so that nothing which was written under an
    earlier one can be found under this: to the service those bytes are gone.
    """

    def __init__(self, stats: WorkerStats) -> None:
        self._stats = stats
        self._owned: dict[str, _Owned] = {}
        self._lock = Lock()
        self._left = False

    def own(self, ref: StorageRef, standing: Standing) -> Backend:
        """The opened pool of this storage, of a volatile kind, for this registration. It is made if need be:
        also when somebody removed it. Raises OpenFailed."""
        with self._lock:
            if self._left:
                raise OpenFailed("options.pool", "the worker ends")
            owned = self._owned.get(ref.name)
            if owned is None or owned.options["pool"] != standing.incarnation:
                owned = self._owned[ref.name] = self._new(ref, standing)
            elif owned.pools.make(owned.options, owned.cluster, ref.name):
                self._stats.pools += 1
                log.warning("pool %s of storage %s was gone; made anew", standing.incarnation, ref.name)
            return owned.backend

    def _new(self, ref: StorageRef, standing: Standing) -> _Owned:
        pools = pools_of(ref.kind)
        if pools is None:
            raise OpenFailed("kind", f"storage {ref.name!r} is of kind {ref.kind!r}, which has no pools")
        # One thread: a worker only deletes, which is one system call a part. Nor is there anything to close
        # in a backend without threads, whoever is still at work with it.
        options = {**ref.options, "pool": standing.incarnation, "threads": "1"}
        removed = pools.remove(options, standing.cluster, ref.name)
        self._stats.pools += pools.make(options, standing.cluster, ref.name)
        log.info("storage %s has pool %s; %d earlier ones removed", ref.name, standing.incarnation, removed)
        return _Owned(pools, options, standing.cluster, open_backend(ref.kind, options))

    def leave(self) -> None:
        """Take the pools away: nobody owns them any more."""
        with self._lock:
            self._left = True
            for name, owned in self._owned.items():
                try:
                    owned.pools.remove({**owned.options, "pool": ""}, owned.cluster, name)
                except OpenFailed as failed:
                    log.warning("the pool of storage %s is left behind: %s", name, failed)
                owned.backend.close()
            self._owned.clear()
