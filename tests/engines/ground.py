"""What fake engines stand on: the real service in a thread of its own, real storages, real workers."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from dataplane import Place, ReadRefused, open_backend
from dataplane.options import WorkerOptions
from dataplane.worker import Worker
from metaservice.api.settings import ApiSettings
from metaservice.client import Client, ClientConfig, PlaceRef
from metaservice.core.machine import Machine
from metaservice.core.model import Limits
from tests.functional.api_house import House, open_house

T = TypeVar("T")

LIMITS = Limits(
    reclaim_delay_ms=50,
    late_write_ms=50,
    write_ttl_ms_min=50,
    lease_ms_min=50,
    lease_ms_max=3_000,
    task_ttl_ms=2_000,
    heartbeat_ms=300,
    suspect_ms=900,
    expire_ms=1_500,
)


class Ground:
    """One service and its `posix` storages below `folder`. Every history has a group and storage of its
    own, so that one service carries many."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        self.folder = folder
        self._limits = limits
        self._loop = asyncio.new_event_loop()
        self._ready = Event()
        self._over: asyncio.Event | None = None
        self._house: House | None = None
        self._thread = Thread(target=self._run, name="ground", daemon=True)
        self._thread.start()
        assert self._ready.wait(30), "the service did not start"
        self.port = self._running.port
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = Client(ClientConfig(url=self.url, timeout_ms=5_000))
        self.client.put_tenant("t")
        self._workers: list[tuple[Event, Thread, Client]] = []
        self._closing: list[Thread] = []

    @property
    def _running(self) -> House:
        assert self._house is not None
        return self._house

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        async with open_house(limits=self._limits, settings=ApiSettings()) as self._house:
            self._ready.set()
            await self._over.wait()

    def later(self, act: Callable[[], None]) -> None:
        """Do something that takes its time beside; `close` waits for it."""
        thread = Thread(target=act, daemon=True)
        thread.start()
        self._closing.append(thread)

    def close(self) -> None:
        """Stop everything."""
        for thread in self._closing:
            thread.join(10)
        self.stop_workers()
        self.client.close()
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)

    # ------------------------------------------------------------------------------------------- furniture

    def group(self, name: str, *, kind: str = "posix", **quota: Any) -> Path:
        """A group of that name with a storage of its own. Returns the storage's folder."""
        root = self.folder / name
        root.mkdir(exist_ok=True)
        if kind == "posix":
            self.client.put_storage(f"s-{name}", "posix", {"root": str(root), "fsync": "none"})
        else:
            options = {"dir": str(root), "slot_bytes": str(1 << 16)}
            self.client.put_storage(f"s-{name}", kind, options, capacity_bytes=1 << 26)
            self.start_worker(f"w-{name}", f"s-{name}")
        self.client.put_group(f"g-{name}", "t", [f"s-{name}"], **quota)
        return root

    def start_worker(self, worker: str, *storages: str) -> Event:
        """A data-plane worker for these storages; setting the event stops it."""
        stop = Event()
        client = Client(ClientConfig(url=self.url, timeout_ms=5_000))
        made = Worker(client, worker, dict.fromkeys(storages), WorkerOptions(poll_ms=100, backoff_ms_max=200))
        thread = Thread(target=made.run, args=(stop,), daemon=True)
        thread.start()
        self._workers.append((stop, thread, client))
        return stop

    def stop_workers(self) -> None:
        """All of them leave."""
        for stop, _, _ in self._workers:
            stop.set()
        for _, thread, client in self._workers:
            thread.join(5)
            client.close()
        self._workers.clear()

    # ------------------------------------------------------------------------------------- what it knows

    def ask(self, look: Callable[[Machine], T]) -> T:
        """What `look` finds in the leader's state."""

        async def now() -> T:
            return look(self._running.shard.state)

        return asyncio.run_coroutine_threadsafe(now(), self._loop).result(10)

    def leases_open(self) -> int:
        """Read leases that somebody holds."""
        return self.ask(lambda machine: len(machine.memory.leases._held))

    def sessions_open(self) -> int:
        """Write sessions under way."""
        return self.ask(lambda machine: len(machine.state.sessions))

    def instances(self, group: str) -> list[str]:
        """Instances of a group."""
        known = self.client.get_json("/v1/instances")
        rows = known["items"] if isinstance(known, dict) else known
        return [row["id"] for row in rows if row["group"] == group]

    def stored(self, instance: str, keys: Iterable[bytes]) -> dict[bytes, list[PlaceRef]]:
        """Which of these blocks serve, and where each of their parts is."""
        asked = list(dict.fromkeys(keys))
        found: dict[bytes, list[PlaceRef]] = {}
        for at in range(0, len(asked), 1_000):
            answer = self.client.lookup(instance, asked[at : at + 1_000], mode="each")
            assert answer.failure is None, (answer.failure, answer.detail)
            for row, key in enumerate(answer.keys):
                found[key] = [answer.place(row, part) for part in range(len(answer.parts))]
        return found


def page_of(ref: PlaceRef) -> bytes | str:
    """The bytes at a place, or why there are none."""
    backend = open_backend(ref.storage.kind, ref.storage.options)
    try:
        return backend.read(Place.of(ref), ref.checksum)
    except ReadRefused as refused:
        return refused.reason
    finally:
        backend.close()


def until(check: Callable[[], object], within_s: float = 10.0, what: str = "it") -> None:
    """Wait until `check` is true."""
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, f"{what} did not happen in time"
        time.sleep(0.01)


def files_of(root: Path) -> list[Path]:
    """Every block file below a posix storage."""
    with suppress(FileNotFoundError):
        return [
            Path(folder) / name for folder, _, names in os.walk(root) for name in names if "tmp" not in name
        ]
    return []
