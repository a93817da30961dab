"""Client processes that call the service, or the bare server, and time each call.

A client process is an engine: it is registered, holds one connection, and calls again as soon as it has its
answer. What it calls with is made before the clock starts.
"""

import gc
import time
from array import array
from collections.abc import Callable, Iterable
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import msgspec

from metaservice.client import Client
from tests.bench.bench_bare import BareClient, BareServer
from tests.bench.bench_service import CHAIN_KEYS, INSTANCE, BenchError, Process, Service, chain, new_client

LEASE_MS = 500
"""Short, so that leases also end during the run, and their end is part of the figures."""
WARM_UP_CALLS = 20
KEYS_PER_S_MAX = 250_000
PAIRS_PER_S_MAX = 4_000
"""Write calls are prepared for so much; no key can be written twice."""
_NEW_CHAINS = 1 << 32
"""Chains from here on are written by client processes, each in a range of its own."""
_ABSENT_CHAINS = 1 << 48


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured at once: `what` is `lookup`, `miss` or `write`, `keys` a call, `blocks` are stored."""

    what: str
    keys: int
    clients: int
    seconds: float
    blocks: int


class Sample(msgspec.Struct, kw_only=True):
    """What one client process measured. `times_ns`: u64, one a call."""

    began_ns: int
    ended_ns: int
    cpu_ns: int
    times_ns: bytes


class Figures(msgspec.Struct, kw_only=True):
    """A measured cell. `cpu_us_per_key` is the processor time of the server, `client_cpu_us_per_call` that of
    the clients."""

    keys_per_s: float
    calls_per_s: float
    p50_us: float
    p99_us: float
    cpu_us_per_key: float
    client_cpu_us_per_call: float


class _Caller:
    """One client process."""

    def __init__(self, number: int, port: int, bare_port: int) -> None:
        self._number = number
        self._written = 0
        self._client: Client = new_client(port)
        registration = self._client.register_engine(f"bench-{number}", instance=INSTANCE)
        if registration.failure is not None:
            raise BenchError(f"not registered: {registration.failure} {registration.detail}")
        self._bare = BareClient(bare_port)

    def prepared(self, cell: Cell, bare: bool) -> tuple[Callable[[list[bytes]], None], list[list[bytes]]]:
        """The call to make, and what to make it with."""
        count = cell.keys
        if cell.what == "lookup":
            chains = cell.blocks // CHAIN_KEYS
            rounds = min(chains, max(16, 65_536 // count))
            step = max(1, chains // rounds)
            requests = [chain((self._number + row * step) % chains, count) for row in range(rounds)]
            return self._bare_lookup if bare else self._lookup, requests
        if cell.what == "miss":
            requests = [chain(_ABSENT_CHAINS + row, count) for row in range(max(16, 16_384 // count))]
            return self._bare_miss if bare else self._miss, requests
        rounds = int(min(KEYS_PER_S_MAX / count, PAIRS_PER_S_MAX) * cell.seconds) + 2 * WARM_UP_CALLS
        first = _NEW_CHAINS * (1 + self._number) + self._written
        self._written += rounds
        requests = [chain(first + row, count) for row in range(rounds)]
        return self._bare_write if bare else self._write, requests

    def _lookup(self, keys: list[bytes]) -> None:
        found = self._client.lookup(INSTANCE, keys, lease_ms=LEASE_MS)
        if found.hits != len(keys) or found.lease is None or len(found.checksums) != len(keys):
            raise BenchError(f"{found.hits} hits of {len(keys)}: {found.failure} {found.detail}")

    def _miss(self, keys: list[bytes]) -> None:
        found = self._client.lookup(INSTANCE, keys)
        if found.hits or found.failure is not None:
            raise BenchError(f"no miss: {found.hits} hits, {found.failure} {found.detail}")

    def _write(self, keys: list[bytes]) -> None:
        write(self._client, keys)

    def _bare_lookup(self, keys: list[bytes]) -> None:
        if self._bare.lookup(keys, LEASE_MS) != len(keys):
            raise BenchError("the bare server missed")

    def _bare_miss(self, keys: list[bytes]) -> None:
        if self._bare.lookup(keys, 0):
            raise BenchError("the bare server hit")

    def _bare_write(self, keys: list[bytes]) -> None:
        if self._bare.finish(self._bare.start(keys)) != len(keys):
            raise BenchError("the bare server did not finish")


def write(client: Client, keys: list[bytes], parent: bytes | None = None) -> None:
    """Start and finish one chain of new blocks."""
    started = client.start_write(INSTANCE, keys, parent=parent)
    if started.failure is not None or any(started.outcomes):
        raise BenchError(f"start-write: {started.failure} {started.detail} {set(started.outcomes)}")
    finished = client.finish(
        started, started.locations, started.generations, checksums=array("Q", range(len(keys)))
    )
    if finished.published != len(keys):
        raise BenchError(f"finish: {finished.failure} {finished.detail} {finished.published}")


def _measured(call: Callable[[Any], None], requests: Iterable[Any], start_ns: int, stop_ns: int) -> Sample:
    clock = time.perf_counter_ns
    times = array("Q")
    while (wait_ns := start_ns - clock()) > 0:
        time.sleep(wait_ns / 1e9)
    cpu_ns = time.process_time_ns()
    ended_ns = began_ns = clock()
    for request in requests:
        before_ns = clock()
        call(request)
        ended_ns = clock()
        times.append(ended_ns - before_ns)
        if ended_ns >= stop_ns:
            break
    return Sample(
        began_ns=began_ns,
        ended_ns=ended_ns,
        cpu_ns=time.process_time_ns() - cpu_ns,
        times_ns=times.tobytes(),
    )


def client_process(pipe: "Connection[Any, Any]", number: int, port: int, bare_port: int) -> None:
    """Serve cells that come through the pipe, until it ends."""
    try:
        caller = _Caller(number, port, bare_port)
        pipe.send("ready")
        while True:
            cell, bare = pipe.recv()
            call, requests = caller.prepared(cell, bare)
            for request in requests[:WARM_UP_CALLS]:
                call(request)
            gc.collect()
            pipe.send("ready")
            start_ns = pipe.recv()
            rest: Iterable[Any] = requests[WARM_UP_CALLS:] if cell.what == "write" else cycle(requests)
            pipe.send(_measured(call, rest, start_ns, start_ns + int(cell.seconds * 1e9)))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        pipe.send(error)


class Fleet:
    """Client processes, kept from cell to cell."""

    def __init__(self, count: int, service: Service, bare: BareServer) -> None:
        self._service = service
        self._bare = bare
        context = get_context("spawn")
        self._pipes: list[Connection[Any, Any]] = []
        self._children = []
        for number in range(count):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=client_process, args=(theirs, number, service.port, bare.port), daemon=True
            )
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)
        for pipe in self._pipes:
            self._answer(pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(5)
            if child.is_alive():
                child.kill()
                child.join()

    def measure(self, cell: Cell, *, bare: bool) -> Figures:
        """One cell against one of the two servers, measured once."""
        pipes = self._pipes[: cell.clients]
        server: Process = self._bare if bare else self._service
        for pipe in pipes:
            pipe.send((cell, bare))
        for pipe in pipes:
            self._answer(pipe)
        cpu_s = server.cpu_s()
        start_ns = time.perf_counter_ns() + 5_000_000
        for pipe in pipes:
            pipe.send(start_ns)
        samples: list[Sample] = [self._answer(pipe) for pipe in pipes]
        cpu_s = server.cpu_s() - cpu_s
        return _figures(cell, samples, cpu_s)

    @staticmethod
    def _answer(pipe: "Connection[Any, Any]") -> Any:
        try:
            answer = pipe.recv()
        except EOFError:
            raise BenchError("a client process ended") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _figures(cell: Cell, samples: list[Sample], cpu_s: float) -> Figures:
    times = array("Q", b"".join(sample.times_ns for sample in samples)).tolist()
    times.sort()
    calls = len(times)
    seconds = (max(one.ended_ns for one in samples) - min(one.began_ns for one in samples)) / 1e9
    return Figures(
        keys_per_s=calls * cell.keys / seconds,
        calls_per_s=calls / seconds,
        p50_us=times[calls // 2] / 1000,
        p99_us=times[min(calls - 1, calls * 99 // 100)] / 1000,
        cpu_us_per_key=cpu_s * 1e6 / (calls * cell.keys),
        client_cpu_us_per_call=sum(one.cpu_ns for one in samples) / 1000 / calls,
    )
