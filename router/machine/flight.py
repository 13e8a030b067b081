"""One accepted request: its journal, its running attempts, and the times of its stages.

These are plain records. `ends`, `placing` and `progress` change them.
"""

from dataclasses import dataclass, field

import msgspec

from engine.messages import LeaseRef, Limits, SeqId, WorkerId
from engine.worker.blocks import BlockHash
from router.cluster.learning import AnswerLengths
from router.cluster.view import ClusterView, WorkerView
from router.machine.requests import PrefixHashes, Request, Stay, Timeline
from router.policies.base import Decision, SharedPrompt

MAX_STAYS = 16  # maximum number of attempts of a request whose times are stored

# Reasons of moves. Another reason is `engine.messages.ROLE_CHANGED`.
DRAINED = "drained"  # the sequence's worker has lost its role
# Reasons of free moves: the sequence may also stay.
BALANCED = "balanced"  # the target is faster
LENT = "lent"  # the target is a prefill worker that has no prompts
GIVEN_BACK = "given back"  # prompts wait for the prefill worker that decodes the sequence
GATHERED = "gathered"  # prompts wait; the target, a prefill worker, decodes more sequences
FREE = (BALANCED, LENT, GIVEN_BACK, GATHERED)
COUNTED_AS = {BALANCED: "balance", LENT: "lend", GIVEN_BACK: "give back", GATHERED: "gather"}


class Stamps(msgspec.Struct):
    """The times in seconds at which a request passed each stage; None if not passed yet."""

    arrived_s: float
    placed_s: float | None = None
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    kv_ready_s: float | None = None
    decode_started_s: float | None = None
    second_token_s: float | None = None


@dataclass(slots=True)
class Move:
    """The target of a move. Room is reserved there for `seq_id`, the sequence's new id."""

    seq_id: SeqId
    decode: WorkerId
    reserved_len: int
    reason: str
    copy_id: SeqId | None = None  # id of the copied blocks, at source and target
    copy_due_s: float | None = None  # deadline of the copy
    gather_until_s: float | None = None  # until then, a copied sequence waits for others

    @property
    def is_free(self) -> bool:
        """True if the sequence may also stay at its source. After a move, KV stays cached there."""
        return self.reason in FREE


class Attempt(msgspec.Struct):
    """One placement of a request. While `offer_due_s` is set, the prompt has not been sent yet.

    While `move` is set, the sequence still decodes at its source, and is moving to another worker.
    """

    seq_id: SeqId
    prefill: WorkerId
    decode: WorkerId
    base_len: int  # number of tokens to prefill
    reserved_len: int  # number of tokens reserved at the decode worker
    placed_s: float
    holder: WorkerId | None = None  # the worker that was asked to offer a prefix
    asked_s: float | None = None  # time of asking the holder, if the holder was computing then
    offer_due_s: float | None = None  # deadline of the holder's offer
    started_s: float | None = None  # start of the prompt's first chunk
    num_cached_tokens: int = 0  # number of the `base_len` tokens that were cached or pulled
    lease: LeaseRef | None = None
    prefilled_s: float | None = None  # time of the first token; after a move, its start
    kv_ready_s: float | None = None  # time at which the decode worker had all KV
    decode_started_s: float | None = None
    kept_by: WorkerId | None = None  # the worker that keeps the KV cached; None: all do
    is_moved: bool = False  # continues an attempt that ran at another decode worker
    is_lent: bool = False  # a prefill worker decodes the sequence
    move: Move | None = None
    decision: Decision | None = None  # None for an attempt after a move
    hedge_after_s: float | None = None  # seconds after sending the prompt; None: never
    hedge_due_s: float | None = None  # time at which a second attempt is started

    @property
    def is_decoding(self) -> bool:
        """True if the decode worker has the first token and all KV of the prompt."""
        return self.prefilled_s is not None and self.kv_ready_s is not None

    @property
    def hands_over(self) -> bool:
        """True if the decode worker is not the prefill worker."""
        return self.prefill != self.decode

    def stay(self, received_s: float, ended_s: float | None = None) -> Stay:
        """Returns the times of the attempt, in seconds since the HTTP request arrived."""
        times_s = (
            self.started_s,
            self.prefilled_s,
            self.kv_ready_s,
            self.decode_started_s,
            ended_s,
        )
        since_s = [None if at_s is None else at_s - received_s for at_s in times_s]
        return Stay(self.prefill, self.decode, self.placed_s - received_s, *since_s)

    def validate(self, view: ClusterView) -> None:
        """Asserts that the attempt's workers are alive, and that its stages are consistent."""
        workers = view.workers
        assert self.decode in workers
        assert self.is_decoding or self.prefill in workers
        if self.move is not None:
            assert self.is_decoding
            assert self.move.decode in workers
            assert self.move.decode != self.decode
        assert self.hedge_due_s is None or self.prefilled_s is None
        if self.holder is not None:
            assert self.holder in workers
            assert self.holder != self.prefill
            assert self.started_s is None
        else:
            assert self.offer_due_s is None


@dataclass(slots=True, eq=False)
class Flight:
    """One accepted request. `attempt` is None while the request is queued or held back.

    While there is a `hedge`, neither `attempt` nor `hedge` has produced a token.
    """

    request: Request
    stamps: Stamps
    last_message_s: float
    number: int = 0  # position in the order of arrival
    tokens: list[int] = field(default_factory=list)  # delivered tokens of the answer
    attempt: Attempt | None = None
    hedge: Attempt | None = None  # a second attempt that runs beside `attempt`
    past: list[Stay] = field(default_factory=list)  # ended attempts
    waits_for_s: float = 0.0  # seconds of prefill, predicted when the request was queued
    compute_s: float = 0.0  # as `waits_for_s`, without the tokens that were cached at arrival
    num_ids: int = 0  # number of sequence ids given to attempts and moves
    num_attempts: int = 0
    num_preemptions: int = 0  # preempted attempts, which do not count as failed
    num_excused: int = 0  # attempts lost to a role change or a hung step; not counted as failed
    num_moves: int = 0  # attempts that continued another attempt after a move
    moved_why: str | None = None  # the reason of the last move
    rests_until_s: float = 0.0  # time before which no free move is started
    num_hedges: int = 0  # attempts that were started as hedges
    preempted_s: dict[WorkerId, float] = field(default_factory=dict)  # last preemption, by worker
    back_off_until_s: float | None = None
    likely_reused: bool = False  # see `Conversations` in `router.cluster.learning`
    leads: bool = True  # True while other requests of its group must wait for this one
    followers: list["Flight"] = field(default_factory=list)  # held back, in order of arrival
    held_by: "Flight | None" = None  # the leader that holds this request back
    shared: SharedPrompt | None = None  # its leader's placement, or its own after it led
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    kv_transfer_s: float | None = None
    kv_exposed_s: float | None = None
    prefix_pull_s: float | None = None
    move_pull_s: float | None = None
    workers: tuple[str, str] = ("", "")
    decision: Decision | None = None  # for the latest placement
    kept_tokens: dict[WorkerId, int] = field(default_factory=dict)  # left cached by lost attempts
    limits: Limits = field(init=False)  # limits of the request, with its effective TPOT bound
    hashes: PrefixHashes = field(init=False)
    prompt_len: int = field(init=False)
    length: int = field(init=False)  # number of tokens of prompt and answer so far
    max_tokens: int = field(init=False)  # maximum length of the answer
    _prompt: list[int] | None = field(init=False, default=None)  # the list that messages carry

    def __post_init__(self) -> None:
        self.prompt_len = self.length = len(self.request.token_ids)
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
        """Keeps the times of an ended attempt, for the dashboard and timelines."""
        if len(self.past) == MAX_STAYS:
            del self.past[0]
        self.past.append(attempt.stay(self.request.received_s, now_s))

    @property
    def token_ids(self) -> list[int]:
        """The journal: prompt and answer so far. Read only."""
        if self.tokens:
            return self.request.journal(self.tokens)
        if self._prompt is None:
            self._prompt = self.request.prompt()
        return self._prompt

    def predicted_len(self, lengths: AnswerLengths) -> int:
        """Returns the predicted final length, prompt included; memory is reserved for it.

        If an answer outgrew its prediction, the new prediction is 1.5 times its length.
        """
        length = self.length
        likely = self.prompt_len + lengths.nearly_longest(self.max_tokens)
        if likely > length:
            return likely
        guess = length + max(len(self.tokens) // 2, 16)
        return max(min(guess, self.request.limits.max_len), length)

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of log-probabilities wanted for each prompt token; None once they were sent."""
        return None if self.tokens else self.request.prompt_logprobs

    def leading_hashes(self, num_tokens: int, worker: WorkerView) -> list[BlockHash]:
        """Returns hashes of the full blocks of the first `num_tokens`, in the worker's layout."""
        block_size = worker.info.layout.block_size
        has_all = num_tokens <= self.prompt_len
        token_ids = self.request.token_ids if has_all else self.token_ids
        return self.hashes.leading(token_ids, num_tokens=num_tokens, block_size=block_size)

    def validate(self, view: ClusterView) -> None:
        """Asserts that attempts are consistent: two attempts use two workers and have no token."""
        assert self.length == self.prompt_len + len(self.tokens)
        for attempt in self.attempts:
            attempt.validate(view)
        first, second = self.attempt, self.hedge
        if second is None:
            return
        assert first is not None
        assert self.num_hedges == 1
        assert first.prefilled_s is None
        assert second.prefilled_s is None
        assert first.prefill != second.prefill
        assert first.hedge_due_s is None
        assert second.hedge_due_s is None
        assert second.holder is None
        assert second.move is None


def running_timeline(flight: Flight, now_s: float) -> Timeline:
    """Returns the stages of a running request, as if the present stage ended now."""
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
    """Returns the end of a stage; the present time if the stage is not over."""
    return now_s if at_s is None else at_s


def timeline(flight: Flight, now_s: float, stamps: Stamps | None = None) -> Timeline:
    """Returns the stages with their durations; by default from the request's own stamps.

    A stage that a lost attempt or an early end skipped has a duration of zero.
    """
    stamps = stamps or flight.stamps
    placed_s = stamps.placed_s if stamps.placed_s is not None else now_s
    first_s = stamps.first_token_s if stamps.first_token_s is not None else max(placed_s, now_s)
    started_s = min(max(stamps.prefill_started_s or placed_s, placed_s), first_s)
    kv_wait_s = decode_queue_s = first_step_s = None
    if stamps.second_token_s is not None:
        second_s = stamps.second_token_s
        kv_ready_s = min(max(stamps.kv_ready_s or first_s, first_s), second_s)
        decode_s = min(max(stamps.decode_started_s or kv_ready_s, kv_ready_s), second_s)
        kv_wait_s, decode_queue_s = kv_ready_s - first_s, decode_s - kv_ready_s
        first_step_s = second_s - decode_s
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
            *[
                attempt.stay(flight.request.received_s)
                for attempt in (flight.attempt, flight.hedge)
                if attempt is not None
            ],
        ),
    )
