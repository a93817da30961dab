"""Object keys, as Dynamo's embedded router looks for them beside SGLang."""

from hashlib import sha256
from typing import Any

import pytest

from metaservice.core.windows import STORAGE, Window
from metaservice.publish.emitters import make
from metaservice.publish.hashes import page_key
from metaservice.wire.tokens import pack_tokens
from tests.unit.emitter_house import NOW_MS, Chain, decode, prompt, stream, window

IDS = list(range(100, 116))


class Pages(Chain):
    """A prompt whose blocks are named as SGLang names pages."""

    def __init__(self, ids: list[int], salt: str = "", lora: str = "") -> None:
        super().__init__(ids, salt=salt, lora=lora)
        before = b""
        for at, packed in enumerate(self.tokens):
            before = self.keys[at] = page_key(before, packed)


PAGES = Pages(IDS)


def objects(of: Window, name: str = "mooncake", **changes: Any) -> list[tuple[str, str]]:
    """(what happened, to which object) of each event."""
    told = decode(make(name).batch(stream(**changes), of))[1]
    return [(event["event_type"], event["object_key"]) for event in told]


def test_a_page_is_named_by_the_bytes_of_its_ids_and_all_before() -> None:
    first = sha256(bytes.fromhex("64000000 65000000 66000000 67000000")).digest()
    second = sha256(first + bytes.fromhex("68000000 69000000 6a000000 6b000000")).digest()
    assert PAGES.keys[:2] == [first, second]


def test_the_batch_is_whole_milliseconds_events_and_rank() -> None:
    """A float would have the router drop the message."""
    ts, [event], rank = decode(make("mooncake:tp=0").batch(stream(rank=3), window(stored=[PAGES.run(0, 1)])))
    assert (ts, rank) == (NOW_MS, 3)
    assert isinstance(ts, int)
    assert event == {
        "event_type": "stored",
        "object_key": f"{PAGES.keys[0].hex()}__k",
        "tenant_id": "default",
    }


@pytest.mark.parametrize(
    ("name", "objects_of_a_page"),
    [
        ("mooncake", ["{}_0_k", "{}_0_v"]),
        ("mooncake:tp=2", ["{}_0_k", "{}_0_v", "{}_1_k", "{}_1_v"]),
        ("mooncake:tp=0", ["{}__k"]),
        ("mooncake:tp=1,prefix=pool", ["pool_{}_0_k", "pool_{}_0_v"]),
        ("mooncake:prefix=pool,tp=0", ["pool_{}__k"]),
    ],
)
def test_a_page_is_these_objects(name: str, objects_of_a_page: list[str]) -> None:
    pages = [PAGES.keys[1].hex(), PAGES.keys[2].hex()]
    each = [spelt.format(page) for page in pages for spelt in objects_of_a_page]
    assert objects(window(stored=[PAGES.run(1, 3)]), name) == [("stored", key) for key in each]
    assert objects(window(removed=[PAGES.gone(1, 3)]), name) == [("removed", key) for key in each]


def test_what_is_restated_is_stored_and_what_is_gone_again_is_removed() -> None:
    said = window(restated=[PAGES.run(0, 1)], again=[PAGES.gone(1, 2)])
    assert [what for what, _ in objects(said, "mooncake:tp=0")] == ["removed", "stored"]


def test_what_only_one_node_reaches_is_not_in_the_shared_pool() -> None:
    local = window(
        stored=[PAGES.run(medium=STORAGE, node="n")], removed=[PAGES.gone(medium=STORAGE, node="n")]
    )
    assert objects(local, node="n") == []


def test_a_key_that_sglang_would_not_ask_for_is_not_told() -> None:
    emitter = make("mooncake")
    pages = Pages(IDS)
    pages.keys[2] = sha256(b"vLLM hashes otherwise").digest()
    said = window(stored=[pages.run(), Chain(IDS).run()])
    assert len(decode(emitter.batch(stream(), said))[1]) == 4
    assert emitter.invalid == {"not_a_page": 6}


@pytest.mark.parametrize("packed", [b"", b"\x09", pack_tokens([1, 2, 3])])
def test_row_03_nor_is_one_without_the_right_number_of_ids(packed: bytes) -> None:
    emitter = make("mooncake")
    pages = Pages(IDS)
    pages.tokens[0] = packed
    assert decode(emitter.batch(stream(), window(stored=[pages.run()])))[1] == []
    assert emitter.invalid == {"not_a_page": 4}


@pytest.mark.parametrize(
    ("realm", "reason"), [({"salt": "a"}, "salt"), ({"lora": "a"}, "adapter")], ids=["salt", "adapter"]
)
def test_row_20_a_salt_or_an_adapter_is_in_no_key_and_so_not_told(realm: dict[str, str], reason: str) -> None:
    emitter = make("mooncake")
    assert decode(emitter.batch(stream(), window(stored=[Pages(IDS, **realm).run()])))[1] == []
    assert emitter.invalid == {reason: 4}


def test_keys_of_another_length_and_columns_that_do_not_match() -> None:
    emitter = make("mooncake")
    said = window(
        stored=[PAGES.run(key_length=16), PAGES.run(tokens=PAGES.tokens[:3])],
        removed=[PAGES.gone(key_length=16)],
    )
    assert decode(emitter.batch(stream(), said))[1] == []
    assert emitter.invalid == {"key_length": 12, "columns": 3}


def test_a_long_run_is_told_in_pieces() -> None:
    pages = Pages(prompt(10_000, 150))
    pieces = list(make("mooncake").snapshot(stream(), [pages.run()], [PAGES.gone()]))
    assert [len(piece) for piece in pieces] == [8, 128, 128, 44]
