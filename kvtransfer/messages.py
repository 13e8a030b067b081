"""What a sink and a source of KV say to each other.

A sink opens a connection to a source's transfer socket. Its first message is `Attach`, which the
source answers with `Attached` or `AttachRefused`; the version is compared before the rest of
`Attach` is decoded, so that a later version may change it. A message is one frame; `Data` is
followed by one payload frame, the records of its blocks one after the other.
"""

from typing import Annotated, TypeVar

import msgspec

from engine.errors import ProtocolError
from engine.layout import KVFormat, KVLayout
from engine.messages import Incarnation, LeaseId
from kvtransfer.records import Shard

T = TypeVar("T")

TRANSFER_VERSION = 3
MAX_BLOCKS_PER_READ = 4096

Reason = Annotated[str, msgspec.Meta(max_length=128)]  # it is logged, and passed on to a gateway


class Identity(msgspec.Struct, frozen=True):
    """What two workers must agree on before a block moves between them: see `kvtransfer.wire`."""

    fingerprint: str  # of model, weights and configuration
    layout: KVLayout  # of this worker's records: of its heads, where tensor parallelism shares them
    shard: Shard = Shard()
    kv_wire_dtype: KVFormat | None = None  # what KV is converted to for the way; None: it is not


class ShmOffer(msgspec.Struct, frozen=True):
    """A source's pool as shared memory: a memfd that processes of the same host can open.

    `boot_id` tells the host; `inode` and `num_bytes` tell that the descriptor is still that memory.
    """

    boot_id: str
    pid: int
    fd: int
    inode: int
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
    """Ways to read a source's pool; `sends` says whether it can be asked to send."""

    shm: ShmOffer | None = None
    nixl: NixlOffer | None = None
    sends: bool = True


# ---------------------------------------------------------------- sink to source


class AttachBody(msgspec.Struct, frozen=True):
    """Who the sink is, and whom it means to talk to."""

    sink: Incarnation
    source: Incarnation
    identity: Identity


class Attach(msgspec.Struct, frozen=True, tag=True):
    """First message of a sink. `body` is an encoded AttachBody of that version."""

    version: int
    body: msgspec.Raw


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Renew a lease; `num_known` of its ready blocks are known. Answered by Ready or Ended."""

    lease_id: LeaseId
    num_known: int
    stamp: int  # of this Hold: its answer says that the lease was open when it arrived


class Read(msgspec.Struct, frozen=True, tag=True):
    """Send these blocks of a lease, by index. Answered by Data or Ended."""

    lease_id: LeaseId
    indices: list[int]


class Release(msgspec.Struct, frozen=True, tag=True):
    """The sink needs the lease no longer. Answered by Ended, with the same `pull_id`."""

    lease_id: LeaseId
    pull_id: int


# ---------------------------------------------------------------- source to sink


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The source's answer to Attach."""

    incarnation: Incarnation
    identity: Identity
    num_blocks: int
    offers: Offers


class AttachRefused(msgspec.Struct, frozen=True, tag=True):
    """The source's other answer to Attach: `field` is what does not agree."""

    field: Reason


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Blocks `first`, `first + 1`, … of a lease are computed; these are their ids at the source.

    `stamp` is that of the Hold which this answers.
    """

    lease_id: LeaseId
    first: int
    block_ids: list[int]
    stamp: int | None = None


class Data(msgspec.Struct, frozen=True, tag=True):
    """Records of blocks follow, one after the other in one frame, of which this is the xxh3-64."""

    lease_id: LeaseId
    indices: list[int]
    checksum: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A lease is over. `released` confirms that it held until the Release of `pull_id` arrived."""

    lease_id: LeaseId
    reason: Reason
    pull_id: int | None = None


ToSource = Attach | Hold | Read | Release
ToSink = Attached | AttachRefused | Ready | Data | Ended

encode = msgspec.msgpack.Encoder().encode
_to_source: msgspec.msgpack.Decoder[ToSource] = msgspec.msgpack.Decoder(ToSource)
_to_sink: msgspec.msgpack.Decoder[ToSink] = msgspec.msgpack.Decoder(ToSink)
_attach_body = msgspec.msgpack.Decoder(AttachBody)


def attach(body: AttachBody) -> Attach:
    """An Attach of this version."""
    return Attach(version=TRANSFER_VERSION, body=msgspec.Raw(encode(body)))


def decode_attach_body(raw: msgspec.Raw) -> AttachBody:
    """The body of an Attach of this version. Raises ProtocolError."""
    return _decode(_attach_body, bytes(raw))


def decode_to_source(frame: bytes) -> ToSource:
    """A sink's message. Raises ProtocolError."""
    return _decode(_to_source, frame)


def decode_to_sink(frame: bytes) -> ToSink:
    """A source's message. Raises ProtocolError."""
    return _decode(_to_sink, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad transfer message: {error}") from error
