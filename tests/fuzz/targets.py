"""The fuzzing targets: code that handles peers' messages, and the errors that count as findings.

An input is a byte that names the target, and a script in msgpack: the messages of one peer. The
targets are the decoders of gateways and workers, and both ends of a transfer with fake sockets.
These results are findings:

    a decoder raises anything but ProtocolError, or an end of a transfer raises anything
    an invariant of a machine does not hold
    a source sends a block that is not leased, or a sink writes to a block that no pull wants
    a sink reports a block as good, but its bytes are not those that the source offered or sent
    a pull from an honest source, which runs at the same time, fails

`tests.fuzz.decoders` looks for findings with atheris.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from engine.errors import ProtocolError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    Cancel,
    Decode,
    Incarnation,
    LeaseId,
    LeaseRef,
    Limits,
    Prefill,
    Sampling,
    SeqId,
    Tokens,
    TransferAddress,
    Welcome,
    WorkerId,
    decode_to_gateway,
    decode_to_worker,
    encode_frame,
)
from engine.net.trust import Secret
from engine.worker.blocks import BlockId
from engine.worker.events import PullDone, PullFailed
from kvtransfer.connections import SourceConnections
from kvtransfer.lease.effects import Timing
from kvtransfer.lease.sink import SinkMachine
from kvtransfer.lease.source import SourceMachine
from kvtransfer.lease_words import LeaseWords
from kvtransfer.memory import SharedPool
from kvtransfer.messages import (
    AskSealed,
    AttachBody,
    Attached,
    AttachRefused,
    Data,
    Ended,
    Hold,
    Identity,
    LeaseWord,
    MaySeal,
    NixlOffer,
    Offers,
    Read,
    Ready,
    Release,
    attach,
    decode_attach_body,
    decode_to_sink,
    decode_to_source,
    encode,
)
from kvtransfer.native.copying import checksum
from kvtransfer.source_end import SourceEnd
from kvtransfer.transports.seam import TransferContext
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.zmq import ZmqTransport
from tests.fuzz.mutation import DECODE_ERRORS, Script, spoiled

LAYOUT = KVLayout(block_size=2, kv_format=KVFormat.FP32, sections=(KVSection(1, 2, 8),))
IDENTITY = Identity("model", LAYOUT)
SOURCE, SINK = Incarnation("source-1"), Incarnation("sink-1")
ADDRESS = TransferAddress(WorkerId("source"), SOURCE, "tcp://source")
SECRET = Secret("secret")
HONEST = TransferAddress(WorkerId("honest"), Incarnation("honest-1"), "tcp://honest")
NUM_BLOCKS = 8
LEASE, OTHER_LEASE, HONEST_LEASE = LeaseId("l"), LeaseId("m"), LeaseId("g")
LEASED = (5, 3)  # block ids at the source; the lease has one more block, which is not ready
WANTED = ((0, 6), (1, 2))  # the blocks that the sink pulls: (index in the lease, local block id)
WANTED_OF_HONEST = 4  # local block id for the honest source's block
WORD = LeaseWord(7, 1)


class FixedClock:
    """A clock that stands still, so that no deadline of an end is ever reached."""

    def now_s(self) -> float:
        return 0.0


class FakeSocket:
    """A socket that receives the messages of a script, and records the messages sent through it."""

    def __init__(self, script: Script) -> None:
        self._messages = deque(script)
        self._frames: deque[bytes] = deque()
        self.sent: list[Any] = []

    def deliver(self, *message: bytes) -> None:
        """Adds a message to the received messages."""
        self._messages.append(message)

    def recv(self, _flags: int = 0, *, copy: bool = True) -> Any:
        if not self._frames:
            if not self._messages:
                raise zmq.Again
            self._frames.extend(self._messages.popleft())
        frame = self._frames.popleft()
        return frame if copy else zmq.Frame(frame)

    def get(self, option: int) -> int:
        if option == zmq.EVENTS:
            return zmq.POLLIN if self._frames or self._messages else 0
        assert option == zmq.RCVMORE
        return bool(self._frames)

    def send(self, frame: Any, *_: object, **options: object) -> zmq.MessageTracker | None:
        self.sent.append(bytes(frame))
        return zmq.MessageTracker() if options.get("track") else None

    def set(self, *_: object) -> None:
        """Ignores the socket option."""

    def connect(self, _address: str) -> None:
        """Does nothing: there is no peer."""

    def bind_to_random_port(self, _address: str) -> int:
        return 1

    def close(self, **_: object) -> None:
        self._messages.clear()
        self._frames.clear()


class FakeContext:
    """Makes a FakeSocket with the script for the first caller; later sockets receive nothing."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = deque(scripts)
        self.sockets: list[FakeSocket] = []

    def socket(self, _kind: int) -> FakeSocket:
        self.sockets.append(FakeSocket(self._scripts.popleft() if self._scripts else []))
        return self.sockets[-1]


class FakePoller:
    def register(self, *_: object) -> None:
        """Does nothing: FakeSocket never waits for messages."""

    def unregister(self, *_: object) -> None:
        """Does nothing: no descriptor was registered."""


def ignore(*_: object) -> None:
    """Ignores its arguments."""


# ---------------------------------------------------------------- the two ends


class World:
    """Memory that all inputs share: the pool of the attacked end, and a pool that a source
    offers.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = (NUM_BLOCKS, LAYOUT.block_bytes)
        self.content = rng.integers(0, 256, shape, dtype=np.uint8)
        self.pool = self.blocks = self.content.copy()
        self.offered = SharedPool(*shape)
        self.offered.open()
        self.offered.blocks[:] = rng.integers(0, 256, shape, dtype=np.uint8)
        self.words = LeaseWords()
        self.words.open()
        self.words.set(WORD.place, WORD.generation)
        wanted = {WANTED_OF_HONEST, *dict(WANTED).values()}
        self.unwanted = [b for b in range(NUM_BLOCKS) if b not in wanted]


def context_of(sockets: FakeContext) -> TransferContext:
    return TransferContext(sockets, FakePoller(), SECRET, Timing(), FixedClock(), ignore)  # type: ignore[arg-type]


def attack_source(world: World, script: Script) -> None:
    """Sends the script, as a sink, to a source with an open lease that has two ready blocks."""
    ended: list[object] = []
    offers = Offers(shm=world.offered.offer())
    machine = SourceMachine(
        incarnation=SOURCE,
        identity=IDENTITY,
        num_blocks=NUM_BLOCKS,
        timing=Timing(),
        offers=offers,
    )
    context = context_of(FakeContext([(b"peer", *message) for message in script]))
    sender = ZmqTransport(context, world.pool, places=ignore, post=ignore)  # type: ignore[arg-type]
    end = SourceEnd(context, machine, sender, words=None, on_ended=ended.append, before=ignore)
    end.open("host")
    machine.open(LEASE, 3, 0.0)
    machine.grow(LEASE, tuple(BlockId(b) for b in LEASED), 0.0)

    def handle(peer: bytes, message: Any) -> None:
        end.perform(machine.receive(peer, message, 0.0))
        machine.validate()

    for _ in range(1 + len(script)):
        end.receive(handle)
        end.send_blocks(may_wait=False)
        machine.validate()
    assert len(ended) + machine.num_leases == 1
    assert np.array_equal(world.pool, world.content)
    _check_blocks(world, end.socket.sent)  # type: ignore[attr-defined]


def _check_blocks(world: World, sent: list[bytes]) -> None:
    """Asserts that every sent block is a block of the lease."""
    frames = iter(sent)
    for frame in frames:
        assert frame == b"peer"
        message = decode_to_sink(next(frames))
        if isinstance(message, Data):
            payload = next(frames)
            assert payload == world.content[[LEASED[i] for i in message.indices]].tobytes()


def attack_sink(world: World, script: Script) -> None:
    """Sends the script, as a source, to a sink that pulls one of its leases and holds another.

    The sink also pulls a lease of an honest source, whose block arrives last.
    """
    honest_record = world.content[0].tobytes()
    context = FakeContext(script, _honest_script())
    ended: list[Any] = []
    machine = SinkMachine(incarnation=SINK, identity=IDENTITY, timing=Timing())
    end = SourceConnections(
        context_of(context), machine, block_bytes=LAYOUT.block_bytes, on_end=ended.append
    )
    sender = ZmqTransport(context_of(context), world.pool, places=machine.places, post=end.post)
    end.open([ShmTransport(world), sender], sender)  # type: ignore[arg-type]
    end.perform(machine.hold(SeqId("s"), LeaseRef(LEASE, ADDRESS, 3), 0.0))
    end.perform(machine.hold(SeqId("honest"), LeaseRef(HONEST_LEASE, HONEST, 1), 0.0))
    end.perform(machine.start(SeqId("honest"), ((0, BlockId(WANTED_OF_HONEST)),), 0.0))
    end.perform(machine.hold(SeqId("t"), LeaseRef(OTHER_LEASE, ADDRESS, 2), 0.0))
    end.perform(machine.start(SeqId("s"), tuple((i, BlockId(b)) for i, b in WANTED), 0.0))
    end.send()
    for _ in range(1 + len(script)):
        end.receive((), may_wait=False)
        end.send()
        machine.validate()
    end.perform(machine.abort(SeqId("s"), 0.0))
    machine.validate()
    context.sockets[1].deliver(
        encode(Data(HONEST_LEASE, [0], checksum(honest_record))), honest_record
    )
    end.receive((), may_wait=False)
    machine.validate()
    assert sorted(event.seq_id for event in ended if event.seq_id != "t") == ["honest", "s"]
    assert any(isinstance(event, PullDone) and event.seq_id == "honest" for event in ended)
    assert world.pool[WANTED_OF_HONEST].tobytes() == honest_record
    for event in ended:
        if event.seq_id == "s":
            _check_arrived(world, script, event)
    end.close()
    changed = (world.pool != world.content).any(axis=1)
    assert not changed[world.unwanted].any(), "a block was written that no pull wants"
    world.pool[:] = world.content


def _check_arrived(world: World, script: Script, end: PullDone | PullFailed) -> None:
    """Asserts that every good block has the bytes that the source offered or sent for it."""
    offered = {row.tobytes() for row in world.offered.blocks}
    for index, block in WANTED:
        if isinstance(end, PullDone) or index in end.arrived:
            assert world.pool[block].tobytes() in offered | _sent_for(script, index)


def _sent_for(script: Script, index: int) -> set[bytes]:
    """Returns the contents that a sink may accept for the block with that index in the lease."""
    found = set()
    for header, *payload in script:
        try:
            data = decode_to_sink(header)
        except ProtocolError:
            continue
        if isinstance(data, Data) and len(payload) == 1 and checksum(payload[0]) == data.checksum:
            size = LAYOUT.block_bytes
            rows = [row for row, i in enumerate(data.indices[:NUM_BLOCKS]) if i == index]
            found |= {payload[0][row * size : (row + 1) * size] for row in rows}
    return found


def _honest_script() -> Script:
    attached = Attached(HONEST.incarnation, IDENTITY, NUM_BLOCKS, Offers())
    return [(encode(attached),), (encode(Ready(HONEST_LEASE, 0, [0])),)]


# ---------------------------------------------------------------- inputs

TARGETS = ("source", "sink", "worker", "gateway")


def run(world: World, data: bytes) -> None:
    """Runs one input. Raises the error if the input is a finding."""
    target, script = unpacked(data)
    for message in script:
        for frame in message:
            _decode_all(frame)
    match target:
        case "source":
            attack_source(world, script)
        case "sink":
            attack_sink(world, script)


def _decode_all(frame: bytes) -> None:
    """Decodes the script with every decoder; each may raise ProtocolError only."""
    for decode in (decode_to_source, decode_to_sink, decode_to_worker, decode_to_gateway):
        try:
            decode(frame)
        except ProtocolError:
            continue
    try:
        decode_attach_body(msgspec.Raw(frame))
    except ProtocolError:
        return


def packed(target: str, script: Script) -> bytes:
    """Packs a target and a script into an input."""
    return bytes([TARGETS.index(target)]) + msgspec.msgpack.encode(script)


def unpacked(data: bytes) -> tuple[str, Script]:
    """Returns an input's target and script. Bytes that are no script count as one message."""
    target = TARGETS[data[0] % len(TARGETS)] if data else TARGETS[0]
    try:
        script = msgspec.msgpack.decode(data[1:], type=list[tuple[bytes, ...]])
    except DECODE_ERRORS:
        script = [(data[1:],)]
    return target, [message for message in script if message]


def another(data: bytes, rng: random.Random, *, starts: Sequence[bytes]) -> bytes:
    """Returns an input with a mutated script: the script of `data`, or one of `starts`.

    The fuzzer begins its search with `starts`.
    """
    if len(data) < 2 or rng.random() < 0.1:
        data = rng.choice(starts)
    target, script = unpacked(data)
    return packed(target, spoiled(script, rng))


def seeds(world: World) -> list[bytes]:
    """Returns inputs of valid messages, and two invalid inputs that one mutation cannot reach."""
    body = AttachBody(SINK, SOURCE, IDENTITY)
    sink = [
        attach(body),
        Hold(LEASE, 0, 0),
        Read(LEASE, [0, 1]),
        AskSealed(bytes(16), bytes(16), bytes(32)),
        Hold(LEASE, 2, 1),
        Release(LEASE, 0),
    ]
    offer = NixlOffer("agent", b"metadata", 2**40, 2**20, "DRAM", 0)
    offers = Offers(shm=world.offered.offer(), nixl=offer, words=world.words.offer())
    shm = Attached(SOURCE, IDENTITY, NUM_BLOCKS, offers)
    more = msgspec.structs.replace(shm, num_blocks=2 * NUM_BLOCKS)
    sends = Attached(SOURCE, IDENTITY, NUM_BLOCKS, Offers(sealed_port=1))
    proven = [Ready(LEASE, 0, [5], word=WORD), Ready(LEASE, 1, [3], 0, WORD)]
    ready = [Ready(LEASE, 0, [5]), Ready(LEASE, 1, [3], 0)]
    ended = Ended(LEASE, "released", 0)
    records = world.content[[5, 3]].tobytes()
    data = Data(LEASE, [0, 1], checksum(records))
    scripts = [
        ("source", [(encode(message),) for message in sink]),
        ("sink", [(encode(m),) for m in (shm, *ready, ended)]),
        ("sink", [(encode(m),) for m in (shm, *proven, ended)]),
        ("sink", [(encode(m),) for m in (sends, MaySeal(), *ready)]),
        (
            "sink",
            [*((encode(m),) for m in (sends, *ready)), (encode(data), records), (encode(ended),)],
        ),
        ("sink", [(encode(AttachRefused("token")),)]),
        ("sink", [(encode(m),) for m in (shm, more, Ready(LEASE, 0, [NUM_BLOCKS, NUM_BLOCKS]))]),
        ("sink", [(encode(sends),), *[(encode(Data(HONEST_LEASE, [0], 0)), records)] * 5]),
        ("worker", [(encode_frame(_to_worker()),)]),
        ("gateway", [(encode_frame(_to_gateway()),)]),
    ]
    return [packed(target, script) for target, script in scripts]


def _to_worker() -> list[Any]:
    seq = SeqId("a.0")
    lease = LeaseRef(LEASE, ADDRESS, 1)
    return [
        Prefill(seq, [0, 7], Sampling(), Limits(9, 4, (1, 2)), lease),
        Decode(seq, [1, 2], Sampling(), Limits(9), lease),
        Cancel(seq),
    ]


def _to_gateway() -> list[Any]:
    welcome = msgspec.convert(
        {
            "type": "Welcome",
            "version": 3,
            "worker_id": "w",
            "incarnation": "w-1",
            "role": "mixed",
            "fingerprint": "model",
            "layout": msgspec.to_builtins(LAYOUT),
            "num_blocks": 8,
            "max_running": 4,
        },
        Welcome,
    )
    return [welcome, Tokens(SeqId("a.0"), [1, 2])]
