"""A few real requests that a version must answer before it replaces another version.

short    a short prompt, decoded greedily, with log-probabilities
again    the same prompt: its tokens must be the same, though its prefix is cached now
long     a prompt of several blocks, which must be computed in parts or handed over whole
"""

import asyncio
import math
from collections.abc import Sequence
from itertools import cycle, islice
from uuid import uuid4

from engine.clock import Clock
from engine.messages import Limits, RequestId, Sampling
from router.machine.requests import Finished, Request, Update
from router.port import RequestPort, ask
from router.text.tokenizer import TextModel

TENANT = "baton-probe"
WITHIN_S = 30.0  # maximum seconds for each request
SHORT_TEXT = "A baton is handed over while both runners run."
ANSWER_LEN = 8
LONG_LEN = 600  # length of the long prompt in tokens


async def fault_of_version(
    port: RequestPort, text: TextModel, context_len: int, clock: Clock
) -> str:
    """Sends the requests. Returns the fault of their answers; empty if they are correct."""
    if text.embedding is not None:  # an embedding model produces no answers to compare
        return ""
    short = text.encode_text(SHORT_TEXT, context_len, may_exceed=True)[: max(context_len // 2, 1)]
    long = list(islice(cycle(short), min(LONG_LEN, max(context_len - ANSWER_LEN, 1))))
    said: list[tuple[int, ...]] = []
    for name, prompt in (("short", short), ("again", short), ("long", long)):
        try:
            async with asyncio.timeout(WITHIN_S):
                answer = await _answer(port, prompt, context_len, clock)
        except TimeoutError:
            return f"the {name} request was not answered in {WITHIN_S:g} s"
        if fault := _fault(answer):
            return f"the {name} request {fault}"
        said.append(answer.token_ids)
    if said[0] != said[1]:
        return f"a request was answered by {list(said[0])}, and again by {list(said[1])}"
    return ""


async def _answer(
    port: RequestPort, prompt: Sequence[int], context_len: int, clock: Clock
) -> Update:
    request = Request(
        request_id=RequestId(f"probe-{uuid4().hex}"),  # unique per gateway process
        token_ids=tuple(prompt),
        sampling=Sampling(temperature=0.0, logprobs=1),
        limits=Limits(max_len=min(len(prompt) + ANSWER_LEN, context_len), prompt_len=len(prompt)),
        received_s=clock.now_s(),
        tenant=TENANT,
    )
    return await ask(port, request)


def _fault(answer: Update) -> str:
    if not isinstance(answer.outcome, Finished):
        return f"ended with {answer.outcome}"
    if not answer.token_ids:
        return "got no token"
    if not all(math.isfinite(each.logprob) for each in answer.logprobs):
        return "got log-probabilities that are no numbers"
    return ""
