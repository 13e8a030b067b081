"""The plan of one `bench interference`: how much prompts hold up streams. Pure.

A few streams decode. In two of three settings a client also sends long prompts. It sends each when
the one before it is answered. No two prompts begin alike, so no cache helps:

    idle            1 prefill + 1 decode worker, streams only
    disaggregated   the same two workers, streams and prompts
    colocated       2 mixed workers with chunked prefill as it is by default, streams and prompts

The comparison is fair: both deployments have two workers of one compute thread each behind the same
gateway, and get the same requests. Prompts that are sent one by one come as fast as a single worker
computes them, which is all that the prefill worker can do. In the colocated deployment they find
two workers, each free every other time. The rate of prompts stands beside every p99.

Both deployments are up all the time, one of them idle. Each repetition runs all settings once, in a
random order. In all runs a stream gets the same number of tokens, so percentiles are over equally
many gaps behind equally long contexts.

Prompts ask for one token by default, so nothing is handed over. With more tokens, the worker that
decodes the streams pulls their KV, and their tokens join its steps.
"""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from random import Random

from tokenizers import Tokenizer

from bench.client.answers import Endpoint, request_body
from bench.common.report import Scalar
from bench.common.shapes import SPECIAL_TOKENS, shape_named, tokenizer_over
from engine.errors import ConfigError

QUICK_STREAM_LEN = 128


class PoolSetting(StrEnum):
    """The load beside the streams."""

    IDLE = "idle"
    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


POOLS: Mapping[PoolSetting, Mapping[str, Scalar]] = {  # options of `baton serve`
    PoolSetting.DISAGGREGATED: {"--prefill": 1, "--decode": 1},
    PoolSetting.COLOCATED: {"--mixed": 2},
}
DEPLOYMENT = {
    **{setting: setting for setting in POOLS},
    PoolSetting.IDLE: PoolSetting.DISAGGREGATED,
}


@dataclass(frozen=True, slots=True)
class InterferenceRequests:
    """Requests of one length; `at_once` of them are open."""

    at_once: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """One benchmark of interference. `shape` names a checkpoint of random weights."""

    shape: str
    streams: InterferenceRequests
    load: InterferenceRequests
    num_repeats: int = 5
    seed: int = 0


def check(plan: InterferencePlan) -> InterferencePlan:
    """Returns the plan. Raises ConfigError if a request does not fit the model."""
    context_len = shape_named(plan.shape).max_positions
    for ask in (plan.streams, plan.load):
        if ask.input_len + ask.output_len > context_len:
            raise ConfigError(
                f"{ask.input_len} tokens in and {ask.output_len} out are more than {plan.shape}"
                f" has room for: {context_len}"
            )
    return plan


def quick(plan: InterferencePlan) -> InterferencePlan:
    """Once, with short streams: under 50 s."""
    streams = replace(plan.streams, output_len=min(plan.streams.output_len, QUICK_STREAM_LEN))
    return replace(plan, streams=streams, num_repeats=1)


def order_of(plan: InterferencePlan, repeat: int) -> list[PoolSetting]:
    """All settings, in that repetition's own order."""
    order = list(PoolSetting)
    Random(f"{plan.seed}/order/{repeat}").shuffle(order)
    return order


def bodies(
    ask: InterferenceRequests, vocab: Sequence[int], *, model: str, rng: Random
) -> Iterator[bytes]:
    """Requests without end, each with a prompt of its own."""
    while True:
        yield request_body(
            Endpoint.COMPLETIONS,
            rng.choices(vocab, k=ask.input_len),
            model=model,
            output_len=ask.output_len,
            temperature=0.0,
        )


def ascii_tokenizer(vocab_size: int) -> Tokenizer:
    """Builds a tokenizer with a whole text for each id, special tokens aside.

    Half a character is shown only with the next token, and the client would see one gap for two
    steps. Nearly 1 % of the ids of `bench.common.shapes` have no text of their own.
    """
    letters = string.digits + string.ascii_letters + string.punctuation
    return tokenizer_over(letters, vocab_size - len(SPECIAL_TOKENS) - len(letters))


def config_of(plan: InterferencePlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {
        "shape": plan.shape,
        **{f"streams_{name}": value for name, value in asdict(plan.streams).items()},
        **{f"load_{name}": value for name, value in asdict(plan.load).items()},
        "num_repeats": plan.num_repeats,
    }
