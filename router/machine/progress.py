"""Handles messages of workers about attempts."""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.messages import (
    PREEMPTED,
    ROLE_CHANGED,
    WRONG_ROLE,
    BlocksOffered,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    GivenBack,
    HandedOver,
    KvReady,
    LoadReport,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    Refused,
    RoleChanged,
    StillStepping,
    ToGateway,
    Tokens,
    Welcome,
    WorkerId,
)
from router.cluster.view import WorkerView
from router.machine.ends import Ends
from router.machine.events import RouterEffect, SendTo
from router.machine.flight import Attempt, Flight, timeline
from router.machine.hedging import Hedging
from router.machine.moves.moving import Moving
from router.machine.placing import Placing
from router.machine.requests import UNFIT, Failed, Finished, Update
from router.machine.state import SEVERED_S, RouterState

FIRST_BACK_OFF_S = 1.0  # about the time between two load reports
MAX_BACK_OFF_S = 8.0

# Built once, because building a union for each message is slow.
_OF_NO_SEQUENCE = (LoadReport, RoleChanged, Welcome, Refused, StillStepping, BlocksOffered)


class Progress:
    """Handles the messages of workers."""

    def __init__(
        self, state: RouterState, ends: Ends, placing: Placing, moving: Moving, hedging: Hedging
    ) -> None:
        self._state = state
        self._ends = ends
        self._placing = placing
        self._moving = moving
        self._hedging = hedging

    def on_message(
        self, worker_id: WorkerId, message: ToGateway, now_s: float
    ) -> list[RouterEffect]:
        """Handles a worker's message."""
        state = self._state
        if isinstance(message, _OF_NO_SEQUENCE):
            return self._on_own_report(worker_id, message, now_s)
        flight = state.by_seq.get(message.seq_id)
        if flight is None:
            return []  # the attempt is over
        attempt = flight.attempt
        if attempt is None or attempt.seq_id != message.seq_id:
            attempt = flight.hedge
            if attempt is None or attempt.seq_id != message.seq_id:
                return self._moving.copying.on_message(flight, message, now_s)
        flight.last_message_s = now_s
        match message:
            case Tokens():
                return self._on_tokens(flight, attempt, message, now_s)
            case PrefixOffered():
                return self._on_prefix_offered(flight, worker_id, message, now_s)
            case PrefillStarted():
                return self._on_prefill_started(flight, attempt, message, now_s)
            case PrefillDone():
                return self._on_prefill_done(flight, attempt, message, now_s)
            case KvReady():
                return self._on_kv_ready(flight, attempt, message, now_s)
            case DecodeStarted():
                attempt.decode_started_s = now_s
                if len(flight.tokens) == 1:
                    flight.stamps.decode_started_s = now_s
                return []
            case HandedOver():
                return self._moving.copying.on_handed_over(flight, attempt, message, now_s)
            case GivenBack():
                return self._on_given_back(flight, attempt, worker_id, message, now_s)

    def _on_own_report(
        self, worker_id: WorkerId, message: ToGateway, now_s: float
    ) -> list[RouterEffect]:
        """Handles a worker's report of its load or role. `router.links` handles other messages."""
        worker = self._state.view.workers.get(worker_id)
        if worker is None:
            return []
        if isinstance(message, RoleChanged):
            return self._moving.on_role_changed(worker, message, now_s)
        if not isinstance(message, LoadReport):
            return []
        worker.report(message, now_s)
        if worker.is_store:
            return []
        self._state.estimates.observe_steps(worker, message.steps)
        self._moving.balancing.on_report(worker, now_s)
        return []

    # ------------------------------------------------------------ prompts

    def _on_prefix_offered(
        self, flight: Flight, worker_id: WorkerId, message: PrefixOffered, now_s: float
    ) -> list[RouterEffect]:
        attempt = flight.attempt
        assert attempt is not None
        if attempt.offer_due_s is None or attempt.holder != worker_id:
            return []  # the offer came too late
        if attempt.asked_s is not None:
            self._state.estimates.observe_offer(now_s - attempt.asked_s)
        num_held = 0 if message.lease is None else message.lease.num_blocks
        self._state.workers.retract(worker_id, flight, attempt.base_len - 1, num_held)
        if message.lease is None:
            return self._placing.compute_all(flight, attempt, "prefix not held", now_s)
        return [self._placing.send_prefill(flight, attempt, message.lease, now_s)]

    def _on_prefill_started(
        self, flight: Flight, attempt: Attempt, message: PrefillStarted, now_s: float
    ) -> list[RouterEffect]:
        if not flight.tokens:
            flight.stamps.prefill_started_s = now_s
            flight.num_cached_tokens = message.num_cached_tokens
            flight.prefix_pull_s = message.pull_s if message.num_pulled_blocks else None
        attempt.started_s, attempt.num_cached_tokens = now_s, message.num_cached_tokens
        if attempt.holder is not None:
            self._state.observe_prefix_pull(attempt, attempt.holder, message, now_s)
            attempt.holder = None  # the prefix is pulled, so its lease has ended
        worker = self._state.view.workers[attempt.prefill]
        worker.begin_prefill(attempt.seq_id, now_s)
        effects = self._moving.on_prompt(worker, now_s) if worker.decodes else []
        if message.lease is None:
            attempt.kv_ready_s = now_s  # nothing has to be pulled
            return effects
        attempt.lease = message.lease
        request = flight.request
        decode = Decode(
            attempt.seq_id,
            flight.token_ids,
            request.sampling,
            flight.limits,
            message.lease,
            salt=request.salt,
            client_id=request.client_id,
            evict_first=attempt.kept_by == attempt.prefill,
            likely_reused=flight.likely_reused,
        )
        self._state.view.workers[attempt.decode].decodes[attempt.seq_id].is_there = True
        return [SendTo(attempt.decode, decode), *effects]

    def _on_prefill_done(
        self, flight: Flight, attempt: Attempt, message: PrefillDone, now_s: float
    ) -> list[RouterEffect]:
        effects: list[RouterEffect] = []
        if flight.hedge is not None:
            effects += self._hedging.settle(flight, attempt, now_s)
        attempt.prefilled_s, attempt.hedge_due_s = now_s, None
        # The deadline of an answer is sooner than the deadline of a prompt.
        self._state.deadlines.watch(flight)
        worker = self._state.view.workers[attempt.prefill]
        # If a fluid worker also decodes, its prompts take longer, so this prompt's time is not
        # used. Prompts of mixed workers are always computed beside decoding.
        is_slowed = worker.info.is_fluid and worker.num_decoding > 0
        if attempt.started_s is not None and not is_slowed:
            self._state.estimates.observe_prefill(
                worker,
                attempt.base_len,
                num_cached=attempt.num_cached_tokens,
                seconds=now_s - attempt.started_s,
            )
        self._state.workers.credit(attempt.prefill, flight, attempt.base_len)
        worker.release_prefill(attempt.seq_id, now_s)
        if worker.info.is_fluid:
            self._moving.balancing.on_computed(worker, now_s)
        self._state.view.workers[attempt.decode].begin_decode(attempt.seq_id)
        update = Update(
            (message.token,),
            logprobs=() if message.logprobs is None else (message.logprobs,),
            prompt_logprobs=tuple(message.prompt_logprobs),
            embedding=message.embedding,
            request_id=flight.request.request_id,
        )
        # A worker that computed the whole answer has finished already and needs no message.
        effects += self._deliver(
            flight, update, message.finish, now_s, notify_workers=attempt.hands_over
        )
        if message.finish is not None:
            return effects
        if attempt.lease is not None:
            effects.append(SendTo(attempt.decode, FirstToken(attempt.seq_id, message.token)))
        return effects + self._start_decode(flight, attempt, now_s)

    def _start_decode(self, flight: Flight, attempt: Attempt, now_s: float) -> list[RouterEffect]:
        """Handles the start of decoding, once the decode worker has the first token and all KV."""
        if not attempt.is_decoding:
            return []
        if flight.leads:
            self._ends.release_followers(flight, now_s)
        if self._state.view.workers[attempt.decode].info.role.decodes:
            return []  # the sequence may stay on this worker
        return self._moving.rule.examine(flight, now_s)

    def _on_kv_ready(
        self, flight: Flight, attempt: Attempt, message: KvReady, now_s: float
    ) -> list[RouterEffect]:
        attempt.kv_ready_s = now_s
        if len(flight.tokens) <= 1:
            flight.stamps.kv_ready_s = now_s
            flight.kv_transfer_s = message.transfer_s
            flight.kv_exposed_s = message.exposed_s
        if attempt.is_moved:
            self._state.moves.end(flight.request.request_id)
            flight.move_pull_s = max(flight.move_pull_s or 0.0, message.transfer_s)
        worker = self._state.view.workers[attempt.decode]
        self._state.observe_pull(attempt.prefill, worker, message, now_s)
        self._state.workers.credit(attempt.decode, flight, attempt.base_len)
        return self._start_decode(flight, attempt, now_s)

    # ------------------------------------------------------------ answers

    def on_step(
        self, worker_id: WorkerId, tokens: Sequence[Tokens], now_s: float
    ) -> list[RouterEffect]:
        """Handles the tokens of one step, equivalent to handling each message alone.

        Most messages only append tokens to their sequence. This frequent case is inlined here, as
        it runs once for each token.
        """
        by_seq, worker = self._state.by_seq, self._state.view.workers.get(worker_id)
        effects: list[RouterEffect] = []
        if worker is None:
            return effects
        num_grown = 0  # number of tokens added to claims, but not yet to the worker's total
        for message in tokens:
            seq_id = message.seq_id
            flight = by_seq.get(seq_id)
            if flight is None:
                continue  # the attempt is over
            claim, attempt, answer = worker.decodes.get(seq_id), flight.attempt, flight.tokens
            assert attempt is not None
            if (
                claim is None  # the worker must not decode this sequence
                or message.finish is not None
                or message.logprobs
                or message.num_drafted
                or len(answer) < 2
                or claim.context_tokens + len(message.token_ids) > attempt.reserved_len
            ):
                worker.grow_decodes(num_grown)
                num_grown = 0
                effects += self.on_message(worker_id, message, now_s)
                continue
            token_ids = tuple(message.token_ids)
            flight.last_message_s = now_s
            answer += token_ids
            flight.length += len(token_ids)
            claim.context_tokens += len(token_ids)
            num_grown += len(token_ids)
            effects.append(Update(token_ids, request_id=flight.request.request_id))
        worker.grow_decodes(num_grown)
        return effects

    def _on_tokens(
        self, flight: Flight, attempt: Attempt, message: Tokens, now_s: float
    ) -> list[RouterEffect]:
        flight.num_drafted_tokens += message.num_drafted
        flight.num_accepted_tokens += message.num_accepted
        update = Update(
            tuple(message.token_ids),
            logprobs=tuple(message.logprobs),
            request_id=flight.request.request_id,
        )
        # When an answer is complete, both workers have finished it and need no message.
        return self._deliver(flight, update, message.finish, now_s, notify_workers=False)

    def _deliver(
        self,
        flight: Flight,
        update: Update,
        finish: FinishReason | None,
        now_s: float,
        *,
        notify_workers: bool,
    ) -> list[RouterEffect]:
        """Appends tokens to an answer, and ends the request if `finish` is set."""
        num_before, num_new, attempt = len(flight.tokens), len(update.token_ids), flight.attempt
        assert attempt is not None
        flight.tokens += update.token_ids
        flight.length += num_new
        worker = self._state.view.workers[attempt.decode]
        worker.grow_decode(attempt.seq_id, num_new)
        if flight.length > attempt.reserved_len:  # the answer outgrew its prediction: predict again
            attempt.reserved_len = flight.predicted_len(self._state.lengths)
            num_blocks = worker.info.layout.num_blocks_for(attempt.reserved_len)
            worker.extend_decode(attempt.seq_id, num_blocks)
            self._state.counters["answer", "longer than predicted"] += 1
        if num_before == 0:
            flight.stamps.first_token_s = now_s
        if num_before < 2 <= len(flight.tokens):
            flight.stamps.second_token_s = now_s
        if finish is not None:
            outcome = Finished(finish)
            return self._ends.end(
                flight, outcome, now_s, last=update, notify_workers=notify_workers
            )
        if num_before < 2:
            update = replace(update, timeline=timeline(flight, now_s))
        return [update]

    # ------------------------------------------------------------ returned sequences

    def _on_given_back(
        self,
        flight: Flight,
        attempt: Attempt,
        worker_id: WorkerId,
        message: GivenBack,
        now_s: float,
    ) -> list[RouterEffect]:
        if message.hopeless:
            return self._ends.end(flight, Failed(message.reason, UNFIT), now_s)
        if message.num_kept_tokens > 0:
            flight.kept_tokens[worker_id] = message.num_kept_tokens
            num_tokens = min(message.num_kept_tokens, attempt.base_len)
            self._state.workers.credit(worker_id, flight, num_tokens)
        if flight.hedge is not None:
            return self._ends.drop(flight, attempt, message.reason, now_s)
        worker = self._state.view.workers.get(worker_id)
        if _has_lost_role(worker, attempt, message.reason):
            return self._ends.excuse(flight, message.reason, now_s)
        if worker_id == attempt.decode and attempt.hands_over and attempt.kv_ready_s is None:
            pair = attempt.prefill, attempt.decode
            self._state.view.severed[pair] = now_s + SEVERED_S
        if message.reason == PREEMPTED and flight.length > attempt.base_len:
            _back_off(flight, worker_id, now_s)
        return self._ends.retry(flight, message.reason, now_s)


def _has_lost_role(worker: WorkerView | None, attempt: Attempt, reason: str) -> bool:
    """True if a worker returned a sequence because it no longer has the role for it.

    If the worker's announced role contradicts this, the attempt counts as failed.
    """
    if reason not in (WRONG_ROLE, ROLE_CHANGED) or worker is None:
        return False
    info = worker.info
    if not attempt.hands_over:
        return not info.generates
    return not (info.role.prefills if info.worker_id == attempt.prefill else info.role.decodes)


def _back_off(flight: Flight, worker_id: WorkerId, now_s: float) -> None:
    """Records a preemption. It does not count as a failed attempt, as tokens were produced."""
    flight.preempted_s[worker_id] = now_s
    back_off_s = FIRST_BACK_OFF_S * 2**flight.num_preemptions
    flight.back_off_until_s = now_s + min(back_off_s, MAX_BACK_OFF_S)
    flight.num_preemptions += 1
