"""The core of a worker: its schedulers around one block pool, without I/O.

Every worker has all schedulers; its role only selects which new work it accepts. So a change of
role builds nothing, and weights, KV, cached blocks and leases stay. New or waiting work that the
role does not accept is given back. Running sequences continue until they end or are handed over. So
after a change of role, a worker may do work of its former role for a while.

In each step the core asks the schedulers for rows under one token budget, and hands the results
back. Rows of the decode scheduler come first, because they are short and a client waits for each
token. Everything else that happens is an event, which the core passes to the schedulers that need
it. The decode scheduler may delay the step for a moment if an event is expected soon.

The host around the core owns the threads: it feeds events, runs the plans, and performs the
effects. Workers, simulated workers, benchmarks and tests all use this core.

**Overlap.** With a runner that overlaps, the next step is planned while a step is in flight. The
plan assumes that the step in flight has ended: its rows count as computed, and the tokens that it
will choose are pending. If the plan depends on the outcome (drafts, lack of memory), the decode
scheduler waits for the outcome. A sequence may end while it has a row in the next step. Then the
result of that row is ignored, and the blocks to which the row may write are freed at the end of
that step (`engine.worker.blocks`).
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from decode.scheduler import DecodeScheduler
from decode.speculation import Speculator
from engine.grammar.guide import OpenedGuide
from engine.messages import (
    FLUID_ROLES,
    ROLES_OF_WORKERS,
    WRONG_ROLE,
    Cancel,
    Decode,
    FirstToken,
    GatewayId,
    Generate,
    GivenBack,
    HandedOver,
    HandOver,
    LoadReport,
    OfferBlocks,
    OfferPrefix,
    Prefill,
    Role,
    RoleChanged,
    SetRole,
    TransferAddress,
)
from engine.worker.batch import BatchPlan, BatchResult, Row
from engine.worker.blocks import BlockPool
from engine.worker.events import (
    Effect,
    Emit,
    EmitToAll,
    Event,
    FromGateway,
    GatewayLost,
    LeaseEnded,
    OfGateway,
    PullDone,
    PullFailed,
)
from engine.worker.intake import Intake
from engine.worker.offers import PrefixOffers
from engine.worker.pace import StepPace
from engine.worker.steps import StepSamples
from prefill.scheduler import PrefillScheduler

MAX_STEPS_IN_FLIGHT = 2


class StepLimits(Protocol):
    """The limits of a worker's steps, as in the worker's settings."""

    @property
    def max_batch_tokens(self) -> int:
        """The maximum number of tokens in a step."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """The maximum number of tokens of one prompt in a step."""
        ...

    @property
    def max_running(self) -> int:
        """The maximum number of sequences that decode at the same time."""
        ...


class WorkerCore:
    """Owns the schedulers, the block pool and the steps in flight. Only one thread may use it."""

    def __init__(  # noqa: PLR0913 - the parts of a worker
        self,
        pool: BlockPool,
        limits: StepLimits,
        *,
        intake: Intake,
        address: TransferAddress,
        role: Role,
        possible: Collection[Role] = ROLES_OF_WORKERS,
        stretch: float | None = None,
        speculator: Speculator | None = None,
        growth_tokens: int = 128,
    ) -> None:
        """`possible` are the roles that the worker may get later. Sinks pull from `address`.

        `stretch` is as in `Welcome`. A worker with a stretch is fluid.
        """
        self.role = role
        self.held_until_s: float | None = None  # the next step waits until then, or for an event
        self._possible = possible
        self._is_fluid = stretch is not None
        self._accepted = accepted_by(role, is_fluid=self._is_fluid)
        self._pool = pool
        self._max_batch_tokens = limits.max_batch_tokens
        self._pace = None if stretch is None else StepPace(stretch)
        if speculator is not None and not (speculator.is_on or speculator.has_draft_model):
            speculator = None
        self._speculator = speculator
        self.decode = DecodeScheduler(
            pool,
            intake=intake,
            max_running=limits.max_running,
            growth_tokens=growth_tokens,
            speculator=speculator,
        )
        self.prefill = PrefillScheduler(
            pool,
            intake=intake,
            chunk_tokens=limits.chunk_tokens,
            address=address,
            adopt=self.decode.adopt,
            pace=self._pace,
        )
        self.offers = PrefixOffers(pool, intake=intake, address=address)
        self._samples = StepSamples(self._pace)
        # For each step: its plan, its rows that decode, and its chunks of prompts.
        self._in_flight: deque[tuple[BatchPlan, Sequence[Row], Sequence[Row]]] = deque()

    # ------------------------------------------------------------ events

    def handle(self, event: Event) -> list[Effect]:
        """Handles an event and returns its effects.

        A sequence that the role does not accept is given back.
        """
        match event:
            case FromGateway(gateway_id, message, guide):
                return self._on_message(gateway_id, message, guide)
            case PullDone() | PullFailed():
                ended = self.decode.on_pull_ended(event)
                return self.prefill.on_pull_ended(event) if ended is None else ended
            case LeaseEnded(lease_id, reason):
                if self.offers.leases.close(lease_id):
                    return []
                return self.prefill.on_lease_ended(lease_id, reason)
            case GatewayLost(gateway_id):
                effects = self.decode.remove_gateway(gateway_id)
                effects += self.prefill.remove_gateway(gateway_id)
                return effects + self.offers.remove_gateway(gateway_id)

    def _on_message(
        self, gateway_id: GatewayId, message: OfGateway, guide: OpenedGuide | None
    ) -> list[Effect]:
        match message:
            case Prefill() | Generate() | Decode():
                if type(message) not in self._accepted:
                    return [Emit(gateway_id, GivenBack(message.seq_id, WRONG_ROLE))]
                if isinstance(message, Decode):
                    return self.decode.enqueue(gateway_id, message, guide)
                return self.prefill.enqueue(gateway_id, message, guide)
            case FirstToken(seq_id, token):
                return self.decode.on_first_token(seq_id, token)
            case Cancel(seq_id):
                effects = self.decode.cancel(seq_id) + self.prefill.cancel(seq_id)
                return effects + self.offers.cancel(seq_id)
            case OfferPrefix():
                return self.offers.offer(gateway_id, message)
            case OfferBlocks():
                return self.offers.offer_blocks(gateway_id, message)
            case HandOver(seq_id, as_seq_id):
                seq = self.decode.remove_running(seq_id)
                if seq is None:
                    return [Emit(gateway_id, HandedOver(seq_id, None))]
                return self.offers.hand_over(seq, as_seq_id)
            case SetRole(role):
                return self._set_role(role)
            case _:
                return []  # a prefetch or a hint, which only stores use

    def _set_role(self, role: Role) -> list[Effect]:
        """Sets the role and informs all gateways. Does so even if the role stays the same, because
        the sender waits for the answer.
        """
        if role in self._possible:
            self.role = role
            self._accepted = accepted_by(role, is_fluid=self._is_fluid)
        effects: list[Effect] = [EmitToAll(RoleChanged(self.role))]
        effects += self.decode.give_back(self._accepted)
        return effects + self.prefill.give_back(self._accepted)

    # ------------------------------------------------------------ steps

    def plan(self, now_s: float) -> tuple[BatchPlan | None, list[Effect]]:
        """Plans the next forward pass, which `finish` completes. The plan is None if there is no
        work, if the step is delayed (`held_until_s`), or if the step in flight must end first.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "the first step must be finished"
        decoding = self.decode.schedule(self._max_batch_tokens, now_s, ahead=bool(self._in_flight))
        self.held_until_s = decoding.held_until_s
        if decoding.waits or decoding.held_until_s is not None:
            return None, decoding.effects
        if self._pace is not None:
            self._pace.start(() if self.role is Role.MIXED else decoding.rows)
        chunks = self.prefill.schedule(self._max_batch_tokens - decoding.num_tokens)
        effects = decoding.effects + chunks.effects
        rows = decoding.rows + chunks.rows
        assert decoding.num_tokens + chunks.num_tokens <= self._max_batch_tokens
        if not rows:
            return None, effects
        plan = BatchPlan(rows)
        self._in_flight.append((plan, decoding.rows, chunks.rows))
        self._pool.begin_step()
        return plan, effects

    def finish(self, result: BatchResult, now_s: float) -> list[Effect]:
        """Handles the results of the oldest step in flight, which the runner has completed."""
        plan, decoding, chunks = self._in_flight.popleft()
        self._pool.end_step()
        if self._speculator is not None:
            self._speculator.observe(plan, result, now_s)
        if result.times is not None:
            self._samples.record(decoding, chunks, result.times.total_s)
        results, num_rows = result.rows, len(plan.rows)
        assert len(results) == num_rows, f"{len(results)} results of {num_rows} rows"
        effects: list[Effect] = []
        if decoding:
            effects += self.decode.advance(decoding, results[: len(decoding)])
        if chunks:
            effects += self.prefill.advance(chunks, results[len(decoding) :])
        return effects

    # ------------------------------------------------------------ reports

    def load(self, open_leases: int, counters: Mapping[str, float]) -> LoadReport:
        """Returns the worker's present load, including the counters of transfers and schedulers.

        `steps` is a sample of the steps since the last call.
        """
        counts, decode, prefill = self._pool.counts(), self.decode, self.prefill
        counted = Counter(decode.counters)
        for more in (prefill.counters, self.offers.counters):
            counted.update(more)
        return LoadReport(
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            owned_blocks=counts.owned,
            leased_blocks=counts.leased,
            in_flight_blocks=counts.in_flight,
            waiting_seqs=decode.num_waiting + prefill.num_waiting,
            running_seqs=decode.num_running + prefill.num_running,
            open_leases=open_leases,
            counters={**counters, **counted},
            prompt_tokens=prefill.num_prompt_tokens,
            decode_seqs=decode.num_waiting + decode.num_running,
            decode_blocks=decode.num_blocks,
            context_tokens=decode.num_context_tokens,
            steps=self._samples.pop_all(),
        )

    def validate(self) -> None:
        """Asserts the invariants of the block pool and the schedulers."""
        self._pool.validate()
        assert self._pool.num_steps == len(self._in_flight)
        self.decode.validate()
        self.prefill.validate()
        self.offers.validate()


def accepted_by(role: Role, *, is_fluid: bool) -> frozenset[type]:
    """Returns the types of messages whose sequences a worker of this role accepts.

    Fluid workers of the prefill and decode roles also accept sequences of the other role.
    """
    lends = is_fluid and role in FLUID_ROLES
    return frozenset(
        kind
        for kind, is_accepted in (
            (Prefill, role.prefills),
            (Decode, role.decodes or lends),
            (Generate, role is Role.MIXED or lends),
        )
        if is_accepted
    )
