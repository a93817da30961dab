"""Registrations at Dynamo's indexer follow the engines, the leader, and the indexer's own restarts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from metaservice.publish.attach import make
from metaservice.publish.attach.dynamo_indexer import UNKNOWN_S
from metaservice.publish.attach.port import Attachment
from tests.unit.attach_house import House
from tests.unit.indexer_house import FakeIndexer

OWN = "tcp://10.0.0.1:5557"
POOL = "tcp://127.0.0.1:20000"


@pytest.fixture
def indexer() -> Iterator[FakeIndexer]:
    server = FakeIndexer()
    yield server
    server.close()


@pytest.fixture
def house() -> Iterator[House]:
    with House() as house:
        house.add_instance()
        yield house


@pytest.fixture
async def attached(indexer: FakeIndexer, house: House) -> AsyncIterator[Attachment]:
    attachment = make(f"dynamo-indexer url={indexer.url} poll_ms=100", house)
    await attachment.start()
    yield attachment
    await attachment.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(250):
        if holds():
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"not within 5 s: {what}")


async def test_every_live_engine_is_registered_under_a_spare_rank(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    house.add_engine("a", 7)
    house.add_engine("b")
    attached.leads(0, True)
    await until(lambda: len(indexer.workers) == 2, "both engines are there")
    assert indexer.ranks()[7] == {1000: POOL}
    (other,) = indexer.workers.keys() - {7}
    assert 2**32 < other < 2**53
    body = indexer.calls[0][1]
    assert body["replay_endpoint"] == "tcp://127.0.0.1:20001"
    assert (body["model_name"], body["routing_group"], body["block_size"]) == ("m", "default", 4)
    await until(lambda: attached.status().engines == 2, "status counts them")
    assert attached.status().ok


async def test_nothing_is_registered_by_one_who_does_not_lead(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    house.add_engine("a", 7)
    attached.changed()
    await asyncio.sleep(0.3)
    assert indexer.looks == 0
    attached.leads(0, True)
    await until(lambda: 7 in indexer.workers, "the leader registers")
    attached.leads(0, False)
    await asyncio.sleep(0.2)
    house.engines.clear()
    attached.changed()
    await asyncio.sleep(0.3)
    assert 7 in indexer.workers


async def test_row_11_worker_expires_and_its_own_rank_goes_too(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    house.add_engine("a", 7)
    house.add_engine("b", 8)
    for worker in (7, 8):
        indexer.answer(
            "/register", {"instance_id": worker, "endpoint": OWN, "model_name": "m", "block_size": 4}
        )
    attached.leads(0, True)
    await until(lambda: all(1000 in ranks for ranks in indexer.ranks().values()), "registered")
    del house.engines["a"]
    attached.changed()
    started = asyncio.get_running_loop().time()
    await until(lambda: 7 not in indexer.workers, "the dead worker is gone")
    assert asyncio.get_running_loop().time() - started < 1.0
    assert indexer.ranks()[8] == {0: OWN, 1000: POOL}
    assert indexer.cleared == [(7, 1000), (7, -1)]


async def test_row_11_a_rank_that_nobody_else_registered_is_cleared(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    """What we told is kept under the real rank: with another rank of the worker alive, to unregister the
    spare rank alone would leave it there for ever."""
    house.add_instance(channel=1, rank=1)
    house.add_engine("a0", 7)
    house.add_engine("a1", 7, channel=1, rank=1)
    attached.leads(0, True)
    await until(lambda: indexer.ranks().get(7, {}).keys() == {1000, 1001}, "both ranks")
    del house.engines["a1"]
    attached.changed()
    await until(lambda: (7, 1) in indexer.cleared, "what was told of rank 1 is dropped")
    assert indexer.ranks()[7] == {1000: POOL}


async def test_row_11_an_engine_that_comes_back_gets_its_own_stream_back(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    """It was cut off, not dead: whoever registered its own stream will not do so again."""
    replay = "tcp://10.0.0.1:5558"
    indexer.answer("/register", {"instance_id": 7, "endpoint": OWN, "model_name": "m", "block_size": 4})
    engine = house.add_engine("a", 7, events="tcp://other-name:5557", replay=replay)
    attached.leads(0, True)
    await until(lambda: 1000 in indexer.ranks()[7], "registered")
    del house.engines["a"]
    attached.changed()
    await until(lambda: 7 not in indexer.workers, "gone")
    house.engines["a"] = engine
    attached.changed()
    await until(lambda: indexer.ranks().get(7) == {0: OWN, 1000: POOL}, "both are back")
    (own,) = [body for _, body, _ in indexer.calls if body["dp_rank"] == 0 and "endpoint" in body]
    assert own["replay_endpoint"] == replay


async def test_row_09_a_new_incarnation_begins_anew_at_the_indexer(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    """Its stream begins at 0 again, which the indexer would take for stale; and its predecessor's blocks
    would stay."""
    indexer.answer("/register", {"instance_id": 7, "endpoint": OWN, "model_name": "m", "block_size": 4})
    house.add_engine("a", 7, events=OWN, replay="tcp://10.0.0.1:5558")
    attached.leads(0, True)
    await until(lambda: 1000 in indexer.ranks()[7], "registered")
    house.add_engine("a", 7, events=OWN, replay="tcp://10.0.0.1:5558", incarnation="2")
    attached.changed()
    await until(lambda: len(indexer.cleared) == 2, "both its ranks began anew")
    await until(lambda: indexer.ranks().get(7) == {0: OWN, 1000: POOL}, "and are there")
    assert (7, 0) in indexer.cleared or (7, -1) in indexer.cleared


async def test_an_indexer_that_was_started_anew_is_told_again(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    house.add_engine("a", 7)
    attached.leads(0, True)
    await until(lambda: 7 in indexer.workers, "registered")
    indexer.workers.clear()
    await until(lambda: 7 in indexer.workers, "registered again, with nothing but a look")


async def test_another_leader_has_other_endpoints(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    house.add_engine("a", 7)
    attached.leads(0, True)
    await until(lambda: 7 in indexer.workers, "registered")
    house.places[0] = ("tcp://127.0.0.9:20000", "tcp://127.0.0.9:20001")
    attached.changed()
    await until(lambda: indexer.ranks().get(7) == {1000: "tcp://127.0.0.9:20000"}, "moved")


async def test_ghosts_of_a_time_without_a_leader_are_taken_away(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    """An engine expired while nobody led, with it a whole stream. What is not ours stays."""
    for worker, rank in ((7, 1000), (8, 1500), (8, 0), (9, 0), (10, 3000)):
        body = {"instance_id": worker, "dp_rank": rank, "endpoint": POOL, "model_name": "m", "block_size": 4}
        indexer.answer("/register", body)
    attached.leads(0, True)
    await until(lambda: 7 not in indexer.workers, "the ghost is gone")
    assert set(indexer.ranks()) == {8, 9, 10}
    house.clock_s += UNKNOWN_S
    await until(lambda: 8 not in indexer.workers, "and the one of an unknown stream")
    assert indexer.ranks() == {9: {0: POOL}, 10: {3000: POOL}}


async def test_row_14_a_worker_of_a_lost_history_is_told_again_under_its_new_stream(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    """Channels are numbered from 0 again: what was told under the old number would stay for ever."""
    for rank, endpoint in ((0, OWN), (1040, POOL)):
        body = {"instance_id": 7, "dp_rank": rank, "endpoint": endpoint, "model_name": "m", "block_size": 4}
        indexer.answer("/register", body)
    house.epochs = 1
    house.add_engine("a", 7, events=OWN, replay="tcp://10.0.0.1:5558")
    attached.leads(0, True)
    await until(lambda: 1000 in indexer.ranks()[7], "it is told under its new stream")
    house.clock_s += UNKNOWN_S
    await until(lambda: (7, -1) in indexer.cleared, "all of before is dropped")
    await until(lambda: indexer.ranks().get(7) == {0: OWN, 1000: POOL}, "and told again")


async def test_row_18_ranks_and_adapters_of_one_worker_have_a_source_each(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    house.add_instance(channel=1, rank=1)
    house.add_instance(channel=2, node="n", rank=0)
    house.add_engine("a0", 7, local_channel=2, node="n")
    house.add_engine("a1", 7, channel=1, rank=1)
    attached.leads(0, True)
    await until(lambda: len(indexer.ranks().get(7, {})) == 3, "three sources")
    assert indexer.ranks()[7] == {1000 + c: f"tcp://127.0.0.1:{20000 + 2 * c}" for c in (0, 1, 2)}
    assert all(status == 201 for *_, status in indexer.calls)


async def test_row_16_a_group_with_another_block_size_is_a_problem_and_said_once(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    indexer.answer("/register", {"instance_id": 1, "endpoint": OWN, "model_name": "m", "block_size": 16})
    house.add_engine("a", 7)
    attached.leads(0, True)
    await until(lambda: not attached.status().ok, "it is a problem")
    await asyncio.sleep(0.3)
    assert "block_size mismatch" in attached.status().detail
    assert sum("block_size mismatch" in line for line in house.said) == 1
    assert 7 not in indexer.workers


async def test_a_worker_of_another_model_is_a_problem(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    indexer.answer("/register", {"instance_id": 7, "endpoint": OWN, "model_name": "x", "block_size": 4})
    house.add_engine("a", 7)
    attached.leads(0, True)
    await until(lambda: "already registered for model=x" in attached.status().detail, "said")
    assert indexer.ranks() == {7: {0: OWN}}


async def test_an_indexer_that_fails_is_asked_again(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    indexer.broken = True
    house.add_engine("a", 7)
    attached.leads(0, True)
    await until(lambda: not attached.status().ok, "it fails")
    (failures,) = [
        value for name, value in attached.stats().items() if name.startswith("attachment_failures")
    ]
    assert failures >= 1
    indexer.broken = False
    await until(lambda: 7 in indexer.workers, "registered")
    await until(lambda: attached.status().ok, "and well")


async def test_engines_of_another_model_are_not_minded(indexer: FakeIndexer, house: House) -> None:
    house.add_engine("a", 7)
    attachment = make(f"dynamo-indexer url={indexer.url} poll_ms=100 model=other", house)
    await attachment.start()
    attachment.leads(0, True)
    await until(lambda: indexer.looks >= 2, "it looked")
    assert not indexer.workers
    await attachment.close()


async def test_engines_own_streams_are_registered_when_asked_for(indexer: FakeIndexer, house: House) -> None:
    house.add_engine("a", 7, events=OWN, replay="tcp://10.0.0.1:5558")
    attachment = make(f"dynamo-indexer url={indexer.url} poll_ms=100 engine_streams=true", house)
    await attachment.start()
    attachment.leads(0, True)
    await until(lambda: indexer.ranks().get(7) == {0: OWN, 1000: POOL}, "both streams")
    await attachment.close()


async def test_row_09_what_a_lost_history_told_is_dropped_once(
    indexer: FakeIndexer, house: House, attached: Attachment
) -> None:
    """The journal was lost: nobody knows any more what there is to take back. Whoever leads first in the new
    history has the indexer forget the old one, also what it keeps under the engine's own rank."""
    for rank, endpoint in ((0, OWN), (1000, POOL)):
        body = {"instance_id": 7, "dp_rank": rank, "endpoint": endpoint, "model_name": "m", "block_size": 4}
        indexer.answer("/register", body)
    house.epochs = 1
    attached.leads(0, True)
    await asyncio.sleep(0.2)
    house.add_engine("a", 7, events=OWN, replay="tcp://10.0.0.1:5558")
    attached.changed()
    await until(lambda: (7, -1) in indexer.cleared, "all that was told of the worker is dropped")
    await until(lambda: indexer.ranks().get(7) == {0: OWN, 1000: POOL}, "and it is registered again")
    calls = len(indexer.calls)
    await asyncio.sleep(0.4)
    assert len(indexer.calls) == calls


async def test_a_failover_drops_nothing(indexer: FakeIndexer, house: House, attached: Attachment) -> None:
    for rank, endpoint in ((0, OWN), (1000, POOL)):
        body = {"instance_id": 7, "dp_rank": rank, "endpoint": endpoint, "model_name": "m", "block_size": 4}
        indexer.answer("/register", body)
    house.add_engine("a", 7)
    attached.leads(0, True)
    await until(lambda: attached.status().engines == 1, "it is seen to be there")
    assert (indexer.cleared, indexer.calls) == ([], [])
