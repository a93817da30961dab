"""Spans of an engine's requests, with the real OpenTelemetry SDK."""

import builtins
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_adapters.vllm import spans as module
from engine_adapters.vllm.settings import Settings, SettingsRefused
from engine_adapters.vllm.spans import OtelSpans, Spans, open_spans

CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
S = 1_000_000_000
T0 = 1_700_000_000 * S


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


class House:
    """Spans that end in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.spans = OtelSpans("engine-1", SimpleSpanProcessor(self.exporter))

    def found(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.found(name)
        return span


def ids(traceparent: str) -> tuple[int, int, int]:
    """Trace id, span id and flags of W3C's form."""
    version, trace, span, flags = traceparent.split("-")
    assert (version, len(trace), len(span), len(flags)) == ("00", 32, 16, 2)
    return int(trace, 16), int(span, 16), int(flags, 16)


def placed(span: ReadableSpan) -> tuple[int, int, int | None]:
    """Trace, own id, parent's id."""
    assert span.context is not None
    return span.context.trace_id, span.context.span_id, span.parent.span_id if span.parent else None


def test_a_request_is_a_root_over_its_children_whose_ids_were_sent_along() -> None:
    house = House()
    root = house.spans.begin("r", 70, None)
    sent = {}
    for number, name in enumerate(("ucm.lookup", "ucm.load", "ucm.compute", "ucm.dump")):
        sent[name] = house.spans.open("r", name)
        house.spans.close(
            "r", name, {"ucm.blocks": 4, "ucm.failure": ""}, T0 + number * S, T0 + (number + 1) * S
        )
    attributes: dict[str, str | int | float] = {
        "requested_tokens": 70,
        "hit_tokens": 64,
        "hit_rate": 1.0,
        "store_tier": "posix",
    }
    house.spans.end("r", {**attributes, "sparse_algo": "none"})
    trace_id, root_id, flags = ids(root)
    assert flags == 1
    assert placed(house.one("ucm.request")) == (trace_id, root_id, None)
    assert dict(house.one("ucm.request").attributes or {}) == {
        **attributes, "sparse_algo": "none", "ucm.request": "r"
    }  # fmt: skip
    for number, name in enumerate(sent):
        child = house.one(name)
        assert placed(child) == (trace_id, ids(sent[name])[1], root_id)
        assert (child.start_time, child.end_time) == (T0 + number * S, T0 + (number + 1) * S)
        assert dict(child.attributes or {}) == {"ucm.blocks": 4}
    assert len(house.exporter.get_finished_spans()) == 5 and not house.found("ucm.sparse_calc")
    resource = house.one("ucm.request").resource.attributes
    assert (resource["service.name"], resource["service.instance.id"]) == ("ucm-vllm", "engine-1")


@pytest.mark.parametrize("header", ["traceparent", "Traceparent"])
def test_a_request_hangs_below_its_caller(header: str) -> None:
    house = House()
    trace_id, caller_id, _ = ids(CALLER)
    root = house.spans.begin("r", 1, {header: CALLER, "tracestate": "a=b"})
    house.spans.end("r", {})
    assert placed(house.one("ucm.request")) == (trace_id, ids(root)[1], caller_id)


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        {"traceparent": ""},
        {"traceparent": "00-" + "0" * 32 + "-0123456789abcdef-01"},
        {"traceparent": CALLER[:-1]},
        {"traceparent": "ff" + CALLER[2:]},
        {"traceparent": "\x00\r\n: é"},
        {"other": "x"},
    ],
)
def test_what_is_no_trace_context_begins_a_trace_of_its_own(headers: dict[str, str] | None) -> None:
    house = House()
    root = house.spans.begin("r", 1, headers)
    house.spans.end("r", {})
    assert placed(house.one("ucm.request")) == (*ids(root)[:2], None)
    assert ids(root)[0] != ids(CALLER)[0]


def test_a_caller_that_does_not_sample_decides_for_everything_below() -> None:
    house = House()
    root = house.spans.begin("r", 1, {"traceparent": CALLER[:-2] + "00"})
    child = house.spans.open("r", "ucm.lookup")
    house.spans.close("r", "ucm.lookup", {}, T0, T0 + S)
    house.spans.end("r", {})
    assert [ids(sent)[2] for sent in (root, child)] == [0, 0]
    assert house.exporter.get_finished_spans() == ()


def test_the_environment_says_how_many_traces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    house = House()
    for number in range(2_000):
        house.spans.begin(f"r{number}", 1, None)
        house.spans.end(f"r{number}", {})
    assert 350 < len(house.found("ucm.request")) < 650
    assert house.found("ucm.request")[0].resource.attributes["service.name"] == "chat"


def test_children_may_close_after_their_request_and_each_under_its_own_id() -> None:
    house = House()
    house.spans.begin("r", 1, None)
    dumps = [house.spans.open("r", "ucm.dump") for _ in range(3)]
    house.spans.end("r", {})
    assert len(house.found("ucm.request")) == 1
    house.spans.close("r", "ucm.dump", {"n": 2}, T0, T0, dumps[2])
    house.spans.close("r", "ucm.dump", {"n": 0}, T0, T0)  # the oldest, when it is not said which
    house.spans.close("r", "ucm.dump", {"n": 1}, T0, T0, dumps[1])
    told = {(span.attributes or {})["n"]: placed(span)[1] for span in house.found("ucm.dump")}
    assert told == {number: ids(dump)[1] for number, dump in enumerate(dumps)}
    house.spans.close("r", "ucm.dump", {"n": 3}, T0, T0)
    assert len(house.found("ucm.dump")) == 3 and not house.spans._requests


def test_a_lookup_given_up_is_told_and_the_next_one_is_its_own() -> None:
    house = House()
    house.spans.begin("r", 1, None)
    first = house.spans.open("r", "ucm.lookup")
    second = house.spans.open("r", "ucm.lookup")
    house.spans.close("r", "ucm.lookup", {"ucm.hits": 3}, T0, T0 + S)
    third = house.spans.open("r", "ucm.lookup")
    house.spans.end("r", {})
    given_up, answered, late = house.found("ucm.lookup")
    assert [placed(span)[1] for span in (given_up, answered, late)] == [
        ids(x)[1] for x in (first, second, third)
    ]
    assert [dict(span.attributes or {}) for span in (given_up, answered, late)] == [
        {"ucm.failure": "given_up"}, {"ucm.hits": 3}, {"ucm.failure": "given_up"}
    ]  # fmt: skip
    assert not house.spans._requests


def test_times_that_are_not_known_are_those_of_the_calls_and_never_run_backwards() -> None:
    house = House()
    before = time.time_ns()
    house.spans.begin("r", 1, None)
    house.spans.open("r", "ucm.load")
    house.spans.close("r", "ucm.load", {}, 0, 0)
    house.spans.open("r", "ucm.dump")
    house.spans.close("r", "ucm.dump", {}, T0 + S, T0)
    load, dump = house.one("ucm.load"), house.one("ucm.dump")
    assert load.start_time is not None and load.end_time is not None
    assert before <= load.start_time <= load.end_time <= time.time_ns()
    assert (dump.start_time, dump.end_time) == (T0 + S, T0 + S)


def test_what_was_never_begun_is_no_error() -> None:
    house = House()
    assert house.spans.open("x", "ucm.lookup") == ""
    house.spans.close("x", "ucm.lookup", {}, T0, T0)
    house.spans.end("x", {})
    house.spans.begin("r", 1, None)
    house.spans.close("r", "ucm.lookup", {}, T0, T0)
    assert house.exporter.get_finished_spans() == ()


def test_memory_is_bounded_when_requests_and_children_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTS_MAX", 10)
    monkeypatch.setattr(module, "CHILDREN_MAX", 5)
    house = House()
    for number in range(100):
        root = house.spans.begin(f"r{number}", 1, None)
        sent = [house.spans.open(f"r{number}", "ucm.dump") for _ in range(8)]
        assert len(set(sent)) == 6 and sent[5:] == [root] * 3
    assert list(house.spans._requests) == [f"r{number}" for number in range(90, 100)]
    assert all(len(trace.children) == 5 for trace in house.spans._requests.values())


def test_an_sdk_that_fails_fails_no_request() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    spans = OtelSpans("e", Broken())
    assert spans.begin("r", 1, None)
    assert spans.open("r", "ucm.lookup")
    spans.close("r", "ucm.lookup", {"x": 1}, T0, T0)
    spans.end("r", {"odd": object()})  # type: ignore[dict-item]
    spans._provider = None  # type: ignore[assignment]
    assert spans.begin("s", 1, None) == ""
    spans.end("s", {})


def test_off_is_the_default_and_does_nothing() -> None:
    spans = open_spans(Settings(group="g"))
    assert type(spans) is Spans
    assert spans.begin("r", 1, {"traceparent": CALLER}) == spans.open("r", "ucm.lookup") == ""
    spans.close("r", "ucm.lookup", {}, T0, T0)
    spans.end("r", {})
    spans.shutdown()


def test_off_needs_no_opentelemetry_and_on_says_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def absent(name: str, *args: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert type(open_spans(Settings(group="g"))) is Spans
    with pytest.raises(SettingsRefused, match=r"needs OpenTelemetry.*opentelemetry"):
        open_spans(Settings(group="g", spans=True))


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "grpc")
    with pytest.raises(SettingsRefused, match=f"{name} is grpc"):
        open_spans(Settings(group="g", spans=True))


@contextmanager
def hanging() -> Iterator[str]:
    """A collector that accepts, reads and never answers."""
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    accepted: list[socket.socket] = []

    def accept() -> None:
        while not stop.is_set():
            try:
                accepted.append(listener.accept()[0])
            except TimeoutError:
                continue

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        thread.join()
        for connection in [*accepted, listener]:
            connection.close()


@contextmanager
def refusing() -> Iterator[str]:
    """Nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("collector", [hanging, refusing])
def test_a_collector_that_hangs_or_refuses_slows_no_request_and_fills_no_memory(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = 3_000
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_MS", 300)
    with collector() as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        spans = open_spans(Settings(group="g", engine="e", spans=True))
        assert isinstance(spans, OtelSpans)
        took_ns = []
        for number in range(requests):
            request = f"r{number}"
            began_ns = time.thread_time_ns()
            walled_ns = time.monotonic_ns()
            assert spans.begin(request, 100, {"traceparent": CALLER})
            assert spans.open(request, "ucm.lookup")
            spans.close(request, "ucm.lookup", {"ucm.hits": 1}, T0, T0 + S)
            spans.end(request, {"hit_tokens": 1})
            took_ns.append((time.thread_time_ns() - began_ns, time.monotonic_ns() - walled_ns))
        queue = spans._processor._batch_processor._queue
        assert len(queue) <= 2_048  # the SDK's bound, of the 6,000 that were made
        assert not spans._requests
        ordered = sorted(cpu for cpu, _ in took_ns)
        assert ordered[requests // 2] < 500_000, ordered[requests // 2]
        assert (
            sorted(wall for _, wall in took_ns)[requests * 99 // 100] < 50_000_000
        )  # never a time-out's length
        began = time.monotonic()
        spans.shutdown()
        assert time.monotonic() - began < 2.0
        assert spans.begin("late", 1, None) == ""  # and nothing is kept any more
        assert spans.open("late", "ucm.lookup") == ""
