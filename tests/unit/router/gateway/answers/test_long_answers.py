"""The event loop keeps running while a long answer is encoded: each pass encodes a short part."""

import asyncio
import struct
from itertools import pairwise

import msgspec
import pytest

from engine.embedding import Embedding
from engine.messages import Logprobs
from router.gateway.answers.choice import SCORED_AT_ONCE
from router.inbox.fair_queue import LoopQueue
from router.inbox.json_parts import NUM_AT_ONCE, PART_BYTES
from router.machine.requests import Update
from tests.kits.router.embeddings import app_of
from tests.kits.router.gateway import LENGTH, Connection, FakeRouter, make_app, tokens

NUM_TOKENS = 200
TOP = tuple(range(97, 117))
SCORES = Logprobs(-1.25, 2, TOP, tuple(-0.125 * i for i in range(20)))
MOST_BYTES = 8 * PART_BYTES  # one part, plus the excess of its last item
MESSAGES = [{"role": "user", "content": "yo"}]
ONCE = {"prompt": "a", "max_tokens": NUM_TOKENS, "logprobs": 20}
CHAT = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, "logprobs": True, "top_logprobs": 20}
INPUT = {
    "input": "yo",
    "max_output_tokens": NUM_TOKENS,
    "top_logprobs": 20,
    "include": ["message.output_text.logprobs"],
}


class Watched(Connection):
    """A request that counts the passes of the event loop between two parts of its response."""

    def __init__(self, app, path: str, fields: dict) -> None:
        super().__init__(app, "POST", path, {"content-type": "application/json"})
        self.put_body(msgspec.json.encode(fields))
        self.passes: list[int] = []
        self._num = 0

    async def watched(self):
        ticking = asyncio.create_task(self._tick())
        try:
            return await self.run()
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        while True:
            self._num += 1
            await asyncio.sleep(0)

    async def _send(self, message) -> None:
        self.passes.append(self._num)
        await super()._send(message)

    def check(self) -> None:
        """Asserts that each part is short, and that the loop made a pass between two parts."""
        sizes = [len(message.get("body", b"")) for message in self.reply.messages]
        assert max(sizes) <= MOST_BYTES
        assert sum(sizes) > 2 * PART_BYTES
        long = [index for index, size in enumerate(sizes) if size > PART_BYTES // 2]
        for one, next_one in pairwise(long):
            assert self.passes[one] < self.passes[next_one]


def scored_app(num_prompt: int = 1):
    text = "abcde" * (NUM_TOKENS // 5)
    update = tokens(
        text,
        logprobs=(SCORES,) * NUM_TOKENS,
        prompt_logprobs=(SCORES,) * (num_prompt - 1),
        outcome=LENGTH,
    )
    return make_app(FakeRouter([update]), context_len=4 * NUM_TOKENS)


def run(app, path: str, fields: dict):
    connection = Watched(app, path, fields)
    reply = asyncio.run(connection.watched())
    assert reply.status == 200
    connection.check()
    return reply


@pytest.mark.parametrize("num_choices", [1, 4])
@pytest.mark.parametrize(("path", "fields"), [("completions", ONCE), ("chat/completions", CHAT)])
def test_a_whole_answer_with_log_probabilities_comes_in_parts(path, fields, num_choices):
    body = run(scored_app(), f"/v1/{path}", {**fields, "n": num_choices}).json()
    assert len(body["choices"]) == num_choices
    for choice in body["choices"]:
        found = choice["logprobs"]
        assert len(found.get("content") or found["tokens"]) == NUM_TOKENS


def test_the_prompts_log_probabilities_come_in_parts_in_each_choice():
    fields = {"prompt": [97] * NUM_TOKENS, "prompt_logprobs": 20, "n": 2, "max_tokens": 1}
    app = make_app(
        FakeRouter([tokens("h", prompt_logprobs=(SCORES,) * (NUM_TOKENS - 1), outcome=LENGTH)]),
        context_len=2 * NUM_TOKENS,
    )
    body = run(app, "/v1/completions", fields).json()
    assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [NUM_TOKENS] * 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", ONCE),
        ("completions", {**ONCE, "n": 3}),
        ("chat/completions", CHAT),
        ("completions", {**ONCE, "prompt": [97] * NUM_TOKENS, "echo": True, "n": 2}),
    ],
)
def test_what_a_slow_reader_has_not_taken_comes_in_short_chunks(path, fields):
    prompt = fields.get("prompt", "a")
    reply = run(scored_app(len(prompt)), f"/v1/{path}", {**fields, "stream": True})
    chunks = [event for event in reply.events()[:-1] if event["choices"]]
    found = [choice["logprobs"] for event in chunks for choice in event["choices"]]
    counts = [len(each.get("content") or each.get("tokens") or ()) for each in found if each]
    assert max(counts) <= SCORED_AT_ONCE
    num_each = NUM_TOKENS + (len(prompt) if fields.get("echo") else 0)
    assert sum(counts) == fields.get("n", 1) * num_each
    texts = [choice.get("text", "") for event in chunks for choice in event["choices"]]
    if "messages" not in fields:
        assert len("".join(texts)) == sum(counts)


def test_a_response_with_log_probabilities_comes_in_parts():
    [item] = run(scored_app(), "/v1/responses", INPUT).json()["output"]
    assert len(item["content"][0]["logprobs"]) == NUM_TOKENS


@pytest.mark.parametrize("background", [False, True])
def test_each_long_event_of_a_response_is_made_in_turns(background, monkeypatch):
    num_turns = 0
    take = LoopQueue.wait

    async def counted(turns, tenant):
        nonlocal num_turns
        num_turns += 1
        await take(turns, tenant)

    monkeypatch.setattr(LoopQueue, "wait", counted)
    fields = {**INPUT, "stream": True, "background": background}
    reply = asyncio.run(Watched(scored_app(), "/v1/responses", fields).watched())
    num_deltas = -(-NUM_TOKENS // SCORED_AT_ONCE)
    assert reply.body.count(b"response.output_text.delta") == 2 * num_deltas
    assert b"event: response.incomplete" in reply.body
    num_pieces = NUM_TOKENS // NUM_AT_ONCE
    assert num_turns >= num_deltas + 4 * num_pieces  # four events contain all items


def test_many_embeddings_come_in_parts():
    size, num_inputs = 512, 40
    embedding = Embedding(is_normalized=False, size=size)
    numbers = struct.pack(f"<{size}f", *[0.1 * i for i in range(size)])
    router = FakeRouter([Update((7,), embedding=numbers, outcome=LENGTH)])
    fields = {"input": ["a"] * num_inputs}
    data = run(app_of(router, embedding), "/v1/embeddings", fields).json()["data"]
    assert [len(each["embedding"]) for each in data] == [size] * num_inputs
    assert [each["index"] for each in data] == list(range(num_inputs))


def test_a_short_answer_has_its_length_in_the_head():
    connection = Watched(make_app(FakeRouter()), "/v1/completions", {"prompt": "a"})
    reply = asyncio.run(connection.watched())
    assert int(reply.headers["content-length"]) == len(reply.body)
