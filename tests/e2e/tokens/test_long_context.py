"""A model whose context exceeds the KV memory, served with default flags and with a few flags.

A request that fits is answered to the last token. A request that can never fit is refused, with the
number of tokens that fit.
"""

import httpx
import pytest

from tests.kits.checkpoints import COMMON, LLAMA_1B_KV, save_checkpoint
from tests.kits.services.served import HTTP, serve

pytestmark = pytest.mark.torch

EOS_ALONE = {"logit_bias": {"257": 100}}
BLOCK_MIB = 1  # 16 tokens in fp32
NUM_BLOCKS = 4
MAX_LEN = 16 * NUM_BLOCKS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "llama-1b-kv"
    save_checkpoint(path, COMMON | LLAMA_1B_KV)
    return str(path)


def post(url: str, **body) -> httpx.Response:
    return HTTP.post(f"{url}/v1/completions", json=body, timeout=60)


def max_model_len(url: str) -> int:
    return HTTP.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]


def test_with_default_flags_a_request_without_max_tokens_is_answered(lent, model):
    with serve("--launcher", "process", model=model, kv_mib=None, command=lent) as served:
        longest = max_model_len(served.url)
        # KV memory is at least 256 MiB by default; the actual size depends on the machine.
        assert longest >= 256 // BLOCK_MIB * 16
        assert longest == min(131_072, served.num_blocks // 2 * 16)
        answer = post(served.url, prompt="def f(", **EOS_ALONE)
        assert answer.status_code == 200, answer.text
        chat = {"messages": [{"role": "user", "content": "yo"}], **EOS_ALONE}
        answer = HTTP.post(f"{served.url}/v1/chat/completions", json=chat, timeout=60)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def small(lent, model):
    """Starts workers that draft, with KV memory for `MAX_LEN` tokens."""
    options = ("--launcher", "process", "--speculate", "ngram")
    with serve(*options, model=model, kv_mib=NUM_BLOCKS * BLOCK_MIB, command=lent) as running:
        assert max_model_len(running.url) == MAX_LEN
        yield running


@pytest.mark.parametrize("prompt_len", [1, 40, MAX_LEN - 1])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_fits_exactly_is_answered_to_the_last_token(small, prompt_len, n):
    body = {"prompt": [7] * prompt_len, "ignore_eos": True, "n": n}
    answer = post(small.url, **body, max_tokens=MAX_LEN - prompt_len)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == n * (MAX_LEN - prompt_len)


@pytest.mark.parametrize("prompt_len", [1, 40, MAX_LEN - 1, MAX_LEN])
def test_one_token_more_than_fits_is_refused(small, prompt_len):
    answer = post(small.url, prompt=[7] * prompt_len, max_tokens=MAX_LEN - prompt_len + 1)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_LEN) in error["message"]
