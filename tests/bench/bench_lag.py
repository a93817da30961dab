"""How long one huge JSON lookup holds everybody else up."""

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tests.bench.bench_service import (
    INSTANCE,
    BenchError,
    RawConnection,
    chain,
    lookup_request,
    new_client,
)
from tests.bench.bench_store import LONG_CHAIN

JSON = "application/json"


class Lag(msgspec.Struct, kw_only=True):
    """Times of lookups of one key by one client, alone and beside lookups of `keys` keys in JSON.

    `beside_worst_ms` is the median, over the huge lookups, of the slowest small one beside each.
    """

    keys: int
    huge_ms: float
    alone_p99_us: float
    alone_worst_ms: float
    beside_p99_us: float
    beside_worst_ms: float


def loop_lag(port: int, keys_count: int, rounds: int) -> Lag:
    """Small lookups one after the other here, huge ones from another process."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    asker = context.Process(target=ask_huge, args=(theirs, port, keys_count, rounds), daemon=True)
    asker.start()
    times: list[tuple[int, int]] = []
    try:
        with new_client(port) as client:
            one = chain(0, 1)
            if ours.recv() != "ready":
                raise BenchError("the huge lookup was not answered as it should be")

            def probe() -> None:
                before_ns = time.perf_counter_ns()
                client.lookup(INSTANCE, one)
                times.append((before_ns, time.perf_counter_ns()))

            for _ in range(20):
                probe()
            times.clear()
            alone_until_ns = time.perf_counter_ns() + 300_000_000
            while time.perf_counter_ns() < alone_until_ns:
                probe()
            alone = sorted(ended - began for began, ended in times)
            times.clear()
            ours.send("go")
            while not ours.poll(0):
                probe()
            windows: list[tuple[int, int]] = ours.recv()
    finally:
        asker.kill()
        asker.join()
    slowest = sorted(
        max((ended - began for began, ended in times if ended > first and began < last), default=0)
        for first, last in windows
    )
    beside = sorted(
        ended - began
        for began, ended in times
        if any(ended > first and began < last for first, last in windows)
    )
    huge = sorted(last - first for first, last in windows)
    return Lag(
        keys=keys_count,
        huge_ms=huge[len(huge) // 2] / 1e6,
        alone_p99_us=alone[len(alone) * 99 // 100] / 1000,
        alone_worst_ms=alone[-1] / 1e6,
        beside_p99_us=beside[len(beside) * 99 // 100] / 1000,
        beside_worst_ms=slowest[len(slowest) // 2] / 1e6,
    )


def ask_huge(pipe: "Connection[Any, Any]", port: int, keys_count: int, rounds: int) -> None:
    """Huge lookups with pauses between them; tells when each began and ended."""
    keys = [key.hex() for key in chain(LONG_CHAIN, keys_count)]
    request = lookup_request(msgspec.json.encode({"keys": keys}), JSON)
    connection = RawConnection(port)
    reply = connection.exchange(request)
    pipe.send("ready" if b'"hits":%d,' % keys_count in reply else reply[:300])
    pipe.recv()
    windows = []
    for _ in range(rounds):
        time.sleep(0.03)
        began_ns = time.perf_counter_ns()
        connection.exchange(request)
        windows.append((began_ns, time.perf_counter_ns()))
    pipe.send(windows)
    pipe.recv()
