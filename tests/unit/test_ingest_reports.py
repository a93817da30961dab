"""Reports of connectors: deltas and snapshots by incarnation, forgotten when nobody confirms them."""

import asyncio
from collections.abc import Sequence
from random import Random
from struct import pack
from typing import Any

import msgspec
import pytest

from metaservice.publish.errors import PublisherUnavailable
from metaservice.publish.feed import EngineDown
from metaservice.publish.hashes import token_keys, token_root
from metaservice.publish.ingest.ingest import Ingest
from metaservice.publish.ingest.limits import IngestLimits
from metaservice.wire.schemas_events import RemovedAsk, ReportAsk, ReportReply, StoredAsk
from tests.unit.ingest_house import ROOT, engine_up, ids, instance_up, names, packed

A, B, C, D = names(4)


class Nowhere:
    """Nothing is announced."""

    def find(self, instance: str, keys: Sequence[bytes]) -> list[Any]:
        return []


def u64(hashes: Sequence[int]) -> bytes:
    return pack(f"<{len(hashes)}Q", *hashes)


def u32(tokens: Sequence[int]) -> bytes:
    return pack(f"<{len(tokens)}I", *tokens)


def put(
    hashes: Sequence[int],
    tokens: Sequence[int] = (),
    parent: int | None = None,
    *,
    tier: str = "cpu",
    lora: str = "",
    salt: str = "",
) -> StoredAsk:
    return StoredAsk(tier, parent, u64(hashes), u32(tokens), lora, salt)


def drop(hashes: Sequence[int], tier: str = "cpu") -> RemovedAsk:
    return RemovedAsk(tier, u64(hashes))


class Office:
    """Takes reports of one engine or more, on a clock of its own."""

    def __init__(self, limits: IngestLimits | None = None) -> None:
        self.now_s = 100.0
        self.ingest = Ingest(
            Nowhere(), lambda *_: None, lambda *_: None, lambda: self.now_s, limits or IngestLimits()
        )
        self.ingest.instance_up(instance_up())
        self.ingest.engine_up(engine_up())

    async def report(
        self,
        number: int,
        base: int | None,
        *items: StoredAsk | RemovedAsk,
        cleared: bool = False,
        incarnation: str = "life-1",
        engine: str = "e0",
    ) -> ReportReply:
        stored = [item for item in items if isinstance(item, StoredAsk)]
        removed = [item for item in items if isinstance(item, RemovedAsk)]
        ask = ReportAsk(engine, incarnation, number, base, cleared, stored, removed)
        return msgspec.msgpack.decode(await self.ingest.report(msgspec.msgpack.encode(ask)), type=ReportReply)

    def held(self, tier: int = 1, engine: str = "e0") -> set[int]:
        member = self.ingest.holdings.get(engine)
        return set(member.reported.hashes(tier)) if member else set()

    def passes(self, ms: int) -> None:
        self.now_s += ms / 1_000
        self.ingest.look()


async def test_a_snapshot_and_what_goes_on_from_it() -> None:
    office = Office()
    reply = await office.report(1, None, put([A, B], ids(2)), put([C], ids(1, 50), tier="gpu"))
    assert (reply.stored, reply.removed, reply.want, reply.number) == (["taken", "taken"], [], "", 1)
    await office.report(2, 1, drop([A]), put([D], ids(1, 90)))
    assert (office.held(), office.held(0)) == ({B, D}, {C})
    await office.report(3, 2, put([A], ids(1)), cleared=True)
    assert (office.held(), office.held(0)) == ({A}, set())
    await office.report(9, None, put([B], ids(1)))
    assert office.held() == {B}


async def test_what_does_not_go_on_from_the_last_report_is_not_taken() -> None:
    office = Office()
    assert (await office.report(2, 1, put([A], ids(1)))).want == "snapshot"
    await office.report(1, None, put([A], ids(1)))
    reply = await office.report(4, 3, drop([A]))
    assert (reply.want, reply.stored, reply.removed, reply.number) == ("snapshot", [], [], 1)
    assert office.held() == {A}


async def test_a_report_that_was_taken_changes_nothing_when_it_comes_again() -> None:
    office = Office()
    await office.report(1, None, put([A], ids(1)))
    first = await office.report(2, 1, drop([A]), put([B], ids(1, 4), A))
    again = await office.report(2, 1, drop([A]), put([B], ids(1, 4), A))
    assert again == first
    late = await office.report(1, None, put([A], ids(1)))
    assert (late.want, late.number, late.stored) == ("", 2, [])
    assert office.held() == {B}


async def test_row_11_reports_of_an_incarnation_that_is_over_are_refused() -> None:
    office = Office()
    await office.report(1, None, put([A], ids(1)))
    office.ingest.engine_up(engine_up(incarnation="life-2"))
    assert office.held() == set()
    for incarnation, code in (("life-1", "incarnation_retired"), ("life-3", "reregister")):
        with pytest.raises(PublisherUnavailable) as refused:
            await office.report(2, 1, put([B], ids(1)), incarnation=incarnation)
        assert refused.value.code == code
    await office.report(1, None, put([C], ids(1)), incarnation="life-2")
    office.ingest.engine_down(EngineDown(0, "e0", "expired"))
    with pytest.raises(PublisherUnavailable) as refused:
        await office.report(2, 1, incarnation="life-2")
    assert refused.value.code == "incarnation_retired"
    office.ingest.engine_up(engine_up(incarnation="life-2"))
    assert (await office.report(2, 1, incarnation="life-2")).want == "snapshot", "it came back, with nothing"


async def test_who_is_not_known_and_what_is_no_report() -> None:
    office = Office()
    with pytest.raises(PublisherUnavailable) as refused:
        await office.report(1, None, engine="nobody")
    assert refused.value.code == "engine_unknown"
    for body in (b"", b"\xc1", msgspec.msgpack.encode({"engine": "e0"}), b"\x91" * 50_000):
        with pytest.raises(PublisherUnavailable) as refused:
            await office.ingest.report(body)
        assert refused.value.code == "invalid_field"


async def test_each_item_is_answered_for_itself() -> None:
    office = Office(IngestLimits(entries_per_engine_max=4))
    reply = await office.report(
        1,
        None,
        put([A], ids(1), tier="external"),
        put([A], ids(1), tier="nonsense"),
        put([A, A], ids(2)),
        put([A], ids(1), A),
        put([7], ids(1)),
        StoredAsk("cpu", None, b"", b"", "", ""),
        StoredAsk("cpu", None, b"123", b"", "", ""),
        put([A], ids(2)),
        StoredAsk("cpu", None, u64([A]), b"123", "", ""),
        put([B], ids(2)[4:], A),
        put([A], ids(1)),
        put([C]),
        put(names(2, 20), ids(2, 50)),
        drop([A], "external"),
        drop([B]),
        RemovedAsk("cpu", b"1"),
    )
    assert reply.stored == [
        *["tier"] * 2,
        *["hashes"] * 5,
        *["tokens"] * 2,
        "held",
        "taken",
        "taken",
        "full",
    ]
    assert reply.removed == ["tier", "taken", "hashes"]
    assert office.held() == {A, B, C}
    member = office.ingest.holdings.get("e0")
    assert member is not None
    assert member.reported.hash_of(token_keys(ROOT, packed(ids(2)))[1]) == B, "the parent came"


async def test_adapters_and_salts_of_reports_are_kept_apart() -> None:
    office = Office()
    await office.report(
        1,
        None,
        put([A], ids(1), lora="one"),
        put([B], ids(1), salt="acme"),
        put([C], ids(1), lora="one", salt="acme"),
    )
    member = office.ingest.holdings.get("e0")
    assert member is not None
    asked = [("", ""), ("one", ""), ("", "acme"), ("one", "acme"), ("two", "")]
    found = [member.reported.hash_of(token_keys(token_root(*realm), packed(ids(1)))[0]) for realm in asked]
    assert found == [None, A, B, C, None]


async def test_what_nobody_confirms_is_hidden_and_then_dropped() -> None:
    office = Office()
    await office.report(1, None, put([A], ids(1)))
    member = office.ingest.holdings.get("e0")
    assert member is not None
    for _ in range(4):
        office.passes(10_000)
        assert member.sources()
        reply = await office.report(1, 1)
        assert (reply.want, reply.visible_ms) == ("", 15_000)
    office.passes(16_000)
    assert not member.sources()
    assert office.ingest.engine_view("e0")[0] == "silent"
    assert office.held() == {A}
    await office.report(2, 1)
    assert member.sources()
    assert office.ingest.engine_view("e0") == (
        "reported",
        0,
        {"gpu": 0, "cpu": 1, "storage": 0, "external": 0},
    )
    office.passes(61_000)
    assert office.held() == set()
    assert office.ingest.engine_view("e0")[0] == "expired"
    assert (await office.report(3, 2)).want == "snapshot"
    assert office.ingest.stats()["holdings_entries"] == 0


async def test_an_engine_that_goes_while_its_report_is_taken_leaves_nothing() -> None:
    office = Office(IngestLimits(slice_blocks=8))
    items = [put(names(8, 10 * row), ids(8, 100 * row)) for row in range(20)]
    taking = asyncio.ensure_future(office.report(1, None, *items))
    while not office.held():
        await asyncio.sleep(0)
    office.ingest.engine_down(EngineDown(0, "e0", "left"))
    with pytest.raises(PublisherUnavailable):
        await taking
    assert office.ingest.stats()["holdings_entries"] == 0


async def test_a_report_that_was_given_up_half_way_is_asked_for_as_a_snapshot() -> None:
    office = Office(IngestLimits(slice_blocks=8))
    await office.report(1, None)
    items = [put(names(8, 10 * row), ids(8, 100 * row)) for row in range(20)]
    taking = asyncio.ensure_future(office.report(2, 1, *items))
    while not office.held():
        await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert (await office.report(2, 1, *items)).want == "snapshot"
    await office.report(3, None, put([A], ids(1)))
    assert office.held() == {A}


async def test_an_adapters_instance_is_reported_without_naming_it_each_time() -> None:
    office = Office()
    office.ingest.instance_up(instance_up(lora="one"))
    await office.report(1, None, put([A], ids(1)), put([B], ids(1, 4), A, lora="two"))
    member = office.ingest.holdings.get("e0")
    assert member is not None
    assert member.reported.hash_of(token_keys(token_root("one"), packed(ids(1)))[0]) == A


async def test_two_reports_at_a_time_are_taken_one_after_the_other() -> None:
    office = Office(IngestLimits(slice_blocks=8))
    await office.report(1, None)
    items = [put(names(8, 10 * row), ids(8, 100 * row)) for row in range(20)]
    first, second = await asyncio.gather(
        office.report(2, 1, *items),
        office.report(3, 2, drop([one for row in range(20) for one in names(8, 10 * row)])),
    )
    assert (first.want, second.want) == ("", "")
    assert office.held() == set()


class Reporter:
    """A connector that reports over a bad line: requests and answers get lost, come twice, or late."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.office = Office()
        self.life = 1
        self.number = 0
        self.taken: int | None = None
        """The number that the last answer confirmed."""
        self.truth: list[set[int]] = [set() for _ in range(3)]
        self.changes: list[tuple[bool, int, int]] = []
        self.sent: list[tuple[int, int | None, list[StoredAsk | RemovedAsk]]] = []

    def change(self) -> None:
        tier = self.random.randrange(3)
        there = self.truth[tier]
        block = self.random.choice(names(30))
        there ^= {block}
        self.changes.append((block in there, tier, block))

    def items(self, changes: Sequence[tuple[bool, int, int]]) -> list[StoredAsk | RemovedAsk]:
        last = {(tier, block): there for there, tier, block in changes}
        tiers = ("gpu", "cpu", "storage")
        return [
            put([block], tier=tiers[tier]) if there else drop([block], tiers[tier])
            for (tier, block), there in last.items()
        ]

    async def tell(self, *, lossy: bool) -> None:
        """All that changed since the last answer, or everything."""
        told = len(self.changes)
        everything = [(True, tier, block) for tier, there in enumerate(self.truth) for block in there]
        items = self.items(everything if self.taken is None else self.changes)
        self.number += 1
        asked = (self.number, self.taken, items)
        self.sent.append(asked)
        for _ in range(1 if not lossy else self.random.choice((0, 1, 1, 2))):
            answer = await self.office.report(*asked[:2], *items, incarnation=f"life-{self.life}")
            if lossy and self.random.random() < 0.2:
                continue  # the answer is lost: the same is asked again, by another number
            if answer.want:
                self.taken = None
            else:
                self.taken = answer.number
                del self.changes[:told]
                told = 0

    async def step(self) -> None:
        dice = self.random.random()
        if dice < 0.5:
            self.change()
        elif dice < 0.85:
            await self.tell(lossy=True)
        elif dice < 0.93 and self.sent:
            number, base, items = self.random.choice(self.sent)
            await self.office.report(number, base, *items, incarnation=f"life-{self.life}")
        elif dice < 0.96:
            self.office.passes(self.random.choice((1_000, 20_000, 70_000)))
        elif dice < 0.98:
            self.life += 1
            self.taken, self.number = None, 0
            self.changes.clear()
            self.sent.clear()
            self.office.ingest.engine_up(engine_up(incarnation=f"life-{self.life}"))


@pytest.mark.parametrize("seed", range(40))
async def test_any_interleaving_of_lost_and_late_reports_ends_with_what_the_reporter_holds(seed: int) -> None:
    print(f"seed {seed}")
    reporter = Reporter(seed)
    for _ in range(150):
        await reporter.step()
    for _ in range(3):
        await reporter.tell(lossy=False)
    assert [reporter.office.held(tier) for tier in range(3)] == reporter.truth, f"seed {seed}"
