"""Questions of routers: the longest prefix by engine and tier, of keys and of token ids."""

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from struct import pack
from typing import Any

import msgspec
import pytest

from metaservice.core.windows import CPU, EXTERNAL, STORAGE
from metaservice.publish.errors import PublisherUnavailable
from metaservice.publish.feed import InstanceUp
from metaservice.publish.hashes import VLLM_SEED, block_keys, event_hash, token_root
from metaservice.publish.holdings import Holdings, Member, Room
from metaservice.publish.route import Router
from metaservice.wire.schemas_events import EngineRoute, RouteAnswer, RouteAsk
from tests.unit.ingest_house import BLOCK, ROOT, engine_up, ids, instance_up, packed

GPU, HOST, DISK, FAR = range(4)
TOKENS = ids(6)
KEYS = [sha256(bytes((row,))).digest() for row in range(6)]
HASHES = [event_hash(key, "tail64") for key in KEYS]
CBOR = {"hash_scheme": "sha256_cbor", "hash_seed": VLLM_SEED}
"""An instance whose keys can be computed from token ids."""


class Pool:
    """What is announced: places of each key."""

    def __init__(self) -> None:
        self.places: dict[bytes, list[tuple[str, str]]] = {}
        self.of = {"i0": self.places}

    def find(self, instance: str, keys: Sequence[bytes]) -> list[Collection[tuple[str, str]]]:
        found: list[Collection[tuple[str, str]]] = []
        places = self.of.get(instance, {})
        for key in keys:
            if key not in places:
                break
            found.append(places[key])
        return found


class Town:
    """Engines, a pool, and a router in the same place."""

    def __init__(self, **given: Any) -> None:
        self.now_s = 50.0
        self.instance = instance_up(**given)
        self.instances: dict[str, InstanceUp] = {"i0": self.instance}
        self.holdings = Holdings(Room(100_000, 10_000, 100))
        self.pool = Pool()
        self.router = Router(self.holdings, self.instances, self.pool, lambda: self.now_s, 1_024)

    def engine(self, name: str, **given: Any) -> Member:
        return self.holdings.add(engine_up(name, **given), True)

    async def ask(self, *, instance: str = "i0", **given: Any) -> RouteAnswer:
        fields: dict[str, Any] = {"keys": [], "token_ids": b"", "lora": "", "salt": "", "top_k": 0, **given}
        ask = RouteAsk(instance=instance, **fields)
        return msgspec.msgpack.decode(await self.router.route(msgspec.msgpack.encode(ask)), type=RouteAnswer)

    async def by_keys(self, count: int = 6, **given: Any) -> list[EngineRoute]:
        return (await self.ask(keys=KEYS[:count], **given)).engines

    async def by_tokens(self, tokens: Sequence[int] = TOKENS, **given: Any) -> list[EngineRoute]:
        return (await self.ask(token_ids=pack(f"<{len(tokens)}I", *tokens), **given)).engines


def put(
    member: Member, tier: int, first: int, last: int, *, root: bytes = ROOT, reported: bool = False
) -> None:
    """Blocks `first` to before `last` of the prompt."""
    source = member.reported if reported else member.own
    parent = HASHES[first - 1] if first else None
    source.store(tier, parent, HASHES[first:last], packed(TOKENS)[first:last], root)


def tiers(route: EngineRoute) -> tuple[int, int, int, int]:
    return route.tiers.gpu, route.tiers.cpu, route.tiers.storage, route.tiers.external


async def test_the_longest_prefix_by_tier_takes_in_all_nearer_ones() -> None:
    town = Town()
    member = town.engine("e0")
    put(member, GPU, 0, 2)
    put(member, HOST, 1, 3)
    put(member, GPU, 3, 4)
    put(member, FAR, 4, 6)
    for found in (await town.by_keys(), await town.by_tokens()):
        (route,) = found
        assert tiers(route) == (2, 4, 4, 6)
        assert (route.blocks, route.tokens) == (6, 6 * BLOCK)


async def test_nothing_counts_behind_a_gap() -> None:
    town = Town()
    put(town.engine("e0"), GPU, 1, 6)
    member = town.engine("e1")
    put(member, HOST, 0, 2)
    put(member, GPU, 3, 6)
    for found in (await town.by_keys(), await town.by_tokens()):
        assert [(route.engine, tiers(route)) for route in found] == [("e1", (0, 2, 2, 2))]


async def test_the_pool_counts_for_every_engine_and_a_nodes_storage_for_its_own() -> None:
    town = Town()
    put(town.engine("near", node="n0"), GPU, 0, 1)
    town.engine("far", node="n1")
    town.engine("nowhere", node="")
    for row, places in enumerate(
        ([(EXTERNAL, "")], [(EXTERNAL, ""), (CPU, "n0")], [(CPU, "n0"), (STORAGE, "n1")])
    ):
        town.pool.places[KEYS[row]] = list(places)
    answer = await town.ask(keys=KEYS)
    assert [(route.engine, tiers(route)) for route in answer.engines] == [
        ("near", (1, 3, 3, 3)),
        ("far", (0, 0, 0, 3)),
        ("nowhere", (0, 0, 0, 2)),
    ]
    assert (answer.announced, answer.asked, answer.block_size_tokens, answer.keys) == (2, 6, BLOCK, [])
    assert [route.staleness_ms for route in answer.engines] == [-1, -1, -1]


async def test_the_best_come_first_and_only_as_many_as_wanted() -> None:
    town = Town()
    for name, tier, count in (
        ("a", FAR, 3),
        ("b", GPU, 3),
        ("c", HOST, 3),
        ("d", GPU, 5),
        ("e", GPU, 3),
        ("f", GPU, 0),
    ):
        member = town.engine(name)
        if count:
            put(member, tier, 0, count)
    longest = town.engine("g")
    put(longest, GPU, 0, 1)
    put(longest, DISK, 1, 6)
    assert [route.engine for route in await town.by_keys()] == ["g", "d", "b", "e", "c", "a"]
    assert [route.engine for route in await town.by_keys(top_k=2)] == ["g", "d"]


async def test_what_is_reported_counts_beside_an_engines_own_events_while_it_is_visible() -> None:
    town = Town()
    member = town.engine("e0")
    put(member, GPU, 0, 2)
    put(member, HOST, 2, 4, reported=True)
    member.heard_s = town.now_s - 1.5
    (route,) = await town.by_keys()
    assert (tiers(route), route.visible, route.staleness_ms) == ((2, 4, 4, 4), True, 1_500)
    member.visible = False
    (route,) = await town.by_keys()
    assert (tiers(route), route.visible) == ((2, 2, 2, 2), False)


async def test_token_ids_find_blocks_whatever_the_engine_hashes_with() -> None:
    town = Town()
    strange = town.engine("strange")
    strange.own.store(GPU, None, [2**60 + row for row in range(6)], packed(TOKENS), ROOT)
    (route,) = await town.by_tokens()
    assert route.blocks == 6
    assert await town.by_keys() == []
    (route,) = await town.by_tokens([*TOKENS, 1, 2])
    assert route.blocks == 6, "a block that is not full is left out"
    (route,) = await town.by_tokens([*TOKENS[:9], 7, *TOKENS[10:]])
    assert route.blocks == 2


async def test_keys_of_token_ids_are_computed_where_the_scheme_is_known() -> None:
    town = Town(**CBOR)
    keys = block_keys("sha256_cbor", VLLM_SEED, TOKENS, BLOCK)
    assert keys is not None
    member = town.engine("e0")
    member.own.store(GPU, None, [event_hash(key, "tail64") for key in keys[:2]], None, ROOT)
    town.pool.places.update({key: [(EXTERNAL, "")] for key in keys[:4]})
    answer = await town.ask(token_ids=pack("<24I", *TOKENS))
    assert (answer.keys, answer.announced, answer.asked) == (keys, 4, 6)
    assert tiers(answer.engines[0]) == (2, 2, 2, 4), "by their hash, though nobody told its tokens"
    short = await Town(**CBOR, key_length=16).ask(token_ids=pack("<24I", *TOKENS))
    assert short.keys == [], "keys of another length are not those of this scheme"
    unknown = await Town().ask(token_ids=pack("<24I", *TOKENS))
    assert (unknown.keys, unknown.announced) == ([], 0)


async def test_row_19_row_20_adapters_and_salts_do_not_meet() -> None:
    town = Town(**CBOR)
    for name, realm in (("base", ("", "")), ("adapter", ("one", "")), ("salted", ("", "acme"))):
        member = town.engine(name)
        member.own.store(
            GPU,
            None,
            [hash((name, row)) % 2**60 + 2**60 for row in range(6)],
            packed(TOKENS),
            token_root(*realm),
        )
    asked: Mapping[str, dict[str, Any]] = {
        "base": {},
        "adapter": {"lora": "one"},
        "salted": {"salt": "acme"},
    }
    for name, realm_asked in asked.items():
        assert [route.engine for route in await town.by_tokens(**realm_asked)] == [name]
    assert await town.by_tokens(lora="one", salt="acme") == []
    adapters = Town(lora="one")
    put(adapters.engine("e0"), GPU, 0, 2, root=token_root("one"))
    assert len(await adapters.by_tokens()) == 1, "an instance of an adapter is asked for it"


async def test_an_engine_that_keeps_pairs_is_asked_by_pairs() -> None:
    town = Town()
    member = town.engine("e0", dialect="sglang")
    member.overlap = 1
    windows = [packed(TOKENS[at : at + BLOCK + 1], BLOCK + 1)[0] for at in range(0, 5 * BLOCK, BLOCK)]
    member.own.store(GPU, None, [2**50 + row for row in range(5)], windows, ROOT)
    (route,) = await town.by_tokens()
    assert route.blocks == 5, "the last block's next token is not known"
    changed = [*TOKENS]
    changed[BLOCK] = 999
    assert await town.by_tokens(changed) == [], "the first block takes in the token behind it"


async def test_an_adapters_blocks_are_those_of_the_base_models_engines() -> None:
    town = Town()
    town.instances["i0.a"] = instance_up(instance="i0.a", lora="a", base="i0")
    town.instances["i0.b"] = instance_up(instance="i0.b", lora="b", base="i0")
    put(town.engine("near", node="n0"), GPU, 0, 2, root=token_root("a"))
    put(town.engine("far", node="n1"), GPU, 0, 3)
    town.pool.of["i0.a"] = {key: [(EXTERNAL, "")] for key in KEYS[:4]}
    for instance, lora in (("i0.a", ""), ("i0.a", "a"), ("i0", "a")):
        answer = await town.ask(instance=instance, lora=lora, keys=KEYS)
        assert (answer.instance, answer.announced) == ("i0.a", 4), (instance, lora)
        assert {(one.engine, one.blocks) for one in answer.engines} == {("near", 4), ("far", 4)}
    (route,) = await town.by_tokens(instance="i0", lora="a")
    assert (route.engine, tiers(route)) == ("near", (2, 2, 2, 2)), "its own memory, found by token ids"
    for lora, instance in (("", "i0"), ("b", "i0.b"), ("unknown", "i0")):
        answer = await town.ask(lora=lora, keys=KEYS)
        assert (answer.instance, answer.announced) == (instance, 0), "another adapter's pool"


async def test_questions_that_cannot_be_answered_are_refused_by_name() -> None:
    town = Town()
    for given, code in (
        ({"instance": "i9", "keys": KEYS}, "instance_unknown"),
        ({"keys": [b"short" * 3]}, "key_length"),
    ):
        with pytest.raises(PublisherUnavailable) as refused:
            await town.ask(**given)
        assert refused.value.code == code
    for body in (b"", msgspec.msgpack.encode({"instance": "i0"}), b"\x91" * 50_000):
        with pytest.raises(PublisherUnavailable) as refused:
            await town.router.route(body)
        assert refused.value.code == "invalid_field"
    answer = await town.ask()
    assert (answer.asked, answer.engines) == (0, [])


async def test_a_long_prompt_is_answered_in_pieces() -> None:
    town = Town(**CBOR)
    tokens = ids(3_000)
    for row in range(4):
        town.engine(f"e{row}").own.store(GPU, None, [2**50 + at for at in range(3_000)], packed(tokens), ROOT)
    found = await town.by_tokens(tokens)
    assert [route.blocks for route in found] == [3_000] * 4
    keys = block_keys("sha256_cbor", VLLM_SEED, tokens, BLOCK)
    assert (await town.ask(token_ids=pack(f"<{len(tokens)}I", *tokens))).keys == keys
