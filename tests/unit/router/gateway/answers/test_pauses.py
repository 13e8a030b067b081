"""No request blocks the gateway's event loop: bodies that once did are measured.

These tests need a quiet machine. `test_prompt_length` and `test_json_fields` do not.
"""

import asyncio
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.hostile.corpus import BOMBS, CHAT, COMPLETIONS
from router.gateway.versions import ServedVersion, Versions
from router.text.templates import DEFAULT, ChatTemplates
from router.text.tokenizer import TextModel
from tests.kits.router.gateway import (
    CONTEXT_LEN,
    TEMPLATE,
    FakeRouter,
    fetch,
    make_app_of,
)

BUNDLED = Path(__file__).parents[4] / "engine/model/bundled/target/tokenizer.json"
MAX_PAUSE_S = 0.25
LONG_CONTEXT = 2**18
MIB = 2**20


def prompt(text: bytes, num_bytes: int) -> bytes:
    return b'{"prompt": "%s"}' % (text * (num_bytes // len(text)))


BODIES_OF_MANY = ("arrays in an unknown field", "texts as stops", "token ids", "biases")
REQUESTS = {
    "1 MiB of words": (COMPLETIONS, prompt(b"the quick brown fox ", MIB)),
    "1 MiB without a space": (COMPLETIONS, prompt(b"a", MIB)),
    "8 MiB of words": (COMPLETIONS, prompt(b"the quick brown fox ", 8 * MIB - 100)),
    "200,000 messages": (
        CHAT,
        b'{"messages": [%s]}' % b",".join([b'{"role":"user","content":"hi"}'] * 200_000),
    ),
    "4,000 messages": (
        CHAT,
        b'{"messages": [%s]}' % b",".join([b'{"role":"user","content":"hi there"}'] * 4000),
    ),
    **{name: (BOMBS[name][0], BOMBS[name][1](7 * MIB)) for name in BODIES_OF_MANY},
}


@pytest.mark.long
@pytest.mark.parametrize("context_len", [CONTEXT_LEN, LONG_CONTEXT])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_loop_goes_on_beside_any_request(name, context_len):
    path, body = REQUESTS[name]
    router = FakeRouter()
    tokenizer = Tokenizer.from_file(str(BUNDLED))
    text = TextModel(
        tokenizer, templates=ChatTemplates({DEFAULT: TEMPLATE}, {}), eos_token_ids=(0,)
    )
    versions = Versions(ServedVersion("v1", router, text, ("tiny",), context_len))
    app = make_app_of(versions, router.clock)
    pause_s, status = asyncio.run(beside(fetch(app, "POST", path, body, {})))
    assert status in (200, 400)
    assert pause_s < MAX_PAUSE_S


async def beside(request) -> tuple[float, int]:
    """Returns the longest pause of a ticking event loop during a request, and the request's
    status."""
    task = asyncio.create_task(request)
    longest_s, last_s = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s, task.result().status
