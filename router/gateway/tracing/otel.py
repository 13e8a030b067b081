"""Traces by OpenTelemetry's SDK, sent to a collector over OTLP (HTTP) from a separate thread.

Only this module imports the SDK, which is installed by the extra `otel`. A trace continues the
caller's W3C trace context. If the context has a sampling decision, the decision is used. Other
requests are sampled by their trace id.
"""

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.clock import Clock, unix_time_ns
from router.gateway.tracing.stages import Attributes, stage_spans
from router.machine.requests import Timeline

EXPORT_TIMEOUT_S = 5.0
_CONTEXT = TraceContextTextMapPropagator()


class OtelTracing:
    """Implements `router.gateway.tracing.trace.Tracing`."""

    def __init__(
        self, processor: SpanProcessor, *, clock: Clock, share: float, process: str, version: str
    ) -> None:
        """`share` is the fraction of traces that are sampled, among traces that start in this
        gateway.
        """
        about = {
            "service.name": "baton",
            "service.instance.id": process,
            "service.version": version,
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)),
            resource=Resource.create(about),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton", version)
        self._clock = clock
        # Spans have wall-clock times. Their durations are differences on the gateway's clock.
        self._origin_ns = unix_time_ns() - int(clock.now_s() * 1e9)

    def begin(
        self, name: str, request_id: str, received_s: float, headers: Mapping[str, str]
    ) -> "OtelTrace | None":
        """Starts the span of a request. Returns its trace; None if the trace is not sampled."""
        span = self._tracer.start_span(
            name,
            context=_CONTEXT.extract(headers),
            kind=SpanKind.SERVER,
            attributes={"baton.request_id": request_id},
            start_time=self._at_ns(received_s),
        )
        if not span.is_recording():
            return None
        return OtelTrace(self, span, received_s)

    def add_stages(self, parent: Span, timeline: Timeline, received_s: float) -> None:
        """Sends the spans of a choice that has just ended, as children of `parent`."""
        context = set_span_in_context(parent)
        for stage in stage_spans(timeline, received_s, self._clock.now_s()):
            span = self._tracer.start_span(
                stage.name,
                context=context,
                attributes=stage.attributes,
                start_time=self._at_ns(stage.begin_s),
            )
            span.end(self._at_ns(stage.end_s))

    def now_ns(self) -> int:
        """Returns the present wall-clock time for spans, in nanoseconds."""
        return self._at_ns(self._clock.now_s())

    def close(self) -> None:
        """Sends the remaining spans within `EXPORT_TIMEOUT_S`, and stops the sending thread."""
        self._provider.force_flush(int(EXPORT_TIMEOUT_S * 1000))
        self._provider.shutdown()

    def _at_ns(self, at_s: float) -> int:
        return self._origin_ns + int(at_s * 1e9)


class OtelTrace:
    """Implements `router.gateway.tracing.trace.RequestTrace`."""

    def __init__(self, tracing: OtelTracing, span: Span, received_s: float) -> None:
        self._tracing = tracing
        self._span = span
        self._received_s = received_s
        headers: dict[str, str] = {}
        _CONTEXT.inject(headers, set_span_in_context(span))
        self.headers: Mapping[str, str] = headers

    def add_choice(self, timeline: Timeline) -> None:
        """Sends the spans of a choice that has just ended."""
        self._tracing.add_stages(self._span, timeline, self._received_s)

    def end(self, outcome: str, attributes: Attributes) -> None:
        """Ends the span of the request."""
        self._span.set_attributes({**attributes, "baton.outcome": outcome})
        if outcome == "failed":
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._tracing.now_ns())


def exporting(endpoint: str) -> SpanProcessor:
    """Returns a processor that sends spans to a collector.

    If the processor's queue is full, new spans are dropped.
    """
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
