"""Every route of the OpenAPI document against names, methods, media types and fields that it must refuse."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from metaservice.core.ids import session_name
from metaservice.wire.problems import PROBLEMS
from tests.functional.api_house import House, key, open_house
from tests.security.raw_http import request_bytes

pytestmark = [pytest.mark.security, pytest.mark.asyncio(loop_scope="module")]

NAMES = {
    "parent folder": "..%2F..%2Fetc%2Fpasswd",
    "dots": "%2e%2e",
    "separator": "a%2Fb",
    "back slash": "a%5Cb",
    "nul": "a%00b",
    "line end": "a%0D%0ASet-Cookie:x",
    "end of line": "a%0A",
    "right-to-left": "%E2%80%AEname",
    "not UTF-8": "%FF%FE",
    "full width": "%EF%BC%8E",
    "double encoded": "%252e%252e",
    "blank": "%20",
    "long": "a" * 129,
    "hyphen first": "-rf",
    "template": "{{7*7}}",
    "wildcard": "*",
}
GOOD = {
    "tenant": "acme",
    "storage": "s1",
    "group": "chat",
    "instance": "m1",
    "engine": "e1",
    "worker": "w1",
    "session": session_name(0, 1),
    "lease": "r-0-1-1",
    "task": "t-0-1-1",
    "key": key(0).hex(),
    "shard": "0",
    "scope": "tenant",
    "id": "acme",
}


class Operation:
    """One method on one route of the document."""

    def __init__(self, method: str, template: str, described: dict[str, Any]) -> None:
        self.method = method
        self.template = template
        self.has_body = "requestBody" in described
        self.parameters = re.findall(r"\{(\w+)\}", template)

    def path(self, **other: str) -> str:
        """A concrete path, good but for `other`."""
        return self.template.format(**{name: GOOD[name] for name in self.parameters} | other)

    def __str__(self) -> str:
        return f"{self.method} {self.template}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[House]:
    async with open_house() as house:
        await house.furnish()
        yield house


async def operations(house: House) -> list[Operation]:
    document = (await house.http.get("/openapi.json")).json()
    found = [
        Operation(method.upper(), template, described)
        for template, path in document["paths"].items()
        for method, described in path.items()
    ]
    assert len(found) > 40
    return found


def refusals(reply: httpx.Response, allowed: set[int]) -> Iterator[str]:
    """What is wrong with a refusal, if anything."""
    if reply.status_code not in allowed:
        yield f"status {reply.status_code}, not one of {allowed}: {reply.text[:200]}"
        return
    if reply.headers["content-type"] != "application/problem+json":
        yield f"content type {reply.headers['content-type']}"
        return
    problem = reply.json()
    if problem["code"] not in PROBLEMS or problem["status"] != reply.status_code:
        yield f"problem {problem}"
    if "Traceback" in reply.text or "metaservice" in reply.text or ".py" in reply.text:
        yield f"tells of its inside: {reply.text[:300]}"


async def test_no_route_takes_a_name_that_is_none(house: House) -> None:
    wrong = []
    for operation in await operations(house):
        for parameter in operation.parameters:
            for what, name in NAMES.items():
                path = operation.path(**{parameter: name})
                body: dict[str, Any] | None = {} if operation.has_body else None
                reply = await house.send(operation.method, path, body)
                where = f"{operation} {parameter} {what}"
                wrong += [f"{where}: {fault}" for fault in refusals(reply, {400, 404, 422})]
                if reply.status_code == 422 and not reply.json().get("field"):
                    wrong.append(f"{where}: no field is named: {reply.text}")
    assert wrong == []
    usage = await house.ask("GET", "/v1/tenants")
    assert [item["id"] for item in usage["items"]] == ["acme"]


@pytest.mark.parametrize("length", [20_000, 2**20])
async def test_a_name_of_a_mebibyte_is_refused_before_it_is_read(house: House, length: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(request_bytes("GET", "/v1/tenants/" + "a" * length, b"", {}))
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "header_too_large"
    writer.close()
    assert (await house.send("GET", "/livez")).status_code == 200


async def test_no_route_takes_another_method(house: House) -> None:
    by_path: dict[str, set[str]] = {}
    for operation in await operations(house):
        by_path.setdefault(operation.path(), set()).add(operation.method)
    for path, methods in by_path.items():
        expected = methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
        for method in {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE"} - expected:
            reply = await house.send(method, path)
            assert reply.status_code == 405, f"{method} {path}: {reply.status_code}"
            assert set(reply.headers["allow"].split(", ")) == expected, path
        options = await house.send("OPTIONS", path)
        assert options.status_code == 204
        assert set(options.headers["allow"].split(", ")) == expected, path


async def test_no_route_reads_another_media_type(house: House) -> None:
    for operation in await operations(house):
        if not operation.has_body:
            continue
        for media in (
            "text/plain",
            "application/xml",
            "",
            "application/json; charset=utf-16",
            "multipart/form-data",
        ):
            reply = await house.http.request(
                operation.method,
                operation.path(),
                content=b"{}",
                headers={"content-type": media} if media else {},
            )
            assert [*refusals(reply, {415})] == [], f"{operation} {media}"
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        reply = await house.http.request(operation.method, operation.path(), content=b"{}", headers=packed)
        assert [*refusals(reply, {415})] == [], f"{operation} gzip"


async def test_no_route_promises_another_media_type(house: House) -> None:
    for operation in await operations(house):
        if operation.path() in ("/metrics", "/livez", "/readyz"):
            continue
        body: dict[str, Any] | None = {} if operation.has_body else None
        reply = await house.send(operation.method, operation.path(), body, accept="text/html")
        assert [*refusals(reply, {406})] == [], str(operation)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("application/msgpack", "application/msgpack"),
        ("application/msgpack;q=0.5, application/json;q=0.9", "application/json"),
        ("text/html, application/msgpack;q=0.2, */*;q=0.1", "application/msgpack"),
        ("application/json;q=0, */*", "application/msgpack"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "application/json"),
    ],
)
async def test_the_accept_header_decides_the_encoding(house: House, accept: str, expected: str) -> None:
    for path in ("/v1/status", "/v1/tenants/acme"):
        reply = await house.send("GET", path, accept=accept)
        assert (reply.status_code, reply.headers["content-type"]) == (200, expected)
    reply = await house.send("POST", "/v1/engines/e1/heartbeat", {"incarnation": "i1"}, accept=accept)
    assert (reply.status_code, reply.headers["content-type"]) == (200, expected)


async def test_no_route_takes_an_unknown_field_or_a_nested_body(house: House) -> None:
    deep = b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    for operation in await operations(house):
        if not operation.has_body:
            continue
        wanted = {
            b'{"no_such_field":1}': {"unknown_field", "invalid_field"},
            deep: {"nesting_too_deep", "unknown_field"},
            b'{"a":1,"a":2}': {"unknown_field", "invalid_field"},
            b"{": {"malformed_body"},
            b"\xff\xfe": {"malformed_body"},
        }
        for body, codes in wanted.items():
            reply = await house.send(operation.method, operation.path(), body)
            assert [*refusals(reply, {400, 422})] == [], str(operation)
            assert reply.json()["code"] in codes, f"{operation}: {reply.text}"
            if reply.status_code == 422:
                assert reply.json()["field"], f"{operation}: no field is named: {reply.text}"
        empty = await house.http.request(operation.method, operation.path())
        # 422: one of two fields has to be there. 409: none has to, but no router is told of the instance.
        assert empty.status_code in (200, 400, 409, 411, 422), str(operation)


async def test_a_body_of_64_mebibytes_is_refused_before_it_is_read(house: House) -> None:
    head = request_bytes("POST", "/v1/instances/m1/lookup", b"", {"Content-Type": "application/json"})
    head = head.replace(b"Content-Length: 0", b"Content-Length: 67108864")
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(head)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "body_too_large"
    writer.close()


CLUSTER_HEADERS: dict[str, list[bytes]] = {
    "x-ucm-hop": [b"", b"r1", b"\xff\xfe", b"a" * 8_000, b"1, 2", b"%0d%0aset-cookie: x"],
    "x-ucm-direct": [b"", b"0", b"no", b"\x80", b"1" * 8_000],
    "x-ucm-seq": [b"0/999999/999999", b"-1/x"],
    "x-ucm-leader": [b"0 http://evil.example"],
    "x-ucm-staleness-ms": [b"-1"],
}


@pytest.mark.parametrize("header", CLUSTER_HEADERS)
async def test_headers_between_replicas_change_no_answer_of_a_leader(house: House, header: str) -> None:
    """Anybody can send them: they only decide what happens to a request that is for another replica."""
    paths = [("GET", "/v1/tenants", None), ("POST", "/v1/instances/m1/lookup", {"keys": [key(0).hex()]})]
    for method, path, body in paths:
        plain = await house.send(method, path, body)
        for value in CLUSTER_HEADERS[header]:
            content = b"" if body is None else json.dumps(body).encode()
            sent = [
                (b"content-type", b"application/json"),
                (header.encode(), value),
                (header.encode(), value),
            ]
            reply = await house.http.request(method, path, content=content, headers=sent)
            assert (reply.status_code, reply.content) == (plain.status_code, plain.content)
            assert "x-ucm-leader" not in reply.headers
            assert "evil" not in str(reply.headers) and "set-cookie" not in reply.headers


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/workers/w1/tasks", {"incarnation": "j1", "shard": -1}, "shard"),
        ("/v1/workers/w1/tasks", {"incarnation": "j1", "shard": 1}, "shard"),
        ("/v1/workers/w1/tasks", {"incarnation": "j1", "shard": 256}, "shard"),
        ("/v1/workers/w1/tasks", {"incarnation": "j1", "shard": 2**70}, "shard"),
        ("/v1/workers/w1/tasks", {"incarnation": "j1", "shard": "0"}, "shard"),
        ("/v1/instances/m1/lookup", {"keys": [], "staleness_ms_max": -1}, "staleness_ms_max"),
        ("/v1/instances/m1/lookup", {"keys": [], "staleness_ms_max": 2**70}, "staleness_ms_max"),
        ("/v1/instances/m1/lookup", {"keys": [], "staleness_ms_max": 5, "lease_ms": 5}, "staleness_ms_max"),
        ("/v1/cluster/shards/0/handover", {"to": "a\nb"}, "to"),
        ("/v1/cluster/shards/0/handover", {"to": ["r2"]}, "to"),
        ("/v1/cluster/shards/0/handover", {"too": "r2"}, "too"),
    ],
)
async def test_what_fields_of_the_cluster_cannot_be(
    house: House, path: str, body: dict[str, Any], field: str
) -> None:
    status, _, named = await house.problem("POST", path, body)
    assert (status, named) == (422, field)


@pytest.mark.parametrize(
    "lease", ["r-0-1-99999999999999999", "r-256-1-1", "r--1-1-1", "r-0-1", "w-0-1", "r-٣-1-1", "r-0-1-1-1"]
)
async def test_ids_that_name_no_shard_are_nobodys(house: House, lease: str) -> None:
    """They are told as unknown, alone and among good ones, and go to no other replica."""
    ascii_only = lease.encode("ascii", "replace").decode().replace("?", "x")
    told = await house.ask("POST", f"/v1/leases/{ascii_only}/release", {"also": ["r-0-1-77", ascii_only]})
    assert told["outcomes"] == ["unknown"] * 3
    for path in (f"/v1/writes/{ascii_only}/abort", f"/v1/workers/w1/tasks/{ascii_only}/confirm"):
        body = {"engine": "e1", "incarnation": "i1"} if "writes" in path else {"incarnation": "j1"}
        status, code, _ = await house.problem("POST", path, body)
        assert status == 404 and code in ("session_unknown", "task_unknown")
