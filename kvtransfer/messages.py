"""The messages between a sink and a source of KV.

A sink opens a connection to a source's transfer socket. Its first message is `Attach`, which the
source answers with `Attached` or `AttachRefused`. The version is compared before the rest of
`Attach` is decoded, so a later version may change the rest. A message is one frame. `Data` is
followed by one payload frame, which holds the records of its blocks without gaps.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

import msgspec

from engine.errors import ProtocolError
from engine.layout import MAX_RANKS, KVFormat, KVLayout, Shard
from engine.messages import Incarnation, LeaseId

T = TypeVar("T")

TRANSFER_VERSION = 6
MAX_BLOCKS_PER_READ = 4096
NUM_WORDS = 4096  # one for each lease, at each rank of a source

Shards = Annotated[tuple[Shard, ...], msgspec.Meta(max_length=MAX_RANKS)]
Generation = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Reason = Annotated[str, msgspec.Meta(max_length=128)]  # it is logged, and passed on to a gateway


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank's terms for exchanging blocks. `kvtransfer.wire` compares two of them."""

    fingerprint: str  # covers model, weights and configuration
    layout: KVLayout  # the whole model's: the same at each rank, and at workers of other shapes
    shard: Shard = Shard()  # what this rank's records hold of it
    kv_wire_dtype: KVFormat | None = None  # format on the wire; None: no conversion
    group: Shards = ()  # all ranks of the worker, in its order; empty: this is the only one

    @property
    def ranks(self) -> tuple[Shard, ...]:
        """The shards of all ranks of the worker, in its order."""
        return self.group or (self.shard,)

    @property
    def record(self) -> KVLayout:
        """The layout of this rank's records."""
        return self.layout.of_rank(self.shard)


class ShmOffer(msgspec.Struct, frozen=True):
    """A source's pool as shared memory: a memfd that processes of the same host can open.

    `boot_id` identifies the host. `inode` and `num_bytes` prove that the descriptor is still this
    memory.
    """

    boot_id: str
    pid: int
    fd: int
    inode: int
    num_bytes: int


class IpcOffer(msgspec.Struct, frozen=True):
    """A source's pool in a GPU's memory: a handle of CUDA's for other processes of that host.

    The pool is `num_bytes` long, and begins `offset` bytes into the memory that the handle names.
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
    kind: str  # DRAM or VRAM
    device_id: int


class Offers(msgspec.Struct, frozen=True):
    """Ways to read a source's pool. `sends`: the source can send blocks over its socket.

    `words` is memory with the words of `NUM_WORDS` leases. `sealed_port` is that for sealed
    streams, on the host of the source's address.
    """

    shm: ShmOffer | None = None
    nixl: NixlOffer | None = None
    sends: bool = True
    ipc: IpcOffer | None = None
    words: ShmOffer | None = None
    sealed_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class LeaseWord(msgspec.Struct, frozen=True, array_like=True):
    """What a lease's word is while the lease is open, and its place in the source's memory.

    No other lease of the source ever has the same `generation`, and none has zero.
    """

    place: int
    generation: Generation


# ---------------------------------------------------------------- sink to source


class AttachBody(msgspec.Struct, frozen=True):
    """The sink's identity, and the source that it expects."""

    sink: Incarnation
    source: Incarnation
    identity: Identity


class Attach(msgspec.Struct, frozen=True, tag=True):
    """First message of a sink. `body` is an encoded AttachBody of that version."""

    version: int
    body: msgspec.Raw


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Renews a lease; the sink knows `num_known` ready blocks. Answered by Ready or Ended."""

    lease_id: LeaseId
    num_known: int
    stamp: int  # identifies this Hold; the answer proves that the lease was open at its arrival


class Read(msgspec.Struct, frozen=True, tag=True):
    """Asks for blocks of a lease, by index. Answered by Data or Ended."""

    lease_id: LeaseId
    indices: list[int]


class Release(msgspec.Struct, frozen=True, tag=True):
    """Gives a lease up. Answered by Ended with the same `pull_id`."""

    lease_id: LeaseId
    pull_id: int


class AskSealed(msgspec.Struct, frozen=True, tag=True):
    """Asks for a sealed stream with that key. Answered by MaySeal.

    With `name` and `word` the sink connects to it, once. All three are random. `lanes` of AEGIS are
    those that the sink can compute at once.
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
    """The source's answer to Attach if `field` does not agree."""

    field: Reason


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Names the computed blocks `first`, `first + 1`, … of a lease, by their ids at the source.

    `stamp` is that of the Hold which this answers, if any. `word` is the lease's, if it has one.
    """

    lease_id: LeaseId
    first: int
    block_ids: list[int]
    stamp: int | None = None
    word: LeaseWord | None = None


class Data(msgspec.Struct, frozen=True, tag=True):
    """Announces the next frame: records of these blocks without gaps, and its xxh3-64."""

    lease_id: LeaseId
    indices: list[int]
    checksum: int


class MaySeal(msgspec.Struct, frozen=True, tag=True):
    """Answers AskSealed: the sink may connect. Until it has, blocks come as before.

    The stream is sealed with AEGIS in so many `lanes`.
    """

    lanes: int = 1


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Says that a lease is over. `released`: it was open until the Release of `pull_id` arrived."""

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
    """Returns an Attach of this version."""
    return Attach(version=TRANSFER_VERSION, body=msgspec.Raw(encode(body)))


def decode_attach_body(raw: msgspec.Raw) -> AttachBody:
    """Decodes the body of an Attach of this version. Raises ProtocolError."""
    return _decode(_attach_body, bytes(raw))


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad transfer message: {error}") from error


# Decode a message of a sink, and a message of a source. Both raise ProtocolError.
decode_to_source: Callable[[bytes], ToSource] = partial(_decode, _to_source)
decode_to_sink: Callable[[bytes], ToSink] = partial(_decode, _to_sink)
