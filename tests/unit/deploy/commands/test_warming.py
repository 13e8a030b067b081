"""Warming computes prompts with bounded concurrency, and waits for stores."""

import threading

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.admin.client import AdminError
from deploy.commands import warming
from deploy.commands.warming import QUIET_S, WarmPrompt, compute, kept_by, read_prompts, until_taken
from engine.errors import ConfigError
from tests.unit.deploy.commands.test_store import STORE

PROMPTS = [WarmPrompt(prompt=f"p{number}") for number in range(20)]


def answer(request: httpx.Request) -> httpx.Response:
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
    return httpx.Response(200, json={"usage": usage})


def client_of(handler):
    return httpx.Client(base_url="http://g", transport=httpx.MockTransport(handler))


def test_every_prompt_is_computed_once():
    seen = []

    def handle(request):
        seen.append(msgspec.json.decode(request.content)["prompt"])
        return answer(request)

    done = compute(client_of(handle), PROMPTS, model="m", num_at_once=3)
    assert sorted(seen) == sorted(f"p{number}" for number in range(20))
    assert (done.num_prompts, done.num_failed) == (20, 0)
    assert (done.prompt_tokens, done.cached_tokens) == (200, 80)


def test_concurrency_is_limited():
    lock, together = threading.Lock(), threading.Barrier(4)
    running, most = 0, 0

    def handle(request):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(10)  # passes only if four prompts are computed in parallel
        with lock:
            running -= 1
        return answer(request)

    compute(client_of(handle), PROMPTS, model="m", num_at_once=4)
    assert most == 4


def test_failures_are_counted_and_the_rest_is_computed():
    def handle(request):
        prompt = msgspec.json.decode(request.content)["prompt"]
        if prompt == "p1":
            raise httpx.ConnectError("gone")
        if prompt == "p2":
            return httpx.Response(400, json={"error": {"message": "too long"}})
        if prompt == "p3":
            return httpx.Response(200, content=b"no json")
        return answer(request)

    done = compute(client_of(handle), PROMPTS, model="m", num_at_once=2)
    assert (done.num_prompts, done.num_failed) == (20, 3)
    assert {"gone", "too long"} < set(done.errors)
    assert done.prompt_tokens == 170


def test_an_error_of_the_file_ends_all():
    def prompts():
        yield PROMPTS[0]
        raise AdminError("the file changed")

    with pytest.raises(AdminError, match="the file changed"):
        compute(client_of(answer), prompts(), model="m", num_at_once=2)


class Waiting:
    """A clock that advances with pauses, and stores that accept blocks over time."""

    def __init__(self, *, num_new, taken_until_s=0.0, are_connected=True):
        self.time_s, self._num_new = 0.0, num_new
        self._taken_until_s, self._are_connected = taken_until_s, are_connected

    def now_s(self):
        return self.time_s

    def pause(self, seconds):
        self.time_s += seconds

    def ask(self):
        taken = min(self.time_s, self._taken_until_s)
        return [
            msgspec.structs.replace(
                STORE,
                num_new=self._num_new if self.time_s < self._taken_until_s else 0,
                counters={"taken_blocks": taken},
                is_connected=self._are_connected,
            )
        ]

    def run(self, timeout_s=60.0):
        return until_taken(self.ask, clock=self, pause=self.pause, timeout_s=timeout_s)


@pytest.mark.parametrize("num_new", [3, 0])
def test_stores_are_waited_for_while_they_take(num_new):
    waiting = Waiting(num_new=num_new, taken_until_s=10.0)
    assert [store.name for store in waiting.run()] == ["store-v1"]
    assert 10.0 + QUIET_S <= waiting.time_s <= 12.0 + QUIET_S


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_new": 7, "taken_until_s": 99.0}, "7 blocks are still new"),
        ({"num_new": 0, "are_connected": False}, "none is connected"),
    ],
)
def test_the_wait_ends_at_its_deadline(changes, reason):
    waiting = Waiting(**changes)
    with pytest.raises(AdminError, match=reason):
        waiting.run(timeout_s=20.0)
    assert 20.0 <= waiting.time_s <= 21.0


def test_kept_tokens_are_reported_by_tier():
    [kept] = kept_by([STORE])
    assert kept.by_tier == {"host": 48, "disk": 128}


def test_prompts_and_messages_become_requests_for_one_token(tmp_path):
    path = tmp_path / "prompts"
    path.write_text(
        '{"prompt": "a b"}\n\n{"prompt": [1, 2]}\n{"messages": [{"role": "user", "content": "c"}]}'
    )
    text, tokens, chat = read_prompts(path)
    same = {"model": "m", "max_tokens": 1, "temperature": 0}
    assert text.body("m") == {**same, "prompt": "a b"}
    assert tokens.body("m") == {**same, "prompt": [1, 2]}
    assert chat.body("m") == {**same, "messages": [{"role": "user", "content": "c"}]}
    assert (text.path, chat.path) == ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "truncated"),
        (b"7", "Expected `object`"),
        (b"{}", "give `prompt` or `messages`"),
        (b'{"prompt": "a", "messages": []}', "give `prompt` or `messages`"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"messages": []}', "the prompt is empty"),
        (b'{"prompts": "a"}', "unknown field `prompts`"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"messages": [' + b'{"a": ' * 5000, "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, reason):
    path = tmp_path / "prompts"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match="prompts, line 2") as error:
        list(read_prompts(path))
    assert reason in str(error.value)


def test_a_line_without_end_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(warming, "MAX_LINE_BYTES", 20)
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "' + "a" * 100)
    with pytest.raises(ConfigError, match="line 1: more than 20 bytes"):
        list(read_prompts(path))


def test_an_absent_file_is_an_error_of_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        list(read_prompts(tmp_path / "none"))


@given(st.binary(max_size=60))
def test_any_line_is_a_prompt_or_an_error(data):
    try:
        found = msgspec.json.decode(data, type=WarmPrompt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    assert found.body("m")["max_tokens"] == 1
