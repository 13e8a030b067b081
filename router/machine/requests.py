"""A request as the gateway knows it, its updates, and its outcome.

The HTTP side (`router.gateway`) makes a `Request` and reads its `Update`s. The `RouterMachine`
decides everything between them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

import msgspec
from msgspec.structs import replace

from engine.messages import (
    FinishReason,
    Limits,
    Logprobs,
    RequestId,
    Salt,
    Sampling,
)
from engine.worker.blocks import BlockHash, hash_blocks
from engine.worker.costs import CostErrors
from router.policies.base import Decision


class PrefixHashes:
    """Block hashes of one prompt and its answer. Each hash is computed once, at its first use."""

    def __init__(
        self, known: Mapping[int, Sequence[BlockHash]] | None = None, *, salt: bytes = b""
    ) -> None:
        """`known`: hashes of the prompt's first full blocks, by block size."""
        self._salt = salt
        self._hashes: dict[int, list[BlockHash]] = {}
        if known is not None:
            self._hashes = {size: list(hashes) for size, hashes in known.items()}

    def copy(self) -> "PrefixHashes":
        """Returns the same hashes for a longer prompt that starts with the same tokens."""
        return PrefixHashes(self._hashes, salt=self._salt)

    def leading(
        self, token_ids: Sequence[int], *, num_tokens: int, block_size: int
    ) -> list[BlockHash]:
        """Returns hashes of the full blocks of the first `num_tokens`.

        From one call to the next, `token_ids` may only grow.
        """
        num_blocks = num_tokens // block_size
        hashes = self._hashes.setdefault(block_size, [])
        if num_blocks > len(hashes):
            new = token_ids[len(hashes) * block_size : num_blocks * block_size]
            parent = hashes[-1] if hashes else None
            hashes += hash_blocks(new, block_size, self._salt, parent=parent)
        return hashes[:num_blocks]


class Request(msgspec.Struct, frozen=True):
    """A client's request, validated and tokenised. Lengths in `limits` include the prompt.

    Several answers to one prompt are a group of requests, each with its own seed. One of them is
    the leader and must be submitted first; the others name it as their `leader`.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]  # the simulator passes an object that acts as both tuple and list
    sampling: Sampling
    limits: Limits
    received_s: float  # time at which the HTTP request arrived
    prompt_logprobs: int | None = None  # as in `engine.messages.Prefill`
    leader: RequestId | None = None
    priority: int = 0  # requests with lower numbers are placed first, as in vLLM
    tenant: str = ""  # API key or user; the queue is shared fairly among tenants
    has_key: bool = False  # True if `tenant` comes from an API key; otherwise the client chose it
    deadline_s: float | None = None  # deadline of the first token, on the clock of `received_s`
    tpot_bound_s: float | None = None  # seconds per token; None: the router's default
    salt: Salt = b""  # only requests with equal salts share cached prefixes
    hashes: PrefixHashes | None = None  # hashes of its blocks that are computed already
    client_id: str = ""  # the client's own request id, for log lines
    is_background: bool = False  # never refused for a time bound, and no pool grows for it

    def prompt(self) -> list[int]:
        """The tokens of the prompt, as a list for messages."""
        tokens: Sequence[int] = self.token_ids
        return list(tokens) if isinstance(tokens, tuple) else cast("list[int]", tokens)

    def journal(self, answer: list[int]) -> list[int]:
        """The tokens of the prompt and an answer so far, as a list for messages."""
        tokens: Sequence[int] = self.token_ids
        if isinstance(tokens, tuple):
            return [*tokens, *answer]
        return cast("list[int]", tokens) + answer


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request was refused before any work was done. Clients may retry after `retry_after_s`."""

    message: str
    retry_after_s: float


UNFIT = "invalid_value"  # the code of a request that no worker can compute


@dataclass(frozen=True, slots=True)
class Failed:
    """The request was accepted but not completed. `code` is for programs."""

    message: str
    code: str = "request_failed"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client disconnected, or a stop string ended the answer."""


Outcome = Finished | Rejected | Failed | Cancelled


class Stay(msgspec.Struct, frozen=True):
    """The times of one attempt of a request at its workers.

    Times are in seconds since the HTTP request arrived, and None for stages that the attempt did
    not reach. `ended_s` is None while the attempt runs. An attempt that continues another one at a
    new decode worker counts as prefilled from its start.
    """

    prefill_worker: str
    decode_worker: str
    placed_s: float
    prefill_started_s: float | None = None
    prefilled_s: float | None = None
    kv_ready_s: float | None = None
    decode_started_s: float | None = None
    ended_s: float | None = None


class Timeline(msgspec.Struct, frozen=True):
    """The stages of a request, in seconds on the gateway's clock. Stages do not overlap.

    The first four stages sum to the time from the HTTP request to its first token (TTFT). The last
    three stages sum to the gap between the first and the second token. They are None without a
    second token, and `kv_wait_s` is zero if one worker did both prefill and decode.

    Two measures beside the stages are None if no KV was handed over. `kv_transfer_s` is the time
    during which blocks were transferred to the decode worker. `kv_exposed_s` is the part of this
    time after the last block was computed. The other part was hidden behind prefill.

    `prefix_pull_s` is the part of `prefill_queue_s` in which the prompt's prefix was pulled. It is
    None if no prefix was pulled. `decision` names the source worker or store, and its medium.

    `move_pull_s` is the longest pause of the answer while KV was transferred to another decode
    worker; None if the answer never moved. `moves` is the number of moves, and `moved_why` is the
    reason of the last move.

    `decision` is the latest placement and its reasons; None before the first. `stays` are the
    latest attempts with their own times, oldest first.

    `num_drafted_tokens` counts the tokens that speculation proposed, `num_accepted_tokens` those
    that the target model accepted. Both are complete only when the request has ended.
    """

    route_s: float  # to validate, apply the chat template and tokenise
    queue_s: float  # wait in the router until a worker is assigned
    prefill_queue_s: float  # wait in the prefill worker, including a pull of the prefix
    prefill_compute_s: float  # from the first chunk to the first token
    kv_wait_s: float | None = None  # from the first token until the decode worker has all KV
    decode_queue_s: float | None = None  # from the arrival of all KV to the first decode step
    first_step_s: float | None = None  # from the first decode step to the second token
    kv_transfer_s: float | None = None
    kv_exposed_s: float | None = None
    prefix_pull_s: float | None = None
    move_pull_s: float | None = None
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    attempts: int = 1
    moves: int = 0
    moved_why: str | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    decision: Decision | None = None
    stays: tuple[Stay, ...] = ()

    @property
    def ttft_s(self) -> float:
        """The time from the HTTP request to the first token. Before that token, the time so far."""
        return self.route_s + self.queue_s + self.prefill_queue_s + self.prefill_compute_s


class Update(msgspec.Struct, frozen=True, gc=False):
    """The part of an answer that one event produced: the machine's effect for the client.

    The last update of a request has an `outcome`. If a client reads slowly, its unread updates are
    merged, so an update may have tokens of several steps.

    Updates with the first two tokens and with the outcome have a timeline; the latest is the most
    complete. Requested log-probabilities come with the tokens of the answer. Log-probabilities of
    the prompt, from its second token on, come with the first token.
    """

    token_ids: tuple[int, ...] = ()
    outcome: Outcome | None = None
    timeline: Timeline | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    embedding: bytes = b""  # from an embedding model, with the first token
    request_id: RequestId = RequestId("")  # empty in merged updates

    def parts(self, num_tokens: int) -> "Iterator[Update]":
        """Yields the update in parts of at most `num_tokens` tokens."""
        last = max(len(self.token_ids) - 1, 0) // num_tokens * num_tokens
        first = self
        for begin in range(0, last, num_tokens):
            tokens = slice(begin, begin + num_tokens)
            yield replace(
                first,
                token_ids=self.token_ids[tokens],
                logprobs=self.logprobs[tokens],
                outcome=None,
            )
            first = replace(self, prompt_logprobs=(), embedding=b"")
        yield (
            replace(first, token_ids=self.token_ids[last:], logprobs=self.logprobs[last:])
            if last
            else self
        )


def joined(updates: Sequence[Update]) -> Update:
    """Merges several updates of a request, in order, into one."""
    if len(updates) == 1:
        return updates[0]
    timelines = [update.timeline for update in updates if update.timeline is not None]
    return Update(
        token_ids=tuple(chain.from_iterable([update.token_ids for update in updates])),
        outcome=updates[-1].outcome,
        timeline=timelines[-1] if timelines else None,
        logprobs=tuple(chain.from_iterable([update.logprobs for update in updates])),
        prompt_logprobs=tuple(chain.from_iterable([u.prompt_logprobs for u in updates])),
        embedding=b"".join([update.embedding for update in updates]),
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted times of a worker under its present load. Unknown times are None."""

    wait_s: float | None = None  # seconds until all its prompts are computed
    tpot_s: float | None = None  # seconds of a step with all its present and promised sequences
    alone_s: float | None = None  # seconds of a step with one sequence
    # Prediction errors of workers of this kind.
    errors: CostErrors = field(default_factory=CostErrors)
