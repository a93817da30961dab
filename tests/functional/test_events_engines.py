"""Engines' own caches, as the service knows them: their streams, their reports, and questions about both."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from metaservice.publish.hashes import block_keys
from tests.functional.events_engine import CLEARED, EngineStream, as_array, removed, stored
from tests.functional.events_service import (
    BLOCK_TOKENS,
    FINGERPRINT,
    EventsService,
    Prompt,
    eventually,
    known,
    running,
    wanted,
)

_numbers = count(1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventsService]:
    with running(tmp_path_factory.mktemp("engines")) as service:
        yield service


@pytest.fixture
def name() -> str:
    return f"m{next(_numbers)}"


@pytest.fixture
def engine() -> Iterator[EngineStream]:
    with EngineStream() as stream:
        yield stream


def route(service: EventsService, name: str, prompt: Prompt, **more: Any) -> Any:
    """Who holds how much of a prompt, asked by keys."""
    body = {"keys": prompt.keys, "lora": prompt.lora, "salt": prompt.salt, **more}
    return service.ask("POST", f"/v1/instances/{name}/route", body)


def tiers(service: EventsService, name: str, prompt: Prompt, engine: str) -> dict[str, int]:
    """Of one engine; {} when it holds nothing."""
    for row in route(service, name, prompt)["engines"]:
        if row["engine"] == engine:
            return dict(row["tiers"])
    return {}


def followed(service: EventsService, name: str, stream: EngineStream, **more: Any) -> str:
    """An engine of the instance whose stream the service follows; once it does."""
    service.furnish(name, publication={"model": name})
    id = f"e-{name}"
    service.engine(id, name, events=stream.endpoint, replay=stream.replay, **more)

    def seen() -> bool:
        stream.publish()
        time.sleep(0.02)
        return any(
            view["engine"] == id and view["state"] == "following"
            for view in service.ask("GET", "/v1/events")["engines"]
        )

    eventually(seen, "the engine's stream is followed")
    return id


def holds(service: EventsService, name: str, prompt: Prompt, engine: str, blocks: int) -> None:
    """Once the engine's memory is known to hold so many."""
    eventually(
        lambda: tiers(service, name, prompt, engine).get("gpu", 0) == blocks,
        f"{blocks} blocks: {tiers(service, name, prompt, engine)}",
    )


@pytest.mark.parametrize(
    "form",
    [
        lambda event: event,
        as_array,
        lambda event: as_array(event, 5),
        lambda event: [*as_array(event), None, 0],
    ],
    ids=["map", "array", "short array", "long array"],
)
def test_row_02_engines_speak_in_maps_and_in_arrays(
    service: EventsService, name: str, engine: EngineStream, form: Callable[[dict[str, Any]], Any]
) -> None:
    id = followed(service, name, engine)
    prompt = Prompt(900, 4)
    engine.publish(form(stored(prompt)))
    holds(service, name, prompt, id, 4)
    engine.publish(removed(prompt.hashes[2:]))
    holds(service, name, prompt, id, 2)


@pytest.mark.parametrize("topics", [True, False], ids=["with topics", "without topics"])
def test_row_01_a_gap_is_closed_by_a_replay_in_both_framings(
    service: EventsService, name: str, topics: bool
) -> None:
    with EngineStream(topics=topics) as engine:
        id = followed(service, name, engine)
        prompt = Prompt(901, 6)
        engine.publish(stored(prompt, 0, 2))
        engine.publish(stored(prompt, 2, 4), lost=True)
        engine.publish(stored(prompt, 4, 6))
        holds(service, name, prompt, id, 6)


def test_row_03_a_span_that_is_no_whole_number_of_blocks_is_left_out(
    service: EventsService, name: str, engine: EngineStream
) -> None:
    id = followed(service, name, engine)
    prompt, good = Prompt(902, 3), Prompt(903, 2)
    short = stored(prompt)
    short["token_ids"] = short["token_ids"][:-5]
    engine.publish(short, stored(good))
    holds(service, name, good, id, 2)
    assert tiers(service, name, prompt, id).get("gpu", 0) in (0, 2)


def test_row_04_a_child_counts_once_its_parent_is_known(
    service: EventsService, name: str, engine: EngineStream
) -> None:
    id = followed(service, name, engine)
    prompt = Prompt(904, 4)
    engine.publish(stored(prompt, 2, 4))
    engine.publish(stored(prompt, 0, 2))
    holds(service, name, prompt, id, 4)


def test_row_11_an_engine_that_leaves_holds_nothing(
    service: EventsService, name: str, engine: EngineStream
) -> None:
    id = followed(service, name, engine)
    prompt = Prompt(905, 3)
    engine.publish(stored(prompt))
    holds(service, name, prompt, id, 3)
    service.ask("DELETE", f"/v1/engines/{id}?incarnation=i1")
    eventually(lambda: not route(service, name, prompt)["engines"], "its entries are gone")


def test_row_11_another_life_of_an_engine_begins_with_nothing(
    service: EventsService, name: str, engine: EngineStream
) -> None:
    id = followed(service, name, engine)
    prompt = Prompt(906, 3)
    engine.publish(stored(prompt))
    holds(service, name, prompt, id, 3)
    engine.restart()
    engine.publish(stored(prompt, 0, 1))
    holds(service, name, prompt, id, 1)


def test_row_11_late_words_of_a_dead_life_announce_nothing(service: EventsService, name: str) -> None:
    """A finish of a session whose engine was replaced is refused, and no router hears of its blocks."""
    service.furnish(name, publication={"model": name})
    reader = service.reader(name)
    prompt = Prompt(802, 3)
    started = service.start(prompt, name)
    service.engine(f"e-{name}", name, life="i2")
    rows = len(started["locations"]) // 8
    body = {
        "engine": f"e-{name}",
        "incarnation": "i1",
        "locations": started["locations"],
        "generations": started["generations"],
        "checksums": bytes(8 * rows),
    }
    refused = service.refused("POST", f"/v1/writes/{started['session']}/finish", body)
    assert refused.status in (404, 409, 410), refused
    reader.beats(3)
    assert not reader.index.blocks and reader.index.stored == 0


def test_row_12_when_an_engine_clears_its_caches_the_pool_is_told_again(
    service: EventsService, name: str, engine: EngineStream
) -> None:
    """Routers forget all tiers of an engine that cleared one."""
    id = followed(service, name, engine)
    reader = service.reader(name)
    prompt = Prompt(907, 5)
    service.write(prompt, name)
    engine.publish(stored(prompt))
    holds(service, name, prompt, id, 5)
    reader.pump(lambda: reader.has(prompt.hashes))
    told = reader.index.stored
    engine.publish(CLEARED)
    eventually(lambda: tiers(service, name, prompt, id).get("gpu") == 0, "its own are gone")
    reader.pump(lambda: reader.index.stored >= told + 5, what="the pool's blocks are told again")
    assert known(reader.index, "EXTERNAL") == wanted(prompt)
    assert tiers(service, name, prompt, id)["external"] == 5


def test_row_23_an_engine_that_says_nothing_is_shown_as_that(service: EventsService, name: str) -> None:
    """It registered an endpoint and nothing comes from there: mis-configured, in silence."""
    service.furnish(name, publication={"model": name})
    service.engine(f"e-{name}", name, events="tcp://127.0.0.1:9", replay="")

    def state() -> str:
        views = service.ask("GET", "/v1/events")["engines"]
        return str(next(view["state"] for view in views if view["engine"] == f"e-{name}"))

    eventually(lambda: state() in ("connecting", "silent"), "it is not taken for followed")


def test_row_06_an_engine_with_another_hash_does_not_join(service: EventsService, name: str) -> None:
    """Its probe block has another hash: every lookup of its would miss, and routers would be misled."""
    fingerprint = {**FINGERPRINT, "canary": "ab" * 16}
    service.furnish(name, publication={"model": name}, fingerprint=fingerprint)
    service.engine(f"f-{name}", name, canary="ab" * 16)
    body = {"incarnation": "i1", "instance": name, "canary": "cd" * 16}
    refused = service.refused("PUT", f"/v1/engines/g-{name}", body)
    assert (refused.status, refused.code) == (409, "canary_mismatch")
    assert f"g-{name}" not in str(service.ask("GET", "/v1/engines"))


@pytest.mark.parametrize(
    "change",
    [
        {"hash_seed": "other"},
        {"hash_scheme": "other"},
        {"canary": "cd" * 8},
        {"block_size_tokens": 32},
        {"key_length": 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_row_27_two_hash_spaces_in_one_routing_group_are_refused(
    service: EventsService, name: str, change: dict[str, Any]
) -> None:
    service.furnish(name, publication={"model": name, "routing_group": "both"})
    group = service.ask("GET", f"/v1/instances/{name}")["group"]
    body = {
        "group": group,
        "fingerprint": {**FINGERPRINT, **change},
        "publication": {"model": "other", "routing_group": "both"},
    }
    refused = service.refused("PUT", f"/v1/instances/x-{name}", body)
    assert (refused.status, refused.code) == (409, "hash_space_mixed")
    assert next(iter(change)) in str(refused)
    body["publication"] = {"model": "other", "routing_group": f"apart-{name}"}
    service.ask("PUT", f"/v1/instances/x-{name}", body)
    service.ask("DELETE", f"/v1/instances/x-{name}")
    service.ask("DELETE", f"/v1/instances/{name}")
    eventually(lambda: f'"{name}"' not in str(service.streams()), "they are gone")


# ---------------------------------------------------------------- questions


def test_routers_may_ask_who_holds_what(service: EventsService, name: str, engine: EngineStream) -> None:
    id = followed(service, name, engine, address="10.0.0.7:8000", node="n1", worker_id=77)
    prompt = Prompt(910, 6)
    service.write(prompt, name)
    engine.publish(stored(prompt, 0, 2))
    holds(service, name, prompt, id, 2)
    answer = route(service, name, prompt)
    assert (answer["asked"], answer["block_size_tokens"]) == (6, BLOCK_TOKENS)
    (row,) = answer["engines"]
    assert (row["engine"], row["address"], row["worker_id"], row["node"]) == (id, "10.0.0.7:8000", 77, "n1")
    assert row["tiers"] == {"gpu": 2, "cpu": 2, "storage": 2, "external": 6}
    assert (row["blocks"], row["tokens"], row["visible"]) == (6, 6 * BLOCK_TOKENS, True)
    assert 0 <= row["staleness_ms"] < 5_000
    pool = answer["pool"]
    assert (pool["blocks"], pool["announced"], pool["staleness_ms"]) == (6, 6, 0)
    assert route(service, name, Prompt(911, 3))["engines"] == []


def test_the_best_engines_come_first_and_top_k_is_how_many(service: EventsService, name: str) -> None:
    prompt = Prompt(912, 6)
    with EngineStream() as first, EngineStream() as second, EngineStream() as third:
        streams = {f"e-{name}": first, f"f-{name}": second, f"g-{name}": third}
        followed(service, name, first)
        for id, stream in list(streams.items())[1:]:
            service.engine(id, name, events=stream.endpoint, replay=stream.replay)
        time.sleep(0.3)
        for (id, stream), blocks in zip(streams.items(), (2, 5, 3), strict=True):
            stream.publish(stored(prompt, 0, blocks))
            holds(service, name, prompt, id, blocks)
        ranked = [row["engine"] for row in route(service, name, prompt)["engines"]]
        assert ranked == [f"f-{name}", f"g-{name}", f"e-{name}"]
        best = route(service, name, prompt, top_k=2)["engines"]
        assert [row["engine"] for row in best] == ranked[:2]


def test_questions_by_token_ids_have_the_same_answer(
    service: EventsService, name: str, engine: EngineStream
) -> None:
    """Whether the instance's hash can be computed here or only the engine can make it."""
    for space, scheme in ((f"{name}a", "sha256_cbor"), (f"{name}b", "nobody-knows")):
        fingerprint = {**FINGERPRINT, "hash_scheme": scheme, "key_length": 32, "hash_seed": "vllm-none-hash"}
        service.furnish(space, publication={"model": space}, fingerprint=fingerprint)
        service.engine(f"e-{space}", space, events=engine.endpoint, replay=engine.replay)
        prompt = Prompt(913, 5, key_length=32)
        if scheme == "sha256_cbor":
            made = block_keys(scheme, "vllm-none-hash", prompt.ids, BLOCK_TOKENS, "", "")
            assert made is not None
            prompt.keys = made
        service.write(prompt, space)
        time.sleep(0.3)
        engine.publish(stored(prompt, 0, 3))
        holds(service, space, prompt, f"e-{space}", 3)
        ids = [*prompt.ids, 1, 2, 3]
        by_ids = service.ask("POST", f"/v1/instances/{space}/route", {"token_ids": ids})
        (row,) = by_ids["engines"]
        assert by_ids["asked"] == 5, "what is no whole block is left out"
        assert row["tiers"]["gpu"] == 3
        assert by_ids["pool"]["blocks"] == (5 if scheme == "sha256_cbor" else -1)
        other = service.ask("POST", f"/v1/instances/{space}/route", {"token_ids": ids, "salt": "another"})
        assert all(row["tiers"]["gpu"] == 0 for row in other["engines"]), "another salt is another text"
        engine.publish(CLEARED)


# ---------------------------------------------------------------- reports


def report(service: EventsService, engine: str, number: int, base: int | None, **more: Any) -> Any:
    """What an engine says of itself."""
    body = {"incarnation": "i1", "number": number, "base": base, **more}
    return service.ask("POST", f"/v1/engines/{engine}/cache", body)


def item(prompt: Prompt, first: int = 0, last: int | None = None, tier: str = "gpu") -> dict[str, Any]:
    """Blocks of a prompt in a tier, as they are reported."""
    parent = prompt.hashes[first - 1] if first else None
    tokens = [token for row in prompt.tokens[first:last] for token in row]
    return {"tier": tier, "parent": parent, "hashes": prompt.hashes[first:last], "token_ids": tokens}


def test_engines_may_report_instead_of_publishing(service: EventsService, name: str) -> None:
    service.furnish(name, publication={"model": name})
    id = f"e-{name}"
    prompt = Prompt(920, 4)
    said = report(service, id, 1, None, stored=[item(prompt, 0, 2)])
    assert (said["stored"], said["want"]) == (["taken"], "")
    assert tiers(service, name, prompt, id)["gpu"] == 2
    said = report(service, id, 2, 1, stored=[item(prompt, 2, 4), item(prompt, 0, 3, "cpu")])
    assert said["stored"] == ["taken", "taken"]
    assert tiers(service, name, prompt, id) == {"gpu": 4, "cpu": 4, "storage": 4, "external": 4}
    report(service, id, 3, 2, removed=[{"tier": "gpu", "hashes": prompt.hashes[1:]}])
    assert tiers(service, name, prompt, id) == {"gpu": 1, "cpu": 3, "storage": 3, "external": 3}
    report(service, id, 4, None, stored=[item(prompt, 0, 1, "storage")])
    assert tiers(service, name, prompt, id) == {"gpu": 0, "cpu": 0, "storage": 1, "external": 1}, "a snapshot"


def test_a_report_that_goes_on_from_something_else_is_not_taken(service: EventsService, name: str) -> None:
    service.furnish(name, publication={"model": name})
    id, prompt = f"e-{name}", Prompt(921, 4)
    assert report(service, id, 5, 4, stored=[item(prompt)])["want"] == "snapshot", "it never had number 4"
    assert tiers(service, name, prompt, id).get("gpu", 0) == 0
    report(service, id, 6, None, stored=[item(prompt, 0, 1)])
    assert report(service, id, 9, 8, stored=[item(prompt, 1, 2)])["want"] == "snapshot", "a gap"
    assert report(service, id, 7, 6, stored=[item(prompt, 1, 2)])["want"] == ""
    assert tiers(service, name, prompt, id)["gpu"] == 2
    report(service, id, 7, 6, stored=[item(prompt, 1, 2)])
    assert tiers(service, name, prompt, id)["gpu"] == 2, "a retry changes nothing"


def test_row_11_reports_of_a_life_that_is_over_are_fenced(service: EventsService, name: str) -> None:
    service.furnish(name, publication={"model": name})
    id, prompt = f"e-{name}", Prompt(922, 3)
    report(service, id, 1, None, stored=[item(prompt)])
    service.engine(id, name, life="i2")
    eventually(lambda: tiers(service, name, prompt, id).get("gpu", 0) == 0, "the new life holds nothing")
    body = {"incarnation": "i1", "number": 2, "base": 1, "stored": [item(prompt)]}
    refused = service.refused("POST", f"/v1/engines/{id}/cache", body)
    assert refused.status in (404, 409), refused
    assert tiers(service, name, prompt, id).get("gpu", 0) == 0


def test_each_item_of_a_report_has_its_own_result(service: EventsService, name: str) -> None:
    service.furnish(name, publication={"model": name})
    id, prompt = f"e-{name}", Prompt(923, 6)
    items = [
        item(prompt, 0, 2),
        {**item(prompt, 2, 4), "tier": "moon"},
        {**item(prompt, 2, 4), "token_ids": [1, 2, 3]},
        {**item(prompt, 2, 4), "hashes": [prompt.hashes[2]] * 2},
        {**item(prompt, 2, 4), "hashes": [5, 6]},
        item(prompt, 3, 5),
    ]
    said = report(service, id, 1, None, stored=items)
    assert said["stored"] == ["taken", "tier", "tokens", "hashes", "hashes", "held"]
    assert tiers(service, name, prompt, id)["gpu"] == 2
    report(service, id, 2, 1, stored=[item(prompt, 2, 3)])
    assert tiers(service, name, prompt, id)["gpu"] == 5, "what was held counts now"


def test_the_answer_is_the_same_in_json(service: EventsService, name: str) -> None:
    service.furnish(name, publication={"model": name})
    prompt = Prompt(924, 3)
    service.write(prompt, name)
    content = msgspec.json.encode({"keys": [one.hex() for one in prompt.keys]})
    headers = {"content-type": "application/json", "accept": "application/json"}
    reply = service.http.post(f"/v1/instances/{name}/route", content=content, headers=headers)
    assert reply.status_code == 200, reply.text
    eventually(lambda: route(service, name, prompt)["pool"]["announced"] == 3, "it is announced")
    assert reply.json()["asked"] == 3 and reply.json()["pool"]["blocks"] == 3
