"""The messages between a sink and a source of KV.

A sink opens a connection to a source's transfer socket. The sink's first message is `Attach`, which
the source answers with `Attached` or `AttachRefused`. The version is compared before the rest of
`Attach` is decoded, so a later version may change the rest. A message is one frame. After a `Data`
comes one payload frame, which contains the records of the named blocks without gaps.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

import msgspec

from engine.errors import ProtocolError
from engine.layout import MAX_RANKS, WHOLE, KVFormat, KVLayout, Shard
from engine.messages import Incarnation, LeaseId

T = TypeVar("T")

TRANSFER_VERSION = 6
MAX_BLOCKS_PER_READ = 4096
NUM_WORDS = 4096  # number of lease words of each rank of a source; each open lease uses one

Shards = Annotated[tuple[Shard, ...], msgspec.Meta(max_length=MAX_RANKS)]
Generation = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
# the reason for an end, which is logged and passed on to a gateway
Reason = Annotated[str, msgspec.Meta(max_length=128)]


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of a rank that determine how it exchanges blocks.

    `kvtransfer.wire` compares the identities of two ranks.
    """

    fingerprint: str  # a hash of model, weights and configuration
    layout: KVLayout  # layout of the whole model, the same at all ranks and workers
    shard: Shard = WHOLE  # the part of the layout that this rank's records contain
    kv_wire_dtype: KVFormat | None = None  # KV format on the wire; None: no conversion
    # shards of all ranks of the worker, in order; empty if there is a single rank
    group: Shards = ()

    @property
    def ranks(self) -> tuple[Shard, ...]:
        """The shards of all ranks of the worker, in order of rank."""
        return self.group or (self.shard,)

    @property
    def record(self) -> KVLayout:
        """The layout of this rank's records."""
        return self.layout.of_rank(self.shard)


class ShmOffer(msgspec.Struct, frozen=True):
    """A source's pool as shared memory: a memfd that processes of the same host can open.

    `boot_id` identifies the host. `inode` and `num_bytes` prove that the descriptor still refers
    to this memory.
    """

    boot_id: str
    pid: int
    fd: int
    inode: int
    num_bytes: int


class IpcOffer(msgspec.Struct, frozen=True):
    """A source's pool in a GPU's memory: a CUDA IPC handle for processes of the same host.

    The pool has `num_bytes` bytes, and starts `offset` bytes after the allocation's start.
    """

    boot_id: str
    handle: bytes
    offset: int
    num_bytes: int


class NixlOffer(msgspec.Struct, frozen=True):
    """A source's pool as memory registered with NIXL."""

    agent: str
    metadata: bytes
    address: int
    num_bytes: int
    kind: str  # kind of memory: DRAM or VRAM
    device_id: int


class Offers(msgspec.Struct, frozen=True):
    """The ways in which a sink can read a source's pool. `sends`: the source can send blocks over
    its socket.

    `words` is shared memory with `NUM_WORDS` lease words. `sealed_port` is the TCP port of
    encrypted streams, on the source's host.
    """

    shm: ShmOffer | None = None
    nixl: NixlOffer | None = None
    sends: bool = True
    ipc: IpcOffer | None = None
    words: ShmOffer | None = None
    sealed_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class LeaseWord(msgspec.Struct, frozen=True, array_like=True):
    """The value of a lease's word while the lease is open, and the word's index.

    Each lease of the source has a different `generation`, which is never zero.
    """

    place: int
    generation: Generation


# ---------------------------------------------------------------- sink to source


class AttachBody(msgspec.Struct, frozen=True):
    """The sink's identity, and the source that the sink expects to reach."""

    sink: Incarnation
    source: Incarnation
    identity: Identity


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The first message of a sink. `body` is an AttachBody in the encoding of protocol
    `version`.
    """

    version: int
    body: msgspec.Raw


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Renews a lease of which the sink knows `num_known` ready blocks.

    The source answers Ready or Ended.
    """

    lease_id: LeaseId
    num_known: int
    stamp: int  # identifies this Hold; the answer proves that the lease was open at its arrival


class Read(msgspec.Struct, frozen=True, tag=True):
    """Asks for blocks of a lease, by index in the lease. The source answers Data or Ended."""

    lease_id: LeaseId
    indices: list[int]


class Release(msgspec.Struct, frozen=True, tag=True):
    """Releases a lease. The source answers Ended with the same `pull_id`."""

    lease_id: LeaseId
    pull_id: int


class AskSealed(msgspec.Struct, frozen=True, tag=True):
    """Asks for a sealed stream with the key `key`. The source answers MaySeal.

    The sink sends `name` and `word` once, when it connects. `name`, `word` and `key` are random.
    `lanes` is the number of AEGIS lanes that the sink can compute in parallel.
    """

    name: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    word: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    lanes: int = 1


# ---------------------------------------------------------------- source to sink


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The source's answer to Attach if it accepts the sink."""

    incarnation: Incarnation
    identity: Identity
    num_blocks: int
    offers: Offers


class AttachRefused(msgspec.Struct, frozen=True, tag=True):
    """The source's refusal of Attach, because the two identities disagree in `field`."""

    field: Reason


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Gives the block ids at the source of the ready blocks `first`, `first + 1`, … of a lease.

    `stamp` is the stamp of the Hold that this message answers, if any. `word` is the lease's word,
    if the lease has one.
    """

    lease_id: LeaseId
    first: int
    block_ids: list[int]
    stamp: int | None = None
    word: LeaseWord | None = None


class Data(msgspec.Struct, frozen=True, tag=True):
    """Announces the next frame, which contains these blocks. `checksum` is the frame's xxh3-64."""

    lease_id: LeaseId
    indices: list[int]
    checksum: int


class MaySeal(msgspec.Struct, frozen=True, tag=True):
    """Answers AskSealed: the sink may connect. Until then, blocks are sent over CURVE.

    The stream is sealed with AEGIS in `lanes` lanes.
    """

    lanes: int = 1


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The end of a lease. After `released`, the lease was open until the Release `pull_id` came."""

    lease_id: LeaseId
    reason: Reason
    pull_id: int | None = None


LeaseMessage = Attach | Hold | Read | Release
ToSource = LeaseMessage | AskSealed
ToSink = Attached | AttachRefused | Ready | Data | Ended | MaySeal

encode = msgspec.msgpack.Encoder().encode
_to_source: msgspec.msgpack.Decoder[ToSource] = msgspec.msgpack.Decoder(ToSource)
_to_sink: msgspec.msgpack.Decoder[ToSink] = msgspec.msgpack.Decoder(ToSink)
_attach_body = msgspec.msgpack.Decoder(AttachBody)


def attach(body: AttachBody) -> Attach:
    """Returns an Attach message of this protocol version with this body."""
    return Attach(version=TRANSFER_VERSION, body=msgspec.Raw(encode(body)))


def decode_attach_body(raw: msgspec.Raw) -> AttachBody:
    """Decodes the body of an Attach of this protocol version. Raises ProtocolError."""
    return _decode(_attach_body, bytes(raw))


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad transfer message: {error}") from error


# Decoders of messages that sinks send, and of messages that sources send. Both raise ProtocolError.
decode_to_source: Callable[[bytes], ToSource] = partial(_decode, _to_source)
decode_to_sink: Callable[[bytes], ToSink] = partial(_decode, _to_sink)
