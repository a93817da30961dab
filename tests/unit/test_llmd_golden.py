"""Our batches held against llm-d's index: which keys it makes of them and how it scores, number by number.

The judge is a model written by hand from llm-d's rules (`llmd_model`), and every expected number stands here
as one. Whether llm-d's Go program agrees is checked outside this repository, by sending it frames like these.
"""

import msgspec
import pytest

from metaservice.core.windows import CPU, EXTERNAL, STORAGE
from metaservice.publish.emitters import make
from tests.unit.emitter_house import Chain, decode, frames, prompt, stream, window
from tests.unit.llmd_model import Llmd, block_key, fnv64a, root

IDS = list(range(100, 116))
PLAIN = [7818764386368817249, 7275372993512346249, 11642435366103556196, 8428323749559861931]
ADAPTER = [6856926853185336272, 10837912697072024019, 18304133713460478983, 12934139440138610371]
SALTED = [11692985834905114789, 4410527517857009323, 14943582244526836799, 6687083530905863668]
BOTH = [9829786768770555706, 18327911605101858423, 17998590807222415577, 772676031373335890]
WIDTHS = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1]

POD = stream(topic=b"kv@10.0.0.1:8000@m")
OTHER = stream(topic=b"kv@10.0.0.2:8000@m")


def index(**settings: object) -> Llmd:
    """An index of the engines' block size with weights for our media."""
    plain = {"block_size_tokens": 4, "weights": {"gpu": 1.0, "cpu": 0.8, "storage": 0.5, "external": 0.25}}
    return Llmd(**(plain | settings))  # type: ignore[arg-type]  # whatever the test sets


def tell(llmd: Llmd, to: object = POD, number: int = 2**20, **parts: object) -> None:
    """Have our encoder tell the index these parts of a window."""
    assert isinstance(to, type(POD))
    llmd.receive(frames(to, number, make("vllm").batch(to, window(number, **parts))))


# ---------------------------------------------------------------- the judge itself


def test_fnv_is_fnv() -> None:
    """The published vectors of FNV-1a."""
    assert fnv64a(b"") == 0xCBF29CE484222325
    assert fnv64a(b"a") == 0xAF63DC4C8601EC8C
    assert fnv64a(b"foobar") == 0x85944171F73967E8


@pytest.mark.parametrize(
    ("model", "ids", "size", "seed", "salt", "keys"),
    [
        ("m", IDS, 4, "", "", PLAIN),
        ("adapter-a", IDS, 4, "", "", ADAPTER),
        ("m", IDS, 4, "", "tenant-a", SALTED),
        ("adapter-a", IDS, 4, "", "tenant-a", BOTH),
        ("m", IDS, 8, "", "", [2934281059590545437, 1530502051046707245]),
        ("m", WIDTHS, 4, "", "", [10352683812554836713, 15394423760671448348]),
        (
            "m",
            IDS,
            4,
            "42",
            "",
            [16897203716128215011, 16342687693988902673, 14510689877552394636, 9462622945318344936],
        ),
        ("m", list(range(48)), 24, "", "", [17336034673354626591, 12411602745623207364]),
        ("m" * 30, list(range(300)), 300, "", "", [17794384657377897683]),
    ],
    ids=["plain", "adapter", "salt", "both", "larger", "widths", "seed", "a-long-head", "a-longer-head"],
)
def test_keys_of_a_request(
    model: str, ids: list[int], size: int, seed: str, salt: str, keys: list[int]
) -> None:
    """FNV-64a over canonical CBOR: the seed, then the model, then [parent, tokens, extras] block by block."""
    assert Llmd(block_size_tokens=size, seed=seed).keys(model, ids, salt) == keys


def test_a_key_by_hand() -> None:
    """[parent, [1, 2], nothing]: 83, 1b and the parent in 8 bytes, 82 01 02, f6."""
    parent = root("m", "")
    assert block_key(parent, [1, 2], None) == fnv64a(
        bytes.fromhex("831b") + parent.to_bytes(8, "big") + bytes.fromhex("820102f6")
    )


# ---------------------------------------------------------------- our frames, its keys


def test_the_frames_themselves() -> None:
    """Byte by byte: what is sent is not changed by accident."""
    chain = Chain([100, 101, 102, 103, 104, 70_000, 2**32 - 1, 0], size=4)
    payload = make("vllm").batch(POD, window(stored=[chain.run()], removed=[chain.gone(0, 1, medium=CPU)]))
    assert frames(POD, 2**20, payload)[:2] == (b"kv@10.0.0.1:8000@m", bytes.fromhex("0000000000100000"))
    assert payload.hex() == (
        "93cb41da4ae2401000009383a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf"
        "9492a2669b49b960a66d656469756da343505583a474797065ac426c6f636b52656d6f766564ac626c6f636b5f"
        "68617368657392cf9492a2669b49b960cf17149bca0ca857dba66d656469756da845585445524e414c88a47479"
        "7065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf9492a2669b49b960cf17149bca0ca857"
        "dbb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473986465666768ce00011170ceffffff"
        "ff00aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da845585445524e414ca96c6f72615f"
        "6e616d65c000"
    )


def test_a_stored_run_makes_the_keys_of_the_request() -> None:
    llmd = index()
    tell(llmd, stored=[Chain(IDS).run()])
    assert sorted(llmd.pods) == sorted(PLAIN)
    assert llmd.scores("m", IDS) == {"10.0.0.1:8000": 1.0}
    assert llmd.scores("m", [*IDS[:8], 0, 0, 0, 0]) == {"10.0.0.1:8000": 0.5}
    assert llmd.scores("m", [0, *IDS]) == {}
    assert llmd.scores("another", IDS) == {}


def test_a_run_told_in_parts_makes_the_same_keys() -> None:
    chain = Chain(IDS)
    llmd = index()
    tell(llmd, stored=[chain.run(0, 1), chain.run(1, 3)])
    tell(llmd, stored=[chain.run(3)], number=2**20 + 1)
    assert sorted(llmd.pods) == sorted(PLAIN)


def test_a_run_of_several_events_makes_the_keys_of_the_request() -> None:
    """150 blocks go in three events, each hanging on the one before."""
    ids = prompt(10_000, 150)
    llmd = index()
    tell(llmd, stored=[Chain(ids).run()])
    assert len(llmd.pods) == 150
    assert llmd.scores("m", ids) == {"10.0.0.1:8000": 37.5}


@pytest.mark.parametrize(
    ("medium", "node", "score"), [(EXTERNAL, "", 1.0), (STORAGE, "n", 2.0), (CPU, "n", 3.2)]
)
def test_media_have_the_weights_of_the_configuration(medium: str, node: str, score: float) -> None:
    llmd = index()
    local = stream(node=node, topic=POD.topic)
    tell(llmd, to=local, stored=[Chain(IDS).run(medium=medium, node=node)])
    assert llmd.scores("m", IDS) == {"10.0.0.1:8000": score}


def test_a_medium_without_a_weight_counts_as_the_gpu() -> None:
    """Why an operator must configure one for `external`."""
    llmd = Llmd(block_size_tokens=4)
    tell(llmd, stored=[Chain(IDS).run()])
    assert llmd.scores("m", IDS) == {"10.0.0.1:8000": 4.0}


def test_the_best_tier_of_a_block_counts() -> None:
    llmd = index()
    chain = Chain(IDS)
    tell(llmd, stored=[chain.run()])
    tell(llmd, to=stream(node="n", topic=POD.topic), stored=[chain.run(0, 2, node="n", medium=CPU)])
    assert llmd.scores("m", IDS) == {"10.0.0.1:8000": 2.1}


@pytest.mark.parametrize(
    ("size", "whole", "keys"),
    [
        (8, 0.5, [2934281059590545437, 1530502051046707245]),
        (
            2,
            2.0,
            [
                10716812876237228330,
                4139083484201237050,
                12825408610856295543,
                10357254752137165527,
            ],
        ),
    ],
    ids=["larger", "smaller"],
)
def test_row_16_an_index_with_another_block_size_makes_its_own_keys(
    size: int, whole: float, keys: list[int]
) -> None:
    llmd = index(block_size_tokens=size)
    chain = Chain(IDS)
    tell(llmd, stored=[chain.run()])
    assert set(keys) <= set(llmd.pods)
    assert llmd.scores("m", IDS) == {"10.0.0.1:8000": whole}
    tell(llmd, removed=[chain.gone()])
    assert not llmd.pods and not llmd.engine_keys


def test_row_16_half_a_block_of_the_index_makes_no_key() -> None:
    llmd = index(block_size_tokens=8)
    tell(llmd, stored=[Chain(IDS).run(0, 1)])
    assert not llmd.pods
    assert llmd.skipped == {"half": 1}


# ---------------------------------------------------------------- adapters and salts


def test_row_19_base_and_two_adapters_are_three_entries() -> None:
    llmd = index()
    chains = {name: Chain(IDS, lora=name) for name in ("", "adapter-a", "adapter-b")}
    tell(llmd, stored=[chain.run() for chain in chains.values()])
    assert len(llmd.pods) == 12
    assert set(PLAIN) | set(ADAPTER) <= set(llmd.pods)
    tell(llmd, removed=[chains["adapter-a"].gone()])
    assert llmd.scores("adapter-a", IDS) == {}
    assert llmd.scores("adapter-b", IDS) == llmd.scores("m", IDS) == {"10.0.0.1:8000": 1.0}


def test_row_19_an_instance_for_one_adapter_needs_no_name_in_its_runs() -> None:
    llmd = index()
    tell(llmd, to=stream(lora="adapter-a", topic=POD.topic), stored=[Chain(IDS).run()])
    assert sorted(llmd.pods) == sorted(ADAPTER)


def test_row_20_a_salt_is_in_the_first_key_and_so_in_all() -> None:
    llmd = index()
    chain = Chain(IDS, salt="tenant-a")
    tell(llmd, stored=[chain.run(0, 2)])
    tell(llmd, stored=[chain.run(2)])
    assert sorted(llmd.pods) == sorted(SALTED)
    assert llmd.scores("m", IDS, salt="tenant-a") == {"10.0.0.1:8000": 1.0}
    assert llmd.scores("m", IDS) == llmd.scores("m", IDS, salt="tenant-b") == {}


def test_row_20_the_same_text_of_three_tenants_is_three_entries() -> None:
    llmd = index()
    tell(llmd, stored=[Chain(IDS, salt=salt).run() for salt in ("", "tenant-a", "tenant-b")])
    assert len(llmd.pods) == 12
    assert set(PLAIN) | set(SALTED) <= set(llmd.pods)


def test_row_20_a_salt_and_an_adapter_at_once() -> None:
    llmd = index()
    tell(llmd, stored=[Chain(IDS, salt="tenant-a", lora="adapter-a").run()])
    assert sorted(llmd.pods) == sorted(BOTH)


def test_row_20_a_salted_prompt_of_several_events() -> None:
    """Only the event that has the prompt's first block carries the salt for llm-d."""
    ids = prompt(20_000, 130)
    llmd = index()
    tell(llmd, stored=[Chain(ids, salt="tenant-a").run()])
    assert sorted(llmd.pods) == sorted(llmd.keys("m", ids, "tenant-a"))


# ---------------------------------------------------------------- what it does not take


def test_row_28_it_takes_no_small_hash_and_we_send_none() -> None:
    """A key that ends in a number below 2^32 is one in four billion, or somebody's malice."""
    chain = Chain(IDS)
    chain.keys[1] = chain.keys[1][:24] + bytes(4) + chain.keys[1][-4:]
    llmd = index()
    emitter = make("vllm")
    other = Chain(prompt(30_000, 4))
    llmd.receive(frames(POD, 1, emitter.batch(POD, window(stored=[chain.run(), other.run()]))))
    assert llmd.poisoned == 0
    assert llmd.scores("m", IDS) == {"10.0.0.1:8000": 0.25}
    assert llmd.scores("m", prompt(30_000, 4)) == {"10.0.0.1:8000": 1.0}
    assert emitter.invalid == {"hash_low": 1, "behind": 2}


@pytest.mark.parametrize(
    "events",
    [
        [{"type": "Something"}],
        [{"type": "BlockRemoved", "block_hashes": [5], "medium": None}],
        [{"type": "BlockRemoved", "block_hashes": 2**40, "medium": None}],
        [17],
    ],
    ids=["unknown", "small-hash", "no-list", "no-event"],
)
def test_row_28_one_bad_event_spoils_its_batch(events: list[object]) -> None:
    """So the judge would have seen it."""
    good = decode(make("vllm").batch(POD, window(stored=[Chain(IDS).run()])))
    llmd = index()
    llmd.receive(frames(POD, 1, msgspec.msgpack.encode([good[0], good[1] + events, 0])))
    assert llmd.poisoned == 1
    assert not llmd.pods


def test_row_17_a_group_that_is_not_the_main_one_makes_no_key() -> None:
    """An engine's own stream may tell of one. Ours names no group at all, and what is announced is the main
    group's."""
    ts, [_, event], rank = decode(make("vllm").batch(POD, window(stored=[Chain(IDS).run()])))
    llmd = index()
    windowed = event | {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    llmd.receive(frames(POD, 1, msgspec.msgpack.encode([ts, [windowed], rank])))
    assert not llmd.pods
    assert llmd.skipped == {"group": 1}
    assert not {"group_idx", "kv_cache_spec_kind"} & set(event)


def test_row_04_a_block_whose_parent_it_does_not_know_is_passed_over() -> None:
    llmd = index()
    tell(llmd, stored=[Chain(IDS).run(2)])
    assert not llmd.pods
    assert llmd.skipped == {"parent": 1}
