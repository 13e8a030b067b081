"""Calls that arrive before their version has a worker are queued, within bounds."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from router.gateway import versions as gateway_versions
from router.gateway.versions import ServedVersion, Versions
from tests.kits.router.gateway import (
    TEMPLATE,
    FakeRouter,
    Reply,
    TickingClock,
    fetch,
    make_app_of,
    text_model,
)

HOLD_S = 600.0  # longer than any test
JSON = {"content-type": "application/json"}
COMPLETION = {"prompt": "yo", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "yo"}], "max_tokens": 4}
RESPONSE = {"input": "yo", "max_output_tokens": 4}


def served(name: str, model: str = "tiny", *, line: str = "") -> ServedVersion:
    text = text_model(TEMPLATE)
    return ServedVersion(name, FakeRouter(), text, (model,), 64, line=line)


async def until(condition: Callable[[], bool]) -> None:
    never = asyncio.get_running_loop().create_future()
    while not condition():
        await asyncio.wait([never], timeout=0.002)


def _is_done(task: "asyncio.Task[Reply]") -> bool:
    return task.done()


def replies_of(
    versions: Versions,
    then: Callable[[], object],
    *bodies: tuple[str, dict[str, Any]],
    hold_s: float = HOLD_S,
    **headers: str,
) -> list[Reply]:
    """Sends calls, runs `then` once all are queued or answered, and returns the replies."""
    app = make_app_of(versions, TickingClock(), queue_timeout_s=hold_s)

    async def scene() -> list[Reply]:
        asked = [
            asyncio.create_task(fetch(app, "POST", path, msgspec.json.encode(body), JSON | headers))
            for path, body in bodies
        ]
        await until(lambda: versions._num_held + sum(map(_is_done, asked)) == len(asked))
        then()
        return await asyncio.gather(*asked)

    return asyncio.run(asyncio.wait_for(scene(), 10.0))


def test_calls_are_held_until_the_first_worker_is_known():
    versions = Versions()
    found = replies_of(
        versions,
        lambda: versions.follow((served("v1"),)),
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSE),
        ("/v1/completions", {**COMPLETION, "prompt": "y" * 5000, "truncate_prompt_tokens": 8}),
    )
    assert [reply.status for reply in found] == [200] * 4


def test_a_call_for_a_model_that_comes_is_held_while_others_are_answered():
    versions = Versions()
    first = served("v1", line="main")
    versions.follow((first,), {"small-v1": "small"})
    both = (first, served("small-v1", "small", line="small"))
    held, other, unknown = replies_of(
        versions,
        lambda: versions.follow(both),
        ("/v1/completions", {**COMPLETION, "model": "small"}),
        ("/v1/completions", {**COMPLETION, "model": "tiny"}),
        ("/v1/completions", {**COMPLETION, "model": "no such"}),
    )
    assert (held.status, other.status, unknown.status) == (200, 200, 404)
    assert held.json()["model"] == "small"


def test_held_calls_are_refused_when_the_server_stops():
    versions = Versions()
    [held] = replies_of(versions, versions.stop, ("/v1/completions", COMPLETION))
    assert held.status == 503
    assert held.json()["error"]["code"] == "server_shutdown"


@pytest.mark.parametrize(
    ("hold_s", "headers"), [(0.001, {}), (HOLD_S, {"x-request-timeout": "0.001"})]
)
def test_no_call_is_held_longer_than_it_may_wait(hold_s, headers):
    [held] = replies_of(
        Versions(), lambda: None, ("/v1/completions", COMPLETION), hold_s=hold_s, **headers
    )
    assert held.status == 503
    assert held.json()["error"]["code"] == "not_ready"
    assert held.headers["retry-after"] == "1"


def test_a_call_beyond_the_most_that_are_held_is_refused(monkeypatch):
    monkeypatch.setattr(gateway_versions, "MAX_HELD", 2)
    versions = Versions()
    found = replies_of(
        versions,
        lambda: versions.follow((served("v1"),)),
        *[("/v1/completions", COMPLETION)] * 3,
    )
    assert sorted(reply.status for reply in found) == [200, 200, 503]


def test_a_client_that_leaves_is_held_no_longer():
    versions = Versions()
    app = make_app_of(versions, TickingClock(), queue_timeout_s=HOLD_S)

    async def scene() -> None:
        body = msgspec.json.encode(COMPLETION)
        task = asyncio.create_task(fetch(app, "POST", "/v1/completions", body, JSON))
        await until(lambda: versions._num_held == 1)
        task.cancel()
        await asyncio.wait([task])
        assert not versions._num_held

    asyncio.run(asyncio.wait_for(scene(), 10.0))
