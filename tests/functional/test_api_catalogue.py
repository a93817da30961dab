"""The admin routes: what is registered, lists in pages, switches, status."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from metaservice.api.settings import ApiSettings
from tests.functional.api_house import FINGERPRINT, HYBRID, JSON, MSGPACK, House, open_house


@pytest_asyncio.fixture(params=[JSON, MSGPACK], ids=["json", "msgpack"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with open_house(settings=ApiSettings(page_size_max=3)) as house:
        house.speech = request.param
        yield house


async def test_everything_is_put_shown_put_again_and_deleted(house: House) -> None:
    bodies: dict[str, Any] = {
        "/v1/tenants/acme": {"quota": {"bytes": 10**9, "blocks": None}},
        "/v1/storages/s1": {
            "kind": "posix",
            "options": {"root": "/s1"},
            "capacity_bytes": 10**12,
            "fault_domain": "rack-7",
        },
        "/v1/groups/chat": {
            "tenant": "acme",
            "storages": ["s1"],
            "high_permille": 900,
            "low_permille": 800,
            "eviction": "reject",
        },
        "/v1/instances/m1": {"group": "chat", "fingerprint": HYBRID, "quota": {"blocks": 100}},
    }
    for path, body in bodies.items():
        created = await house.send("PUT", path, body)
        assert (created.status_code, created.headers.get("location")) == (201, path), created.text
        again = await house.send("PUT", path, body)
        assert (again.status_code, again.headers.get("location")) == (200, None), again.text
    tenant = await house.ask("GET", "/v1/tenants/acme")
    assert tenant["id"] == "acme" and tenant["quota"] == {"bytes": 10**9, "blocks": None}
    assert tenant["switch"] == "normal" and tenant["usage"]["bytes"] == 0
    storage = await house.ask("GET", "/v1/storages/s1")
    assert (storage["kind"], storage["capacity_bytes"], storage["fault_domain"]) == (
        "posix",
        10**12,
        "rack-7",
    )
    group = await house.ask("GET", "/v1/groups/chat")
    assert (group["tenant"], group["storages"], group["eviction"]) == ("acme", ["s1"], "reject")
    assert (group["high_permille"], group["low_permille"]) == (900, 800)
    instance = await house.ask("GET", "/v1/instances/m1")
    kinds = [each["kind"] for each in instance["fingerprint"]["groups"]]
    assert kinds == ["full", "sliding_window", "state"]
    assert instance["quota"]["blocks"] == 100 and not instance["retiring"]

    for path in ("/v1/tenants/acme", "/v1/storages/s1", "/v1/groups/chat"):
        assert (await house.problem("DELETE", path))[:2] == (409, "in_use")
    assert await house.ask("DELETE", "/v1/instances/m1", status=202) == {"id": "m1"}
    while (await house.send("GET", "/v1/instances/m1")).status_code == 200:
        pass
    for path in ("/v1/groups/chat", "/v1/storages/s1", "/v1/tenants/acme"):
        await house.ask("DELETE", path)
        assert (await house.problem("GET", path))[0] == 404
        assert (await house.problem("DELETE", path))[0] == 404


async def test_the_same_instance_with_another_fingerprint_is_refused_naming_each_field(house: House) -> None:
    await house.furnish()
    other = {**FINGERPRINT, "kv_dtype": "fp8", "revision": "r2"}
    reply = await house.send("PUT", "/v1/instances/m1", {"group": "chat", "fingerprint": other})
    problem = house.speech.decode(reply.content)
    assert (reply.status_code, problem["code"]) == (409, "fingerprint_mismatch")
    told = str(problem["facts"])
    assert all(word in told for word in ("kv_dtype", "bf16", "fp8", "revision", "r1", "r2"))
    assert "hash_seed" not in told


async def test_lists_come_in_pages_that_cover_everything_once(house: House) -> None:
    names = [f"t{number:02}" for number in range(8)]
    for name in names:
        await house.put(f"/v1/tenants/{name}", {})
    seen: list[str] = []
    token = ""
    sizes = []
    while True:
        page = await house.ask("GET", f"/v1/tenants?page_size=1000&page_token={token}")
        seen += [item["id"] for item in page["items"]]
        sizes.append(len(page["items"]))
        token = page["next_page_token"]
        if not token:
            break
    assert seen == names
    assert sizes == [3, 3, 2], "the service's bound on pages holds"
    assert (await house.problem("GET", "/v1/tenants?page_token=%25%25"))[1:] == (
        "invalid_field",
        "page_token",
    )
    assert (await house.problem("GET", "/v1/tenants?page_size=0"))[1:] == ("invalid_field", "page_size")
    for kind in ("storages", "groups", "instances", "engines", "workers"):
        assert await house.ask("GET", f"/v1/{kind}") == {"items": [], "next_page_token": ""}


async def test_switches_are_set_shown_and_listed(house: House) -> None:
    await house.furnish()
    normal = await house.ask("GET", "/v1/switches/tenant/acme")
    assert normal["mode"] == "normal"
    for path in ("cluster", "tenant/acme", "group/chat", "instance/m1", "storage/s1"):
        put = await house.ask("PUT", f"/v1/switches/{path}", {"mode": "read_only", "reason": "drill"})
        shown = await house.ask("GET", f"/v1/switches/{path}")
        assert shown == put
        assert (shown["id"], shown["mode"], shown["reason"]) == (path, "read_only", "drill")
    listed = await house.ask("GET", "/v1/switches")
    assert len(listed["items"]) == 5
    await house.ask("PUT", "/v1/switches/cluster", {"mode": "normal"})
    assert len((await house.ask("GET", "/v1/switches"))["items"]) == 4
    assert (await house.problem("PUT", "/v1/switches/tenant/nobody", {"mode": "bypass"}))[:2] == (
        404,
        "tenant_unknown",
    )
    assert (await house.problem("PUT", "/v1/switches/planet/x", {"mode": "bypass"}))[1:] == (
        "invalid_field",
        "scope",
    )
    assert (await house.problem("PUT", "/v1/switches/cluster", {"mode": "off"}))[1:] == (
        "invalid_field",
        "mode",
    )


async def test_status_names_what_serves(house: House) -> None:
    status = await house.ask("GET", "/v1/status")
    assert (status["cluster"], status["shard"], status["status"], status["ready"]) == (
        "cluster1",
        0,
        "leading",
        True,
    )
    assert status["epoch"] == house.shard.epoch and status["seq"] == house.shard.durable_seq
    assert set(status["versions"]) == {"service", "wire", "python"}


async def test_a_service_that_does_not_lead_says_so_and_still_answers_probes() -> None:
    async with open_house() as house:
        await house.furnish()
        await house.replica.stop()
        assert (await house.send("GET", "/livez")).status_code == 200
        ready = await house.send("GET", "/readyz")
        assert (ready.status_code, ready.json()["code"]) == (503, "not_ready")
        assert int(ready.headers["retry-after"]) >= 1
        status = await house.ask("GET", "/v1/status")
        assert (status["ready"], status["status"], status["epoch"]) == (False, "stopped", 0)
        assert (await house.send("GET", "/metrics")).status_code == 200
        for method, path, body in (
            ("POST", "/v1/instances/m1/lookup", {"keys": []}),
            ("GET", "/v1/tenants", None),
            ("PUT", "/v1/tenants/acme", {}),
        ):
            reply = await house.send(method, path, body)
            assert (reply.status_code, reply.json()["code"]) == (503, "not_ready"), path
            assert reply.json()["retry_after_ms"] > 0 and "retry-after" in reply.headers


async def test_probes_answer_people_and_machines(house: House) -> None:
    assert (await house.send("GET", "/livez")).json() == {"status": "live"}
    assert (await house.send("GET", "/readyz")).json() == {"status": "ready"}
    head = await house.send("HEAD", "/readyz")
    assert (head.status_code, head.content) == (200, b"")
    assert (await house.http.get("/metrics")).headers["content-type"].startswith("text/plain")
    open_metrics = await house.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")
    assert (await house.send("POST", "/livez", {})).status_code == 405
