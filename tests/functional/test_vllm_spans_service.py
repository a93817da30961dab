"""A request of an engine is one trace: the connector's spans, and the service's own below them, sent by two
processes to one OTLP collector."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from engine_adapters.namespace import Part
from engine_adapters.vllm.broker import Broker
from engine_adapters.vllm.mover import Mover
from engine_adapters.vllm.ordering import Shape, Step
from engine_adapters.vllm.scheduler import SchedulerSide
from engine_adapters.vllm.settings import Settings
from engine_adapters.vllm.spans import open_spans
from engine_adapters.vllm.worker import RankParts, WorkerSide
from metaservice.client import Client, ClientConfig
from tests.functional.client_service import Service, eventually
from tests.unit.namespace_house import make_namespace
from tests.unit.vllm_memory_service import PAGE_BYTES, key_of
from tests.unit.vllm_worker_house import MemoryPages

TOKENS = 32
RANK = RankParts(0, 1, ("tp0",))
CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@dataclass
class Told:
    """One span as a collector gets it."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]


class Collector:
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.spans: list[Told] = []
        self._lock = Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, body: bytes) -> None:
        """Note the spans of one request."""
        for of_one in ExportTraceServiceRequest.FromString(body).resource_spans:
            sender = {pair.key: pair.value.string_value for pair in of_one.resource.attributes}
            for span in (span for scope in of_one.scope_spans for span in scope.spans):
                attributes = {
                    pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "")
                    for pair in span.attributes
                }
                told = Told(
                    span.name,
                    sender["service.name"],
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    attributes,
                )
                with self._lock:
                    self.spans.append(told)

    def below(self, parent: Told) -> list[Told]:
        """The spans whose parent is this one."""
        with self._lock:
            return [span for span in self.spans if (span.trace, span.parent) == (parent.trace, parent.id)]

    def named(self, name: str, request: str = "") -> list[Told]:
        """The engine's spans of this name; of one request's trace."""
        with self._lock:
            roots = {s.trace for s in self.spans if s.attributes.get("ucm.request") == request}
            return [
                s for s in self.spans
                if s.name == name and s.service == "ucm-vllm" and (not request or s.trace in roots)
            ]  # fmt: skip


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    serving = Thread(target=collector.server.serve_forever)
    serving.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    yield collector
    collector.server.shutdown()
    serving.join()
    collector.server.server_close()


@pytest.fixture
def service(tmp_path: Path, collector: Collector, free_port: Callable[[], int]) -> Iterator[Service]:
    service = Service(tmp_path, free_port(), "--otlp-endpoint", f"{collector.url}/v1/traces")
    service.start()
    (tmp_path / "blocks").mkdir()
    with Client(ClientConfig(url=service.url)) as client:
        client.put_tenant("t")
        client.put_storage("s", "posix", {"root": str(tmp_path / "blocks"), "fsync": "none"})
        client.put_group("g", "t", ["s"])
    yield service
    service.stop()


class Engine:
    """The scheduler's side and one worker's, stepped by hand as vLLM steps them."""

    def __init__(self, settings: Settings) -> None:
        namespace = make_namespace(tp=1, block_size_tokens=TOKENS)
        self.spans = open_spans(settings)
        self.broker = Broker(settings, namespace, [Part("tp0", PAGE_BYTES)])
        self.broker.start()
        assert self.broker.wait_ready(10_000)
        self.side = SchedulerSide(settings, Shape(TOKENS, (False,), 1), self.broker, self.spans)
        self.pages = MemoryPages()
        self.worker = WorkerSide(settings, RANK, self.pages, Mover(settings))

    def step(self, scheduled: dict[str, int], blocks: list[int]) -> None:
        """One step: orders, what the worker does with them, and its report."""
        orders = self.side.build(Step(scheduled, (), lambda request: (blocks,)))
        self.worker.preempted(orders)
        self.worker.start_loads(orders)
        self.worker.submit_saves(orders)
        self.worker.take_results(set())
        report = self.worker.report()
        if report is not None:
            self.side.report(report)

    def until(self, over: Callable[[], object]) -> None:
        """Idle steps until something is over."""

        def look() -> object:
            self.step({}, [])
            return over()

        eventually(look)

    def close(self) -> None:
        self.worker.shutdown()
        self.broker.close()
        self.spans.shutdown()


@contextmanager
def engine(service: Service, name: str) -> Iterator[Engine]:
    engine = Engine(Settings(url=service.url, group="g", engine=name, spans=True, timeout_ms=5_000))
    try:
        yield engine
    finally:
        engine.close()


def request_of(name: str, blocks: int, headers: dict[str, str] | None = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_tokens=blocks * TOKENS + 1,
        num_prompt_tokens=blocks * TOKENS + 1,
        num_computed_tokens=0,
        block_hashes=[key_of(number) for number in range(blocks)],
        all_token_ids=list(range(blocks * TOKENS + 1)),
        lora_request=None,
        trace_headers=headers,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        kv_transfer_params=None,
    )


def asked(engine: Engine, request: Any) -> tuple[int, bool]:
    """What the connector promises, once it knows."""
    until_s = time.monotonic() + 10
    while True:
        tokens, beside = engine.side.matched(request, 0)
        if tokens is not None:
            return tokens, beside
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_a_write_and_a_load_are_traces_that_go_on_in_the_service(
    service: Service, collector: Collector
) -> None:
    blocks = [1, 2, 3, 4]
    with engine(service, "writer") as writer:
        cold = request_of("cold", 4, {"traceparent": CALLER})
        writer.side.new_request(cold)
        assert asked(writer, cold) == (0, False)
        writer.side.allocated(cold, (blocks,), 0)
        for number, block in enumerate(blocks):
            writer.pages.compute(RANK, key_of(number), [block])
        writer.step({"cold": cold.num_tokens}, blocks)
        writer.side.finished(cold)
        saved: dict[str, int] = {}
        writer.until(lambda: saved.update(writer.side.counters()) or "saved_blocks" in saved)
        assert saved["saved_blocks"] == 4
    with engine(service, "reader") as reader:
        warm = request_of("warm", 4)
        warm.kv_transfer_params = {"ucm_sparse": {"algo": "esa", "began_ns": 1_000, "ended_ns": 2_000}}
        reader.side.new_request(warm)
        assert asked(reader, warm) == (4 * TOKENS, True)
        reader.side.allocated(warm, ([5, 6, 7, 8],), 4 * TOKENS)
        loaded: dict[str, int] = {}
        reader.until(lambda: loaded.update(reader.side.counters()) or "loads" in loaded)
        assert loaded["loaded_blocks"] == 4
        warm.num_computed_tokens = 4 * TOKENS
        reader.step({"warm": 1}, [5, 6, 7, 8])
        reader.side.finished(warm)

    def whole() -> bool:
        dumps, lookups = collector.named("ucm.dump"), collector.named("ucm.lookup")
        return bool(
            len(collector.named("ucm.request")) == 2
            and dumps and len(collector.below(dumps[0])) >= 2
            and len(lookups) == 2 and all(collector.below(lookup) for lookup in lookups)
        )  # fmt: skip

    eventually(whole, 20)

    def one(name: str, request: str) -> Told:
        (found,) = collector.named(name, request)
        return found

    root = one("ucm.request", "cold")
    assert (root.trace, root.parent) == (CALLER.split("-")[1], CALLER.split("-")[2])
    assert (root.attributes["requested_tokens"], root.attributes["hit_tokens"]) == (4 * TOKENS + 1, 0)
    below = {span.name for span in collector.below(root)}
    assert below == {"ucm.lookup", "ucm.compute", "ucm.dump"}
    (served,) = collector.below(one("ucm.lookup", "cold"))
    assert (served.name, served.service) == ("ucm.lookup", "ucm-meta")
    written = collector.below(one("ucm.dump", "cold"))
    assert len(written) == 2 and {span.service for span in written} == {"ucm-meta"}
    assert one("ucm.dump", "cold").attributes["ucm.blocks"] == 4

    root = one("ucm.request", "warm")
    assert root.parent == "" and root.trace != CALLER.split("-")[1]
    told = {name: root.attributes[name] for name in ("hit_tokens", "hit_rate", "store_tier", "sparse_algo")}
    assert told == {"hit_tokens": 4 * TOKENS, "hit_rate": 1.0, "store_tier": "posix", "sparse_algo": "esa"}
    below = {span.name for span in collector.below(root)}
    assert below == {"ucm.lookup", "ucm.load", "ucm.sparse_calc", "ucm.compute"}
    assert [span.service for span in collector.below(one("ucm.lookup", "warm"))] == ["ucm-meta"]
    assert one("ucm.load", "warm").attributes["ucm.bytes"] == 4 * PAGE_BYTES
