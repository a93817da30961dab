"""What it costs to know engines' own caches: events taken in, memory, questions of routers.

    python tests/bench/bench_ingest.py [--blocks 400000] [--engines 16] [--tokens 16]

One process, without sockets: batches as vLLM publishes them are read and taken in, the blocks of all engines
together `--blocks`. CPU time, since other processes may be busy. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from random import Random
from struct import pack

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from metaservice.publish.feed import EngineUp, InstanceUp
from metaservice.publish.holdings import Holdings, Member, Room
from metaservice.publish.ingest.dialect import DialectReader
from metaservice.publish.ingest.events import EngineEvents
from metaservice.publish.ingest.limits import IngestLimits
from metaservice.publish.route import Router
from metaservice.wire.schemas_events import RouteAsk

CHAIN = 64
"""Blocks of one stored event."""
VOCABULARY = 150_000
PROMPT_BLOCKS = 512
QUESTIONS = 50


class Nothing:
    """Nothing is announced."""

    def find(self, instance: str, keys: Sequence[bytes]) -> list[Collection[tuple[str, str]]]:
        return []


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def stored(random: Random, blocks: int, size: int) -> Iterator[tuple[bytes, list[int]]]:
    """Batches of one event each, and its hashes."""
    for _ in range(blocks // CHAIN):
        hashes = [random.getrandbits(63) | 1 << 40 for _ in range(CHAIN)]
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": [random.randrange(VOCABULARY) for _ in range(size * CHAIN)],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * CHAIN,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        yield msgspec.msgpack.encode([1.0, [event], 0]), hashes


async def taken(events: EngineEvents, reader: DialectReader, payloads: Sequence[bytes]) -> float:
    """CPU seconds."""
    began_s = time.process_time()
    for payload in payloads:
        batch = reader.read(payload)
        assert batch is not None
        await events.take(batch)
    return time.process_time() - began_s


async def measure(blocks: int, engines: int, size: int) -> dict[str, float]:
    instance = InstanceUp(0, "i0", "t0", "m", "m", "", "tail64", size, 32, "other", "", "")
    limits = IngestLimits(entries_per_engine_max=blocks, entries_max=blocks)
    known = Holdings(Room(limits.entries_max, limits.entries_per_engine_max, limits.orphans_per_engine_max))
    bad: Counter[str] = Counter()
    reader = DialectReader("vllm", bad)
    random = Random(1)
    store_s = memory = 0.0
    members: list[tuple[Member, EngineEvents]] = []
    for row in range(engines):
        member = known.add(EngineUp(0, f"e{row}", "x", "i0", 0, "", "", row, "", "", "vllm", 0, -1), True)
        members.append((member, EngineEvents(member, instance, limits, Counter(), bad, lambda *_: None)))
        payloads = [payload for payload, _ in stored(random, blocks // engines, size)]
        before = rss_bytes()
        store_s += await taken(members[-1][1], reader, payloads)
        memory += rss_bytes() - before
    held = known.room.entries

    prompt = [random.randrange(VOCABULARY) for _ in range(PROMPT_BLOCKS * size)]
    event = {
        "type": "BlockStored",
        "block_hashes": [random.getrandbits(63) | 1 << 40 for _ in range(PROMPT_BLOCKS)],
        "token_ids": prompt,
        "block_size": size,
    }
    for member, events in members:
        member.own.remove(0, list(member.own.hashes(0))[:PROMPT_BLOCKS])
        await taken(events, reader, [msgspec.msgpack.encode([1.0, [event], 0])])
    router = Router(known, {"i0": instance}, Nothing(), time.monotonic, limits.slice_blocks)
    ask = msgspec.msgpack.encode(RouteAsk("i0", [], pack(f"<{len(prompt)}I", *prompt), "", "", 0))
    began_s = time.process_time()
    for _ in range(QUESTIONS):
        await router.route(ask)
    route_s = (time.process_time() - began_s) / QUESTIONS

    remove_s = 0.0
    for member, events in members:
        gone = list(member.own.hashes(0))
        random.shuffle(gone)
        one = [
            {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}
            for block in gone
        ]
        payloads = [msgspec.msgpack.encode([1.0, one[at : at + 50], 0]) for at in range(0, len(one), 50)]
        remove_s += await taken(events, reader, payloads)
    assert not bad
    return {
        "blocks": held,
        "engines": engines,
        "stored_per_s": round(held / store_s),
        "removed_per_s": round(held / remove_s),
        "bytes_per_entry": round(memory / held),
        "route_ms": round(1_000 * route_s, 2),
        "route_blocks": PROMPT_BLOCKS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=400_000)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="of a block")
    given = parser.parse_args()
    found = asyncio.run(measure(given.blocks, given.engines, given.tokens))
    for name, value in found.items():
        print(f"{name:>16} {value:>12,}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
