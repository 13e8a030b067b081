"""Every message that crosses a process boundary between gateways and workers, in one schema.

A gateway opens one stream to each worker. Both directions carry *frames*. A frame is a list of
messages, so one decode step sends one frame for all of its sequences. The first frame in each
direction is the handshake, `Hello` and `Welcome`. Each end checks the other end's version before it
uses any other field. Before that, each end proves that it has the secret (`engine.net.sessions`).
KV bytes and leases travel between workers: see `kvtransfer.messages`.

A `SeqId` names one attempt of one request. A request that is placed again gets a new `SeqId`, so a
late message of a lost attempt matches no sequence.

Lengths are absolute, in tokens, prompt included. So `max_len` and `min_len` have the same meaning
on every worker that continues a request.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NewType

import msgspec

from engine.errors import ProtocolError
from engine.layout import MAX_RANKS, WHOLE, KVFormat, KVLayout, Shard
from engine.net.trust import SALT_BYTES

PROTOCOL_VERSION = 14
# Reasons why a worker gives a sequence back to the gateway.
PREEMPTED = "preempted"  # the worker has no memory left for the sequence
STUCK = "no memory came free"  # even though no other sequence ran on the worker
WRONG_ROLE = "wrong role"  # the worker's role does not accept the sequence
PULL_FAILED = "pull failed"  # first words of the reason if a pull of the sequence's KV has failed
ROLE_CHANGED = "role changed"  # the worker accepted the sequence while it had another role
MAX_FRAME_BYTES = 64 * 2**20
MAX_HASHES = 65_536  # most block hashes in one message
HASH_BYTES = 16  # bytes of one block hash, as `engine.worker.blocks` computes it
MAX_ENDPOINT_LEN = 512  # most characters of a ZeroMQ endpoint
MAX_HINT_ID_LEN = 64  # most characters of an id in a client's hint
MAX_KEEP_S = 86_400.0  # longest time that a client may ask a store to keep a session

RequestId = NewType("RequestId", str)
SeqId = NewType("SeqId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
LeaseId = NewType("LeaseId", str)
Incarnation = NewType("Incarnation", str)  # random text, new at every start of a process

# Hashing and the step loop rely on this: a prompt is not empty, and each id fits in 32 bits.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Prompt = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
# The key under which a tenant's blocks are hashed: see `engine.net.trust.Secret.salt`.
Salt = Annotated[bytes, msgspec.Meta(max_length=SALT_BYTES)]
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Endpoint = Annotated[str, msgspec.Meta(max_length=MAX_ENDPOINT_LEN)]  # an address of ZeroMQ
Hashes = Annotated[list[Hash], msgspec.Meta(max_length=MAX_HASHES)]
# Identifies an API key or a session to stores. It does not reveal the key or the session.
HintId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_HINT_ID_LEN)]
KeepS = Annotated[float, msgspec.Meta(gt=0, le=MAX_KEEP_S)]


class Role(StrEnum):
    """The work that a worker accepts. A decode worker may also compute prompts: see
    `Welcome.generates`.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    DRAINED = "drained"  # accepts no work: its sequences finish on it or are moved to other workers
    STORE = "store"  # computes nothing: keeps blocks of workers, and offers them

    # Plain attributes, because each event reads them:
    prefills: bool  # computes prompts, also for answers that another worker generates
    decodes: bool  # can generate tokens

    __hash__ = str.__hash__  # an enum's own hash is slower, and costs are looked up by role

    def __init__(self, name: str) -> None:
        self.prefills = name in ("prefill", "mixed")
        self.decodes = name in ("decode", "mixed")


# The roles that a controller can give to a worker. A store never changes its role.
ROLES_OF_WORKERS = frozenset(Role) - {Role.STORE}
# The roles whose workers may also do work of the other role's pool: see `Welcome.stretch`.
FLUID_ROLES = (Role.PREFILL, Role.DECODE)


class FinishReason(StrEnum):
    """The reason why an answer is complete."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(StrEnum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    TOKENS = "tokens"  # token ids in JSON: see `engine.grammar.tokens`


class ThinkingMarks(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that enclose reasoning. A grammar applies only to the text after the reasoning.

    `is_inside` means that the prompt ends with the begin mark, so the answer begins within the
    reasoning. See `engine.grammar.thinking`.
    """

    begin: TokenId
    end: TokenId
    is_inside: bool


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """The rules that an answer must follow. If the answer may contain reasoning, they apply after
    it.
    """

    kind: GrammarKind
    source: str
    thinking: ThinkingMarks | None = None


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """The rules by which a token is chosen from logits. With zero temperature the best logit wins.

    `top_k` 0 means all tokens.

    Penalties and biases change the logits before the temperature does, in this order. The
    repetition penalty concerns tokens of prompt and answer: positive logits are divided by it,
    others multiplied. The frequency penalty is subtracted once for each occurrence of the token in
    the answer. The presence penalty is subtracted once if the answer contains the token. The bias
    is added. With a `grammar`, only tokens that the grammar allows can be chosen.

    With `logprobs`, each token is sent with its log-probability and with the `logprobs` likeliest
    tokens.
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
        """True if penalties make the choice depend on earlier tokens."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one token: the log-softmax of the model's unchanged logits.

    `rank` 1 is the likeliest token. `top_ids` are the likeliest tokens, best first.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """The place where the answer begins, and the rules for its end. Lengths are tokens, with the
    prompt.

    `prompt_len` is the length of the client's prompt, also when a request continues an answer that
    began on another worker. `tpot_s` is the bound on the time per output token, in seconds, that
    workers try to meet.
    """

    max_len: int
    min_len: int = 0
    stop_token_ids: tuple[int, ...] = ()
    prompt_len: int = 0
    tpot_s: float | None = None

    def finish_reason(self, length: int, last_token: int) -> FinishReason | None:
        """Returns why a sequence of this length is complete, if its last token is `last_token`;
        None if it is not complete.
        """
        if last_token in self.stop_token_ids and length > self.min_len:
            return FinishReason.STOP
        if length >= self.max_len:
            return FinishReason.LENGTH
        return None


class RankAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The address of one rank of a worker, and its share of each block."""

    address: Endpoint
    shard: Shard = WHOLE


class TransferAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The addresses from which other workers pull a worker's blocks, one for each rank.

    All ranks have the worker's incarnation. `others` are the addresses of the ranks after the
    first.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    address: Endpoint
    shard: Shard = WHOLE
    others: Annotated[tuple[RankAddress, ...], msgspec.Meta(max_length=MAX_RANKS - 1)] = ()

    def __post_init__(self) -> None:
        if len({self.address, *(rank.address for rank in self.others)}) <= len(self.others):
            raise ValueError("two ranks have one address")

    @property
    def ranks(self) -> tuple["TransferAddress", ...]:
        """Returns the address of each rank, in the form of a worker with one rank."""
        ranks = (RankAddress(self.address, self.shard), *self.others)
        return tuple(
            TransferAddress(self.worker_id, self.incarnation, rank.address, rank.shard)
            for rank in ranks
        )


class EventsAddress(msgspec.Struct, frozen=True):
    """The endpoints at which a worker publishes its cached blocks: see
    `engine.worker.block_events`.
    """

    published: str  # ZeroMQ endpoint that publishes batches of events
    asked: str  # ZeroMQ endpoint that resends missed batches on request


class LeaseRef(msgspec.Struct, frozen=True):
    """A lease, in the form that its sink needs. It covers `num_blocks` blocks, in the order of the
    prompt.
    """

    lease_id: LeaseId
    source: TransferAddress
    num_blocks: int


# ---------------------------------------------------------------- gateway to worker


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A gateway's first message."""

    version: int
    gateway_id: GatewayId


class ComputePrompt(msgspec.Struct, frozen=True):
    """Compute the KV of `token_ids` and sample one token.

    The worker may pull the blocks under `prefix`, a lease of another worker, instead of computing
    them. With `prompt_logprobs` the worker computes all blocks. Then each prompt token except the
    first is sent with its log-probability and with the `prompt_logprobs` likeliest tokens.

    With `evict_first`, another worker keeps the blocks. So this worker evicts them before other
    blocks once no sequence uses them. `likely_reused` blocks are evicted later than others.
    """

    seq_id: SeqId
    token_ids: Prompt
    sampling: Sampling
    limits: Limits
    prefix: LeaseRef | None = None
    prompt_logprobs: int | None = None
    salt: Salt = b""
    client_id: str = ""  # the id that the client gave to its request, for log lines
    evict_first: bool = False
    likely_reused: bool = False


class Prefill(ComputePrompt, frozen=True, tag=True):
    """Compute a prompt and lease its blocks, because another worker generates the answer."""


class Generate(ComputePrompt, frozen=True, tag=True):
    """Compute a prompt and then generate the answer on the same worker."""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Pull the KV of `token_ids` under `lease`. Generate once `FirstToken` has arrived as well.

    A sequence that ran on another worker arrives in the same way: its last token is the first token
    here. `is_moved` means that most of its KV is on this worker already. Then steps wait for the
    rest of the KV, because the client is in the middle of an answer.

    A copy (`is_copy`) brings KV of a sequence that still runs on another worker. A copy gets no
    first token, and is given back before any sequence waits for its memory.
    """

    seq_id: SeqId
    token_ids: Prompt
    sampling: Sampling
    limits: Limits
    lease: LeaseRef
    num_draft_tokens: int | None = None  # see `HandedOver`
    is_copy: bool = False
    is_moved: bool = False
    salt: Salt = b""
    client_id: str = ""  # see `ComputePrompt`
    evict_first: bool = False  # see `ComputePrompt`
    likely_reused: bool = False  # see `ComputePrompt`


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The token that the prefill worker sampled. The gateway has received the token, so decode may
    continue from it.
    """

    seq_id: SeqId
    token: TokenId


class OfferPrefix(msgspec.Struct, frozen=True, tag=True):
    """Lease the blocks of a prompt that this worker has: another worker will compute the prompt."""

    seq_id: SeqId
    token_ids: Prompt
    salt: Salt = b""
    evict_first: bool = False  # see `ComputePrompt`; applies after the blocks were pulled


class OfferBlocks(msgspec.Struct, frozen=True, tag=True):
    """Lease the blocks that this worker has, in this order: a store will copy them."""

    seq_id: SeqId
    hashes: Hashes


class Prefetch(msgspec.Struct, frozen=True, tag=True):
    """Load these leading blocks of a prompt into memory: the prompt will be placed soon.

    Only a store acts on this message. It is a hint, and is not answered.
    """

    hashes: Hashes


class SessionUse(msgspec.Struct, frozen=True, tag=True):
    """A request of a client's session used these blocks of its prompt and answer, in order.

    `keep_s`: the session's next request is expected within this number of seconds. Only a store
    acts on this message and on the next three messages. They are hints, and are not answered.
    """

    key: HintId
    session: HintId
    hashes: Hashes
    keep_s: KeepS | None = None


class SessionEnd(msgspec.Struct, frozen=True, tag=True):
    """A client's session has ended, and will make no further request."""

    key: HintId
    session: HintId


class PinBlocks(msgspec.Struct, frozen=True, tag=True):
    """Pin these leading blocks of a prompt, within the share of pins that the API key may use."""

    key: HintId
    hashes: Hashes


class UnpinBlocks(msgspec.Struct, frozen=True, tag=True):
    """Remove the API key's pin on these blocks."""

    key: HintId
    hashes: Hashes


StoreHint = SessionUse | SessionEnd | PinBlocks | UnpinBlocks


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Free everything that this sequence, or an offer for it, uses: no gateway needs it any
    more.
    """

    seq_id: SeqId


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """Stop decoding this sequence and lease its KV: another worker continues it as `as_seq_id`.

    The leased blocks are freed by `Cancel(as_seq_id)`, or when they have been pulled.
    """

    seq_id: SeqId
    as_seq_id: SeqId


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Change to this role now. Weights, KV and cached blocks stay.

    New work of the old role, and waiting work, is given back. Running sequences continue until they
    end or a gateway moves them to another worker (`HandOver`).
    """

    role: Role


# ---------------------------------------------------------------- worker to gateway


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer to `Hello`: its identity and its capacity.

    With a `stretch` the worker is fluid: beside the work of its role it accepts whole requests, and
    both prefills and decodes them. Their tokens are exactly the tokens that a hand-over would give.
    `stretch` is the factor by which prompts may lengthen a step whose sequences have no TPOT bound.
    """

    version: int
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    fingerprint: str
    layout: KVLayout  # layout of the whole model; each rank has a share of it
    num_blocks: int
    max_running: int
    kv_wire_dtype: KVFormat | None = None  # format of KV during transfer; None: the pool's format
    events: EventsAddress | None = None  # None: the worker publishes no events about its blocks
    stretch: float | None = None  # None: the worker does only the work of its role
    step: "StillStepping | None" = None  # the running step, if it has lasted long; else None
    kernels: str = ""  # the kernels in use: workers with other kernels may choose other tokens

    @property
    def generates(self) -> bool:
        """True if the worker accepts `Generate`: it computes a prompt and then generates the
        answer.
        """
        return self.role is Role.MIXED or self.is_fluid

    @property
    def is_fluid(self) -> bool:
        """True if a prefill or decode worker also accepts whole requests, as a mixed worker
        does.
        """
        return self.stretch is not None and self.role in FLUID_ROLES

    @property
    def pulls_unchanged(self) -> bool:
        """True if pulled KV arrives bit for bit as it was computed, because the transfer does not
        round.
        """
        return self.kv_wire_dtype in (None, self.layout.kv_format)


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A worker's answer to a `Hello` that it does not accept."""

    reason: str


class PrefillStarted(msgspec.Struct, frozen=True, tag=True):
    """The first chunk of the prompt is about to run. `lease` is None if this worker generates the
    answer.

    `num_pulled_blocks` blocks of the prompt were pulled in `pull_s` seconds (see
    `engine.worker.events.PullDone`). Zero seconds mean that the time is unknown.
    """

    seq_id: SeqId
    num_cached_tokens: int
    lease: LeaseRef | None
    num_pulled_blocks: int = 0
    pull_s: float = 0.0


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    """The prompt is computed. `token` is the first token of the answer."""

    seq_id: SeqId
    token: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None  # log-probability of `token`, if requested
    prompt_logprobs: list[Logprobs] = []  # for the prompt's tokens, from the second token on
    embedding: bytes = b""  # fp32 [hidden], little-endian; empty if the model embeds nothing


class KvReady(msgspec.Struct, frozen=True, tag=True):
    """All KV of a handed-over sequence has arrived in the decode worker.

    `transfer_s` and `exposed_s` are defined in `engine.worker.events.PullDone`.
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
    """All tokens that one step added to a sequence.

    For this step, `num_drafted` tokens were proposed. The model chose the first `num_accepted` of
    these tokens.
    """

    seq_id: SeqId
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[Logprobs] = []  # one for each token, if requested
    num_drafted: int = 0
    num_accepted: int = 0


class PrefixOffered(msgspec.Struct, frozen=True, tag=True):
    """The answer to `OfferPrefix`. `lease` is None if the worker has no whole block of the
    prompt.
    """

    seq_id: SeqId
    lease: LeaseRef | None


class BlocksOffered(msgspec.Struct, frozen=True, tag=True):
    """The answer to `OfferBlocks`. `held` are the places, in `OfferBlocks`, of the blocks under
    `lease`.

    `lease` is None if the worker has none of the blocks.
    """

    seq_id: SeqId
    lease: LeaseRef | None
    held: list[int] = []


class GivenBack(msgspec.Struct, frozen=True, tag=True):
    """The worker has stopped this sequence, and the gateway must place it again.

    The KV of the first `num_kept_tokens` prompt tokens stays cached in the worker. If the sequence
    is `hopeless`, every worker would give it back.
    """

    seq_id: SeqId
    reason: str
    num_kept_tokens: int = 0
    hopeless: bool = False


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """The answer to `HandOver`: the sequence has stopped and sends no more tokens.

    `lease` covers the KV of all tokens except the last, whose KV is not computed yet. `lease` is
    None if the worker does not decode the sequence. The draft model's KV exists for the first
    `num_draft_tokens` tokens; None means for all tokens.
    """

    seq_id: SeqId
    lease: LeaseRef | None
    num_draft_tokens: int | None = None


class RoleChanged(msgspec.Struct, frozen=True, tag=True):
    """The worker's role has changed since its `Welcome`. Every gateway receives this message."""

    role: Role


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """The size of a step and its duration, from which gateways learn the costs of steps.

    Each prompt chunk covers tokens p to n: the report has the sums of n - p and of n² - p². For
    decoding sequences it has their number and the sum of their context lengths.
    """

    seconds: float
    num_prefill_tokens: int = 0
    prefill_squares: int = 0
    num_rows: int = 0
    num_context_tokens: int = 0


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """The blocks and sequences of a worker. The counts of blocks add up to the size of the pool.

    Four numbers show a gateway the load that other gateways cause: the tokens of all prompts that
    wait or run, cached tokens included; the number of sequences that decode or wait to decode; the
    blocks that these sequences need at their present lengths; and the sum of their context lengths.
    `steps` is a sample of the steps since the last report.
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
    num_event_batches: int = 0  # number of published batches: see `engine.worker.block_events`
    prompt_tokens: int = 0
    decode_seqs: int = 0
    decode_blocks: int = 0
    context_tokens: int = 0
    steps: list[StepReport] = []
    gauges: dict[str, float] = {}  # metrics of the worker's process, by name

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool."""
        held = self.owned_blocks + self.leased_blocks + self.in_flight_blocks
        return self.free_blocks + self.cached_blocks + held


class StillStepping(msgspec.Struct, frozen=True, tag=True):
    """The running step has lasted `seconds` and still runs. Sent every second instead of
    `LoadReport`.
    """

    seconds: float
    is_early: bool = False  # one of the first steps of its kind, which may have to compile kernels


ToWorker = (
    Hello
    | Prefill
    | Generate
    | Decode
    | FirstToken
    | OfferPrefix
    | OfferBlocks
    | Prefetch
    | SessionUse
    | SessionEnd
    | PinBlocks
    | UnpinBlocks
    | Cancel
    | HandOver
    | SetRole
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
    | BlocksOffered
    | GivenBack
    | HandedOver
    | RoleChanged
    | LoadReport
    | StillStepping
)

# Decoders raise these errors for bytes that are no message. UnicodeDecodeError means invalid UTF-8.
_BAD_FRAME = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(list[ToWorker])
_to_gateway = msgspec.msgpack.Decoder(list[ToGateway])


def encode_frame(messages: Sequence[ToWorker] | Sequence[ToGateway]) -> bytes:
    """Encodes one frame, to a worker or from it."""
    return _encoder.encode(messages)


def decode_to_worker(frame: bytes) -> list[ToWorker]:
    """Decodes the messages of a gateway's frame. Raises ProtocolError."""
    try:
        return _to_worker.decode(frame)
    except _BAD_FRAME as error:
        raise ProtocolError(f"bad frame from a gateway: {error}") from error


def decode_to_gateway(frame: bytes) -> list[ToGateway]:
    """Decodes the messages of a worker's frame. Raises ProtocolError."""
    try:
        return _to_gateway.decode(frame)
    except _BAD_FRAME as error:
        raise ProtocolError(f"bad frame from a worker: {error}") from error


def decode_welcome(frame: bytes | None) -> Welcome:
    """Decodes the answer to `Hello`; returns None if there was no answer. Raises ProtocolError."""
    match decode_to_gateway(frame) if frame is not None else []:
        case [Welcome(version=version) as info] if version == PROTOCOL_VERSION:
            return info
        case [Welcome(version=version)]:
            raise ProtocolError(f"protocol version differs: {PROTOCOL_VERSION} and {version}")
        case [Refused(reason)]:
            raise ProtocolError(f"refused: {reason}")
        case _:
            raise ProtocolError("did not answer with a Welcome")
