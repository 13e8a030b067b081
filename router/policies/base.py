"""The arguments and the results of a placement policy.

A policy chooses among candidates, the workers that could serve the request now (`candidates.py`). A
policy is a function of the view, the need and the costs. Its only state is a turn counter and a
seeded generator, which breaks ties.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol

import msgspec

from engine.messages import Role, WorkerId
from router.cluster.estimates import Estimates
from router.cluster.view import ClusterView, WorkerView

Worker = tuple[WorkerId, WorkerView]


class Placement(msgspec.Struct, frozen=True):
    """The two workers of a request; they are the same if one worker prefills and decodes."""

    prefill: WorkerId
    decode: WorkerId


class SharedPrompt(msgspec.Struct, frozen=True):
    """The placement of another request with the same prompt, and its number of cached tokens."""

    placement: Placement
    num_tokens: int


class Need(msgspec.Struct, frozen=True):
    """The memory and other conditions that a placement must fulfil."""

    num_tokens: int  # number of tokens to prefill
    max_len: int  # maximum final length in tokens, prompt included
    predicted_len: int | None = None  # predicted final length; None: `max_len`
    kept_tokens: Mapping[WorkerId, int] = {}  # tokens cached by earlier attempts, by worker
    shared: SharedPrompt | None = None
    preempted_s: Mapping[WorkerId, float] = {}  # time of the last preemption, by worker
    tpot_bound_s: float | None = None
    may_pull: bool = True

    @property
    def end_len(self) -> int:
        """The final length in tokens for which memory is reserved."""
        if self.predicted_len is None:
            return self.max_len
        return min(max(self.predicted_len, self.num_tokens + 1), self.max_len)

    @property
    def decodes(self) -> bool:
        """True if the answer has more tokens than the first one, which the prefill produces."""
        return self.max_len > self.num_tokens + 1

    @property
    def num_to_come(self) -> int:
        """The predicted number of tokens in the answer."""
        return max(self.end_len - self.num_tokens, 1)

    @property
    def mean_context_tokens(self) -> int:
        """The mean context length in tokens while the answer grows."""
        return (self.num_tokens + self.end_len) // 2


class Known(Protocol):
    """The prompt's prefixes that workers and stores have cached; looked up at the first use."""

    def matched_tokens(self) -> Mapping[WorkerId, int]:
        """Returns the number of the prompt's leading tokens that each worker has, in full blocks.

        At least one token is left to compute. For a store, only blocks in memory count.
        """
        ...

    def matched_below(self) -> Mapping[tuple[WorkerId, str], int]:
        """Returns the number of leading tokens on lower media of stores, by store and medium."""
        ...


class PrefillCandidate(msgspec.Struct, frozen=True):
    """A worker that could have computed the prompt. Predictions are None if unknown."""

    worker_id: WorkerId
    wait_s: float | None  # seconds until the worker has computed its other prompts
    predicted_ttft_s: float | None
    num_matched_tokens: int


class Decision(msgspec.Struct, frozen=True):
    """A placement and its reasons, which clients may read. Predictions are None if unknown."""

    policy: str
    why: str
    prefill_worker: WorkerId
    decode_worker: WorkerId
    num_candidates: int  # number of prefill workers that were compared
    num_matched_tokens: int = 0  # leading tokens cached in the prefill worker
    pulled_from: WorkerId | None = None  # worker or store from which more of the prefix is pulled
    num_pulled_tokens: int = 0  # pulled tokens beyond the matched tokens
    pulled_medium: str | None = None  # slowest medium that is read; None: pulled from a worker
    predicted_load_s: float = (
        0.0  # seconds in which the store reads blocks from lower media; 0: none
    )
    predicted_ttft_s: float | None = None  # seconds from the placement to the first token
    predicted_tpot_s: float | None = None
    slowdown: float = 1.0  # factor on the prompt's time, because its worker also decodes
    candidates: tuple[
        PrefillCandidate, ...
    ] = ()  # the chosen one first; empty if the decision was not explained

    @property
    def placement(self) -> Placement:
        """Returns the prefill and the decode worker."""
        return Placement(self.prefill_worker, self.decode_worker)

    @property
    def num_cached_tokens(self) -> int:
        """The number of tokens that the prefill worker is predicted not to compute."""
        return self.num_matched_tokens + self.num_pulled_tokens

    def pulled_of(self, num_cached_tokens: int) -> int:
        """Returns the number of cached tokens that were pulled for this request."""
        num_pulled = num_cached_tokens - self.num_matched_tokens
        return min(max(num_pulled, 0), self.num_pulled_tokens)


class Busy(msgspec.Struct, frozen=True):
    """No worker that could serve the request has room now."""

    until_s: float | None = None  # predicted time at which a worker has room; None if unknown
    lacks: Role = Role.DECODE  # the role whose workers have no room; DECODE if unknown


@dataclass(frozen=True, slots=True)
class Impossible:
    """No live worker could ever serve the request. `reason` is the cause."""

    reason: str


class Candidates(msgspec.Struct, frozen=True):
    """Workers that could take a request now.

    `partners` maps each prefill worker to the decode workers that have room and that its KV can
    reach. A worker that also decodes is its own partner.

    One of the two lists may be empty, if the policy lets fluid workers do both. If no fluid worker
    can do both, `busy` is the decision.
    """

    prefillers: list[Worker]
    decoders: list[Worker]
    apart: frozenset[tuple[WorkerId, WorkerId]] = frozenset()  # pairs whose pulls failed
    busy: Busy = Busy()

    def partners(self, prefill: WorkerId) -> list[Worker]:
        """Returns the decode workers that can continue the requests of this prefill worker."""
        if not self.apart:
            return self.decoders
        return [item for item in self.decoders if (prefill, item[0]) not in self.apart]


class Queue(msgspec.Struct, frozen=True):
    """The other queued or expected prompts, divided by the number of workers that prefill."""

    waiting: float = 0.0  # number of requests
    seconds: float = 0.0  # predicted seconds to compute all waiting prompts
    busy: float = 0.0  # share of recent time spent on prompts; above 1 if prompts must queue


EMPTY = Queue()


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a policy: all that it may read."""

    view: ClusterView
    candidates: Candidates
    need: Need
    known: Known
    costs: Estimates
    now_s: float
    rng: random.Random
    wait_bound_s: float = inf  # longest queue in seconds at which a worker still gets a prompt


class Policy(Protocol):
    """Chooses among candidates."""

    name: ClassVar[str]
    binds_late: ClassVar[bool]
    """True if a prompt waits in the router until a prefill worker has little work left."""
    pulls: ClassVar[bool]
    """True if the policy may have a prefix pulled before the rest is computed."""
    is_fluid: ClassVar[bool]
    """True if the policy may choose one fluid worker for both, even while a pool is full."""

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns the best placement, or `Busy` if waiting for a better placement is quicker."""
        ...
