"""The question that a placement policy gets, and its possible answers.

A policy chooses among candidates, the workers that could serve the request now (`candidates.py`).
It is a function of the view, the need and the costs. A seeded generator breaks ties. That generator
and a turn counter are its only state.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol

import msgspec

from engine.demand import DecodeCost
from engine.messages import Role, WorkerId
from engine.worker.costs import PullCost
from router.cluster.view import ClusterView, WorkerView

Worker = tuple[WorkerId, WorkerView]


class Placement(msgspec.Struct, frozen=True):
    """Both workers are the same where prefill and decode run in one."""

    prefill: WorkerId
    decode: WorkerId


class SharedPrompt(msgspec.Struct, frozen=True):
    """The placement of another request with the same prompt, and the tokens found there."""

    placement: Placement
    num_tokens: int


class Need(msgspec.Struct, frozen=True):
    """The room that a placement must provide."""

    num_tokens: int  # to prefill
    max_len: int  # tokens at the end of the answer, prompt included
    predicted_len: int | None = None  # the same, as answers like it ended; None: `max_len`
    kept_tokens: Mapping[WorkerId, int] = {}  # left by earlier attempts
    shared: SharedPrompt | None = None
    preempted_s: Mapping[WorkerId, float] = {}  # when, by worker
    tpot_bound_s: float | None = None
    may_pull: bool = True

    @property
    def end_len(self) -> int:
        """Tokens that memory is reserved for."""
        if self.predicted_len is None:
            return self.max_len
        return min(max(self.predicted_len, self.num_tokens + 1), self.max_len)

    @property
    def decodes(self) -> bool:
        """True if tokens follow the first one, which comes with the prompt."""
        return self.max_len > self.num_tokens + 1

    @property
    def num_to_come(self) -> int:
        """Tokens of the answer that are predicted to come."""
        return max(self.end_len - self.num_tokens, 1)

    @property
    def mean_context_tokens(self) -> int:
        """Tokens of context in the middle of its growth."""
        return (self.num_tokens + self.end_len) // 2


class Known(Protocol):
    """The prompt's leading tokens that workers hold, looked up when a policy first asks."""

    def matched_tokens(self) -> Mapping[WorkerId, int]:
        """Leading tokens in full blocks that each worker holds; one token is always left over.

        Of a store, those in its memory.
        """
        ...

    def matched_below(self) -> Mapping[tuple[WorkerId, str], int]:
        """The same for stores and their lower media (`router.cluster.media`)."""
        ...


class Costs(Protocol):
    """Predicted seconds. None: nothing was measured yet."""

    def prefill_s(self, worker: WorkerView, num_tokens: int, num_cached: int) -> float | None:
        """Seconds to compute a prompt of which `num_cached` leading tokens are cached."""
        ...

    def pull_s(self, worker: WorkerView, num_tokens: int) -> float:
        """Seconds to pull `num_tokens` in full blocks to this worker; at first a guess."""
        ...

    def pull_cost(self, worker: WorkerView) -> PullCost:
        """The formula of `pull_s`."""
        ...

    def load_s(self, store: WorkerView, medium: str, num_blocks: int) -> float:
        """Seconds until a store has read `num_blocks` from a lower medium; at first a guess."""
        ...

    def offer_s(self) -> float:
        """Seconds until a worker that computes prompts answers a request for a prefix."""
        ...

    def step_s(self, worker: WorkerView, num_seqs: int, context_tokens: int) -> float | None:
        """Seconds of a decode step of `num_seqs` sequences with `context_tokens` in all."""
        ...

    def decode_cost(self, worker: WorkerView) -> DecodeCost | None:
        """The formula of `step_s`."""
        ...


class PrefillCandidate(msgspec.Struct, frozen=True):
    """A worker that could have computed the prompt. Unknown predictions are None."""

    worker_id: WorkerId
    wait_s: float | None  # until the worker is done with its other prompts
    predicted_ttft_s: float | None
    num_matched_tokens: int


class Decision(msgspec.Struct, frozen=True):
    """A placement and its reasons, as clients may read them. Unknown predictions are None."""

    policy: str
    why: str
    prefill_worker: WorkerId
    decode_worker: WorkerId
    num_candidates: int  # prefill workers that were compared
    num_matched_tokens: int = 0  # in the prefill worker
    pulled_from: WorkerId | None = None  # the worker or store whose prefix is pulled first
    num_pulled_tokens: int = 0  # beyond the matched ones
    pulled_medium: str | None = None  # a store's slowest one that it needs; None: from a worker
    predicted_load_s: float = 0.0  # until the store has read what it lacks in memory
    predicted_ttft_s: float | None = None  # from the placement on
    predicted_tpot_s: float | None = None
    drag: float = 1.0  # factor by which decoding beside it slows its prompt down
    candidates: tuple[
        PrefillCandidate, ...
    ] = ()  # the chosen one first; empty if it was not explained

    @property
    def placement(self) -> Placement:
        """Returns the two workers."""
        return Placement(self.prefill_worker, self.decode_worker)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the prefill worker will not compute, if all goes as predicted."""
        return self.num_matched_tokens + self.num_pulled_tokens

    def pulled_of(self, num_cached_tokens: int) -> int:
        """How many of the tokens that turned out to be cached were pulled for this request."""
        num_pulled = num_cached_tokens - self.num_matched_tokens
        return min(max(num_pulled, 0), self.num_pulled_tokens)


class Busy(msgspec.Struct, frozen=True):
    """All workers that could serve this are full."""

    until_s: float | None = None  # one is predicted to be free then, should nothing happen before
    lacks: Role = Role.DECODE  # which of the two is waited for; in doubt it is room


@dataclass(frozen=True, slots=True)
class Impossible:
    """No live worker could serve this, and why."""

    reason: str


class Candidates(msgspec.Struct, frozen=True):
    """Workers that could take a request now.

    `partners` maps each prefill worker to the decode workers that have room and that its KV can
    reach. A worker that also decodes is its own partner.

    One of the two lists may be empty, if the policy asks fluid workers to do both. If none of these
    can, `busy` says what the request waits for.
    """

    prefillers: list[Worker]
    decoders: list[Worker]
    apart: frozenset[tuple[WorkerId, WorkerId]] = frozenset()  # KV does not arrive between them
    busy: Busy = Busy()

    def partners(self, prefill: WorkerId) -> list[Worker]:
        """Decode workers for what this one prefills."""
        if not self.apart:
            return self.decoders
        return [item for item in self.decoders if (prefill, item[0]) not in self.apart]


class Queue(msgspec.Struct, frozen=True):
    """Other prompts that wait or will come, in shares for each worker that prefills."""

    waiting: float = 0.0  # requests
    seconds: float = 0.0  # that all these are predicted to take
    busy: float = 0.0  # share of the time that prompts lately took; above 1 if they must queue


EMPTY = Queue()


@dataclass(frozen=True, slots=True)
class Asked:
    """All that a policy may look at."""

    view: ClusterView
    candidates: Candidates
    need: Need
    known: Known
    costs: Costs
    now_s: float
    rng: random.Random
    wait_bound_s: float = inf  # the longest queue at a worker that prefills


class Policy(Protocol):
    """Chooses among candidates."""

    name: ClassVar[str]
    binds_late: ClassVar[bool]
    """True if a prompt waits in the router until a prefill worker has little left to do."""
    pulls: ClassVar[bool]
    """True if it may have a prefix pulled before the rest is computed."""
    is_fluid: ClassVar[bool]
    """True if it may choose one fluid worker for both, so it is asked while a pool is full."""

    def choose(self, asked: Asked) -> Decision | Busy:
        """The best placement, or `Busy` if waiting for a better one pays."""
        ...
