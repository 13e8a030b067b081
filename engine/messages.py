"""Every message that crosses a process boundary between gateway and workers: one schema.

A gateway opens one stream to each worker. Both directions carry *frames*, a frame being a list of
messages, so that one decode step sends one frame whatever the number of its sequences. The first
frame each way is the handshake, `Hello` and `Welcome`, whose version is compared before anything
else is believed. By then each end has proved that it holds the secret (`engine.net.rpc`). (KV
bytes and
leases travel between workers: `kvtransfer.messages`.)

A `SeqId` names one attempt of one request: when a request is placed again it gets a new one, so a
late message of a lost attempt matches nothing.

Token lengths are absolute (prompt included): `max_len` and `min_len` mean the same on whatever
worker a request continues.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NewType

import msgspec

from engine.errors import ProtocolError
from engine.layout import KVFormat, KVLayout
from engine.net.trust import SALT_BYTES

PROTOCOL_VERSION = 9
PREEMPTED = "preempted"  # why a sequence is given back for which there is no memory
WRONG_ROLE = "wrong role"  # why one is that the worker is not there for
PULL_FAILED = "pull failed"  # how the reason begins where its KV did not come
ROLE_CHANGED = "role changed"  # the same, of one that it had accepted before
MAX_FRAME_BYTES = 64 * 2**20

RequestId = NewType("RequestId", str)
SeqId = NewType("SeqId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
LeaseId = NewType("LeaseId", str)
Incarnation = NewType("Incarnation", str)  # random, new at every start of a process

# What hashing and the step loop rely on: a prompt is never empty, an id fits in 32 bits.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Prompt = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
# The key of the tenant's block hashes: see `engine.net.trust.Secret.salt`.
Salt = Annotated[bytes, msgspec.Meta(max_length=SALT_BYTES)]


class Role(StrEnum):
    """What a worker is there for. One that decodes may prefill too: see `Welcome.generates`."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    DRAINED = "drained"  # for nothing: it finishes what it has, or has it moved away

    @property
    def prefills(self) -> bool:
        """Whether prompts are computed here, also for others to go on from."""
        return self in (Role.PREFILL, Role.MIXED)

    @property
    def decodes(self) -> bool:
        """Whether tokens can be generated here."""
        return self in (Role.DECODE, Role.MIXED)


class FinishReason(StrEnum):
    """Why an answer is complete."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(StrEnum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must look like."""

    kind: GrammarKind
    source: str


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one token is chosen from logits. Zero temperature is argmax; `top_k` 0 means all.

    Penalties and biases change logits before the temperature does, in this order: repetition (of
    what prompt and answer hold: positive logits are divided by it, others multiplied), frequency
    (of the answer: subtracted once for each time), presence (of the answer: subtracted once), bias
    (added). With a `grammar` only what it allows can be chosen.

    With `logprobs`, each token comes with its log-probability and with so many of the likeliest.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether what is likely depends on which tokens there are already, beside the model."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token's place in the model's own distribution: softmax of the logits as they come.

    `rank` 1 is the likeliest. `top_ids` are the likeliest tokens, best first.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Where the answer begins and when it ends. Lengths in tokens, prompt included.

    `prompt_len` is that of the client's prompt, also where a request goes on from an answer begun
    elsewhere.
    """

    max_len: int
    min_len: int = 0
    stop_token_ids: tuple[int, ...] = ()
    prompt_len: int = 0

    def finish_reason(self, length: int, last_token: int) -> FinishReason | None:
        """Whether a sequence of this length that ends in `last_token` is complete."""
        if last_token in self.stop_token_ids and length > self.min_len:
            return FinishReason.STOP
        if length >= self.max_len:
            return FinishReason.LENGTH
        return None


class TransferAddress(msgspec.Struct, frozen=True):
    """Where a worker's blocks can be pulled from."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str  # ZeroMQ endpoint of its transfer socket


class EventsAddress(msgspec.Struct, frozen=True):
    """Where a worker tells which blocks it holds cached: see `engine.worker.block_events`."""

    published: str  # ZeroMQ endpoint that batches of events come from
    asked: str  # ZeroMQ endpoint that answers who missed some


class LeaseRef(msgspec.Struct, frozen=True):
    """A lease as its sink knows it. It covers `num_blocks` blocks, in the order of the prompt."""

    lease_id: LeaseId
    source: TransferAddress
    num_blocks: int


# ---------------------------------------------------------------- gateway to worker


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a gateway."""

    version: int
    gateway_id: GatewayId


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute the KV of `token_ids`, sample one token, and lease the blocks.

    Blocks under `prefix`, another worker's, may be pulled instead of computed. With
    `prompt_logprobs` all is computed, and each token of the prompt but the first comes with its
    log-probability and with so many of the likeliest.
    """

    seq_id: SeqId
    token_ids: Prompt
    sampling: Sampling
    limits: Limits
    prefix: LeaseRef | None = None
    prompt_logprobs: int | None = None
    salt: Salt = b""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Compute the KV of `token_ids` and go on generating in the same worker.

    Blocks under `prefix`, another worker's, may be pulled instead of computed. With
    `prompt_logprobs` all is computed, and each token of the prompt but the first comes with its
    log-probability and with so many of the likeliest.
    """

    seq_id: SeqId
    token_ids: Prompt
    sampling: Sampling
    limits: Limits
    prefix: LeaseRef | None = None
    prompt_logprobs: int | None = None
    salt: Salt = b""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Pull the KV of `token_ids` under `lease`; generate when `FirstToken` has come too.

    What was a running sequence elsewhere comes in the same way: its last token is the first here.
    Where little of it is not here yet it `is_moved`: a step waits for it, as its client does in the
    middle of its answer.
    A copy is what one that still runs elsewhere may find here: it gets no first token, and is given
    back before anybody waits for its memory.
    """

    seq_id: SeqId
    token_ids: Prompt
    sampling: Sampling
    limits: Limits
    lease: LeaseRef
    num_draft_tokens: int | None = None  # as `HandedOver` says
    is_copy: bool = False
    is_moved: bool = False
    salt: Salt = b""


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The token that prefill sampled. The gateway has it, so decode may go on from it."""

    seq_id: SeqId
    token: TokenId


class OfferPrefix(msgspec.Struct, frozen=True, tag=True):
    """Lease the blocks that this worker holds of a prompt which another worker will compute."""

    seq_id: SeqId
    token_ids: Prompt
    salt: Salt = b""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants this sequence, or what was offered for it, any more: free what it holds."""

    seq_id: SeqId


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Stop decoding this sequence and lease out its KV: it goes on elsewhere, as `as_seq_id`.

    What the lease covers is freed by `Cancel(as_seq_id)`, or when it has been pulled.
    """

    seq_id: SeqId
    as_seq_id: SeqId


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Be there for this from now on. Weights, KV and what is cached stay.

    New work of the old role is given back, and so is what waits; what runs goes on until it is done
    or a gateway moves it away (`HandOver`).
    """

    role: Role


# ---------------------------------------------------------------- worker to gateway


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer to `Hello`: who it is and what it can hold.

    A decode worker that `prefills_locally` answers a prompt that it computes itself with the very
    tokens that follow a hand-over.
    """

    version: int
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    fingerprint: str
    layout: KVLayout
    num_blocks: int
    max_running: int
    kv_wire_dtype: KVFormat | None = None  # what KV is converted to for the way; None: it is not
    events: EventsAddress | None = None  # None: it does not tell what it caches
    prefills_locally: bool = False  # said by decode workers alone
    step: "StillStepping | None" = None  # as it would be said now

    @property
    def generates(self) -> bool:
        """Whether it takes `Generate`: computes a prompt and goes on decoding."""
        return self.role is Role.MIXED or self.prefills_locally


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A worker's other answer to `Hello`."""

    reason: str


class PrefillStarted(msgspec.Struct, frozen=True, tag=True):
    """The first chunk is about to run. `lease` is None where generation stays in this worker."""

    seq_id: SeqId
    num_cached_tokens: int
    lease: LeaseRef | None


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    """The prompt is computed; `token` is the first of the answer."""

    seq_id: SeqId
    token: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None  # of `token`, where asked for
    prompt_logprobs: list[Logprobs] = []  # of the prompt from its second token on


class KvReady(msgspec.Struct, frozen=True, tag=True):
    """All KV of a handed-over sequence is in the decode worker.

    `transfer_s` and `exposed_s` as in `engine.worker.events.PullDone`.
    """

    seq_id: SeqId
    num_pulled_blocks: int
    num_cached_blocks: int
    transport: str
    transfer_s: float = 0.0
    exposed_s: float = 0.0


class DecodeStarted(msgspec.Struct, frozen=True, tag=True):
    """The first decode step of a sequence is about to run."""

    seq_id: SeqId


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The next tokens of a sequence: as many as one step made.

    Of the `num_drafted` tokens that were proposed for this step, the first `num_accepted` were what
    the model chose.
    """

    seq_id: SeqId
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[Logprobs] = []  # one a token, where asked for
    num_drafted: int = 0
    num_accepted: int = 0


class PrefixOffered(msgspec.Struct, frozen=True, tag=True):
    """The answer to `OfferPrefix`; None where no whole block of the prompt is held."""

    seq_id: SeqId
    lease: LeaseRef | None


class GivenBack(msgspec.Struct, frozen=True, tag=True):
    """The worker runs this sequence no longer; the gateway places it again.

    The KV of the first `num_kept_tokens` of its prompt stays cached in the worker. Where it is
    `hopeless`, every other worker would give it back too.
    """

    seq_id: SeqId
    reason: str
    num_kept_tokens: int = 0
    hopeless: bool = False


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """The answer to `HandOver`: the sequence has stopped, and no token of it will come any more.

    `lease` covers the KV of all its tokens but the last, which was not fed back yet. None where it
    does not decode here, or not yet. The draft model's KV is there of the first `num_draft_tokens`;
    None: of as many.
    """

    seq_id: SeqId
    lease: LeaseRef | None
    num_draft_tokens: int | None = None


class RoleChanged(msgspec.Struct, frozen=True, tag=True):
    """The worker is there for something else than its `Welcome` said. Said to every gateway."""

    role: Role
    prefills_locally: bool = False  # as in `Welcome`


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """What a step was and how long it took: what its cost is learned from.

    Of the chunks of prompts, each from p to n, the sums of n - p and of n² - p²; of the sequences
    that decoded, how many and the tokens of their contexts.
    """

    seconds: float
    num_prefill_tokens: int = 0
    prefill_squares: int = 0
    num_rows: int = 0
    num_context_tokens: int = 0


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """What a worker holds now. Blocks are counted once each and sum to the pool.

    Four numbers tell a gateway what others have promised to it: the tokens of all prompts that wait
    or are being computed, cached ones included; the sequences that decode or wait to, the blocks
    that their present lengths need, and the tokens of their contexts. `steps` are some of those
    since the last report.
    """

    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    leased_blocks: int
    in_flight_blocks: int
    waiting_seqs: int
    running_seqs: int
    open_leases: int
    counters: dict[str, float] = {}
    num_event_batches: int = 0  # published so far: see `engine.worker.block_events`
    prompt_tokens: int = 0
    decode_seqs: int = 0
    decode_blocks: int = 0
    context_tokens: int = 0
    steps: list[StepReport] = []


class StillStepping(msgspec.Struct, frozen=True, tag=True):
    """A step has lasted so long, and goes on. Said once a second instead of `LoadReport`."""

    seconds: float
    is_early: bool = False  # one of the first of its kind, which may have something to compile


ToWorker = (
    Hello | Prefill | Generate | Decode | FirstToken | OfferPrefix | Cancel | HandOver | SetRole
)
ToGateway = (
    Welcome
    | Refused
    | PrefillStarted
    | PrefillDone
    | KvReady
    | DecodeStarted
    | Tokens
    | PrefixOffered
    | GivenBack
    | HandedOver
    | RoleChanged
    | LoadReport
    | StillStepping
)

# What a decoder raises for bytes that are no message; text that is not UTF-8 is a case of its own.
_BAD_FRAME = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(list[ToWorker])
_to_gateway = msgspec.msgpack.Decoder(list[ToGateway])


def encode_frame(messages: Sequence[ToWorker] | Sequence[ToGateway]) -> bytes:
    """One frame of either direction."""
    return _encoder.encode(messages)


def decode_to_worker(frame: bytes) -> list[ToWorker]:
    """Messages of a gateway's frame. Raises ProtocolError."""
    try:
        return _to_worker.decode(frame)
    except _BAD_FRAME as error:
        raise ProtocolError(f"bad frame from a gateway: {error}") from error


def decode_to_gateway(frame: bytes) -> list[ToGateway]:
    """Messages of a worker's frame. Raises ProtocolError."""
    try:
        return _to_gateway.decode(frame)
    except _BAD_FRAME as error:
        raise ProtocolError(f"bad frame from a worker: {error}") from error
