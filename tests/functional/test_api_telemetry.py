"""What the service tells about itself, and that telling it never costs a request anything."""

import asyncio
import re
from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Never

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from metaservice.clock import monotonic_s
from metaservice.core.model import Limits
from metaservice.telemetry.instruments import OTHER
from metaservice.telemetry.metrics import Metrics
from metaservice.telemetry.tracing import open_tracer
from tests.functional.api_house import MSGPACK, OWNER, House, key, keys, open_house


async def scrape(house: House) -> dict[str, float]:
    """Every series of a scrape with its value."""
    text = (await house.http.get("/metrics")).text
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


async def test_every_outcome_is_counted_as_numerator_and_denominator() -> None:
    async with open_house() as house:
        await house.furnish()
        started = await house.start(keys(4))
        await house.start(keys(4))
        body = {**OWNER, "locations": started["locations"], "generations": started["generations"]}
        body |= {"ok": [True] * 6 + [False] * 2, "checksums": [1] * 8}
        await house.ask("POST", f"/v1/writes/{started['session']}/finish", body)
        found = await house.lookup(keys(4), lease_ms=1000)
        await house.ask("POST", f"/v1/leases/{found['lease']}/release", {})
        await house.ask("POST", "/v1/instances/m1/remove", {"keys": [key(2).hex(), key(9).hex()]})
        await house.problem("POST", "/v1/instances/nowhere/lookup", {"keys": []})
        for accept in ("application/openmetrics-text; version=abc", "text/plain; version=x", ";;,q=z"):
            assert (await house.http.get("/metrics", headers={"accept": accept})).status_code == 200
        seen = await scrape(house)
        prefix = "ucm_meta_"
        route = 'method="POST",route="/v1/instances/{instance}/lookup"'
        expected = {
            'lookups_total{cut="miss",mode="prefix"}': 1,
            'lookup_blocks_asked_total{mode="prefix"}': 4,
            'lookup_blocks_hit_total{mode="prefix"}': 3,
            'write_blocks_total{outcome="write",reason="none"}': 4,
            'write_blocks_total{outcome="in_progress",reason="none"}': 4,
            'finish_locations_total{status="serving"}': 3,
            'finish_locations_total{status="freed"}': 1,
            'finish_aborted_blocks_total{how="part_failed"}': 1,
            "published_blocks_total": 3,
            "leases_granted_total": 1,
            'lease_operations_total{outcome="released"}': 1,
            'removed_blocks_total{outcome="removed"}': 1,
            'removed_blocks_total{outcome="absent"}': 1,
            f'http_requests_total{{{route},status="200"}}': 1,
            f'http_requests_total{{{route},status="404"}}': 1,
            f"http_request_seconds_count{{{route}}}": 2,
            "lookup_keys_count": 1,
            "lookup_keys_sum": 4,
            'usage_blocks{id="acme",level="tenant"}': 2,
            'usage_blocks{id="m1",level="instance"}': 2,
            'registered{level="storage"}': 2,
            "telemetry_failures_total": 0,
        }
        got = {name: seen.get(prefix + name) for name in expected}
        assert got == expected
        assert seen[prefix + "commands_total"] > 5
        assert seen[prefix + "journal_append_seconds_count"] > 3
        assert seen[prefix + "process_resident_memory_bytes"] > 10**6
        buckets = [value for name, value in seen.items() if name.startswith(prefix + "lookup_keys_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == 1


async def test_b6_forced_releases_are_counted() -> None:
    """A holder that never releases is found by the clock, and the count of such ends is visible."""
    async with open_house() as house:
        await house.furnish()
        await house.fill(1)
        await house.lookup(keys(1), lease_ms=60)
        for _ in range(100):
            if house.app.metrics.expirations.value("lease"):
                break
            await asyncio.sleep(0.05)
        assert (await scrape(house))['ucm_meta_expired_total{kind="lease"}'] == 1


async def test_a6_writes_that_never_succeed_show() -> None:
    """Every part is reported as failed: the blocks are free at once, and the counters say so."""
    async with open_house() as house:
        await house.furnish()
        for _ in range(3):
            started = await house.start(keys(2))
            assert started["outcomes"] == ["write", "write"]
            await house.finish(started, ok=[False] * 4, checksums=None)
        seen = await scrape(house)
        assert seen['ucm_meta_finish_aborted_blocks_total{how="part_failed"}'] == 6
        assert seen["ucm_meta_published_blocks_total"] == 0
        assert seen['ucm_meta_usage_blocks{id="m1",level="instance"}'] == 0


async def test_i8_series_are_bounded_and_routes_are_templates() -> None:
    """Ids of tenants, instances, keys and requests do not become time series without bound."""
    limits = Limits(registered_max=3000)
    async with open_house(limits=limits, metrics=Metrics(monotonic_s, label_values_max=5)) as house:
        await house.furnish()
        house.speech = MSGPACK
        first = await scrape(house)
        for number in range(30):
            await house.send("PUT", f"/v1/tenants/tenant{number}", {})
            await house.send("GET", f"/v1/tenants/tenant{number}")
            await house.send("GET", f"/v1/nowhere{number}")
            await house.send("POST", f"/v1/instances/i{number}/lookup", {"keys": b"x" * 16})
            await house.send(("PROPFIND", "LOCK", "PATCH")[number % 3], "/v1/tenants")
        last = await scrape(house)
        new = {re.sub(r"_bucket|le=[^,}]*", "", name) for name in last.keys() - first.keys()}
        assert len(new) < 80, new
        assert last[f'ucm_meta_usage_bytes{{id="{OTHER}",level="tenant"}}'] == 0
        assert last['ucm_meta_registered{level="tenant"}'] == 31
        routes = set(re.findall(r'route="([^"]*)"', "\n".join(last)))
        assert not [route for route in routes if re.search(r"\d", route.replace("/v1", ""))]
        assert "/v1/tenants/{tenant}" in routes and "unmatched" in routes


class Broken(Metrics):
    """Telemetry in which everything that may go wrong does, at a scrape."""

    def watch_usage(self, describe: object) -> None:
        def fail(kind: str) -> Never:
            raise RuntimeError(f"no {kind} today")

        super().watch_usage(fail)


async def test_h6_a_fault_of_the_metrics_costs_its_part_only() -> None:
    async with open_house(metrics=Broken(monotonic_s)) as house:
        await house.furnish()
        await house.fill(1)
        await house.lookup(keys(1), mode="prefix")
        seen = await scrape(house)
        assert seen["ucm_meta_telemetry_failures_total"] == 1
        assert seen['ucm_meta_lookups_total{cut="none",mode="prefix"}'] == 1
        house.app.metrics.looked("a mode nobody has", "a cut nobody has", 1, 1, True)
        for number in range(1000):
            house.app.metrics.expired(f"kind{number}", 1)
        seen = await scrape(house)
        assert len([name for name in seen if "expired_total" in name]) <= 65


class Dead(SpanExporter):
    """An exporter whose collector is down."""

    def __init__(self) -> None:
        self.tries = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.tries += 1
        raise ConnectionError("the collector is down")


async def test_h6_a_dead_exporter_neither_fails_nor_slows_a_request() -> None:
    """Judged by the serving thread's processor time, median of many, beside a service without tracing."""
    exporter = Dead()
    tracer = open_tracer(True, exporter=exporter)
    async with open_house() as plain, open_house(tracer=tracer) as traced:
        for house in (plain, traced):
            await house.furnish()
            await house.fill(4)
        took: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(60):
            for which, house in enumerate((plain, traced)):
                begun = thread_time()
                assert (await house.lookup(keys(4)))["hits"] == 4
                took[which].append(thread_time() - begun)
        medians = [sorted(times)[len(times) // 2] for times in took.values()]
        assert medians[1] - medians[0] < 0.001
    await asyncio.to_thread(tracer.close)
    assert exporter.tries


async def test_spans_carry_what_a_trace_is_searched_by() -> None:
    exporter = InMemorySpanExporter()
    tracer = open_tracer(True, exporter=exporter, instance="replica-1")
    async with open_house(tracer=tracer) as house:
        await house.furnish()
        await house.fill(3)
        trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        wanted = [each.hex() for each in keys(4)]
        await house.send(
            "POST",
            "/v1/instances/m1/lookup",
            {"keys": wanted},
            traceparent=f"00-{trace_id}-{parent_id}-01",
        )
        await house.send("POST", "/v1/instances/m1/lookup", {"keys": [1]}, traceparent="nonsense")
    await asyncio.to_thread(tracer.close)
    spans = exporter.get_finished_spans()
    names = [span.name for span in spans]
    assert {"ucm.start_write", "ucm.finish", "ucm.lookup", "ucm.register_engine", "ucm.admin"} <= set(names)
    good, bad = [span for span in spans if span.name == "ucm.lookup"]
    assert good.attributes is not None and bad.attributes is not None
    assert format(good.context.trace_id, "032x") == trace_id
    assert good.parent is not None and format(good.parent.span_id, "016x") == parent_id
    assert (good.attributes["requested_blocks"], good.attributes["hit_blocks"]) == (4, 3)
    assert good.attributes["hit_rate"] == 0.75
    assert (good.attributes["ucm.cut"], good.attributes["ucm.instance"]) == ("miss", "m1")
    assert bad.parent is None
    assert (bad.attributes["error.type"], bad.attributes["http.response.status_code"]) == ("invalid_key", 422)
    assert good.resource.attributes["service.instance.id"] == "replica-1"


def test_tracing_refuses_to_start_without_an_endpoint() -> None:
    with pytest.raises(ValueError, match="endpoint"):
        open_tracer(True)
    with pytest.raises(ValueError, match="ratio"):
        open_tracer(True, endpoint="http://127.0.0.1:1/v1/traces", ratio=2)
    assert not open_tracer(False).enabled


async def test_an_endpoint_that_nobody_listens_on_harms_nobody(free_port: object) -> None:
    assert callable(free_port)
    tracer = open_tracer(True, endpoint=f"http://127.0.0.1:{free_port()}/v1/traces")
    async with open_house(tracer=tracer) as house:
        await house.furnish()
        for _ in range(50):
            assert (await house.send("GET", "/v1/status")).status_code == 200
        await house.lookup(keys(1))
    begun = perf_counter()
    await asyncio.to_thread(tracer.close)
    assert perf_counter() - begun < 4, "the end of the process does not wait for a collector"
