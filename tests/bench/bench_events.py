"""What cache events cost: so many blocks announced to so many routers, and what lookups feel of it.

    python tests/bench/bench_events.py [--blocks 1000000] [--workers 16] [--ranks 1] [--tokens 16]

One service on SQLite, `workers` engines, a subscriber for each. The blocks are written with their token ids
by one client while everybody listens; then one who knows nothing asks for a replay; then lookups are measured
in turns, without and with something going on: all of an instance told again (the most that the publisher can
have to do), and blocks being written, those of an instance that is not announced and those of one that is.
The last line is one JSON object.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.bench_events_lookups import LOOKUP_KEYS, lookups
from tests.bench.bench_events_readers import Recovered, Subscribers, recover
from tests.bench.bench_events_service import BIG, SMALL, Bench, Options, cpu_s, restate, rss_bytes
from tests.bench.bench_service import (
    CHAIN_KEYS,
    NEVER_SNAPSHOT,
    BenchError,
    Service,
    chain,
    machine_of,
)

SECONDS_MAX = 355


# ---------------------------------------------------------------- filling


def fill(bench: Bench, readers: Subscribers, say: Callable[[str], None]) -> dict[str, float]:
    """Write and announce all of it; what it cost."""
    blocks, small = bench.options.blocks, bench.options.small
    pid = bench.publisher()
    before, service_before, cpu_before_s = rss_bytes(pid), bench.service.rss_bytes(), cpu_s(pid)
    readers.count()
    began_s = time.perf_counter()
    for instance, many, first in ((BIG, blocks - small, 0), (SMALL, small, 1 << 24)):
        for number in range(many // CHAIN_KEYS):
            bench.write(bench.client, instance, chain(first + number, CHAIN_KEYS))
    wrote_s = time.perf_counter() - began_s
    say("waiting until routers were told of all of it")
    wanted = (blocks - small) // CHAIN_KEYS * CHAIN_KEYS + small // CHAIN_KEYS * CHAIN_KEYS
    while bench.announced(BIG) + bench.announced(SMALL) < wanted:
        if time.perf_counter() - began_s > 150:
            raise BenchError(f"{bench.announced(BIG)} + {bench.announced(SMALL)} of {wanted} announced")
        time.sleep(0.1)
    told_s = time.perf_counter() - began_s
    counted = readers.settled()
    after = rss_bytes(pid)
    return {
        "blocks": wanted,
        "write_blocks_s": wanted / wrote_s,
        "announced_after_s": told_s,
        "announced_blocks_s": wanted / told_s,
        "delivered_worker_blocks_s": wanted * bench.options.workers / told_s,
        "bytes_a_block": counted.block_bytes * bench.options.workers / counted.stored
        if bench.options.ranks >= bench.options.workers
        else counted.block_bytes / max(1, counted.stored),
        "gaps": counted.gaps,
        "publisher_bytes_a_block": (after - before) / wanted,
        "publisher_rss_mib": after / 2**20,
        "publisher_cpu_us_a_block": (cpu_s(pid) - cpu_before_s) * 1e6 / wanted,
        "service_bytes_a_block": (bench.service.rss_bytes() - service_before) / wanted,
    }


# ---------------------------------------------------------------- told again


def told_again(bench: Bench, readers: Subscribers) -> dict[str, float]:
    """All of the smaller instance at once, as after a router's loss."""
    pid = bench.publisher()
    wanted = bench.announced(SMALL) * min(bench.options.ranks, bench.options.workers)
    readers.count()
    cpu_before_s, service_s = cpu_s(pid), bench.service.cpu_s()
    began_s = time.perf_counter()
    restate(bench.client, SMALL)
    stored = sent = gaps = 0
    while stored < wanted:
        if time.perf_counter() - began_s > 60:
            raise BenchError(f"told again: {stored} of {wanted} blocks in 60 s")
        time.sleep(0.25)
        counted = readers.count()
        stored += counted.stored
        sent += counted.bytes
        gaps += counted.gaps
    seconds = time.perf_counter() - began_s
    each = bench.announced(SMALL)
    return {
        "blocks": each,
        "seconds": seconds,
        "blocks_s": each / seconds,
        "worker_blocks_s": each * bench.options.workers / seconds,
        "mb_s": sent / seconds / 1e6,
        "gaps": gaps,
        "publisher_cpu_us_a_block": (cpu_s(pid) - cpu_before_s) * 1e6 / each,
        "service_cpu_us_a_block": (bench.service.cpu_s() - service_s) * 1e6 / each,
    }


def recovery(bench: Bench, repeats: int) -> Recovered:
    """A subscriber that knows nothing, over the largest stream; the median of several."""
    (view, *_) = bench.streams(BIG)
    found = sorted((recover(view["replay"]) for _ in range(repeats)), key=lambda one: one.seconds)
    return found[len(found) // 2]


# ---------------------------------------------------------------- the run


def arguments() -> Options:
    """From the command line."""
    parser = argparse.ArgumentParser(description="What cache events cost.", allow_abbrev=False)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="announced blocks (default 1000000)")
    parser.add_argument("--small", type=int, default=0, help="of them, in the instance told again (a tenth)")
    parser.add_argument("--workers", type=int, default=16, help="engines, and subscribers (default 16)")
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks of the engines: a stream each (default 1)"
    )
    parser.add_argument("--tokens", type=int, default=16, help="token ids of a block (default 16)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each turn of lookups (default 1.5)")
    parser.add_argument("--turns", type=int, default=9, help="turns of lookups (default 9)")
    parser.add_argument("--replays", type=int, default=3, help="recoveries; the median counts (default 3)")
    given = vars(parser.parse_args())
    given["small"] = given["small"] or max(CHAIN_KEYS, given["blocks"] // 10)
    options = Options(**given)
    if options.blocks < 2 * options.small or options.small < CHAIN_KEYS:
        parser.error(f"--small is at least {CHAIN_KEYS}, and --blocks twice that")
    return options


def free_ports(wanted: int) -> int:
    """The first of so many loopback ports in a row that nobody listens on now."""
    for first in range(21_000, 32_000, wanted):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + wanted):
                    probe = stack.enter_context(socket(AF_INET, SOCK_STREAM))
                    probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise BenchError(f"no {wanted} free ports in a row")


def measure(options: Options, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole run."""
    channels = 2 * options.ranks + 2
    flags = ["--events-port-base", str(free_ports(2 * channels)), "--events-channels-max", str(channels)]
    flags += ["--expire-ms", str(3_600_000), *NEVER_SNAPSHOT]
    with Service(directory / "data", *flags) as service:
        bench = Bench(options, service)
        bench.set_up()
        endpoints = [view["endpoint"] for name in (BIG, SMALL) for view in bench.streams(name)]
        each = -(-options.workers // min(options.ranks, options.workers))
        with Subscribers(endpoints, each) as readers:
            time.sleep(1.0)
            say(f"writing {options.blocks:,} blocks")
            filled = fill(bench, readers, say)
            say("replays for one who knows nothing")
            recovered = recovery(bench, options.replays)
            say("all of it told again")
            again = told_again(bench, readers)
            found = lookups(bench, readers, say)
        bench.client.close()
    return {
        "blocks": filled["blocks"],
        "workers": options.workers,
        "streams": len(endpoints),
        "block_tokens": options.tokens,
        "fill": {name: round(value, 2) for name, value in filled.items()},
        "told_again": {name: round(value, 2) for name, value in again.items()},
        "recovery": {
            "seconds": round(recovered.seconds, 3),
            "first_batch_s": round(recovered.first_s, 3),
            "batches": recovered.batches,
            "blocks": recovered.blocks,
            "blocks_s": round(recovered.blocks / recovered.seconds),
            "bytes_a_block": round(recovered.bytes / max(1, recovered.blocks), 1),
        },
        "lookups": found,
    }


def text_of(result: dict[str, Any]) -> str:
    """For people."""
    fill_, again, back, found = (result[key] for key in ("fill", "told_again", "recovery", "lookups"))
    rows = [
        f"{result['blocks']:,} blocks of {result['block_tokens']} tokens announced to {result['workers']} "
        f"subscribers of {result['streams']} streams",
        f"written at {fill_['write_blocks_s']:,.0f} blocks/s and announced at "
        f"{fill_['announced_blocks_s']:,.0f} blocks/s ({fill_['delivered_worker_blocks_s']:,.0f} to all)",
        f"told again at {again['blocks_s']:,.0f} blocks/s ({again['worker_blocks_s']:,.0f} to all, "
        f"{again['mb_s']:,.0f} MB/s); processor time a block: publisher "
        f"{again['publisher_cpu_us_a_block']:.1f} us, service {again['service_cpu_us_a_block']:.1f} us",
        f"bytes a block: {fill_['bytes_a_block']:.0f} on the wire, {fill_['publisher_bytes_a_block']:.0f} of "
        f"the publisher's memory, {fill_['service_bytes_a_block']:.0f} of the service's",
        f"recovery of one who knows nothing: {back['blocks']:,} blocks in {back['seconds']:.2f} s "
        f"({back['blocks_s']:,} blocks/s, first batch after {back['first_batch_s'] * 1000:.0f} ms)",
        f"lookups of {LOOKUP_KEYS} keys, p99: {found['writes_unannounced']['p99_ms']:.2f} ms beside writes, "
        f"{found['writes_announced']['p99_ms']:.2f} ms beside the same writes announced "
        f"(x {found['p99_ratio']:.2f}); {found['idle']['p99_ms']:.2f} ms idle, "
        f"{found['told_again']['p99_ms']:.2f} ms while {found['told_again']['stored_blocks_s']:,} blocks/s "
        f"are told again (x {found['p99_ratio_told_again']:.2f})",
    ]
    return "\n".join(rows)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise SystemExit("bench-events: took too long" if number == signal.SIGALRM else 128 + number)


def main() -> int:
    """The exit status."""
    options = arguments()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _give_up)
    signal.alarm(SECONDS_MAX)

    def say(doing: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{doing}")
            sys.stderr.flush()

    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="ucm-bench-") as directory:
            machine = machine_of(Path(directory))
            result = measure(options, Path(directory), say)
    except BenchError as error:
        say("")
        sys.stderr.write(f"bench-events: {error}\n")
        return 1
    say("")
    result["seconds"] = round(time.monotonic() - began_s, 1)
    sys.stdout.write(f"{text_of(result)}\nmachine: {machine.line()}\n{json.dumps(result)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
