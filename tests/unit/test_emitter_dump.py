"""The answer to `GET /dump`, in the form that Dynamo's indexer takes from a peer."""

import json
from collections import Counter
from typing import Any

from metaservice.core.windows import CPU, STORAGE
from metaservice.publish.emitters.dump import Held, dump
from metaservice.publish.emitters.spans import Checks
from tests.unit.emitter_house import Chain, prompt, stream

IDS = list(range(8))
LOCAL = [9143094415614847814, 12124091508212882195]
"""Dynamo's own hashes of 0..3 and 4..7."""


def body(*held: Held) -> Any:
    return json.loads(b"".join(dump(held, Checks(Counter()))))


def pool(chain: Chain, *workers: tuple[int, int], **changes: Any) -> Held:
    return Held(stream(), "default", workers, [chain.run(**changes)])


def test_one_workers_blocks() -> None:
    """An indexer of Dynamo 1.6.1 that was started with `--peers` took answers of this form."""
    chain = Chain(IDS)
    assert body(pool(chain, (7, 1))) == {
        "m:default": {
            "block_size": 4,
            "events": [
                {
                    "worker_id": 7,
                    "storage_tier": "external",
                    "event": {
                        "event_id": 0,
                        "data": {
                            "stored": {
                                "parent_hash": None,
                                "start_position": None,
                                "blocks": [
                                    {
                                        "block_hash": chain.hashes[0],
                                        "tokens_hash": LOCAL[0],
                                        "mm_extra_info": None,
                                    },
                                    {
                                        "block_hash": chain.hashes[1],
                                        "tokens_hash": LOCAL[1],
                                        "mm_extra_info": None,
                                    },
                                ],
                            }
                        },
                        "dp_rank": 1,
                    },
                    "residency_domain": "worker",
                }
            ],
        }
    }


def test_nothing_announced_is_an_empty_answer() -> None:
    assert body() == {}
    assert body(Held(stream(), "default", [], [Chain(IDS).run()])) == {
        "m:default": {"block_size": 4, "events": []}
    }


def test_every_worker_has_every_span_under_a_number_of_its_own() -> None:
    chain = Chain(prompt(10_000, 150))
    events = body(pool(chain, (1, 0), (2, 0), (2, 1)))["m:default"]["events"]
    assert [(event["worker_id"], event["event"]["dp_rank"]) for event in events] == [
        (1, 0),
        (2, 0),
        (2, 1),
    ] * 3
    assert [event["event"]["event_id"] for event in events] == list(range(9))
    parents = [event["event"]["data"]["stored"]["parent_hash"] for event in events[::3]]
    assert parents == [None, chain.hashes[63], chain.hashes[127]]


def test_media_have_dynamos_names() -> None:
    chain = Chain(IDS)
    local = [
        Held(stream(node="n"), "default", [(1, 0)], [chain.run(medium=medium, node="n")])
        for medium in (CPU, STORAGE)
    ]
    tiers = [event["storage_tier"] for event in body(*local, pool(chain, (1, 0)))["m:default"]["events"]]
    assert tiers == ["host_pinned", "disk", "external"]


def test_models_and_groups_are_apart_and_instances_of_one_together() -> None:
    chain = Chain(IDS)
    told = body(
        pool(chain, (1, 0)),
        Held(stream(model="other"), "g", [(2, 0)], [chain.run()]),
        Held(stream(instance="j"), "default", [(3, 0)], [chain.run()]),
    )
    assert {name: [event["worker_id"] for event in of["events"]] for name, of in told.items()} == {
        "m:default": [1, 3],
        "other:g": [2],
    }


def test_row_20_salts_and_adapters_have_hashes_of_their_own() -> None:
    """As ai-dynamo-runtime 1.6.1 makes them of these ids."""
    ids = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1]

    def hashes(salt: str = "", lora: str = "") -> list[int]:
        events = body(pool(Chain(ids, salt=salt, lora=lora), (1, 0)))["m:default"]["events"]
        return [block["tokens_hash"] for block in events[0]["event"]["data"]["stored"]["blocks"]]

    assert hashes() == [14054138925946121321, 6404824029841797909]
    assert hashes(lora="adapter-a") == [4937911255529010124, 14134298358384424398]
    assert hashes(salt="tenant-a") == [2459644305745921723, 12976456330909618075]
    assert hashes(salt="dynamo-cache-salt:tenant-a") == hashes(salt="tenant-a")
    assert hashes(lora="adapter-a", salt="tenant-a") == [6533629176612766906, 5472262812130445438]


def test_row_28_a_bad_block_is_left_out_and_counted() -> None:
    chain = Chain(IDS)
    chain.tokens[1] = b""
    invalid: Counter[str] = Counter()
    text = b"".join(dump([pool(chain, (1, 0))], Checks(invalid)))
    [event] = json.loads(text)["m:default"]["events"]
    assert len(event["event"]["data"]["stored"]["blocks"]) == 1
    assert invalid == {"tokens": 1}


def test_names_are_written_as_json() -> None:
    told = body(Held(stream(model='a "b"/ü'), "g", [(1, 0)], [Chain(IDS).run()]))
    assert list(told) == ['a "b"/ü:g']
