"""What writers, operators, engines and routers may put into requests about cache events: all that is odd is
refused by name, and nothing odd is ever told to a router."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from metaservice.wire.problems import PROBLEMS
from metaservice.wire.tokens import pack_tokens
from tests.functional.events_reader import Reader, check_event
from tests.functional.events_service import BLOCK_TOKENS, FINGERPRINT, EventsService, Prompt, known, wanted
from tests.security.events_house import furnished, same_publisher, unharmed

pytestmark = pytest.mark.security
HUGE = 2**70


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EventsService, Reader]]:
    with furnished(tmp_path_factory.mktemp("bodies"), keys_per_request_max=16_384) as house:
        yield house


def refused(service: EventsService, method: str, path: str, body: Any, statuses: tuple[int, ...]) -> str:
    """The field that a request is refused for, which it must be, in JSON: msgpack has no such numbers."""
    reply = service.http.request(method, path, json=body)
    assert reply.status_code in statuses, f"{reply.status_code} {reply.text[:300]}"
    problem = reply.json()
    assert problem["code"] in PROBLEMS
    assert "Traceback" not in reply.text and ".py" not in reply.text
    return str(problem.get("field", ""))


GOOD_ROW = pack_tokens([7] * BLOCK_TOKENS)
ODD_ROWS: dict[str, Any] = {
    "too short": GOOD_ROW[:-1],
    "too long": GOOD_ROW + b"\x01",
    "no width": b"\x00" * (1 + BLOCK_TOKENS),
    "width 5": b"\x05" + bytes(5 * BLOCK_TOKENS),
    "width 255": b"\xff" * (1 + BLOCK_TOKENS),
    "wider than needed": b"\x02" + b"\x07" * BLOCK_TOKENS + bytes(BLOCK_TOKENS),
    "half a block": pack_tokens([7] * (BLOCK_TOKENS // 2)),
    "two blocks": pack_tokens([7] * (2 * BLOCK_TOKENS)),
    "one byte": b"\x01",
    "a megabyte": b"\x01" + bytes(2**20),
    "text": "abc",
    "a number": 5,
    "a list of text": ["a"] * BLOCK_TOKENS,
    "a list too short": [1] * (BLOCK_TOKENS - 1),
    "negative": [-1] * BLOCK_TOKENS,
    "too large": [2**32] * BLOCK_TOKENS,
    "a map": {"a": 1},
    "fractions": [1.5] * BLOCK_TOKENS,
}


@pytest.mark.parametrize("what", ODD_ROWS)
def test_token_ids_that_are_no_block_s_are_refused(house: tuple[EventsService, Reader], what: str) -> None:
    service, reader = house
    prompt = Prompt(2_000 + list(ODD_ROWS).index(what), 3)
    for row in (0, 2):
        tokens: list[Any] = list(prompt.packed)
        tokens[row] = ODD_ROWS[what]
        body = {"engine": "e-m1", "incarnation": "i1", "keys": prompt.keys, "tokens": tokens}
        refusal = service.refused("POST", "/v1/instances/m1/writes", body)
        assert refusal.status in (400, 422), refusal
        assert refusal.field.startswith("tokens"), refusal
    service.write(prompt)
    reader.pump(lambda: reader.has(prompt.hashes))
    assert wanted(prompt).items() <= known(reader.index, "EXTERNAL").items()


@pytest.mark.parametrize("rows", [0, 2, 4, 16_384])
def test_a_row_of_token_ids_a_key(house: tuple[EventsService, Reader], rows: int) -> None:
    service, _ = house
    body = {
        "engine": "e-m1",
        "incarnation": "i1",
        "keys": Prompt(2_100, 3).keys,
        "tokens": [GOOD_ROW] * rows,
    }
    refusal = service.refused("POST", "/v1/instances/m1/writes", body)
    assert refusal.status in (400, 422) and refusal.field.startswith("tokens"), refusal


@pytest.mark.slow
def test_the_largest_request_is_taken_and_told(house: tuple[EventsService, Reader]) -> None:
    service, reader = house
    prompt = Prompt(2_101, 16_384)
    before = time.monotonic()
    service.write(prompt)
    assert time.monotonic() - before < 10
    reader.pump(lambda: reader.has(prompt.hashes), 20.0)
    service.remove(prompt.keys[:1])
    reader.pump(lambda: not reader.has(prompt.hashes[-1:]), 20.0, "and taken back, all that hangs on it")


@pytest.mark.parametrize("field", ["lora", "salt"])
@pytest.mark.parametrize(
    "text",
    ["a\0b", "a\nb", "\x1b[2J", "\x7f", "x" * 513, 5, None, ["a"]],
    ids=["nul", "line end", "escape", "delete", "long", "number", "null", "list"],
)
def test_names_of_adapters_and_salts_are_text(
    house: tuple[EventsService, Reader], field: str, text: Any
) -> None:
    service, _ = house
    prompt = Prompt(2_200, 1)
    body = {"engine": "e-m1", "incarnation": "i1", "keys": prompt.keys, "tokens": prompt.packed, field: text}
    refusal = service.refused("POST", "/v1/instances/m1/writes", body)
    assert refusal.status in (400, 422) and refusal.field == field, refusal
    refusal = service.refused("POST", "/v1/instances/m1/route", {"keys": prompt.keys, field: text})
    assert refusal.status in (400, 422) and refusal.field == field, refusal


@pytest.mark.parametrize(
    "text", ["a@b@c", "kv@pool@x", "../../etc/passwd", "%00", "тест", "x" * 512, "'; --"]
)
def test_odd_but_possible_names_are_told_as_they_are(house: tuple[EventsService, Reader], text: str) -> None:
    service, reader = house
    prompt = Prompt(2_300, 2, lora=text, salt=text)
    service.write(prompt)
    reader.pump(lambda: reader.has(prompt.hashes))
    block = reader.index.blocks[prompt.hashes[0], "EXTERNAL"]
    assert (block.lora, block.salt) == (text, text)
    assert reader.batches[-1].topic.count("@") == 2


@pytest.mark.parametrize("model", ["a@b", "kv@pool@m", "@", "@@@", "имя", "a b", "x" * 256])
def test_a_model_s_name_cannot_break_a_topic(house: tuple[EventsService, Reader], model: str) -> None:
    """llm-d takes a topic with another number of `@` for the name of a pod."""
    service, _ = house
    name = f"odd-{len(model)}-{abs(hash(model)) % 10_000}"
    service.furnish(name, publication={"model": model})
    reader = service.reader(name)
    prompt = Prompt(2_400, 1)
    service.write(prompt, name)
    reader.pump(lambda: reader.has(prompt.hashes))
    assert reader.batches[-1].topic.startswith("kv@pool@") and reader.batches[-1].topic.count("@") == 2
    service.ask("DELETE", f"/v1/instances/{name}")


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"model": "a\0b"},
        {"model": "x" * 100_000},
        {"routing_group": "a\nb"},
        {"lora": "\x00"},
        {"hash_of": "middle64"},
        {"entries_max": 0},
        {"entries_max": -1},
        {"entries_max": HUGE},
        {"entries_max": "many"},
        {"base": "m1"},
        {"base": "nobody"},
        {"no_such_field": 1},
    ],
    ids=str,
)
def test_publications_that_make_no_sense_are_refused(
    house: tuple[EventsService, Reader], change: dict[str, Any]
) -> None:
    service, _ = house
    group = service.ask("GET", "/v1/instances/m1")["group"]
    body = {"group": group, "fingerprint": FINGERPRINT, "publication": {"model": "m1", **change}}
    field = refused(service, "PUT", "/v1/instances/m1", body, (400, 422))
    assert next(iter(change)) in field or field.startswith("publication"), field
    assert service.ask("GET", "/v1/instances/m1")["publication"]["model"] == "m1"


def test_keys_whose_hash_no_router_takes_are_told_to_none(house: tuple[EventsService, Reader]) -> None:
    """A hash below 2**32, or the same as its parent's, would make a router drop the batch, or the block."""
    service, reader = house
    prompt = Prompt(2_500, 4)
    prompt.keys[1] = prompt.keys[1][:8] + bytes(7) + b"\x05"
    service.write(prompt)
    twins = Prompt(2_501, 3)
    twins.keys[1] = bytes(8) + twins.keys[0][8:]
    twins.keys[2] = b"\x01" * 8 + twins.keys[0][8:]
    service.write(twins)
    after = Prompt(2_502, 2)
    service.write(after)
    reader.pump(lambda: reader.has(after.hashes) and reader.has(prompt.hashes[:1]))
    reader.beats(3)
    assert not reader.index.hashes() & set(prompt.hashes[1:]), "nor what hangs on it"
    for event in reader.events():
        check_event(event)
    assert service.lookup(prompt) == 4 and service.lookup(twins) == 3


ODD_REPORTS: dict[str, dict[str, Any]] = {
    "no number": {"number": None},
    "negative": {"number": -1},
    "huge": {"number": HUGE},
    "huge base": {"number": 5, "base": HUGE},
    "text": {"number": "5"},
    "items that are no list": {"stored": {"tier": "gpu"}},
    "items that are numbers": {"stored": [1, 2]},
    "too many items": {"removed": [{"tier": "gpu", "hashes": []}] * 5_000},
    "hashes that are text": {"removed": [{"tier": "gpu", "hashes": "abc"}]},
    "negative hashes": {"removed": [{"tier": "gpu", "hashes": [-1]}]},
    "hashes beyond 64 bits": {"removed": [{"tier": "gpu", "hashes": [2**64]}]},
    "a tier without end": {"removed": [{"tier": "x" * 10_000, "hashes": []}]},
    "an unknown field": {"removed": [{"tier": "gpu", "hashes": [], "why": 1}]},
    "a parent beyond 64 bits": {"stored": [{"tier": "gpu", "hashes": [2**40], "parent": 2**64}]},
    "token ids beyond 32 bits": {"stored": [{"tier": "gpu", "hashes": [2**40], "token_ids": [2**32]}]},
    "an adapter with a nul": {"stored": [{"tier": "gpu", "hashes": [2**40], "lora": "a\0"}]},
}


@pytest.mark.parametrize("what", ODD_REPORTS)
def test_reports_that_make_no_sense_are_refused(house: tuple[EventsService, Reader], what: str) -> None:
    service, reader = house
    body = {"incarnation": "i1", "number": 1, **ODD_REPORTS[what]}
    with same_publisher(service):
        refused(service, "POST", "/v1/engines/e-m1/cache", body, (400, 413, 422))
    unharmed(service, reader, "m1")


def test_reports_of_strangers_are_refused(house: tuple[EventsService, Reader]) -> None:
    service, _ = house
    body = {"incarnation": "i1", "number": 1}
    assert service.refused("POST", "/v1/engines/nobody/cache", body).status in (404, 409)
    body["incarnation"] = "i9"
    assert service.refused("POST", "/v1/engines/e-m1/cache", body).status in (404, 409)


ODD_ROUTES: dict[str, dict[str, Any]] = {
    "neither": {},
    "both": {"keys": ["00" * 16], "token_ids": [1] * 16},
    "keys of another length": {"keys": ["00" * 15]},
    "keys that are no hex": {"keys": ["zz" * 16]},
    "keys that are a number": {"keys": 5},
    "negative ids": {"token_ids": [-1] * 16},
    "huge ids": {"token_ids": [HUGE] * 16},
    "ids that are text": {"token_ids": "abcd"},
    "top_k -1": {"token_ids": [1] * 16, "top_k": -1},
    "top_k huge": {"token_ids": [1] * 16, "top_k": HUGE},
    "staleness -1": {"token_ids": [1] * 16, "staleness_ms_max": -1},
    "an unknown field": {"token_ids": [1] * 16, "why": 1},
}


@pytest.mark.parametrize("what", ODD_ROUTES)
def test_questions_that_make_no_sense_are_refused(house: tuple[EventsService, Reader], what: str) -> None:
    service, _ = house
    refused(service, "POST", "/v1/instances/m1/route", ODD_ROUTES[what], (400, 422))


def test_the_longest_question_is_answered_and_nobody_waits_for_it(
    house: tuple[EventsService, Reader],
) -> None:
    service, reader = house
    ids = b"\x07\0\0\0" * (16_384 * BLOCK_TOKENS)
    began_s = time.monotonic()
    answer = service.ask("POST", "/v1/instances/m1/route", {"token_ids": ids})
    assert answer["asked"] == 16_384 and time.monotonic() - began_s < 5
    refusal = service.refused("POST", "/v1/instances/m1/route", {"token_ids": ids * 40})
    assert refusal.status in (413, 422), refusal
    unharmed(service, reader, "m1")


def test_asking_to_be_told_again_over_and_over_costs_lookups_nothing(
    house: tuple[EventsService, Reader],
) -> None:
    service, reader = house
    prompt = Prompt(2_600, 512)
    service.write(prompt)
    reader.pump(lambda: reader.has(prompt.hashes))
    for _ in range(50):
        service.ask("POST", "/v1/instances/m1/restate", {})
    began_s = time.monotonic()
    for _ in range(20):
        assert service.lookup(prompt) == 512
    assert time.monotonic() - began_s < 4.0
    unharmed(service, reader, "m1")
    assert service.refused("POST", "/v1/instances/nobody/restate", {}).status == 404
