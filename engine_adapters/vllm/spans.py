"""OpenTelemetry spans of requests: off unless asked for, and never able to slow or fail a request.

    ucm.request                  requested_tokens, hit_tokens, hit_rate, store_tier, sparse_algo
        ucm.lookup               below it, the service's own span of the lookup
        ucm.load
        ucm.sparse_calc          only where an engine reports a sparse algorithm
        ucm.compute
        ucm.dump                 below it, the service's own spans of the write

A request's root hangs below whatever its caller's `traceparent` names. A child's id is known when it is
opened, so that it can be sent along; the span itself is made when it is closed, from the times at which the
work was done, and handed to the SDK's queue. That is all the scheduler's thread does. A thread of the SDK
sends; when the collector is away or hangs the queue overflows and spans are lost, nothing else.

`OTEL_*` variables of the environment say where spans go (OTLP over HTTP), how many are kept, under which
service name. An engine brings OpenTelemetry along; it is imported only when spans are asked for.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from engine_adapters.vllm.settings import Settings, SettingsRefused

log = logging.getLogger("ucm.vllm")

REQUESTS_MAX = 8_192
"""Requests whose spans are open; beyond, the oldest is forgotten."""
CHILDREN_MAX = 256
"""Open children of one request; beyond, a child has no id that could be sent along."""
CLOSE_TIMEOUT_MS = 2_000
ONE_AT_A_TIME = frozenset({"ucm.lookup"})
"""A new one means that the one before was given up."""

Attributes = Mapping[str, str | int | float | bool]


class Spans:
    """What the scheduler's side notes of requests; this one notes nothing, for spans that are off.

    Called from one thread. Returns at once, raises nothing. Times are ns since 1970; 0 is "not known" (a
    child then began when it was opened, or ended just now). A `traceparent` is in W3C's form, empty when
    there is none to send.
    """

    def begin(self, request: str, tokens: int, headers: Mapping[str, str] | None) -> str:
        """A request arrived with so many tokens, and with its caller's trace headers. Its traceparent."""
        return ""

    def open(self, request: str, name: str) -> str:
        """A child begins: its traceparent, to be sent along with what is done for it."""
        return ""

    def close(
        self,
        request: str,
        name: str,
        attributes: Attributes,
        start_ns: int,
        end_ns: int,
        traceparent: str = "",
    ) -> None:
        """A child ended; attributes that are empty texts are left out. `traceparent` is what `open` returned;
        without it the child that was opened first is meant. May come after the request's end."""

    def end(self, request: str, attributes: Attributes) -> None:
        """The request ended. Its lookup, if still open, was given up; its other children may close later."""

    def shutdown(self) -> None:
        """Send what is left, for a bounded time."""


class _Open:
    """A child that is open: its span's context and its traceparent."""

    __slots__ = ("context", "name", "opened_ns", "traceparent")

    def __init__(self, name: str, context: Any) -> None:
        self.name = name
        self.context = context
        self.opened_ns = time.time_ns()
        self.traceparent = _traceparent(context)


class _Trace:
    """One request's: the root's context, whom it hangs below, its open children in the order of opening."""

    __slots__ = ("began_ns", "children", "context", "ended", "parent", "tokens")

    def __init__(self, context: Any, parent: Any, tokens: int) -> None:
        self.context = context
        self.parent = parent
        self.tokens = tokens
        self.began_ns = time.time_ns()
        self.children: list[_Open] = []
        self.ended = False

    def take(self, name: str, traceparent: str) -> _Open | None:
        """Take a child out."""
        for child in self.children:
            if child.name == name and traceparent in ("", child.traceparent):
                self.children.remove(child)
                return child
        return None


class OtelSpans(Spans):
    """Spans through the OpenTelemetry SDK.

    `processor` replaces the SDK's batches and its OTLP exporter (a test's). Raises SettingsRefused when
    OpenTelemetry is not installed, or the environment asks for another protocol than OTLP over HTTP. Make it
    in the process that uses it: its thread does not survive a fork.
    """

    def __init__(self, engine: str, processor: Any = None) -> None:
        try:
            # An engine without spans need not have it.
            from opentelemetry import trace  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.sampling import Decision  # noqa: PLC0415
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )

            self._processor = _batches() if processor is None else processor
        except ImportError as error:
            raise SettingsRefused(
                f"kv_connector_extra_config.spans: true needs OpenTelemetry, which is not installed: {error}"
            ) from None
        self._trace = trace
        self._span = ReadableSpan
        self._sampled = Decision.RECORD_AND_SAMPLE
        self._scope = InstrumentationScope("ucm.vllm")
        self._propagator = TraceContextTextMapPropagator()
        named: dict[str, str | bool | int | float] = {"service.instance.id": engine}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            named["service.name"] = "ucm-vllm"
        # Never a tracer's: spans made by one cost the scheduler's thread several times as much.
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._requests: dict[str, _Trace] = {}
        self._enabled = True

    def begin(self, request: str, tokens: int, headers: Mapping[str, str] | None) -> str:
        """See Spans."""
        try:
            return self._begin(request, tokens, headers)
        except Exception:
            log.debug("a request's span could not be begun", exc_info=True)
            return ""

    def _begin(self, request: str, tokens: int, headers: Mapping[str, str] | None) -> str:
        if not self._enabled:
            return ""
        above = self._propagator.extract({name.lower(): value for name, value in (headers or {}).items()})
        named = self._trace.get_current_span(above).get_span_context()
        parent = named if named.is_valid else None
        trace_id = named.trace_id if parent is not None else self._provider.id_generator.generate_trace_id()
        decided = self._provider.sampler.should_sample(above, trace_id, "ucm.request")
        sampled = decided.decision is self._sampled
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED if sampled else 0)
        context = self._trace.SpanContext(
            trace_id, self._provider.id_generator.generate_span_id(), False, flags, decided.trace_state
        )
        self._requests.pop(request, None)
        while len(self._requests) >= REQUESTS_MAX:
            del self._requests[next(iter(self._requests))]
        self._requests[request] = _Trace(context, parent, tokens)
        return _traceparent(context)

    def open(self, request: str, name: str) -> str:
        """See Spans."""
        trace = self._requests.get(request)
        if trace is None:
            return ""
        if name in ONE_AT_A_TIME and any(child.name == name for child in trace.children):
            self.close(request, name, {"ucm.failure": "given_up"}, 0, 0)
        if len(trace.children) >= CHILDREN_MAX:
            return _traceparent(trace.context)
        child = _Open(name, self._child_of(trace))
        trace.children.append(child)
        return child.traceparent

    def _child_of(self, trace: _Trace) -> Any:
        context = trace.context
        return self._trace.SpanContext(
            context.trace_id,
            self._provider.id_generator.generate_span_id(),
            False,
            context.trace_flags,
            context.trace_state,
        )

    def close(
        self,
        request: str,
        name: str,
        attributes: Attributes,
        start_ns: int,
        end_ns: int,
        traceparent: str = "",
    ) -> None:
        """See Spans."""
        trace = self._requests.get(request)
        if trace is None:
            return
        child = trace.take(name, traceparent)
        if child is not None:
            kept = {key: value for key, value in attributes.items() if value != ""}
            self._emit(
                name,
                child.context,
                trace.context,
                kept,
                start_ns or child.opened_ns,
                end_ns or time.time_ns(),
            )
        if trace.ended and not trace.children:
            del self._requests[request]

    def end(self, request: str, attributes: Attributes) -> None:
        """See Spans."""
        trace = self._requests.get(request)
        if trace is None or trace.ended:
            return
        for name in ONE_AT_A_TIME:
            self.close(request, name, {"ucm.failure": "given_up"}, 0, 0)
        named = {"ucm.request": request, "requested_tokens": trace.tokens, **attributes}
        self._emit("ucm.request", trace.context, trace.parent, named, trace.began_ns, time.time_ns())
        trace.ended = True
        if not trace.children:
            del self._requests[request]

    def _emit(
        self, name: str, context: Any, parent: Any, attributes: Attributes, start_ns: int, end_ns: int
    ) -> None:
        if not (self._enabled and context.trace_flags.sampled):
            return
        try:
            self._processor.on_end(
                self._span(
                    name,
                    context=context,
                    parent=parent,
                    resource=self._provider.resource,
                    attributes=attributes,
                    kind=self._trace.SpanKind.INTERNAL,
                    instrumentation_scope=self._scope,
                    start_time=start_ns,
                    end_time=max(start_ns, end_ns),
                )
            )
        except Exception:
            log.debug("a span could not be noted", exc_info=True)

    def shutdown(self) -> None:
        """See Spans: the SDK alone would wait for a dead collector, batch by batch."""
        self._enabled = False
        sending = threading.Thread(target=self._processor.shutdown, name="ucm-spans-last", daemon=True)
        sending.start()
        sending.join(CLOSE_TIMEOUT_MS / 1000)


def open_spans(settings: Settings) -> Spans:
    """The spans of this engine. Raises SettingsRefused: see OtelSpans."""
    return OtelSpans(settings.engine) if settings.spans else Spans()


def _traceparent(context: Any) -> str:
    """In W3C's form; a trace that is not sampled is sent along too, so that nobody below samples it."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _batches() -> Any:
    """Batches to where the environment says, from a bounded queue."""
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "")
        if protocol not in ("", "http/protobuf"):
            raise SettingsRefused(
                f"kv_connector_extra_config.spans: {variable} is {protocol}; spans go as http/protobuf only"
            )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    return BatchSpanProcessor(OTLPSpanExporter())
