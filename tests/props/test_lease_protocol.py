"""The lease protocol on a network that delays, repeats, drops and reorders messages.

The network also cuts connections. The blocks of a pull that is reported done always have exactly
the content that the lease promised. The same is true of the blocks that a failed pull reports as
good. To make mistakes visible, a source overwrites the blocks of a lease as soon as the lease ends.
A sink overwrites the blocks of a pull as soon as the pull ends. The two sinks may be ranks of one
worker. Then both sinks pull under each lease.

Sources may have lease words, which sinks read after a copy. A lease may then end, and its blocks
may be reused, during the copy or between the copy and the reading of the word. A word may also be
lost or arrive late.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest

from engine.layout import KVFormat, KVLayout, KVSection, Shard
from engine.messages import LeaseRef, TransferAddress
from engine.worker.events import LeaseEnded, PullDone, PullFailed
from kvtransfer.lease.effects import (
    CloseSource,
    Fetch,
    SendBlocks,
    SendToSink,
    SendToSource,
    SetWord,
    SinkEffect,
    SourceEffect,
    Timing,
    UseSource,
)
from kvtransfer.lease.pull import Means
from kvtransfer.lease.sink import SinkMachine
from kvtransfer.lease.source import SourceMachine
from kvtransfer.messages import Data, Identity, Offers, Read, Ready, ShmOffer, ToSink, ToSource
from tests.kits.seeds import seeds

IDENTITY = Identity("model", KVLayout(4, KVFormat.FP32, (KVSection(1, 2, 2),)))
TIMING = Timing(ttl_s=8.0, hold_every_s=1.0, reread_s=1.5, silence_s=3.0)
NUM_BLOCKS = 12
NUM_SOURCES = NUM_SINKS = 2
PAIR = tuple(Shard(rank, NUM_SINKS) for rank in range(NUM_SINKS))
RANKS = [msgspec.structs.replace(IDENTITY, shard=shard, group=PAIR) for shard in PAIR]
FAULTS = [
    "revoke", "abort", "restart", "disorder", "repeat", "drop", "damage", "cut", "delay", "busy",
    "die", "end in a copy", "no word",
]  # fmt: skip
NO_WORDS = Offers()
WORDS = Offers(words=ShmOffer("this host", pid=1, fd=2, inode=3, num_bytes=4))

# (lease id, index in the lease); meaningless content has an id that no lease has
Content = tuple[str, int]
rubbish: Iterator[Content] = (("rubbish", i) for i in itertools.count())


@dataclass(eq=False)
class Connection:
    """A sink's connection to one address. `peer` is the sink's name at the source, also after a
    cut.
    """

    sink: "Sink"
    address: str
    peer: bytes


@dataclass(eq=False)
class Letter:
    """An undelivered message. A sink that has closed the connection does not receive it."""

    connection: Connection
    peer: bytes
    message: ToSource | ToSink
    payload: tuple[Content, ...] = ()
    to_sink: bool = False
    damaged: bool = False


@dataclass(eq=False)
class Process:
    """One run of a source's process: its machine, memory and records."""

    machine: SourceMachine
    memory: list[Content] = field(default_factory=lambda: [next(rubbish) for _ in range(12)])
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    leased: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_ready: dict[str, int] = field(default_factory=dict)
    queued: list[SendBlocks] = field(default_factory=list)
    words: dict[int, int] = field(default_factory=dict)  # the lease words, by index


class Source:
    """A worker, or a rank of one, that leases out blocks. Its address survives restarts."""

    def __init__(self, world: "World", name: str, identity: Identity) -> None:
        self.world = world
        self.identity = identity
        # ends of leases that were reported to the worker's core
        self.ended: deque[LeaseEnded] = deque()
        self.address = f"fake://{name}"
        self.name = name
        self.num_lives = 0
        self.end_reasons: set[str] = set()
        self.restart()

    def restart(self) -> None:
        self.num_lives += 1
        self.incarnation = f"life {self.num_lives} of {self.name}"
        machine = SourceMachine(
            incarnation=self.incarnation,
            identity=self.identity,
            num_blocks=NUM_BLOCKS,
            offers=self.world.offers,
            timing=TIMING,
        )
        self.process = Process(machine)
        self.world.cut(self.address)

    def open(self, lease_id: str, num_blocks: int) -> LeaseRef | None:
        process = self.process
        if num_blocks > len(process.free):
            return None
        blocks = tuple(process.free[:num_blocks])
        del process.free[:num_blocks]
        process.leased[lease_id] = blocks
        process.num_ready[lease_id] = 0
        self.perform(process.machine.open(lease_id, num_blocks, self.world.now_s))
        return LeaseRef(lease_id, self.here, num_blocks)

    @property
    def here(self) -> TransferAddress:
        shard = self.identity.shard
        return TransferAddress(self.name, self.incarnation, self.address, shard)

    def grow(self, lease_id: str, num_blocks: int) -> None:
        """Computes the next blocks of a lease, if it is still open."""
        process = self.process
        if lease_id not in process.leased:
            return
        first = process.num_ready[lease_id]
        blocks = process.leased[lease_id][first : first + num_blocks]
        for index, block in enumerate(blocks, first):
            process.memory[block] = (lease_id, index)
        process.num_ready[lease_id] += len(blocks)
        self.perform(process.machine.grow(lease_id, blocks, self.world.now_s))

    def revoke(self, lease_id: str) -> None:
        self.perform(self.process.machine.revoke(lease_id, self.world.now_s))

    def take(self, letter: Letter) -> None:
        message = letter.message
        effects = self.process.machine.receive(letter.peer, message, self.world.now_s)
        self.perform(effects)

    def sweep(self) -> None:
        self.perform(self.process.machine.sweep(self.world.now_s))

    def perform(self, effects: list[SourceEffect]) -> None:
        process = self.process
        for effect in effects:
            match effect:
                case LeaseEnded(lease_id, reason):
                    self.end_reasons.add(reason)
                    self.ended.append(effect)
                    # raises KeyError if the end of a lease is reported twice
                    blocks = process.leased.pop(lease_id)
                    process.free.extend(blocks)
                    for block in blocks:
                        process.memory[block] = next(rubbish)
                case SendToSink(peer, message):
                    self.world.post_to_sink(peer, message, ())
                case SendBlocks():
                    process.queued.append(effect)
                case SetWord(place, generation):
                    process.words[place] = generation
        if not self.world.busy:
            self.send_queued()

    def send_queued(self) -> None:
        """Sends the queued blocks whose lease is still open."""
        process = self.process
        while process.queued:
            read = process.queued.pop(0)
            if process.machine.may_send(read):
                payload = tuple(process.memory[b] for b in read.block_ids)
                data = Data(read.lease_id, list(read.indices), 0)
                self.world.post_to_sink(read.peer, data, payload)

    def validate(self) -> None:
        process = self.process
        process.machine.validate()
        assert process.machine.num_leases == len(process.leased)
        taken = [block for blocks in process.leased.values() for block in blocks]
        assert sorted(taken + process.free) == list(range(NUM_BLOCKS))


@dataclass(eq=False)
class Pull:
    """The test's record of one pull at a sink."""

    seq_id: str
    sink: "Sink"
    lease: LeaseRef
    wanted: dict[int, int] | None = None  # index in the lease -> block at the sink
    ends: list[PullDone | PullFailed] = field(default_factory=list)
    aborted: bool = False


class Sink:
    """A worker, or a rank of one, that pulls: by copying at once, or by Read and Data."""

    def __init__(
        self, world: "World", name: str, *, identity: Identity, copies_at_once: bool, window: int
    ) -> None:
        self.world = world
        self.identity = identity
        self.is_dead = False
        self.ended: deque[tuple[Pull, PullDone | PullFailed]] = deque()
        self.copies_at_once = copies_at_once
        self.means = Means("fake", window, 2 * window, resends=not copies_at_once)
        self.machine = SinkMachine(incarnation=f"life of {name}", identity=identity, timing=TIMING)
        self.memory: dict[int, Content] = {}
        self.writers: dict[int, str] = {}  # block -> lease whose pull may write to the block
        self.pulls: dict[str, Pull] = {}
        self.connections: dict[str, Connection] = {}
        self.mapped: dict[str, Process] = {}

    def hold(self, pull: Pull) -> None:
        self.pulls[pull.seq_id] = pull
        self.perform(self.machine.hold(pull.seq_id, pull.lease, self.world.now_s))

    def start(self, pull: Pull, indices: list[int]) -> None:
        self.perform(self.machine.start(pull.seq_id, self.want(pull, indices), self.world.now_s))

    def want(self, pull: Pull, indices: list[int]) -> tuple[tuple[int, int], ...]:
        """Returns (index in the lease, new local block) for each of these indices."""
        blocks = self.world.new_blocks(len(indices))
        pull.wanted = dict(zip(indices, blocks, strict=True))
        for block in blocks:
            self.memory[block] = next(rubbish)
            self.writers[block] = pull.lease.lease_id
        pull.ends.clear()  # an earlier end was the end of the hold, not of this pull
        return tuple(pull.wanted.items())

    def abort(self, pull: Pull) -> None:
        pull.aborted = True
        self.perform(self.machine.abort(pull.seq_id, self.world.now_s))

    def take(self, letter: Letter) -> None:
        address, now_s = letter.connection.address, self.world.now_s
        if self.is_dead or self.connections.get(address) is not letter.connection:
            return
        message = letter.message
        fetched: list[SinkEffect] = []
        if isinstance(message, Data):
            good = []
            places = self.machine.places(address, message)
            for index, place, content in zip(message.indices, places, letter.payload, strict=True):
                if place is not None and not letter.damaged:
                    self.write(place, content, message.lease_id)
                    good.append(index)
            if letter.damaged:
                fetched = self.machine.damaged(address, message.lease_id, message.indices, now_s)
            else:
                fetched = self.machine.fetched(
                    address, message.lease_id, tuple(good), now_s, are_good=True
                )
        self.perform(self.machine.receive(address, message, now_s) + fetched)

    def sweep(self) -> None:
        if not self.is_dead:
            self.perform(self.machine.sweep(self.world.now_s))

    def write(self, block: int, content: Content, lease_id: str) -> None:
        assert self.writers.get(block) == lease_id, "a write to another pull's memory"
        self.memory[block] = content

    def perform(self, effects: list[SinkEffect]) -> None:
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            match effect:
                case SendToSource(address, message):
                    self.world.post_to_source(self, address, message)
                case UseSource(address):
                    self.mapped[address] = self.world.sources[address].process
                    self.machine.use_transport(address, self.means)
                case Fetch():
                    todo += self.fetch(effect)
                case CloseSource(address):
                    self.connections.pop(address, None)
                    self.mapped.pop(address, None)
                case PullDone(seq_id) | PullFailed(seq_id):
                    self.end(self.pulls[seq_id], effect)

    def fetch(self, effect: Fetch) -> list[SinkEffect]:
        if not self.copies_at_once:
            read = Read(effect.lease_id, list(effect.indices))
            self.world.post_to_source(self, effect.address, read)
            return []
        for source_block, block in zip(effect.source_blocks, effect.block_ids, strict=True):
            content = self.mapped[effect.address].memory[source_block]
            self.write(block, content, effect.lease_id)
            self.world.meanwhile(effect)
        return self.machine.fetched(
            *(effect.address, effect.lease_id, effect.indices, self.world.now_s),
            are_good=self.is_proven(effect),
        )

    def is_proven(self, fetch: Fetch) -> bool:
        """Returns True if the lease's word proves that the lease was open after the copy."""
        process = self.mapped[fetch.address]
        if fetch.word is None or self.world.loses_word():
            return False
        lives = self.world.sources[fetch.address].process is process
        return lives and process.words[fetch.word.place] == fetch.word.generation

    def end(self, pull: Pull, event: PullDone | PullFailed) -> None:
        pull.ends.append(event)
        self.ended.append((pull, event))
        assert len(pull.ends) == 1, f"{pull.seq_id} ended twice"
        if isinstance(event, PullDone):
            assert pull.wanted is not None, "done before it was started"
            assert event.exposed_s <= event.transfer_s
            good = tuple(pull.wanted)
        else:
            good = event.arrived
        for index in good:
            assert self.memory[pull.wanted[index]] == (pull.lease.lease_id, index), "a wrong block"
        for block in (pull.wanted or {}).values():
            del self.writers[block]
            self.memory[block] = next(rubbish)

    def validate(self) -> None:
        self.machine.validate()
        live = [p for p in self.pulls.values() if not p.ends]
        # the other pulls wait for the end of their lease
        assert self.machine.num_pulls >= len(live)


class World:
    """Sources, sinks, a clock, and the undelivered messages."""

    def __init__(
        self,
        *,
        copies_at_once: tuple[bool, ...],
        windows: tuple[int, ...],
        are_ranks: bool = False,
        sources: Sequence[Identity] = (IDENTITY,) * NUM_SOURCES,
        offers: Offers = NO_WORDS,
    ) -> None:
        self.now_s = 0.0
        self.offers = offers
        # called after each copied block of a fetch
        self.meanwhile: Callable[[Fetch], None] = lambda fetch: None
        self.loses_word: Callable[[], bool] = lambda: False
        self.busy = False  # True while sources cannot send, so their blocks are queued
        self.letters: list[Letter] = []
        self.connections: dict[bytes, Connection] = {}  # connections by peer, including closed ones
        self._numbers = itertools.count()
        self.sources: dict[str, Source] = {}
        for i, identity in enumerate(sources):
            source = Source(self, f"p{i}", identity)
            self.sources[source.address] = source
        self.are_ranks = are_ranks  # True if both sinks are ranks of one worker
        self.sinks = [
            Sink(
                self,
                "d" if are_ranks else f"d{i}",
                identity=RANKS[i] if are_ranks else IDENTITY,
                copies_at_once=copies_at_once[i],
                window=windows[i],
            )
            for i in range(NUM_SINKS)
        ]

    def new_blocks(self, num_blocks: int) -> list[int]:
        return [next(self._numbers) for _ in range(num_blocks)]

    def new_name(self, kind: str) -> str:
        return f"{kind}{next(self._numbers)}"

    def post_to_source(self, sink: Sink, address: str, message: ToSource) -> None:
        connection = sink.connections.get(address)
        if connection is None:
            peer = b"peer %d" % next(self._numbers)
            connection = sink.connections[address] = Connection(sink, address, peer)
            self.connections[peer] = connection
        self.letters.append(Letter(connection, connection.peer, message))

    def post_to_sink(self, peer: bytes, message: ToSink, payload: tuple[Content, ...]) -> None:
        letter = Letter(self.connections[peer], peer, message, payload, to_sink=True)
        self.letters.append(letter)

    def deliver(self, letter: Letter) -> None:
        if letter.to_sink:
            letter.connection.sink.take(letter)
        else:
            self.sources[letter.connection.address].take(letter)

    def deliver_all(self) -> None:
        while self.letters:
            self.deliver(self.letters.pop(0))

    def cut(self, address: str) -> None:
        """Breaks and renews connections to a source; messages in flight are lost."""
        self.letters[:] = [x for x in self.letters if x.connection.address != address]

    def keep_busy(self, *, busy: bool) -> None:
        """Makes sources queue their blocks, or sends the queued blocks."""
        self.busy = busy
        for source in self.sources.values() if not busy else ():
            source.send_queued()

    def sweep(self) -> None:
        for party in (*self.sources.values(), *self.sinks):
            party.sweep()

    def validate(self) -> None:
        for party in (*self.sources.values(), *self.sinks):
            party.validate()

    def run_down(self) -> None:
        """Stops all faults, and runs until no machine has a deadline left."""
        self.keep_busy(busy=False)
        for _ in range(400):
            self.deliver_all()
            self.validate()
            machines = [s.machine for s in self.sinks if not s.is_dead]
            machines += [s.process.machine for s in self.sources.values()]
            wakes = [w for w in (m.next_wake_s() for m in machines) if w is not None]
            if not wakes:
                return
            self.now_s = max(self.now_s, min(wakes))
            self.sweep()
        raise AssertionError("it does not come to rest")


def choose_letter(world: World, rng: random.Random, faults: frozenset[str]) -> Letter:
    """Returns the next letter of a connection and direction, or any letter under disorder."""
    letter = rng.choice(world.letters)
    if "disorder" in faults and rng.random() < 0.2:
        return letter
    way = (letter.connection, letter.to_sink)
    return next(x for x in world.letters if (x.connection, x.to_sink) == way)


def deliver_some(world: World, rng: random.Random, faults: frozenset[str]) -> None:
    for _ in range(rng.randint(0, 8)):
        if not world.letters:
            return
        letter = choose_letter(world, rng, faults)
        fate = rng.random()
        if not ("repeat" in faults and fate < 0.1):
            world.letters.remove(letter)
        letter.damaged = "damage" in faults and 0.5 < fate < 0.55
        if not ("drop" in faults and fate > 0.95):
            world.deliver(letter)
        world.validate()


def pull_again(world: World, pull: Pull) -> list[Pull]:
    """Starts a second pull of the same lease for another sequence. No worker does this today."""
    again = Pull(world.new_name("seq"), pull.sink, pull.lease)
    pull.sink.hold(again)
    pull.sink.start(again, list(range(pull.lease.num_blocks)))
    return [again]


def disturb(world: World, rng: random.Random, faults: frozenset[str], pull: Pull) -> list[Pull]:
    """Sometimes injects a fault. Returns the pulls that the fault starts."""
    address = pull.lease.source.address
    fault = rng.choice(FAULTS)
    if fault not in faults or rng.random() > 0.15:
        return []
    if fault == "revoke":
        world.sources[address].revoke(pull.lease.lease_id)
    elif fault == "abort" and not pull.ends:
        pull.sink.abort(pull)
        return pull_again(world, pull) if rng.random() < 0.5 else []
    elif fault == "restart" and rng.random() < 0.3:
        world.sources[address].restart()
    elif fault == "cut":
        world.cut(address)
    elif fault == "busy":
        world.keep_busy(busy=not world.busy)
    elif fault == "delay":
        world.now_s += rng.choice([1.0, 3.0, 8.0])
        world.sweep()
    elif fault == "die" and rng.random() < 0.1:
        pull.sink.is_dead = True
    return []


def end_in_a_copy(world: World, rng: random.Random, fetch: Fetch) -> None:
    """Sometimes ends a lease while its blocks are copied, and reuses the blocks for another."""
    if rng.random() > 0.1:
        return
    source = world.sources[fetch.address]
    source.revoke(fetch.lease_id)
    other = source.open(world.new_name("lease"), rng.randint(1, 4))
    if other is not None:
        source.grow(other.lease_id, 4)


def busy_day(world: World, rng: random.Random, faults: frozenset[str]) -> list[Pull]:
    """Runs leases that grow step by step, with faults. Returns their pulls, which have ended."""
    if "end in a copy" in faults:
        world.meanwhile = partial(end_in_a_copy, world, rng)
    if "no word" in faults:
        world.loses_word = lambda: rng.random() < 0.3
    pulls: list[Pull] = []
    for _ in range(120):
        if rng.random() < 0.4:
            source = rng.choice(list(world.sources.values()))
            lease = source.open(world.new_name("lease"), rng.randint(1, 4))
            for sink in sinks_of_a_lease(world, rng) if lease is not None else ():
                pulls.append(Pull(world.new_name("seq"), sink, lease))
                sink.hold(pulls[-1])
        for pull in pulls[-6:]:
            if pull.sink.is_dead:
                continue
            if pull.wanted is None and not pull.aborted and rng.random() < 0.3:
                skipped = rng.choice([0, 0, 1, 4])
                pull.sink.start(pull, list(range(skipped, pull.lease.num_blocks)))
            if rng.random() < 0.3:
                world.sources[pull.lease.source.address].grow(pull.lease.lease_id, 1)
            deliver_some(world, rng, faults)
            pulls += disturb(world, rng, faults, pull)
        world.now_s += 0.1
        world.sweep()
        world.validate()
    alive = [pull for pull in pulls if not pull.sink.is_dead]
    for pull in alive:
        if pull.wanted is None and not pull.aborted:
            pull.sink.start(pull, list(range(pull.lease.num_blocks)))
        world.sources[pull.lease.source.address].grow(pull.lease.lease_id, 4)
    world.run_down()
    for pull in alive:
        assert len(pull.ends) == 1, f"{pull.seq_id} ended {len(pull.ends)} times"
    for sink in world.sinks:
        assert sink.is_dead or not (sink.machine.num_pulls or sink.connections)
    assert not any(source.process.machine.num_leases for source in world.sources.values())
    return pulls


def sinks_of_a_lease(world: World, rng: random.Random) -> list[Sink]:
    """Returns the sinks that pull under a new lease: all ranks of a worker, or one worker."""
    sinks = world.sinks if world.are_ranks else [rng.choice(world.sinks)]
    return [sink for sink in sinks if not sink.is_dead]


def random_world(rng: random.Random) -> World:
    return World(
        copies_at_once=(rng.random() < 0.5, rng.random() < 0.5),
        windows=(rng.choice([1, 2, 64]), rng.choice([1, 2, 64])),
        are_ranks=rng.random() < 0.5,
        offers=WORDS if rng.random() < 0.7 else NO_WORDS,
    )


@pytest.mark.parametrize("seed", seeds(10))
def test_on_a_good_network_every_pull_is_done(seed):
    """Every interleaving succeeds if each connection keeps its order and nothing is slow."""
    rng = random.Random(seed)
    world = random_world(rng)
    pulls = busy_day(world, rng, frozenset())
    assert len(pulls) > 20
    assert all(source.end_reasons == {"released"} for source in world.sources.values())
    assert all(isinstance(end, PullDone) for pull in pulls for end in pull.ends)


@pytest.mark.parametrize("seed", seeds(200))
def test_on_a_bad_network_every_pull_ends_once_and_correctly(seed):
    rng = random.Random(seed)
    faults = frozenset(fault for fault in FAULTS if rng.random() < 0.4)
    pulls = busy_day(random_world(rng), rng, faults)
    if "die" not in faults:
        assert any(isinstance(end, PullDone) for pull in pulls for end in pull.ends)


def one_pull(*, copies_at_once: bool, offers: Offers = NO_WORDS) -> tuple[World, Source, Pull]:
    """Returns a held lease of two blocks. One block is ready, and the sink knows that."""
    world = World(
        copies_at_once=(copies_at_once,) * NUM_SINKS, windows=(64,) * NUM_SINKS, offers=offers
    )
    source = next(iter(world.sources.values()))
    lease = source.open("lease", 2)
    assert lease is not None
    source.grow("lease", 1)
    pull = Pull("seq", world.sinks[0], lease)
    pull.sink.hold(pull)
    world.deliver_all()
    return world, source, pull


def test_blocks_that_wait_until_their_lease_is_over_are_not_sent():
    world, source, pull = one_pull(copies_at_once=False)
    world.keep_busy(busy=True)
    pull.sink.start(pull, [0])
    world.deliver_all()
    source.revoke("lease")
    world.letters.clear()  # the sink is not informed of the end
    world.keep_busy(busy=False)
    world.run_down()
    assert isinstance(pull.ends[0], PullFailed)


def test_an_unrelated_answer_makes_no_copy_good():
    world, source, pull = one_pull(copies_at_once=True)
    source.grow("lease", 1)
    (late,) = world.letters
    source.revoke("lease")
    world.letters.clear()
    pull.sink.start(pull, [0, 1])  # copies blocks that already belong to another sequence
    world.now_s += TIMING.hold_every_s
    world.sweep()
    world.deliver(late)
    pull.sink.abort(pull)
    world.run_down()
    assert pull.ends == [PullFailed("seq", "aborted")]


def test_a_word_that_is_unchanged_after_the_copy_makes_a_pull_done_without_an_answer():
    world, source, pull = one_pull(copies_at_once=True, offers=WORDS)
    pull.sink.start(pull, [0])
    assert [type(end) for end in pull.ends] == [PullDone]
    world.run_down()
    assert source.end_reasons == {"released"}


@pytest.mark.parametrize("reason", ["revoked", "expired"])
def test_a_lease_that_ends_between_copy_and_word_makes_no_block_good(reason):
    world, source, pull = one_pull(copies_at_once=True, offers=WORDS)

    def end(fetch: Fetch) -> None:
        if reason == "revoked":
            source.revoke("lease")
        else:
            world.now_s += TIMING.ttl_s
            source.sweep()
        source.open("other", NUM_BLOCKS)
        source.grow("other", NUM_BLOCKS)

    world.meanwhile = end
    pull.sink.start(pull, [0])
    assert not pull.ends
    world.run_down()
    (ended,) = pull.ends
    assert isinstance(ended, PullFailed)
    assert ended.arrived == ()
    assert reason in source.end_reasons


def test_a_source_that_dies_in_a_copy_proves_nothing_by_its_word():
    world, source, pull = one_pull(copies_at_once=True, offers=WORDS)
    world.meanwhile = lambda fetch: source.restart()
    pull.sink.start(pull, [0])
    assert not pull.ends
    world.run_down()
    assert isinstance(pull.ends[0], PullFailed)


def test_without_its_word_a_pull_waits_for_the_answer_to_its_release():
    world, _, pull = one_pull(copies_at_once=True, offers=WORDS)
    world.loses_word = lambda: True
    pull.sink.start(pull, [0])
    assert not pull.ends
    world.run_down()
    assert isinstance(pull.ends[0], PullDone)


def test_blocks_that_were_copied_without_a_word_wait_for_an_answer():
    world, source, pull = one_pull(copies_at_once=True, offers=WORDS)
    pull.sink.start(pull, [0, 1])
    source.grow("lease", 1)
    (ready,) = (x for x in world.letters if x.to_sink and isinstance(x.message, Ready))
    world.letters.clear()
    ready.message = msgspec.structs.replace(ready.message, word=None)
    world.deliver(ready)
    assert not pull.ends  # the second block is copied, but not proven good
    world.run_down()
    assert isinstance(pull.ends[0], PullDone)
