"""Lookups in turns, without and with cache events going on."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from statistics import median
from typing import Any

from tests.bench.bench_events_readers import Subscribers
from tests.bench.bench_events_service import BIG, QUIET, SMALL, Bench, restate
from tests.bench.bench_service import CHAIN_KEYS, BenchError, chain, new_client

LOOKUP_KEYS = 256
LOOKUP_EVERY_S = 0.004
WRITE_KEYS = 64
WRITE_EVERY_S = 0.05
_numbers = count(1 << 32)
"""Chains that are written while lookups are timed."""


class Lookups:
    """One client that looks up as often as it should, whatever the last answer took."""

    def __init__(self, bench: Bench) -> None:
        self._client = new_client(bench.service.port)
        chains = max(1, (bench.options.blocks - bench.options.small) // CHAIN_KEYS)
        self._requests = [chain(row % chains, LOOKUP_KEYS) for row in range(min(chains, 256))]
        self._at = 0

    def measure(self, seconds: float) -> list[float]:
        """Milliseconds of each. A machine that stands still for a while delays one of them, not all that
        would have been sent meanwhile: it stands still in every phase."""
        times: list[float] = []
        gc.collect()
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() < ends_s:
            keys = self._requests[self._at % len(self._requests)]
            self._at += 1
            sent_s = time.perf_counter()
            found = self._client.lookup(BIG, keys)
            took_s = time.perf_counter() - sent_s
            if found.hits != len(keys):
                raise BenchError(f"{found.hits} hits of {len(keys)}: {found.failure} {found.detail}")
            times.append(took_s * 1_000)
            time.sleep(max(0.0, LOOKUP_EVERY_S - took_s))
        return times


def percentile(times: list[float], share: float) -> float:
    """The value that so much of them is not above."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def quiet(figures: Iterable[float]) -> float:
    """The lower quartile: others on the machine only ever make a turn slower."""
    ordered = sorted(figures)
    return ordered[len(ordered) // 4]


@contextlib.contextmanager
def nothing(bench: Bench) -> Iterator[None]:
    """Only beats."""
    yield


@contextlib.contextmanager
def told(bench: Bench) -> Iterator[None]:
    """The small instance is told again, over and over."""
    ending = threading.Event()

    def run() -> None:
        with new_client(bench.service.port) as client:
            while not ending.is_set():
                restate(client, SMALL)
                ending.wait(0.25)

    with running(run, ending):
        yield


def writing(instance: str) -> Callable[[Bench], "contextlib.AbstractContextManager[None]"]:
    """Blocks of an instance are written, so many a second."""

    @contextlib.contextmanager
    def going_on(bench: Bench) -> Iterator[None]:
        ending = threading.Event()

        def run() -> None:
            with new_client(bench.service.port) as client:
                client.register_engine(f"load-{instance}", instance=instance, keepalive=None)
                while not ending.is_set():
                    bench.write(client, instance, chain(next(_numbers), WRITE_KEYS))
                    ending.wait(WRITE_EVERY_S)

        with running(run, ending):
            yield

    return going_on


@contextlib.contextmanager
def running(run: Callable[[], None], ending: threading.Event) -> Iterator[None]:
    """Something in a thread of its own while lookups are measured."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(30)
    if failed:
        raise failed[0]


PHASES: dict[str, Callable[[Bench], "contextlib.AbstractContextManager[None]"]] = {
    "idle": nothing,
    "told_again": told,
    "writes_unannounced": writing(QUIET),
    "writes_announced": writing(SMALL),
}


def lookups(bench: Bench, readers: Subscribers, say: Callable[[str], None]) -> dict[str, Any]:
    """Turn by turn, so that a busy moment of the machine meets every phase; figures are of the quieter turns
    (`quiet`). `p99_ratio`: the same writes, announced and not; `p99_ratio_told_again`: against nothing at
    all."""
    client = Lookups(bench)
    client.measure(0.5)
    times: dict[str, list[list[float]]] = {name: [] for name in PHASES}
    told_blocks = dict.fromkeys(PHASES, 0)
    spent_s = dict.fromkeys(PHASES, 0.0)
    for turn in range(bench.options.turns):
        say(f"lookups, turn {turn + 1} of {bench.options.turns}")
        for name, phase in PHASES.items():
            readers.count()
            with phase(bench):
                time.sleep(0.2)
                began_s = time.perf_counter()
                times[name].append(client.measure(bench.options.seconds))
                counted = readers.count()
                spent_s[name] += time.perf_counter() - began_s
                told_blocks[name] += counted.stored
            readers.settled()
    result: dict[str, Any] = {
        name: {
            "lookups": sum(map(len, turns)),
            "p50_ms": round(quiet(percentile(turn, 0.5) for turn in turns), 3),
            "p99_ms": round(quiet(percentile(turn, 0.99) for turn in turns), 3),
            "p99_median_ms": round(median(percentile(turn, 0.99) for turn in turns), 3),
            "stored_blocks_s": round(told_blocks[name] / spent_s[name]),
        }
        for name, turns in times.items()
    }
    result["p99_ratio"] = round(
        result["writes_announced"]["p99_ms"] / result["writes_unannounced"]["p99_ms"], 3
    )
    result["p99_ratio_told_again"] = round(result["told_again"]["p99_ms"] / result["idle"]["p99_ms"], 3)
    return result
