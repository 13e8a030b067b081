"""The probe of a version's streamed and whole answers over HTTP finds wrong answers."""

import asyncio
from typing import Any

import msgspec
import pytest

from router.gateway import stream_probe
from router.gateway.stream_probe import StreamProbe
from router.machine.requests import Failed
from tests.kits.router.gateway import (
    TEMPLATE,
    FakeRouter,
    answer,
    create_parts,
    settings_of,
    tokens,
    versions_of,
)


def probe(
    router: FakeRouter,
    *,
    template: str | None = TEMPLATE,
    name: str = "v1",
    context_len: int = 512,
) -> str:
    versions = versions_of(router, template=template, context_len=context_len)
    settings = settings_of(requests_per_s=1e-3)
    parts = create_parts(versions, clock=router.clock, settings=settings)
    return asyncio.run(StreamProbe(parts).fault_of(name))


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_good_version_answers_whole_and_streamed(template):
    router = FakeRouter(answer("grüße"))
    assert probe(router, template=template) == ""
    assert {request.tenant for request in router.requests} == {stream_probe.PROBER.name}
    assert len(router.requests) == 2


@pytest.mark.parametrize("given", [{"name": "v2"}, {"context_len": 64}])
def test_a_version_that_is_not_served_or_too_short_for_a_chat_is_left_alone(given):
    router = FakeRouter(answer("hi"))
    assert probe(router, **given) == ""
    assert not router.requests


def test_a_template_that_fails_is_a_fault():
    fault = probe(FakeRouter(answer("hi")), template="{{ raise_exception('no') }}")
    assert fault.startswith("a request over HTTP was answered by 400")


def test_a_failed_answer_is_a_fault():
    fault = probe(FakeRouter([tokens("hi"), tokens("", outcome=Failed("it broke"))]))
    assert "answered by 5" in fault


def event(**choice: Any) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


END = event(delta={}, finish_reason="stop") + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("streamed", "says"),
    [
        (event(delta={"content": "hi"}) + END, ""),
        (event(delta={"content": "ho"}) + END, "an answer was 'hi', and streamed 'ho'"),
        (event(delta={"content": "hi"}), "ended without [DONE]"),
        (b"", "ended without [DONE]"),
        (event(delta={"content": "hi"}) + b"data: [DONE]\n\n", "0 finish reasons"),
        (b'data: {"error": "x"}\n\ndata: [DONE]\n\n', "has no choice"),
        (b"data: {\n\ndata: [DONE]\n\n", "has no choice"),
    ],
)
def test_a_stream_that_is_not_like_the_whole_answer_is_a_fault(monkeypatch, streamed, says):
    whole = msgspec.json.encode({"choices": [{"message": {"content": "hi"}}]})

    async def ask(_: StreamProbe, __: object, *, stream: bool) -> bytes:
        return streamed if stream else whole

    monkeypatch.setattr(StreamProbe, "_ask", ask)
    fault = probe(FakeRouter(answer("hi")))
    assert says in fault
    assert bool(fault) == bool(says)
