"""A request as the gateway knows it, and what becomes of it.

The HTTP side (`gateway.py`) makes a `Request` and follows its `Update`s; the `RouterMachine`
decides everything in between. `RouterPort` is the seam, so that each side is tested without the
other.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from engine.messages import (
    FinishReason,
    Limits,
    LoadReport,
    Logprobs,
    RequestId,
    Role,
    Salt,
    Sampling,
    WorkerId,
)
from router.cluster.costs import CostErrors
from router.prefixes.map import PrefixHashes


@dataclass(frozen=True, slots=True)
class Request:
    """What the client asked, validated and tokenised. Lengths in `limits` include the prompt.

    Several answers to one prompt are a group of requests, each with a seed and a life of its own.
    All but one name that one as their `leader`; it must have been submitted before them.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]  # of a simulated one, what acts like it and need not be copied
    sampling: Sampling
    limits: Limits
    received_s: float  # when the HTTP request came in
    prompt_logprobs: int | None = None  # as in `engine.messages.Prefill`
    leader: RequestId | None = None
    priority: int = 0  # lower is served earlier, as in vLLM
    tenant: str = ""  # API key or user: the queue is shared fairly among these
    has_key: bool = False  # `tenant` is known by its key; else it is the client's own word
    deadline_s: float | None = None  # for the first token, on the clock of `received_s`
    tpot_bound_s: float | None = None  # seconds per token; None: the router's
    salt: Salt = b""  # only requests of equal ones share cached prefixes
    hashes: PrefixHashes | None = None  # of its blocks, as far as they are known

    def prompt(self) -> list[int]:
        """The tokens as messages carry them."""
        tokens: Sequence[int] = self.token_ids
        return list(tokens) if isinstance(tokens, tuple) else cast("list[int]", tokens)


class Decision(msgspec.Struct, frozen=True):
    """A placement and its reasons. What nobody could predict is None."""

    policy: str
    why: str
    prefill_worker: str
    decode_worker: str
    num_candidates: int  # prefill workers that were compared
    num_matched_tokens: int  # in the prefill worker
    pulled_from: str | None = None
    num_pulled_tokens: int = 0
    predicted_ttft_s: float | None = None  # from the placement on
    predicted_tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused before any work was done for it: try again later."""

    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Accepted, and could not be completed. The code is for programs to read."""

    message: str
    code: str = "request_failed"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client is gone, or has what it wanted."""


Outcome = Finished | Rejected | Failed | Cancelled


class Timeline(msgspec.Struct, frozen=True):
    """Where a request's time went, seconds on the gateway's clock. Stages do not overlap.

    The first four sum to the time from the HTTP request to its first token (TTFT). The last three
    sum to the gap between the first and the second token; they are None where there was no second
    token, and `kv_wait_s` is zero where prefill and decode ran in one worker.

    Two measures beside the stages, None where no KV was handed over: `kv_transfer_s`, while blocks
    were on their way to the decode worker, and of that `kv_exposed_s`, after the last block was
    computed. The difference was hidden behind prefill.

    `move_pull_s` is the longest time for which KV was on its way while the answer stood still, for
    it goes on in another decode worker; None where it stayed. `moves` counts how often it did.

    `decision` is the latest placement and why it was made; None before the first.

    Of the `num_drafted_tokens` that speculation proposed, `num_accepted_tokens` were what the model
    chose; both are complete at the end of the request only.
    """

    route_s: float  # validate, apply the chat template, tokenise
    queue_s: float  # wait in the router for a worker
    prefill_queue_s: float  # wait in the prefill worker, a pull of its prefix included
    prefill_compute_s: float  # first chunk to first token
    kv_wait_s: float | None = None  # first token to all KV in the decode worker
    decode_queue_s: float | None = None  # KV there to the first decode step
    first_step_s: float | None = None  # first decode step to the second token
    kv_transfer_s: float | None = None
    kv_exposed_s: float | None = None
    move_pull_s: float | None = None
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    attempts: int = 1
    moves: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    decision: Decision | None = None


class Update(msgspec.Struct, frozen=True, gc=False):
    """News of one request. With an `outcome` it is the last one.

    The timeline comes with the first two tokens and with the outcome; the latest is the truest.
    Log-probabilities come where they were asked for: those of an answer's tokens with the tokens,
    those of the prompt, from its second token on, with the first token.
    """

    token_ids: tuple[int, ...] = ()
    outcome: Outcome | None = None
    timeline: Timeline | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()


TakeAtOnce = Callable[[Update], bool]


# An update that brings tokens and nothing else, as nearly all do, and when it came in, in seconds.
TakeTokens = Callable[[Sequence[int], float], bool]


def take_nothing(_: Update) -> bool:
    """A `TakeAtOnce` of somebody who only iterates."""
    return False


def take_no_tokens(_: Sequence[int], __: float) -> bool:
    """A `TakeTokens` of somebody to whom all updates are alike."""
    return False


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is predicted of a worker as it is now. What nobody could predict is None."""

    wait_s: float | None = None  # until it has computed the prompts that it was given
    tpot_s: float | None = None  # a step of all that it decodes, or will
    errors: CostErrors = field(default_factory=CostErrors)  # of workers like this one


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the router sees it."""

    role: Role
    load: LoadReport | None
    reserved_blocks: int
    reserved_tokens: int
    forecast: Forecast = field(default_factory=Forecast)


class RouterStatus(Protocol):
    """What can be seen of the router: of one, or of several taken together."""

    def readiness(self) -> str | None:
        """None when requests can be served, else what is missing."""
        ...

    def fingerprint(self) -> str:
        """Identifies model and configuration in answers; empty until a worker is known."""
        ...

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        """All live workers."""
        ...

    def queue_len(self) -> int:
        """Requests that wait in the router for a worker."""
        ...

    def queued_s(self) -> float:
        """Predicted seconds of one prefill worker to compute what waits."""
        ...

    def counters(self) -> Mapping[tuple[str, str], int]:
        """Router-side events since start by (name, reason): retries, refusals, fallbacks."""
        ...


class RouterPort(RouterStatus, Protocol):
    """What the HTTP side needs of the router."""

    def capacity_tokens(self) -> int | None:
        """The length of the longest request that workers could hold; None until it is known."""
        ...

    def submit(
        self,
        request: Request,
        take_at_once: TakeAtOnce = take_nothing,
        take_tokens: TakeTokens = take_no_tokens,
    ) -> AsyncGenerator[Update, None]:
        """Starts a request. Closing the iterator before its last update cancels the request.

        While the iterator is waited for, each update is first offered to `take_at_once`, and does
        not come out of the iterator if that is true: most tokens of a stream can be sent where
        they come in, and need not wait until it is some task's turn. One of tokens alone is offered
        to `take_tokens` before.
        """
        ...
