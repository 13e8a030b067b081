"""One accepted request: its journal, its present attempt, and the times of its stages.

Plain records. `ends`, `placing` and `progress` decide what happens to them.
"""

from dataclasses import dataclass, field

import msgspec

from engine.messages import LeaseRef, Limits, SeqId, WorkerId
from engine.worker.blocks import BlockHash
from router.cluster.learning import AnswerLengths
from router.cluster.view import ClusterView, WorkerView
from router.machine.moves.reasons import FREE
from router.machine.requests import Request, Stay, Timeline
from router.policies.base import Decision, SharedPrompt
from router.prefixes.hashes import PrefixHashes

MAX_STAYS = 16  # attempts of a request whose times are kept


class Stamps(msgspec.Struct):
    """When a request passed each stage of its present attempt, seconds. None until it did."""

    arrived_s: float
    placed_s: float | None = None
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    kv_ready_s: float | None = None
    decode_started_s: float | None = None
    second_token_s: float | None = None


@dataclass(slots=True)
class Move:
    """The target of a move. Room is reserved there under `seq_id`, its id from then on."""

    seq_id: SeqId
    decode: WorkerId
    reserved_len: int
    reason: str
    copy_id: SeqId | None = None  # names its copied blocks, at both workers
    copy_due_s: float | None = None  # until then they are waited for
    gather_until_s: float | None = None  # copied, it waits so long for others to leave with it

    @property
    def is_free(self) -> bool:
        """True if the sequence may stay. Then its KV stays cached where it was, or is kept."""
        return self.reason in FREE


class Attempt(msgspec.Struct):
    """One placement. While `offer_due_s` is set, the prompt was not yet sent.

    With a `move` it decodes on a worker that is no longer to decode, and moves to another one.
    """

    seq_id: SeqId
    prefill: WorkerId
    decode: WorkerId
    base_len: int  # tokens that it prefills
    reserved_len: int  # tokens that the decode worker's reservation is for
    placed_s: float
    holder: WorkerId | None = None  # asked to offer a prefix; the offer may be open
    asked_s: float | None = None  # when it was asked, if it was computing then
    offer_due_s: float | None = None  # deadline of its offer
    started_s: float | None = None  # the first chunk
    num_cached_tokens: int = 0  # how many of `base_len` were found cached or pulled
    lease: LeaseRef | None = None
    prefilled_s: float | None = None  # at its first token; at its begin if it continues an answer
    kv_ready_s: float | None = None
    decode_started_s: float | None = None
    kept_by: WorkerId | None = None  # which of the workers keeps its KV; None: all
    is_moved: bool = False  # it continues an attempt at another decode worker
    is_lent: bool = False  # a prefill worker decodes it
    move: Move | None = None
    decision: Decision | None = None  # None if it is moved
    hedge_after_s: float | None = None  # from the prompt's sending; None: no second attempt
    hedge_due_s: float | None = None  # a second attempt begins then

    @property
    def prefilled(self) -> bool:
        """True if its prompt is computed."""
        return self.prefilled_s is not None

    @property
    def kv_ready(self) -> bool:
        """True if nothing is to be pulled by the decode worker any more."""
        return self.kv_ready_s is not None

    @property
    def is_decoding(self) -> bool:
        """True if its first token and all its KV are at the decode worker."""
        return self.prefilled and self.kv_ready

    @property
    def hands_over(self) -> bool:
        """True if another worker than the one that prefills decodes it."""
        return self.prefill != self.decode

    def stay(self, received_s: float, ended_s: float | None = None) -> Stay:
        """Returns the times of the attempt, in seconds since the HTTP request."""
        return Stay(
            self.prefill,
            self.decode,
            self.placed_s - received_s,
            _since(self.started_s, received_s),
            _since(self.prefilled_s, received_s),
            _since(self.kv_ready_s, received_s),
            _since(self.decode_started_s, received_s),
            _since(ended_s, received_s),
        )

    def validate(self, view: ClusterView) -> None:
        """Asserts that its workers live, and that its stages agree."""
        workers = view.workers
        assert self.decode in workers
        assert self.is_decoding or self.prefill in workers
        if self.move is not None:
            assert self.is_decoding
            assert self.move.decode in workers
            assert self.move.decode != self.decode
        assert self.hedge_due_s is None or not self.prefilled
        if self.holder is not None:
            assert self.holder in workers
            assert self.holder != self.prefill
            assert self.started_s is None
        else:
            assert self.offer_due_s is None


@dataclass(slots=True)
class Flight:
    """One accepted request. `attempt` is None while it is queued or held back.

    While there is a `hedge` too, neither of the two has a token.
    """

    request: Request
    stamps: Stamps
    last_news_s: float
    number: int = 0  # in the order of arrival
    tokens: list[int] = field(default_factory=list)  # the answer's, all delivered
    attempt: Attempt | None = None
    hedge: Attempt | None = None  # a second one beside it
    past: list[Stay] = field(default_factory=list)  # attempts that are over
    waits_for_s: float = 0.0  # predicted when it was queued: seconds to compute its tokens
    compute_s: float = 0.0  # the same without what was cached when it arrived
    num_ids: int = 0  # sequence ids of attempts and moves
    num_attempts: int = 0
    num_preemptions: int = 0  # attempts that do not count
    num_excused: int = 0  # nor these: a worker changed its role, or its step hung
    num_moves: int = 0  # attempts that continued another
    moved_why: str | None = None  # the reason of the last move
    rests_until_s: float = 0.0  # a move that is not necessary waits so long
    num_hedges: int = 0  # attempts beside another
    preempted_s: dict[WorkerId, float] = field(default_factory=dict)  # last time, by worker
    back_off_until_s: float | None = None
    likely_reused: bool = False  # see `router.cluster.learning`
    leads: bool = True  # followers are held back for it
    shared: SharedPrompt | None = None  # its leader's, or its own once it no longer leads
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    kv_transfer_s: float | None = None
    kv_exposed_s: float | None = None
    prefix_pull_s: float | None = None
    move_pull_s: float | None = None
    workers: tuple[str, str] = ("", "")
    decision: Decision | None = None  # for the latest placement
    kept_tokens: dict[WorkerId, int] = field(default_factory=dict)  # cached by lost attempts
    limits: Limits = field(init=False)  # the request's, with the bound on TPOT that holds for it
    hashes: PrefixHashes = field(init=False)
    prompt_len: int = field(init=False)
    max_tokens: int = field(init=False)  # that the answer may have
    _prompt: list[int] | None = field(init=False, default=None)  # as messages carry it

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.token_ids)
        self.max_tokens = max(self.request.limits.max_len - self.prompt_len, 1)
        self.limits = self.request.limits
        self.hashes = self.request.hashes or PrefixHashes(salt=self.request.salt)

    def next_seq_id(self) -> SeqId:
        """Returns a new id for an attempt or a move."""
        seq_id = SeqId(f"{self.request.request_id}.{self.num_ids}")
        self.num_ids += 1
        return seq_id

    @property
    def num_counted(self) -> int:
        """Attempts that count towards `max_attempts`."""
        uncounted = self.num_preemptions + self.num_excused + self.num_moves + self.num_hedges
        return self.num_attempts - uncounted

    @property
    def attempts(self) -> list[Attempt]:
        """The running attempts: none, one, or two."""
        return [each for each in (self.attempt, self.hedge) if each is not None]

    def leave(self, attempt: Attempt, now_s: float) -> None:
        """Keeps the times of an attempt that is over, for the dashboard and timelines."""
        if len(self.past) == MAX_STAYS:
            del self.past[0]
        self.past.append(attempt.stay(self.request.received_s, now_s))

    def attempt_of(self, seq_id: SeqId) -> Attempt | None:
        """Returns the attempt with this id; None for a sequence that only holds a copy."""
        for attempt in (self.attempt, self.hedge):
            if attempt is not None and attempt.seq_id == seq_id:
                return attempt
        return None

    @property
    def token_ids(self) -> list[int]:
        """The journal: prompt and answer so far. Read only."""
        if self.tokens:
            return self.request.journal(self.tokens)
        if self._prompt is None:
            self._prompt = self.request.prompt()
        return self._prompt

    @property
    def length(self) -> int:
        """Tokens in the journal."""
        return self.prompt_len + len(self.tokens)

    def predicted_len(self, lengths: AnswerLengths) -> int:
        """The length at the end that memory is reserved for, prompt included.

        For an answer that became longer than predicted, the new guess is half as much again.
        """
        length = self.length
        likely = self.prompt_len + lengths.nearly_longest(self.max_tokens)
        if likely > length:
            return likely
        guess = length + max(len(self.tokens) // 2, 16)
        return max(min(guess, self.request.limits.max_len), length)

    @property
    def prompt_logprobs(self) -> int | None:
        """Log-probabilities that are wanted for each prompt token; None once they were sent."""
        return None if self.tokens else self.request.prompt_logprobs

    def leading_hashes(self, num_tokens: int, worker: WorkerView) -> list[BlockHash]:
        """Hashes of the full blocks among the first `num_tokens`, as this worker makes them."""
        block_size = worker.info.layout.block_size
        has_all = num_tokens <= self.prompt_len
        token_ids = self.request.token_ids if has_all else self.token_ids
        return self.hashes.leading(token_ids, num_tokens=num_tokens, block_size=block_size)

    def validate(self, view: ClusterView) -> None:
        """Asserts the invariants of its attempts: two of them run at two workers, without a
        token.
        """
        for attempt in self.attempts:
            attempt.validate(view)
        first, second = self.attempt, self.hedge
        if second is None:
            return
        assert first is not None
        assert self.num_hedges == 1
        assert not any(each.prefilled for each in (first, second))
        assert first.prefill != second.prefill
        assert first.hedge_due_s is None
        assert second.hedge_due_s is None
        assert second.holder is None
        assert second.move is None


def running_timeline(flight: Flight, now_s: float) -> Timeline:
    """Returns the stages of a request that runs, as if the present one ended now."""
    stamps, attempt = flight.stamps, flight.attempt
    if stamps.second_token_s is not None:
        return timeline(flight, now_s)
    is_queued = attempt is None and stamps.first_token_s is None  # perhaps after a lost attempt
    hands_over = attempt is not None and attempt.hands_over
    started_s = stamps.prefill_started_s
    if attempt is not None and not flight.tokens:
        started_s = attempt.started_s
    kv_ready_s = stamps.kv_ready_s if hands_over else stamps.first_token_s
    shown = Stamps(
        stamps.arrived_s,
        placed_s=_or(None if is_queued else stamps.placed_s, now_s),
        prefill_started_s=_or(None if is_queued else started_s, now_s),
        first_token_s=_or(stamps.first_token_s, now_s),
        kv_ready_s=_or(kv_ready_s, now_s),
        decode_started_s=_or(stamps.decode_started_s, now_s),
        second_token_s=now_s,
    )
    return timeline(flight, now_s, shown)


def _or(at_s: float | None, now_s: float) -> float:
    """The time of a stage's end; now if it is not over."""
    return now_s if at_s is None else at_s


def timeline(flight: Flight, now_s: float, stamps: Stamps | None = None) -> Timeline:
    """Returns the stages, by default the stages that the request has passed.

    A stage that was left out by a lost attempt or an early end is zero.
    """
    stamps = stamps or flight.stamps
    placed_s = stamps.placed_s if stamps.placed_s is not None else now_s
    first_s = stamps.first_token_s if stamps.first_token_s is not None else max(placed_s, now_s)
    started_s = _between(placed_s, stamps.prefill_started_s, first_s)
    kv_wait_s = decode_queue_s = first_step_s = None
    if stamps.second_token_s is not None:
        kv_ready_s = _between(first_s, stamps.kv_ready_s, stamps.second_token_s)
        decode_s = _between(kv_ready_s, stamps.decode_started_s, stamps.second_token_s)
        kv_wait_s, decode_queue_s = kv_ready_s - first_s, decode_s - kv_ready_s
        first_step_s = stamps.second_token_s - decode_s
    return Timeline(
        route_s=stamps.arrived_s - flight.request.received_s,
        queue_s=placed_s - stamps.arrived_s,
        prefill_queue_s=started_s - placed_s,
        prefill_compute_s=first_s - started_s,
        kv_wait_s=kv_wait_s,
        decode_queue_s=decode_queue_s,
        first_step_s=first_step_s,
        kv_transfer_s=flight.kv_transfer_s,
        kv_exposed_s=flight.kv_exposed_s,
        prefix_pull_s=flight.prefix_pull_s,
        move_pull_s=flight.move_pull_s,
        num_cached_tokens=flight.num_cached_tokens,
        num_drafted_tokens=flight.num_drafted_tokens,
        num_accepted_tokens=flight.num_accepted_tokens,
        attempts=flight.num_attempts - flight.num_moves - flight.num_hedges,
        moves=flight.num_moves,
        moved_why=flight.moved_why,
        prefill_worker=flight.workers[0],
        decode_worker=flight.workers[1],
        decision=flight.decision,
        stays=(
            *flight.past,
            *(each.stay(flight.request.received_s) for each in flight.attempts),
        ),
    )


def _since(at_s: float | None, start_s: float) -> float | None:
    return None if at_s is None else at_s - start_s


def _between(low_s: float, at_s: float | None, high_s: float) -> float:
    """Returns `at_s` within the two bounds; without it the lower one: the stage is empty."""
    return low_s if at_s is None else min(max(at_s, low_s), high_s)
