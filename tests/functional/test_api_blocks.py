"""The life of blocks over the wire, in both encodings: written, looked up, leased, removed, seen."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from metaservice.core.model import Limits
from tests.functional.api_house import (
    HYBRID,
    JSON,
    LIMITS,
    MSGPACK,
    OWNER,
    PART_BYTES,
    House,
    Speech,
    key,
    keys,
    numbers,
    open_house,
    until,
)


@pytest.fixture(params=[JSON, MSGPACK], ids=["json", "msgpack"])
def speech(request: pytest.FixtureRequest) -> Iterator[Speech]:
    yield request.param


@pytest_asyncio.fixture
async def house(speech: Speech) -> AsyncIterator[House]:
    async with open_house() as house:
        await house.furnish()
        house.speech = speech
        yield house


def codes(house: House, column: object, names: list[str]) -> list[int]:
    """An outcome column as codes, given the names in order."""
    if house.speech.is_json:
        assert isinstance(column, list)
        return [names.index(each) for each in column]
    assert isinstance(column, bytes)
    return [*column]


WRITE = ["write", "present", "in_progress", "refused"]
FINISH = ["serving", "pending", "freed", "removed"]
LEASE = ["renewed", "released", "expired", "unknown"]
REMOVE = ["absent", "removed", "waiting_for_lease"]


async def test_blocks_are_written_once_and_found_with_all_their_places(house: House) -> None:
    started = await house.start(keys(3))
    assert codes(house, started["outcomes"], WRITE) == [0, 0, 0]
    assert started["session"].startswith("w-0-")
    assert started["parts"] == [{"name": "tp0", "bytes": PART_BYTES}, {"name": "tp1", "bytes": PART_BYTES}]
    assert started["storage_table"] == [{"name": "s1", "kind": "posix", "options": {"root": "/s1"}}]
    assert started["cluster"] == "cluster1"
    assert (await house.lookup(keys(3)))["hits"] == 0

    sums = [11, 2**64 - 1, 13, 14, 15, 16]
    finished = await house.finish(started, checksums=house.speech.column(sums, "Q"))
    assert codes(house, finished["status"], FINISH) == [0, 0, 0]
    assert (finished["published"], finished["open"]) == (3, 0)

    found = await house.lookup(keys(4), lease_ms=1000, request_id="q1")
    assert (found["hits"], found["start"], found["cut"], found["cut_at"]) == (3, 0, "miss", 3)
    assert (found["asked"], found["mode"], found["lease_ms"]) == (4, "prefix", 1000)
    locations = numbers(found["locations"], "Q")
    assert locations == numbers(started["locations"], "Q")
    assert numbers(found["generations"], "I") == numbers(started["generations"], "I")
    assert numbers(found["storages"], "H") == [0, 0, 0]
    assert numbers(found["checksums"], "Q") == sums
    assert found["lease"].startswith("r-0-")
    assert found["epoch"] == house.shard.epoch and 0 < found["seq"] <= house.shard.durable_seq
    if house.speech.is_json:
        first = numbers(found["generations"], "I")[0]
        assert found["uris"][0] == {
            part: f"posix://s1/cluster1/{locations[0]:x}-{first}.{part}" for part in ("tp0", "tp1")
        }
        assert len(found["uris"]) == 3
    else:
        assert "uris" not in found

    again = await house.start(keys(4))
    assert codes(house, again["outcomes"], WRITE) == [1, 1, 1, 0]
    assert numbers(again["locations"], "Q")[:3] == [0, 0, 0]
    assert numbers(again["generations"], "I")[:3] == [0, 0, 0]
    other = await house.start(keys(4)[3:], parent=house.speech.key(key(2)))
    assert codes(house, other["outcomes"], WRITE) == [2]
    assert 0 < numbers(other["wait_ms"], "I")[0] <= 30_000
    assert other["session"] is None


async def test_a_block_serves_when_its_last_part_is_in(house: House) -> None:
    started = await house.start(keys(2))
    rows = {"locations": started["locations"], "generations": started["generations"]}
    path = f"/v1/writes/{started['session']}/finish"
    one = house.speech.column([1, 2], "Q")
    first = await house.ask("POST", path, {**OWNER, **rows, "parts": ["tp0"], "checksums": one})
    assert codes(house, first["status"], FINISH) == [1, 1]
    assert (first["published"], first["open"]) == (0, 2)
    assert (await house.lookup(keys(2)))["hits"] == 0
    ok = house.speech.flags([True, False])
    body = {**OWNER, **rows, "parts": ["tp1"], "checksums": one, "ok": ok, "sizes": [PART_BYTES, PART_BYTES]}
    second = await house.ask("POST", path, body)
    assert codes(house, second["status"], FINISH) == [0, 2]
    assert (second["published"], second["open"]) == (1, 0)
    assert (await house.lookup(keys(2)))["hits"] == 1


async def test_a_session_is_renewed_and_aborted(house: House) -> None:
    started = await house.start(keys(2))
    path = f"/v1/writes/{started['session']}"
    assert await house.ask("POST", f"{path}/renew", {**OWNER, "ttl_ms": 60_000}) == {"ttl_ms": 60_000}
    assert await house.ask("POST", f"{path}/abort", dict(OWNER)) == {"freed": 2}
    assert codes(house, (await house.start(keys(2)))["outcomes"], WRITE) == [0, 0]
    status, code, _ = await house.problem("POST", f"{path}/renew", dict(OWNER))
    assert (status, code) == (409, "session_aborted")


async def test_leases_are_renewed_together_and_released(house: House) -> None:
    await house.fill(4)
    leases = [(await house.lookup(keys(n + 1), lease_ms=800))["lease"] for n in range(3)]
    body = {"ttl_ms": 900, "also": [*leases[1:], "r-0-99-1"]}
    renewed = await house.ask("POST", f"/v1/leases/{leases[0]}/renew", body)
    assert renewed["leases"] == [*leases, "r-0-99-1"]
    assert codes(house, renewed["outcomes"], LEASE) == [0, 0, 0, 3]
    assert numbers(renewed["changed"], "I") == [0, 0, 0, 0]
    assert renewed["ttl_ms"] == 900
    released = await house.ask("POST", f"/v1/leases/{leases[0]}/release", {"also": leases[1:2]})
    assert codes(house, released["outcomes"], LEASE) == [1, 1]
    empty = await house.send("POST", f"/v1/leases/{leases[2]}/release")
    assert empty.status_code == 200
    answer = house.speech.decode(empty.content)
    assert codes(house, answer["outcomes"], LEASE) == [1]


async def test_part_of_a_lease_is_renewed_by_its_locations(house: House) -> None:
    await house.fill(4)
    found = await house.lookup(keys(4), lease_ms=400)
    half = house.speech.column(numbers(found["locations"], "Q")[:2], "Q")
    renewed = await house.ask(
        "POST", f"/v1/leases/{found['lease']}/renew", {"ttl_ms": 2000, "locations": half}
    )
    assert codes(house, renewed["outcomes"], LEASE) == [0]


async def test_each_window_and_limit(house: House) -> None:
    await house.fill(3)
    each = await house.lookup([key(0), key(9), key(2)], mode="each")
    hit = each["hit"] if house.speech.is_json else [flag == 1 for flag in each["hit"]]
    assert (each["hits"], hit, each["cut"], each["cut_at"]) == (2, [True, False, True], "miss", 1)
    limited = await house.lookup(keys(3), limit=2)
    assert (limited["hits"], limited["cut"], limited["cut_at"]) == (2, "limit", 2)
    window = await house.lookup(keys(4), mode="window", window_blocks=2, group="full")
    assert (window["hits"], window["start"]) == (2, 1)
    below = await house.lookup(keys(2, 1), parent=house.speech.key(key(0)))
    assert below["hits"] == 2


async def test_a_state_lookup_gives_the_prefix_and_its_state_block(speech: Speech) -> None:
    async with open_house() as house:
        await house.furnish(fingerprint=HYBRID)
        house.speech = speech
        await house.fill(3, group="full")
        await house.fill(2, group="mamba")
        found = await house.lookup(keys(3), mode="state")
        assert found["hits"] == 2
        assert [part["name"] for part in found["parts"]] == ["tp0"]
        assert [part["name"] for part in found["state"]["parts"]] == ["ssm0"]
        assert len(numbers(found["state"]["locations"], "Q")) == 1
        assert found["state"]["storage_table"][0]["name"] == "s1"
        if speech.is_json:
            assert list(found["state"]["uris"][0]) == ["ssm0"]


async def test_removed_blocks_are_hidden_at_once(house: House) -> None:
    await house.fill(3)
    lease = (await house.lookup(keys(3), lease_ms=5000))["lease"]
    wanted = house.speech.keys([key(2), key(8)])
    removed = await house.ask("POST", "/v1/instances/m1/remove", {"keys": wanted})
    assert codes(house, removed["outcomes"], REMOVE) == [2, 0]
    assert removed["removed"] == 1
    assert (await house.lookup(keys(3)))["hits"] == 2
    again = {"keys": house.speech.keys([key(1)]), "lease": lease, "engine": "e1", "request_id": "r7"}
    assert (await house.ask("POST", "/v1/instances/m1/remove", again))["removed"] == 1


async def test_one_block_is_shown_to_people(house: House) -> None:
    await house.fill(2)
    shown = await house.ask("GET", f"/v1/instances/m1/blocks/{key(1).hex()}")
    assert shown["key"] == key(1).hex()
    assert shown["parent"] == key(0).hex()
    assert (shown["state"], shown["visible"], shown["instance"], shown["group"]) == (
        "serving",
        True,
        "m1",
        "full",
    )
    assert shown["size_bytes"] == 2 * PART_BYTES
    assert await house.ask("GET", f"/v1/instances/m1/blocks/{key(1).hex()}?group=full") == shown
    assert (await house.problem("GET", f"/v1/instances/m1/blocks/{key(5).hex()}"))[1] == "block_unknown"


async def test_a_retry_gets_the_first_answer(house: House) -> None:
    first = await house.start(keys(2), request_id="once")
    assert await house.start(keys(2), request_id="once") == first
    done = await house.finish(first, request_id="twice")
    assert await house.finish(first, request_id="twice") == done


async def test_h5_a_cut_says_by_what(house: House) -> None:
    """Miss, limit and switch are told apart in the reply and in the metrics."""
    await house.fill(3)
    asked: dict[str, dict[str, Any]] = {"miss": {}, "limit": {"limit": 1}}
    for cut, more in asked.items():
        assert (await house.lookup(keys(4), **more))["cut"] == cut
    assert (await house.lookup(keys(3)))["cut"] == "none"
    await house.ask("PUT", "/v1/switches/instance/m1", {"mode": "bypass", "reason": "drill"})
    bypassed = await house.lookup(keys(3), lease_ms=1000)
    assert (bypassed["cut"], bypassed["hits"], bypassed["lease"]) == ("switch", 0, None)
    assert bypassed["switch"] == {"scope": "instance", "id": "m1", "mode": "bypass"}
    counted = house.app.metrics.lookups
    seen = {cut: counted.value("prefix", cut) for cut in ("none", "miss", "limit", "switch")}
    assert seen == {"none": 1, "miss": 1, "limit": 1, "switch": 1}


async def test_h3_a_flip_between_lookup_and_lease_gives_an_honest_zero(house: House) -> None:
    await house.fill(2)
    assert (await house.lookup(keys(2)))["hits"] == 2
    await house.ask("PUT", "/v1/switches/cluster", {"mode": "bypass"})
    leased = await house.lookup(keys(2), lease_ms=1000)
    assert (leased["hits"], leased["lease"], leased["cut"]) == (0, None, "switch")
    assert leased["switch"]["scope"] == "cluster"


async def test_a_lapsed_session_answers_so(speech: Speech) -> None:
    limits = Limits(write_ttl_ms_min=50, late_write_ms=0, reclaim_delay_ms=0)
    async with open_house(limits=limits) as house:
        await house.furnish()
        house.speech = speech
        started = await house.start(keys(1), ttl_ms=50)
        await until(lambda: house.app.metrics.expirations.value("session") == 1)
        assert codes(house, (await house.start(keys(1)))["outcomes"], WRITE) == [0]
        body = {**OWNER, "locations": started["locations"], "generations": started["generations"]}
        body["checksums"] = speech.column([1, 1], "Q")
        refused = await house.problem("POST", f"/v1/writes/{started['session']}/finish", body)
        assert refused[:2] == (409, "session_expired")


async def test_lists_of_bytes_are_taken_from_msgpack_clients() -> None:
    async with open_house(limits=LIMITS) as house:
        await house.furnish()
        house.speech = MSGPACK
        body = {**OWNER, "keys": keys(2), "parents": [None, key(0)]}
        started = await house.ask("POST", "/v1/instances/m1/writes", body)
        assert [*started["outcomes"]] == [0, 0]
        done = {
            **OWNER,
            "locations": numbers(started["locations"], "Q"),
            "generations": numbers(started["generations"], "I"),
            "ok": [True] * 4,
            "checksums": [1, 2, 3, 4],
        }
        assert (await house.ask("POST", f"/v1/writes/{started['session']}/finish", done))["published"] == 2
        reply = await house.ask("POST", "/v1/instances/m1/lookup", {"keys": keys(2)})
        assert reply["hits"] == 2
