"""Traces of requests, as OpenTelemetry's exporter receives them."""

import msgspec
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.messages import FinishReason
from router.gateway.tracing.otel import OtelTracing
from router.machine.requests import Failed, Finished, Timeline, Update
from tests.kits.router.gateway import (
    FakeRouter,
    answer,
    create_app,
    make_app,
    post,
    versions_of,
)

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "yo"}
CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TIMELINE = Timeline(
    route_s=0.0,
    queue_s=0.5,
    prefill_queue_s=0.0,
    prefill_compute_s=0.5,
    kv_wait_s=0.0,
    decode_queue_s=0.0,
    first_step_s=0.5,
    kv_transfer_s=0.25,
    prefill_worker="worker-0",
    decode_worker="worker-1",
)


def script(outcome=None):
    *first, last = answer("hi")
    return [
        *first,
        msgspec.structs.replace(
            last, outcome=outcome or Finished(FinishReason.STOP), timeline=TIMELINE
        ),
    ]


class Traced:
    """An app whose spans are kept in memory."""

    def __init__(self, share=1.0, steps=None):
        router = FakeRouter(steps or script())
        self.exporter = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self.exporter)
        self.tracing = OtelTracing(
            processor, clock=router.clock, share=share, process="gateway", version="1"
        )
        self.app = create_app(versions_of(router), clock=router.clock, tracing=self.tracing)

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_stages_below():
    traced = Traced()
    reply = post(traced.app, PATH, BODY)
    spans = traced.spans()
    assert list(spans) == ["route", "queue", "prefill", "pull", "decode", "cmpl"]
    root = spans.pop("cmpl")
    assert root.parent is None
    assert root.attributes["baton.outcome"] == "finished"
    assert root.attributes["gen_ai.usage.input_tokens"] == 2
    assert root.attributes["baton.request_id"] == reply.headers["x-request-id"]
    assert {span.parent.span_id for span in spans.values()} == {root.context.span_id}
    assert spans["prefill"].attributes["baton.worker"] == "worker-0"
    trace_id, span_id = root.context.trace_id, root.context.span_id
    assert (
        reply.headers["traceparent"] == f"00-{trace_id:032x}-{span_id:016x}-03"
    )  # flags: sampled, random


@pytest.mark.parametrize("stream", [False, True])
def test_the_callers_trace_goes_on(stream):
    traced = Traced(share=0.0)  # the caller's header decides on sampling
    headers = {"traceparent": f"00-{CALLER}-{PARENT}-01", "tracestate": "a=b"}
    reply = post(traced.app, PATH, BODY | {"stream": stream}, **headers)
    root = traced.spans()["cmpl"]
    assert f"{root.context.trace_id:032x}" == CALLER
    assert f"{root.parent.span_id:016x}" == PARENT
    assert reply.headers["traceparent"].startswith(f"00-{CALLER}-")
    assert reply.headers["tracestate"] == "a=b"


@pytest.mark.parametrize("flag", ["00", None])
def test_a_request_that_is_not_sampled_leaves_nothing(flag):
    traced = Traced(share=0.0 if flag is None else 1.0)
    headers = {} if flag is None else {"traceparent": f"00-{CALLER}-{PARENT}-{flag}"}
    reply = post(traced.app, PATH, BODY, **headers)
    assert traced.spans() == {}
    assert "traceparent" not in reply.headers


@pytest.mark.parametrize("sent", ["", "00-zz-1-01", "00-" + "0" * 32 + f"-{PARENT}-01", "x" * 5000])
def test_a_malformed_context_begins_a_trace_of_its_own(sent):
    traced = Traced()
    assert post(traced.app, PATH, BODY, traceparent=sent).status == 200
    assert traced.spans()["cmpl"].parent is None


def test_a_failure_is_an_error_and_a_refusal_is_reported():
    failed = Traced(steps=[Update(outcome=Failed("it broke"), timeline=TIMELINE)])
    post(failed.app, PATH, BODY)
    assert not failed.spans()["cmpl"].status.is_ok
    refused = Traced()
    post(refused.app, PATH, BODY | {"max_tokens": -1})
    assert refused.spans()["cmpl"].attributes["baton.outcome"] == "invalid"


def test_without_tracing_answers_have_no_trace():
    app = make_app(FakeRouter(script()))
    assert "traceparent" not in post(app, PATH, BODY).headers
