"""What is stored and registered for routers: token ids of writes, publications, where engines are."""

from base64 import b64encode
from typing import Any

import httpx
import msgspec
import pytest

from metaservice.core import commands
from metaservice.wire.tokens import pack_tokens
from tests.functional.api_house import FINGERPRINT, JSON, MSGPACK, Speech, keys, open_house
from tests.functional.fake_fleet import open_fleet


@pytest.mark.parametrize("speech", [JSON, MSGPACK], ids=["json", "msgpack"])
async def test_writes_carry_token_ids_in_every_form(speech: Speech) -> None:
    async with open_fleet("r1") as fleet:
        packed = pack_tokens([70_000] * 16)
        rows: list[Any] = [b64encode(packed).decode() if speech.is_json else packed, [*range(16)], None]
        body = {
            "engine": "e1", "incarnation": "i1", "keys": speech.keys(keys(3)), "tokens": rows,
            "lora": "sql", "salt": "tenant",
        }  # fmt: skip
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            url = f"{fleet.cluster.urls['r1']}/v1/instances/m0/writes"
            headers = {"content-type": speech.media}
            reply = await http.post(url, content=speech.encode(body), headers=headers)
        assert reply.status_code == 200, reply.text
        (command,) = fleet["r1"].replica.shard(0).asked
        assert isinstance(command, commands.StartWrite)
        assert command.tokens == [packed, pack_tokens(range(16)), b""]
        assert (command.lora, command.salt) == ("sql", "tenant")


WIDE = b64encode(b"\x02" + b"\x01" * 16 + b"\0" * 16).decode()
"""Ids that fit in a byte each, packed in two."""
NO_TOKENS: list[tuple[Any, ...]] = [
    ({"tokens": [None]}, "column_length", "tokens"),
    ({"tokens": [None, None, None]}, "column_length", "tokens"),
    ({"tokens": [None, [1] * 15]}, "invalid_field", "tokens[1]"),
    ({"tokens": [None, []]}, "invalid_field", "tokens[1]"),
    ({"tokens": [[-1] * 16, None]}, "invalid_field", "tokens[0]"),
    ({"tokens": [[2**32] * 16, None]}, "invalid_field", "tokens[0]"),
    ({"tokens": [b64encode(b"\x01" * 16).decode(), None]}, "invalid_field", "tokens[0]"),
    ({"tokens": [WIDE, None]}, "invalid_field", "tokens[0]"),
    ({"tokens": ["?!", None]}, "invalid_field", "tokens[0]"),
    ({"tokens": {}}, "invalid_field", "tokens"),
    ({"salt": "\x7f"}, "invalid_field", "salt"),
    ({"lora": 5}, "invalid_field", "lora"),
]


async def test_what_token_ids_cannot_be() -> None:
    async with open_fleet("r1") as fleet:
        for body, code, field in NO_TOKENS:
            start = {"engine": "e1", "incarnation": "i1", "keys": [each.hex() for each in keys(2)], **body}
            reply = await fleet.send("r1", "POST", "/v1/instances/m0/writes", start)
            told = msgspec.json.decode(reply.content)
            assert (told["code"], told["field"]) == (code, field), told
        assert not fleet["r1"].replica.shard(0).asked


async def test_what_is_registered_for_routers_is_shown() -> None:
    async with open_house() as house:
        await house.furnish()
        publication = {
            "model": "tiny",
            "routing_group": "g",
            "lora": "sql",
            "hash_of": "head64",
            "entries_max": 10,
            "base": "",
        }
        body = {"group": "chat", "fingerprint": FINGERPRINT, "publication": publication}
        await house.put("/v1/instances/m1", body)
        shown = await house.ask("GET", "/v1/instances/m1")
        assert (shown["publication"], shown["announced"]) == (publication, 0)
        await house.put("/v1/instances/m1", {"group": "chat", "fingerprint": FINGERPRINT})
        assert (await house.ask("GET", "/v1/instances/m1"))["publication"] is None
        storage = {"kind": "posix", "options": {"root": "/s1"}, "fault_domain": "n1", "reach": "node"}
        await house.put("/v1/storages/s1", storage)
        assert (await house.ask("GET", "/v1/storages/s1"))["reach"] == "node"
        endpoints = {
            "node": "n1", "address": "10.0.0.1:8000", "worker_id": 2**64 - 1,
            "events": "tcp://10.0.0.1:5557", "replay": "tcp://10.0.0.1:5558", "dialect": "sglang",
        }  # fmt: skip
        engine = {"incarnation": "i2", "instance": "m1", "endpoints": endpoints}
        await house.ask("PUT", "/v1/engines/e2", engine)
        shown = await house.ask("GET", "/v1/engines/e2")
        assert shown["endpoints"] == endpoints
        assert shown["pool_channel"] >= 0 and shown["local_channel"] >= 0


NO_REGISTRATIONS: list[tuple[Any, ...]] = [
    ("instances/m1", {"publication": {}}, "publication.model"),
    ("instances/m1", {"publication": {"model": ""}}, "publication.model"),
    ("instances/m1", {"publication": {"model": "a\nb"}}, "publication.model"),
    ("instances/m1", {"publication": {"model": "a", "hash_of": "crc"}}, "publication.hash_of"),
    ("instances/m1", {"publication": {"model": "a", "entries_max": 0}}, "publication.entries_max"),
    ("storages/s1", {"kind": "posix", "reach": "rack"}, "reach"),
    ("engines/e1", {"endpoints": {"worker_id": 2**64}}, "endpoints.worker_id"),
    ("engines/e1", {"endpoints": {"worker_id": -1}}, "endpoints.worker_id"),
    ("engines/e1", {"endpoints": {"events": "tcp://a b"}}, "endpoints.events"),
    ("engines/e1", {"endpoints": {"address": "x" * 257}}, "endpoints.address"),
    ("engines/e1", {"endpoints": {"dialect": "trt"}}, "endpoints.dialect"),
    ("engines/e1", {"canary": "a\0"}, "canary"),
]


async def test_what_cannot_be_registered_for_routers() -> None:
    async with open_house() as house:
        await house.furnish()
        base: dict[str, dict[str, Any]] = {
            "instances": {"group": "chat", "fingerprint": FINGERPRINT},
            "storages": {},
            "engines": {"incarnation": "i1", "instance": "m1"},
        }
        for path, body, field in NO_REGISTRATIONS:
            whole = {**base[path.partition("/")[0]], **body}
            assert await house.problem("PUT", f"/v1/{path}", whole) == (422, "invalid_field", field), whole


async def test_row_06_an_engine_that_hashes_otherwise_is_refused() -> None:
    """Two seeds in one namespace are an error, not a hit rate of 0."""
    async with open_house() as house:
        await house.furnish("m2", {**FINGERPRINT, "canary": "cafe"})
        engine = {"incarnation": "x", "instance": "m2"}
        found = await house.problem("PUT", "/v1/engines/e7", {**engine, "canary": "beef"})
        assert found[:2] == (409, "canary_mismatch")
        await house.ask("PUT", "/v1/engines/e7", {**engine, "canary": "cafe"})


async def test_row_27_two_hash_spaces_in_one_routing_group_are_refused() -> None:
    """A router that knows both for the same tokens would keep dead entries for ever."""
    async with open_house() as house:
        await house.furnish()
        body = {"group": "chat", "fingerprint": FINGERPRINT, "publication": {"model": "tiny"}}
        await house.put("/v1/instances/m1", body)
        other = {**FINGERPRINT, "hash_seed": "8"}
        body = {**body, "fingerprint": other}
        assert (await house.problem("PUT", "/v1/instances/m2", body))[:2] == (409, "hash_space_mixed")
        body = {**body, "publication": {"model": "tiny", "routing_group": "others"}}
        await house.put("/v1/instances/m2", body)


async def test_the_openapi_document_has_the_routes_and_every_reference_leads_somewhere() -> None:
    async with open_house() as house:
        text = (await house.http.get("/openapi.json")).text
        document: dict[str, Any] = msgspec.json.decode(text)
        for path, method in (
            ("/v1/instances/{instance}/route", "post"),
            ("/v1/instances/{instance}/restate", "post"),
            ("/v1/engines/{engine}/cache", "post"),
            ("/v1/events", "get"),
        ):
            assert document["paths"][path][method]["responses"]["200"]["content"], path
        schemas = document["components"]["schemas"]
        hashes = schemas["StoredItem"]["properties"]["hashes"]["items"]
        assert (hashes["type"], hashes["maximum"]) == ("integer", 2**64 - 1)
        assert schemas["StoredItem"]["properties"]["parent"]["anyOf"][0]["type"] == "integer"
        assert "tokens" in schemas["StartWriteRequest"]["properties"]
        assert "publication" in schemas["InstanceBody"]["properties"]
        assert "\\\\A" not in text and "\\\\Z" not in text

        def references(part: Any) -> set[str]:
            if isinstance(part, dict):
                here = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
                return here.union(*map(references, part.values()))
            return set().union(*map(references, part)) if isinstance(part, list) else set()

        dangling = {ref for ref in references(document) if ref.rpartition("/")[2] not in schemas}
        assert not dangling
