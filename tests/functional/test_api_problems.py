"""Each typed error over the wire, in both encodings: its status, its code, and the field that it names."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from metaservice.core.model import Limits
from tests.functional.api_house import (
    FINGERPRINT,
    HYBRID,
    JSON,
    LIMITS,
    MSGPACK,
    OWNER,
    House,
    key,
    keys,
    open_house,
)

SMALL = msgspec.structs.replace(
    LIMITS, keys_per_request_max=16, sessions_max=2, leases_max=2, registered_max=4
)


@pytest_asyncio.fixture(params=[JSON, MSGPACK], ids=["json", "msgpack"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with open_house(limits=SMALL) as house:
        await house.furnish(fingerprint=HYBRID)
        house.speech = request.param
        yield house


Wrong = tuple[Any, tuple[int, str, str]]
"""A body, and the status, code and field that it is refused with."""


async def refused(house: House, method: str, path: str, rows: list[Wrong], **base: Any) -> None:
    """Each body (on top of `base`) is refused as the row says."""
    wrong = []
    for body, expected in rows:
        full = {**base, **body} if isinstance(body, dict) else body
        found = await house.problem(method, path, full)
        if found != expected:
            wrong.append((str(body)[:80], found, expected))
    assert wrong == []


def hex_or_bytes(house: House, hexadecimal: str) -> Any:
    return hexadecimal if house.speech.is_json else bytes.fromhex(hexadecimal)


LOOKUP = "/v1/instances/m1/lookup"
WRITES = "/v1/instances/m1/writes"


async def test_what_a_lookup_may_not_say(house: House) -> None:
    good = house.speech.keys(keys(1))
    short = hex_or_bytes(house, "ab" * 15)
    rows: list[Wrong] = [
        ({"keys": []}, (422, "empty_batch", "keys")),
        ({"keys": None}, (422, "invalid_key", "keys")),
        ({"keys": 7}, (422, "invalid_key", "keys")),
        ({"keys": [None]}, (422, "invalid_key", "keys[0]")),
        ({"keys": [7]}, (422, "invalid_key", "keys[0]")),
        ({"keys": [[]]}, (422, "invalid_key", "keys[0]")),
        ({"keys": [{}]}, (422, "invalid_key", "keys[0]")),
        ({"keys": [hex_or_bytes(house, "ab" * 16), short]}, (422, "key_length", "keys[1]")),
        ({"keys": ["z" * 32]}, (422, "invalid_key", "keys[0]")),
        ({"keys": ["a b" + "a" * 29]}, (422, "invalid_key", "keys[0]")),
        ({"keys": house.speech.keys(keys(17))}, (422, "too_many_keys", "keys")),
        ({"mode": "fuzzy"}, (422, "invalid_field", "mode")),
        ({"mode": 7}, (422, "invalid_field", "mode")),
        ({"group": "../etc"}, (422, "invalid_name", "group")),
        ({"group": "a\0"}, (422, "invalid_name", "group")),
        ({"group": "nope"}, (422, "unknown_group", "group")),
        ({"limit": -1}, (422, "invalid_field", "limit")),
        ({"limit": 1.5}, (422, "invalid_field", "limit")),
        ({"lease_ms": -1}, (422, "ttl_out_of_range", "lease_ms")),
        ({"lease_ms": 10**15}, (422, "ttl_out_of_range", "lease_ms")),
        ({"lease_ms": 2**60}, (422, "ttl_out_of_range", "lease_ms")),
        ({"lease_ms": "1s"}, (422, "invalid_field", "lease_ms")),
        ({"lease_ms": True}, (422, "invalid_field", "lease_ms")),
        ({"parent": short}, (422, "key_length", "parent")),
        ({"parent": 3}, (422, "invalid_key", "parent")),
        ({"request_id": "a" * 65}, (422, "invalid_field", "request_id")),
        ({"leese_ms": 5}, (422, "unknown_field", "leese_ms")),
        ({"engine": "e9", "incarnation": "x"}, (409, "reregister", "engine")),
    ]
    if house.speech.is_json:  # msgpack cannot say it
        rows.append(({"limit": 10**30}, (422, "invalid_field", "limit")))
    await refused(house, "POST", LOOKUP, rows, keys=good)
    await refused(house, "POST", LOOKUP, [({}, (422, "invalid_field", "keys"))])
    nowhere: list[Wrong] = [({"keys": good}, (404, "instance_unknown", "instance"))]
    await refused(house, "POST", "/v1/instances/none/lookup", nowhere)


async def test_what_a_start_write_may_not_say(house: House) -> None:
    one = house.speech.key
    circle = [one(key(1)), one(key(0))]
    await refused(
        house,
        "POST",
        WRITES,
        [
            ({"engine": "e9"}, (409, "reregister", "engine")),
            ({"incarnation": "old"}, (409, "reregister", "incarnation")),
            ({"incarnation": ""}, (422, "invalid_field", "incarnation")),
            ({"parents": [None]}, (422, "column_length", "parents")),
            ({"parents": [None, one(b"short")]}, (422, "key_length", "parents[1]")),
            ({"parents": [None, 1]}, (422, "invalid_key", "parents[1]")),
            ({"parents": [None, None], "parent": one(key(9))}, (422, "invalid_field", "parent")),
            ({"parents": circle}, (422, "parent_cycle", "keys[0]")),
            ({"sizes": [1]}, (422, "size_mismatch", "sizes")),
            ({"sizes": [-1]}, (422, "invalid_field", "sizes[0]")),
            ({"ttl_ms": 1}, (422, "ttl_out_of_range", "ttl_ms")),
            ({"ttl_ms": -5}, (422, "ttl_out_of_range", "ttl_ms")),
            ({"group": "no such"}, (422, "invalid_name", "group")),
        ],
        **OWNER,
        keys=house.speech.keys(keys(2)),
    )
    same = {"keys": house.speech.keys([key(0), key(0)]), "parents": [None, one(key(3))]}
    expected = (422, "duplicate_conflict", "keys[1]")
    await refused(house, "POST", WRITES, [(same, expected)], **OWNER)
    assert (await house.ask("GET", "/v1/instances/m1"))["usage"]["blocks"] == 0, "nothing was changed"


async def test_what_a_finish_may_not_say(house: House) -> None:
    started = await house.start(keys(2))
    path = f"/v1/writes/{started['session']}/finish"
    rows = {"locations": started["locations"], "generations": started["generations"]}
    sums = {"checksums": house.speech.column([1, 2], "Q")}
    whole: dict[str, Any] = {**OWNER, **rows, **sums}
    huge = 2**70 if house.speech.is_json else 1.0
    await refused(
        house,
        "POST",
        path,
        [
            ({"checksums": None}, (422, "invalid_field", "checksums")),
            ({"checksums": [1, 2, 3]}, (422, "column_length", "checksums")),
            ({"parts": ["nope"]}, (422, "unknown_part", "parts[0]")),
            ({"parts": ["a/b"]}, (422, "invalid_name", "parts[0]")),
            ({"sizes": [5]}, (422, "size_mismatch", "sizes")),
            ({"ok": [True]}, (422, "column_length", "ok")),
            ({"ok": ["yes", "no"]}, (422, "invalid_field", "ok[0]")),
            ({"engine": "e9"}, (403, "foreign_session", "engine")),
            ({"incarnation": "i0"}, (409, "reregister", "incarnation")),
            ({"locations": [1, 99]}, (422, "foreign_location", "locations[1]")),
            ({"generations": [2, 3]}, (409, "stale_generation", "generations[0]")),
            ({"generations": [1]}, (422, "column_length", "generations")),
            ({"locations": [-1, 0]}, (422, "invalid_field", "locations[0]")),
            ({"locations": [0, huge]}, (422, "invalid_field", "locations[1]")),
            ({"locations": "0,1"}, (422, "invalid_field", "locations")),
        ],
        **whole,
    )
    without: Wrong = ({**OWNER, "generations": [1]}, (422, "invalid_field", "locations"))
    await refused(house, "POST", path, [without])
    unknown: list[Wrong] = [(whole, (404, "session_unknown", "session"))]
    for session in ("w-0-999", "w-9-1", "w-0-x", "r-0-1-1", "nonsense"):
        await refused(house, "POST", f"/v1/writes/{session}/finish", unknown)
    assert (await house.ask("POST", path, whole))["published"] == 2, "no refused finish had an effect"


async def test_a_session_of_another_engine_is_foreign(house: House) -> None:
    started = await house.start(keys(1))
    await house.ask("PUT", "/v1/engines/e2", {"incarnation": "z", "instance": "m1"})
    for verb in ("renew", "abort"):
        body = {"engine": "e2", "incarnation": "z"}
        found = await house.problem("POST", f"/v1/writes/{started['session']}/{verb}", body)
        assert found == (403, "foreign_session", "engine")


async def test_bounds_of_what_may_be_open(house: House) -> None:
    for number in range(2):
        await house.start(keys(1, number))
    reply = await house.send("POST", WRITES, {**OWNER, "keys": house.speech.keys(keys(1, 5))})
    problem = house.speech.decode(reply.content)
    assert (reply.status_code, problem["code"]) == (503, "too_many_sessions")
    assert problem["retry_after_ms"] > 0 and int(reply.headers["retry-after"]) >= 1
    for number in range(2, 4):
        await house.ask("PUT", f"/v1/engines/e{number}", {"incarnation": "a"})
    await house.ask("PUT", "/v1/engines/e4", {"incarnation": "a"})
    found = await house.problem("PUT", "/v1/engines/e5", {"incarnation": "a"})
    assert found[:2] == (409, "registry_full")


async def test_what_the_catalogue_may_not_be_told(house: House) -> None:
    part = {"name": "a", "bytes": 0}
    group = {"tenant": "acme", "storages": ["s1"]}
    bodies: list[tuple[str, Wrong]] = [
        ("tenants/t", ({"quota": {"bytes": -1}}, (422, "invalid_field", "quota.bytes"))),
        ("tenants/t", ({"quota": {"bites": 1}}, (422, "unknown_field", "quota.bites"))),
        ("tenants/t", ({"quota": {"bytes": "1"}}, (422, "invalid_field", "quota.bytes"))),
        ("tenants/t", ({"qota": {}}, (422, "unknown_field", "qota"))),
        ("tenants/t", ([], (400, "bad_request", ""))),
        ("storages/s", ({}, (422, "invalid_field", "kind"))),
        ("storages/s", ({"kind": "a", "options": {"x": "a\0b"}}, (422, "invalid_field", "options.x"))),
        ("groups/g", ({**group, "tenant": "nobody"}, (404, "tenant_unknown", "tenant"))),
        ("groups/g", ({**group, "storages": ["zz"]}, (404, "storage_unknown", "storages[0]"))),
        ("groups/g", ({**group, "tenant": "../x"}, (422, "invalid_name", "tenant"))),
        ("groups/g", ({**group, "eviction": "fifo"}, (422, "invalid_field", "eviction"))),
        ("groups/g", ({**group, "storages": ["s1", "a/b"]}, (422, "invalid_name", "storages[1]"))),
        ("instances/m2", ({"group": "none", "fingerprint": FINGERPRINT}, (404, "group_unknown", "group"))),
    ]
    of_fingerprints: list[tuple[dict[str, Any], str]] = [
        ({"parts": []}, "fingerprint.parts"),
        ({"parts": [part]}, "fingerprint.parts[0].bytes"),
        ({"key_length": 8}, "fingerprint.key_length"),
        ({"key_length": 65}, "fingerprint.key_length"),
        ({"block_size_tokens": 0}, "fingerprint.block_size_tokens"),
        ({"model": "a\nb"}, "fingerprint.model"),
    ]
    for change, field in of_fingerprints:
        body = {"group": "chat", "fingerprint": {**FINGERPRINT, **change}}
        bodies.append(("instances/m2", (body, (422, "invalid_field", field))))
    for path, row in bodies:
        await refused(house, "PUT", f"/v1/{path}", [row])
    twice = {**FINGERPRINT, "parts": [{"name": "a", "bytes": 1}, {"name": "a", "bytes": 1}]}
    found = await house.problem("PUT", "/v1/instances/m2", {"group": "chat", "fingerprint": twice})
    assert found[:2] == (422, "invalid_fingerprint")
    await house.put("/v1/tenants/other", {})
    await house.put("/v1/groups/g2", {"tenant": "acme", "storages": ["s1"]})
    body = {"tenant": "other", "storages": ["s1", "s2"]}
    assert (await house.problem("PUT", "/v1/groups/chat", body))[:2] == (409, "tenant_mismatch")
    body = {"group": "g2", "fingerprint": HYBRID}
    assert (await house.problem("PUT", "/v1/instances/m1", body))[:2] == (409, "group_mismatch")
    body = {"kind": "posix", "options": {"root": "/elsewhere"}}
    assert (await house.problem("PUT", "/v1/storages/s1", body))[:2] == (409, "storage_mismatch")


async def test_an_instance_that_is_being_removed_answers_so(house: House) -> None:
    limits = Limits(retire_batch_max=1, reclaim_delay_ms=0, late_write_ms=0)
    async with open_house(limits=limits) as other:
        await other.furnish()
        other.speech = house.speech
        for first in range(0, 3000, 500):
            await other.fill(500, first)
        await other.ask("DELETE", "/v1/instances/m1", status=202)
        found = await other.problem("POST", LOOKUP, {"keys": other.speech.keys(keys(1))})
        assert found[:2] == (409, "instance_retiring")


async def test_bodies_that_are_none(house: House) -> None:
    packed = msgspec.msgpack.encode
    malformed, twice = (400, "malformed_body", ""), (422, "invalid_field", "keys")
    in_json: list[Wrong] = [
        (b"", malformed),
        (b"null", (400, "bad_request", "")),
        (b"[1]", (400, "bad_request", "")),
        (b'{"keys":' + b"[" * 10_000 + b"]" * 10_000 + b"}", (400, "nesting_too_deep", "")),
        (b'{"keys":["', malformed),
        (b'{"keys":[]} x', malformed),
        (b'{"keys":["\xff\xfe"]}', malformed),
        (b'{"keys":[NaN]}', malformed),
        (b'{"keys":["\\ud800"]}', malformed),
        (b"\xef\xbb\xbf{}", malformed),
        (b'{"keys":[],"keys":[]}', twice),
        (b'{"keys":[],"\\u006beys":[]}', twice),
        (b'{"keys":["' + b"9" * 5000 + b'"]}', (422, "key_length", "keys[0]")),
        (b'{"keys":[' + b"9" * 5000 + b"]}", (422, "invalid_field", "keys[0]")),
    ]
    in_msgpack: list[Wrong] = [
        (b"", malformed),
        (b"\xc0", (400, "bad_request", "")),
        (b"\x91\x01", (400, "bad_request", "")),
        (b"\x81\xa4keys" + b"\x91" * 10_000 + b"\xc0", (400, "nesting_too_deep", "")),
        (b"\x82\xa4keys\x90", malformed),
        (b"\x81\xa4keys\xdd\xff\xff\xff\xff", malformed),
        (b"\xdf\xff\xff\xff\xff", malformed),
        (packed({"keys": []}) + b"\0", malformed),
        (b"\x81\xa4keys\x91\xa2\xff\xfe", malformed),
        (b"\xc1", malformed),
        (b"\x81\xa4keys\x81\x81\xc0\xc0\xc0", malformed),
        (b"\x81\x01\xc0", (422, "invalid_field", "")),
        (b"\x82\xa4keys\x90\xa4keys\x90", twice),
        (packed({"keys": msgspec.msgpack.Ext(5, b"x")}), (422, "invalid_key", "keys")),
        (packed({"keys": [msgspec.msgpack.Ext(5, b"x")]}), (422, "invalid_key", "keys[0]")),
        (b"\x81\xa4keys\xd6\xff\0\0\0\0", (422, "invalid_key", "keys")),
        (packed({"keys": b"x" * 31}), (422, "key_length", "keys")),
        (packed({"keys": b"x" * 16, "lease_ms": float("nan")}), (422, "invalid_field", "lease_ms")),
    ]
    await refused(house, "POST", LOOKUP, in_json if house.speech.is_json else in_msgpack)
