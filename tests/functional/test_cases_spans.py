"""I9: spans of several processes arrive at one OTLP/HTTP collector, those of each process under a name of its
own, also of the next life of one that was killed; and none waits at its end for a collector that is gone."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from urllib.request import Request, urlopen

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

import metaservice
from metaservice.cli.local.cluster import LocalCluster
from metaservice.cli.local.replicas import LocalReplica
from tests.functional.cluster_house import FAST

ASKED = 20
ARRIVE_S = 30.0
END_S = 40.0


class Collector:
    """What a collector does with what is posted to it: it keeps who sent which spans."""

    def __init__(self) -> None:
        self.spans: dict[str, list[dict[str, str]]] = {}
        """Trace id -> for each of its spans what the sender says of itself."""
        self.answering = Event()
        self.answering.set()
        self._lock = Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.answering.wait()
                assert self.path == "/v1/traces"
                collector.take(ExportTraceServiceRequest.FromString(body))
                reply = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Note the spans of one request."""
        with self._lock:
            for of_one in request.resource_spans:
                sender = {pair.key: pair.value.string_value for pair in of_one.resource.attributes}
                for scope in of_one.scope_spans:
                    for span in scope.spans:
                        self.spans.setdefault(span.trace_id.hex(), []).append(sender)

    def senders(self, trace: str, count: int) -> list[dict[str, str]]:
        """Who sent the spans of a trace, once so many have arrived."""
        until_s = time.monotonic() + ARRIVE_S
        while len(found := self.spans.get(trace, [])) < count:
            assert time.monotonic() < until_s, f"{len(found)} of {count} spans arrived"
            time.sleep(0.05)
        return found

    def go(self) -> None:
        """Stop listening; what hangs in here is let go."""
        self.server.shutdown()
        self.server.server_close()
        self.answering.set()

    @contextmanager
    def listening(self) -> Iterator["Collector"]:
        """It answers until `go`, or the end."""
        thread = Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.go()
            thread.join()


def traced(replica: LocalReplica) -> str:
    """Ask a replica what only it can answer, all as parts of one trace; the trace's id."""
    trace = secrets.token_hex(16)
    for _ in range(ASKED):
        header = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
        with urlopen(Request(f"{replica.url}/v1/cluster", headers=header), timeout=10) as answer:
            assert answer.status == 200
    return trace


def instance(collector: Collector, trace: str) -> str:
    """The one sender of all spans of a trace."""
    senders = collector.senders(trace, ASKED)
    assert len(senders) == ASKED, "each request is one span"
    assert {sender["service.name"] for sender in senders} == {"ucm-meta"}
    assert {sender["service.version"] for sender in senders} == {metaservice.__version__}
    (name,) = {sender["service.instance.id"] for sender in senders}
    return name


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_i9_spans_of_all_processes_arrive_and_none_hangs_when_the_collector_is_gone() -> None:
    with Collector().listening() as collector:
        settings = {**FAST, "otlp_endpoint": collector.url, "trace_ratio": 1.0}
        with LocalCluster(leadership="sql_lease", shards=1, settings=settings) as cluster:
            first, second, third = cluster.replicas
            traces = {replica.name: traced(replica) for replica in cluster.replicas}
            before = {name: instance(collector, trace) for name, trace in traces.items()}
            assert len(set(before.values())) == len(cluster.replicas), before
            for name, said in before.items():
                assert said.startswith(f"{name}/"), "people find the replica by it"

            second.crash()
            lasting = traced(first)
            second.launch()
            second.await_ready()
            again = traced(second)
            assert second.stop(END_S), "it ends by itself"
            renewed = instance(collector, again)
            assert renewed.startswith("r2/")
            assert renewed != before["r2"], "another life is another instance"
            assert instance(collector, lasting) == before["r1"], "one that lives on is the same"

            collector.answering.clear()
            traced(third)
            assert third.stop(END_S), "it does not wait for a collector that hangs"
            collector.go()
            traced(first)
            assert first.stop(END_S), "nor for one that is gone"
