"""Kit of the tests of core and schedulers: tables of events and their expected effects.

Blocks have four tokens, and an empty pool allocates the blocks 0, 1, 2, … in this order.
"""

from dataclasses import dataclass
from itertools import chain, repeat

from decode.acceptance import Proposer
from decode.choosing import Proposal
from deploy.worker.core import WorkerCore
from engine.messages import (
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    GatewayId,
    Generate,
    GivenBack,
    HandedOver,
    HandOver,
    Incarnation,
    KvReady,
    LeaseId,
    LeaseRef,
    Limits,
    Logprobs,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    Role,
    RoleChanged,
    Sampling,
    SeqId,
    SetRole,
    ToGateway,
    Tokens,
    TransferAddress,
    WorkerId,
)
from engine.worker.batch import BatchResult, Row, RowResult, StepTimes
from engine.worker.blocks import BlockCounts, BlockId, BlockPool
from engine.worker.events import (
    AbortPull,
    Effect,
    Emit,
    EmitToAll,
    Event,
    FromGateway,
    GatewayLost,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
)
from engine.worker.intake import Intake
from tests.kits.fakes.worker import WorkerShape

BLOCK_SIZE = 4
ROOM = 100  # default maximum tokens of an answer
SAMPLED = 99  # token that every step samples by default
PLAIN = Sampling()
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def address(name: str) -> TransferAddress:
    return TransferAddress(WorkerId(name), Incarnation("1"), f"tcp://{name}")


HERE, THERE = address("here"), address("there")


# ---------------------------------------------------------------- events


def _fields(name, prompt, more, least, stops, sampling) -> dict[str, object]:
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    limits = Limits(len(tokens) + more, len(tokens) + least, stops, len(tokens))
    return {"seq_id": SeqId(name), "token_ids": tokens, "sampling": sampling, "limits": limits}


def prefill(
    name,
    prompt,
    *,
    more=ROOM,
    least=0,
    stops=(),
    sampling=PLAIN,
    prefix=0,
    num_top=None,
    gateway="g",
) -> FromGateway:
    """Returns a prompt, given by its tokens or their number, with bounds on the answer's length.

    Another worker offers `prefix` blocks of the prompt.
    """
    fields = _fields(name, prompt, more, least, stops, sampling)
    lease = there(f"{name}.prefix", prefix) if prefix else None
    message = Prefill(**fields, prefix=lease, prompt_logprobs=num_top)
    return FromGateway(GatewayId(gateway), message)


def generate(
    name, prompt, *, more=ROOM, least=0, stops=(), sampling=PLAIN, prefix=0, gateway="g"
) -> FromGateway:
    fields = _fields(name, prompt, more, least, stops, sampling)
    lease = there(f"{name}.prefix", prefix) if prefix else None
    return FromGateway(GatewayId(gateway), Generate(**fields, prefix=lease))


def offer_prefix(name, prompt, gateway="g") -> FromGateway:
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    return FromGateway(GatewayId(gateway), OfferPrefix(SeqId(name), tokens))


def decode(
    name, prompt, *, more=ROOM, least=0, stops=(), sampling=PLAIN, gateway="g", **kind
) -> FromGateway:
    """Returns a `Decode` message; `kind` may be is_copy or is_moved."""
    fields = _fields(name, prompt, more, least, stops, sampling)
    lease = there(name, -(-len(fields["token_ids"]) // BLOCK_SIZE))
    return FromGateway(GatewayId(gateway), Decode(**fields, lease=lease, **kind))


def copy(name, prompt, gateway="g") -> FromGateway:
    """Returns the message for a copy of a sequence that still runs on another worker."""
    return decode(name, prompt, more=1, gateway=gateway, is_copy=True)


def first(name, token=SAMPLED, gateway="g") -> FromGateway:
    return FromGateway(GatewayId(gateway), FirstToken(SeqId(name), token))


def cancel(name, gateway="g") -> FromGateway:
    return FromGateway(GatewayId(gateway), Cancel(SeqId(name)))


def set_role(role, gateway="g") -> FromGateway:
    return FromGateway(GatewayId(gateway), SetRole(role))


def hand_over(name, as_name, gateway="g") -> FromGateway:
    return FromGateway(GatewayId(gateway), HandOver(SeqId(name), SeqId(as_name)))


def lost(gateway) -> GatewayLost:
    return GatewayLost(GatewayId(gateway))


def ended(name, reason) -> LeaseEnded:
    return LeaseEnded(LeaseId(name), reason)


def pull_done(name, *, transfer_s=0.0, exposed_s=0.0) -> PullDone:
    return PullDone(SeqId(name), "shm", transfer_s, exposed_s)


def pull_failed(name, reason="why", arrived=()) -> PullFailed:
    return PullFailed(SeqId(name), reason, tuple(arrived))


class Step:
    """A step of the core, with the token that each sampling row gets.

    A tuple gives one row several tokens: all but the last are accepted drafts.
    """

    def __init__(self, *tokens: int | tuple[int, ...]) -> None:
        self.tokens = tokens


class Blocks:
    """Not an event: the expected effect is the number of blocks in each state."""


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Ran:
    """Not an effect: a row of a step that computes the tokens `start` to `end` of a sequence."""

    name: str
    start: int
    end: int


def there(name, num_blocks) -> LeaseRef:
    """Returns a lease on another worker."""
    return LeaseRef(LeaseId(name), THERE, num_blocks)


def here(name, num_blocks) -> LeaseRef:
    """Returns a lease on the worker under test."""
    return LeaseRef(LeaseId(name), HERE, num_blocks)


def emit(message: ToGateway, gateway="g") -> Emit:
    return Emit(GatewayId(gateway), message)


def opened(name, num_blocks) -> OpenLease:
    return OpenLease(LeaseId(name), num_blocks)


def grown(name, *blocks) -> GrowLease:
    return GrowLease(LeaseId(name), blocks)


def revoked(name) -> RevokeLease:
    return RevokeLease(LeaseId(name))


def started(name, cached=0, lease=None, gateway="g", pulled=0) -> Emit:
    return emit(PrefillStarted(SeqId(name), cached, lease, pulled), gateway)


def prefilled(name, token=SAMPLED, finish=None, gateway="g") -> Emit:
    return emit(PrefillDone(SeqId(name), token, finish), gateway)


def hold(name, num_blocks) -> HoldLease:
    return HoldLease(SeqId(name), there(name, num_blocks))


def hold_prefix(name, num_blocks) -> HoldLease:
    return HoldLease(SeqId(name), there(f"{name}.prefix", num_blocks))


def offered(name, num_blocks, gateway="g") -> Emit:
    """Returns the answer to a requested offer; without blocks, it has no lease."""
    lease = here(f"{name}.prefix", num_blocks) if num_blocks else None
    return emit(PrefixOffered(SeqId(name), lease), gateway)


def abort(name) -> AbortPull:
    return AbortPull(SeqId(name))


def pull(name, *blocks: tuple[int, int]) -> StartPull:
    return StartPull(SeqId(name), tuple((i, BlockId(b)) for i, b in blocks))


def kv_ready(name, pulled, cached=0, *, transfer_s=0.0, exposed_s=0.0, gateway="g") -> Emit:
    ready = KvReady(SeqId(name), pulled, cached, "shm", transfer_s, exposed_s)
    return emit(ready, gateway)


def decoding(name, gateway="g") -> Emit:
    return emit(DecodeStarted(SeqId(name)), gateway)


def token(name, token=SAMPLED, finish=None, gateway="g") -> Emit:
    return emit(Tokens(SeqId(name), [token], finish), gateway)


def tokens(name, *token_ids, drafted=0, accepted=None, finish=None) -> Emit:
    """Returns the tokens of a step with a draft."""
    num_accepted = len(token_ids) - 1 if accepted is None else accepted
    return emit(Tokens(SeqId(name), list(token_ids), finish, [], drafted, num_accepted))


def given_back(name, reason, *, kept=0, hopeless=False, gateway="g") -> Emit:
    return emit(GivenBack(SeqId(name), reason, kept, hopeless), gateway)


def role_changed(role) -> EmitToAll:
    return EmitToAll(RoleChanged(role))


def handed_over(name, lease=None, num_blocks=0, gateway="g") -> Emit:
    """Returns the hand-over message. Without a lease, the sequence does not run on this worker."""
    ref = None if lease is None else here(lease, num_blocks)
    return emit(HandedOver(SeqId(name), ref), gateway)


def blocks(*, free=0, cached=0, owned=0, leased=0, in_flight=0) -> list[BlockCounts]:
    return [BlockCounts(free, cached, owned, leased, in_flight)]


# ---------------------------------------------------------------- worker under test


class FixedSpeculator:
    """Stands in for a `Speculator`: returns the same draft wherever a draft is allowed."""

    def __init__(self, proposer: Proposer | None, num_tokens=3, *, has_draft_model=True) -> None:
        self.max_draft_tokens = self.num_tokens = num_tokens
        self.proposer = proposer
        self.has_draft_model = has_draft_model
        self.uses_ngrams = proposer is Proposer.NGRAM
        self.is_on = True
        self.num_to_pass = 0
        self.may_see = True
        self.forgotten: list[SeqId] = []
        self.learned: list[tuple[SeqId, int, int]] = []

    def weighs_draft_model(self, num_rows, num_context_tokens):
        return self.proposer is not Proposer.NGRAM

    def plan(self, candidates, *, num_others=0, others_tokens=0):
        return [self._proposal(candidate) for candidate in candidates]

    def _proposal(self, candidate):
        num_tokens = min(candidate.max_tokens, self.num_tokens)
        if self.proposer is None or (self.uses_ngrams and not candidate.match_len):
            return None
        return Proposal(self.proposer, num_tokens, candidate.match_len) if num_tokens else None

    def rests(self):
        return False

    def catches_up(self):
        return self.may_see

    def may_catch_up(self, num_tokens, num_passes):
        return self.may_see

    def learn(self, seq_id, proposal, *, num_drafted, num_accepted):
        self.learned.append((seq_id, num_drafted, num_accepted))

    def remove(self, seq_id):
        self.forgotten.append(seq_id)

    def observe(self, plan, result, now_s):
        pass


class Rig:
    """A core of one role with a small pool; with a `stretch` the worker is fluid."""

    def __init__(
        self,
        role: Role,
        *,
        stretch=None,
        num_blocks=8,
        budget=16,
        chunk=8,
        max_running=4,
        growth=0,
        speculator=None,
        **intake,
    ) -> None:
        """`intake` is guides, vocab_size and context_len."""
        self.pool = BlockPool(num_blocks)
        self.core = WorkerCore(
            self.pool,
            WorkerShape(role, max_batch_tokens=budget, chunk_tokens=chunk, max_running=max_running),
            intake=Intake(BLOCK_SIZE, **intake),
            address=HERE,
            role=role,
            stretch=stretch,
            speculator=speculator,
            growth_tokens=growth,
        )
        self.decode, self.prefill = self.core.decode, self.core.prefill
        self.offers = self.core.offers
        self.rows: tuple[Row, ...] = ()  # rows of the last step
        self.seconds: float | None = None  # duration of a step in the runner
        self.now_s = 0.0

    def take(self, event: Event | Step | Blocks) -> list[Effect | Ran | BlockCounts]:
        if isinstance(event, Blocks):
            return [self.pool.counts()]
        if isinstance(event, Step):
            return self.step(*event.tokens)
        return list(self.core.handle(event))

    def arrive(self, name: str, prompt, token=SAMPLED, **fields) -> None:
        """Submits a sequence, pulls its KV, and delivers its first token."""
        self.take(decode(name, prompt, **fields))
        self.step()
        self.take(pull_done(name))
        self.take(first(name, token))

    def step(self, *tokens: int | tuple[int, ...]) -> list[Effect | Ran]:
        plan, effects = self.core.plan(self.now_s)
        self.rows = ()
        if plan is None:
            return list(effects)
        self.rows = tuple(plan.rows)
        left = chain(tokens, repeat(SAMPLED))
        sampled = [_result(r, () if r.sampling is None else next(left)) for r in plan.rows]
        ran = [Ran(row.seq_id, row.start, row.end) for row in plan.rows]
        times = None if self.seconds is None else StepTimes(0.0, self.seconds, 0.0)
        return [*effects, *ran, *self.core.finish(BatchResult(sampled, times), self.now_s)]

    def play(self, *steps: tuple[object, list[object]]) -> None:
        """Asserts that each event has exactly these effects, in this order."""
        for number, (event, expected) in enumerate(steps, start=1):
            assert self.take(event) == expected, f"event {number}"
            self.core.validate()


def _result(row: Row, chosen: int | tuple[int, ...]) -> RowResult:
    token_ids = (chosen,) if isinstance(chosen, int) else chosen
    num_top = None if row.sampling is None else row.sampling.logprobs
    return RowResult(
        token_ids,
        row.max_drafted,
        logprobs=() if num_top is None else tuple(map(score, token_ids)),
        scored=tuple(map(score, row.scored)),
    )


def score(token_id: int) -> Logprobs:
    """Returns the rig's log-probability of a token."""
    return Logprobs(-float(token_id), token_id)
