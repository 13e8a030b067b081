from dataclasses import replace
from itertools import pairwise
from random import Random

import msgspec
import pytest
from typer.testing import CliRunner

from bench.common.report import from_json
from bench.simulator.cluster import (
    SimulatedPools,
    SimulatedRequest,
    SimulationSetup,
    in_order,
    simulate,
)
from bench.simulator.cluster import _Cluster as Cluster
from bench.simulator.hardware import HardwareProfile
from bench.simulator.stores import SimStore
from bench.simulator.tiers import GIB, SimulatedStores, SimulatedTier, TierPrice
from bench.simulator.traces import Chat, Trace, TraceRequest, synthetic, with_ids, write_trace
from bench.simulator.transfers import Future, Rank, Transfers
from bench.simulator.workers import SimWorker
from deploy.commands.main import app
from engine.config import RouterConfig, RouterPolicy, StoreEviction
from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    BlocksOffered,
    Cancel,
    GatewayId,
    Incarnation,
    LeaseId,
    LeaseRef,
    LoadReport,
    OfferPrefix,
    Prefetch,
    PrefixOffered,
    SeqId,
    TransferAddress,
    WorkerId,
)
from engine.worker.block_events import BlockStored, Medium
from engine.worker.blocks import BlockHash, hash_block
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from engine.worker.events import FromGateway, LeaseEnded, PullDone
from engine.worker.intake import read_prompt
from kvtransfer.store.events import BlockLoaded, BlockWritten, LoadBlock, WriteBlock
from router.cluster.estimates import Estimates
from router.machine.events import WorkerLost
from router.machine.machine import RouterMachine
from router.machine.requests import Finished

SLOW = HardwareProfile(  # prefill is expensive and pulls are cheap
    name="slow",
    source="made up",
    layout=KVLayout(8, KVFormat.BF16, (KVSection(1, 1, 32),)),
    num_blocks=64,
    prefill=PrefillCost(1e-3, 5e-3, 1e-7),
    decode=DecodeCost(5e-3, 1e-4, 1e-6),
    pull=PullCost(1e-3, 1e-5, 1e8),
    max_batch_tokens=64,
    chunk_tokens=48,
    max_running=8,
)
BLOCK_BYTES = SLOW.layout.block_bytes
PRICES = WorkerCosts(SLOW.prefill, SLOW.decode, SLOW.pull)
DISK = TierPrice(1000 * BLOCK_BYTES, 500 * BLOCK_BYTES, 0.01, 4)
STORES = SimulatedStores(256, node_workers=2, take_bytes_per_s=1e9)


def machine_of(policy=RouterPolicy.SLO, **config):
    return RouterMachine(RouterConfig(policy=policy, **config), estimates=Estimates(PRICES))


def busy_trace(num_requests, seed=0):
    chat = Chat(20.0, 3.0, 0.5, system_tokens=512, input_tokens=1500, output_tokens=1500)
    made = synthetic(chat, num_requests, Random(seed)).shortened(64)
    short = [replace(r, input_len=min(r.input_len, 300)) for r in made.requests]
    whole = [replace(r, block_ids=r.block_ids[: -(-r.input_len // 8)]) for r in short]
    return replace(made, requests=tuple(whole))


# ---------------------------------------------------------------- a single store


class Worker:
    """A worker with all blocks of some prompts, which answers the store at once."""

    def __init__(self, name, transfers, hashes):
        self.worker_id = WorkerId(name)
        self.heard = []
        self._transfers = transfers
        self._hashes = set(hashes)

    def offer(self, store, message):
        held = [place for place, block in enumerate(message.hashes) if block in self._hashes]
        lease_id = LeaseId(f"{message.seq_id}.prefix")
        self._transfers.open(self, lease_id)
        self._transfers.grow(lease_id, len(held))
        address = TransferAddress(self.worker_id, Incarnation("1"), "")
        lease = LeaseRef(lease_id, address, len(held))
        store.answered(self.worker_id, BlocksOffered(message.seq_id, lease, held))

    def receive(self, events):
        self.heard += events


class Node:
    """A store, a worker that has cached a prompt, and a worker that pulls from the store."""

    def __init__(self, setup, num_tokens=80):
        self.future = Future()
        self.transfers = Transfers(self.future, SLOW.pull, SLOW.layout, latency_s=0.0)
        self.prompt = tuple(range(num_tokens + 1))
        self.hashes = []
        for start in range(0, num_tokens, 8):
            parent = self.hashes[-1] if self.hashes else None
            self.hashes.append(hash_block(parent, self.prompt[start : start + 8]))
        self.source = Worker("source", self.transfers, self.hashes)
        self.sink = Worker("sink", self.transfers, ())
        self.frames = []
        self.asked = []
        self.store = SimStore(
            WorkerId("store-0"),
            setup,
            hardware=SLOW,
            future=self.future,
            transfers=self.transfers,
            listener=self,
            read=read_prompt,
        )
        self.store.meet(self.source.worker_id, is_store=False)

    def on_frame(self, worker_id, frame):
        self.frames.append((self.future.now_s, frame))

    def ask(self, store_id, worker_id, message):
        self.asked.append(message)
        if not isinstance(message, Cancel):
            at_s = self.future.now_s
            self.future.plan(
                at_s, Rank.MESSAGE, lambda m: self.source.offer(self.store, m), message
            )

    def settle(self):
        self.store.reports = False
        self.future.run()

    def fill(self):
        """Makes the store pull the prompt from the worker, and then removes the worker."""
        events = [BlockStored(self.hashes, None, [], 8, *3 * [None])]
        self.store.follow(self.source.worker_id, events)
        self.settle()
        self.store.miss(self.source.worker_id)

    def said(self, kind):
        messages = [said.message for _, frame in self.frames for said in frame.said]
        return [message for message in messages if isinstance(message, kind)]

    def pull(self, name="a"):
        """Pulls the offered prefix of the prompt.

        Returns its blocks and the seconds that it took.
        """
        began_s = self.future.now_s
        message = OfferPrefix(SeqId(name), self.prompt)
        self.store.receive([FromGateway(GatewayId("gateway"), message)])
        lease = self.said(PrefixOffered)[-1].lease
        if lease is None:
            return 0, 0.0
        self.transfers.hold(self.sink, SeqId(name), lease)
        self.transfers.start(self.sink, SeqId(name), tuple(range(lease.num_blocks)))
        ended_s = []
        self.sink.receive = lambda events: ended_s.append((self.future.now_s, *events))
        self.settle()
        [(at_s, done)] = ended_s
        assert isinstance(done, PullDone)
        self.store.validate()
        return lease.num_blocks, at_s - began_s


def test_store_offers_what_a_lost_worker_had():
    node = Node(SimulatedStores(64))
    node.fill()
    assert node.store.record().num_held == {"host": 10}
    num_blocks, seconds = node.pull()
    assert num_blocks == 10
    assert seconds == pytest.approx(SLOW.pull.seconds(10, 10 * BLOCK_BYTES))
    assert node.store.record().counters["offered_blocks:host"] == 10


def test_disk_is_slower_than_memory_by_its_price():
    setup = SimulatedStores(10, 64, disk=DISK, eviction=StoreEviction.LRU)
    node = Node(setup)
    node.fill()
    assert node.store.record().num_held == {"host": 10, "disk": 10}
    _, from_memory_s = node.pull("a")
    for block in node.hashes:
        node.store.machine.holdings.memory.drop(block)
    num_blocks, from_disk_s = node.pull("b")
    assert num_blocks == 10
    assert node.store.record().counters["offered_blocks:disk"] == 10
    # The last of ten reads ends after three batches of four, and then one block is pulled.
    waves_s = 3 * DISK.fixed_s + (4 + 4 + 2) * 1e-3
    assert from_memory_s + 0.01 < from_disk_s <= waves_s + from_memory_s


def test_lease_grows_while_blocks_are_read():
    node = Node(SimulatedStores(10, 64, disk=DISK))
    node.fill()
    for block in node.hashes:
        node.store.machine.holdings.memory.drop(block)
    grown = []
    grow = node.transfers.grow
    node.transfers.grow = lambda lease_id, num: (
        grown.append(node.future.now_s),
        grow(lease_id, num),
    )
    node.pull()
    assert len(grown) == 10
    assert all(a <= b for a, b in pairwise(grown))
    assert grown[0] < grown[-1]


def test_prefetched_blocks_are_leased_from_memory():
    node = Node(SimulatedStores(64, 64, disk=DISK))
    node.fill()
    for block in node.hashes:
        node.store.machine.holdings.memory.drop(block)
    prefetch = Prefetch([bytes(each) for each in node.hashes])
    node.store.receive([FromGateway(GatewayId("gateway"), prefetch)])
    node.settle()
    node.pull()
    counters = node.store.record().counters
    assert counters["loaded_blocks:disk"] == counters["prefetched_blocks"] == 10
    assert counters["offered_blocks:host"] == 10


def test_store_takes_no_faster_than_its_pace():
    node = Node(SimulatedStores(1024, take_bytes_per_s=64 * BLOCK_BYTES), num_tokens=8 * 200)
    node.fill()
    counts = [(at_s, len(event.block_hashes)) for at_s, f in node.frames for event in f.blocks]
    assert [num for _, num in counts] == [64, 64, 64, 8]
    times_s = [at_s for at_s, _ in counts]
    assert [b - a for a, b in pairwise(times_s)] == pytest.approx([1.0, 1.0, 1.0], abs=0.1)


def test_store_reports_its_blocks_and_the_price_of_reads():
    node = Node(SimulatedStores(64, 64, disk=DISK))
    node.store.follow(node.source.worker_id, [BlockStored(node.hashes, None, [], 8, *3 * [None])])
    node.future.plan(3.5, Rank.ROUTINE, lambda _: node.future.stop(), None)
    node.future.run()
    last = node.said(LoadReport)[-1]
    assert last.cached_blocks == 10
    assert last.num_blocks == 64
    assert last.gauges["load_fixed_s:disk"] == pytest.approx(0.011)
    assert last.gauges["load_block_s:disk"] == pytest.approx(0.001)


# ---------------------------------------------------------------- a single tier


def test_waiting_reads_go_before_waiting_writes_and_few_at_once():
    future, done = Future(), []
    price = TierPrice(1000.0, 500.0, 0.5, 2)
    tier = SimulatedTier(
        Medium.DISK,
        price,
        block_bytes=1000,
        future=future,
        on_done=lambda event: done.append((future.now_s, event)),
    )
    blocks = [BlockHash(bytes([i]) * 16) for i in range(4)]
    for block in blocks[:3]:
        tier.submit(WriteBlock(Medium.DISK, block, None, 0, 0))
    tier.submit(LoadBlock(Medium.DISK, blocks[3], 0, 5))
    future.run()
    # Two concurrent writes share the channel. The waiting read overtakes the third write.
    assert done == [
        (2.5, BlockWritten(Medium.DISK, blocks[0])),
        (4.5, BlockWritten(Medium.DISK, blocks[1])),
        (5.5, BlockLoaded(Medium.DISK, blocks[3], 5)),
        (7.5, BlockWritten(Medium.DISK, blocks[2])),
    ]
    tier.validate()


# ---------------------------------------------------------------- clusters


def replaced_at(cluster, at_s):
    """Plans that all workers are lost at this time, and that empty workers replace them."""

    def replace_all(_):
        for worker_id, old in list(cluster._workers.items()):
            assert not old.core.load(0, {}).owned_blocks, "the test replaces idle workers"
            old.reports = False
            cluster._handle(WorkerLost(worker_id, "gone"))
            for store in cluster._near.get(worker_id, ()):
                store.miss(worker_id)
            new = cluster._workers[worker_id] = SimWorker(
                worker_id,
                old.role,
                hardware=SLOW,
                future=cluster._future,
                transfers=cluster._transfers,
                listener=cluster,
                read=cluster._prompts.read,
            )
            cluster._join(new)
        cluster._decoding = [w for w in cluster._workers.values() if w.role.decodes]

    cluster._future.plan(at_s, Rank.ROUTINE, replace_all, None)


@pytest.mark.parametrize("stores", [STORES, None])
def test_prefix_outlives_all_workers_where_there_is_a_store(stores):
    ids = tuple(range(30))
    trace = Trace("t", 8, (TraceRequest(0.0, 240, 2, ids), TraceRequest(60.0, 244, 2, (*ids, 99))))
    setup = SimulationSetup(SLOW, SimulatedPools(2, 1), stores=stores)
    records: dict[int, SimulatedRequest] = {}
    trace = with_ids(trace)
    ended = records.__setitem__
    cluster = Cluster(trace, in_order(trace.requests), setup, machine_of(), ended)
    replaced_at(cluster, 30.0)
    cluster.run()
    cluster.validate()
    first, second = records[0], records[1]
    assert isinstance(second.outcome, Finished)
    if stores is None:
        assert second.timeline.num_cached_tokens == 0
        return
    assert second.timeline.num_cached_tokens == 240
    ttfts_s = [record.times_s[0] - record.asked.arrived_s for record in (first, second)]
    assert ttfts_s[1] < ttfts_s[0] / 10


def test_store_larger_than_the_workers_finds_more():
    hardware = msgspec.structs.replace(SLOW, num_blocks=44)
    trace, hits = busy_trace(40), []
    for stores in (None, replace(STORES, memory_blocks=4000)):
        setup = SimulationSetup(hardware, SimulatedPools(2, 1), stores=stores)
        run = simulate(trace, setup, machine_of())
        hits.append(sum(r.timeline.num_cached_tokens for r in run.records))
    assert hits[1] > 1.2 * hits[0]


# ---------------------------------------------------------------- options


def test_command_reports_hits_by_medium(tmp_path):
    write_trace(busy_trace(30), tmp_path / "t.jsonl")
    (tmp_path / "slow.json").write_bytes(msgspec.json.encode(SLOW))
    command = f"simulate --trace {tmp_path}/t.jsonl --hardware {tmp_path}/slow.json --prefill 2"
    command += " --goodput-requests 0 --max-tokens 8 --store-memory-gib 0.00004"
    command += f" --store-disk-gib 0.01 --node-workers 3 --json {tmp_path}/r.json"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert "with 1 stores of" in result.output
    report = from_json((tmp_path / "r.json").read_bytes())
    assert report.config["store_memory_blocks"] == int(0.00004 * GIB) // BLOCK_BYTES
    assert report.config["store_eviction"] == "worth"
    assert report.value("store/taken") > 0
    assert report.value("store/evicted/host") > 0
    hits = [report.value(f"store/hits/{medium}") for medium in ("host", "disk")]
    assert 0 < sum(hits) < 1


def test_disk_without_memory_is_refused():
    command = "simulate --trace synthetic --requests 3 --store-disk-gib 1"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 1
    assert "the memory of a store" in result.stderr


def test_lease_of_a_lost_pull_ends_by_the_cancel_of_its_gateway():
    node = Node(SimulatedStores(64))
    node.fill()
    message = OfferPrefix(SeqId("a"), node.prompt)
    node.store.receive([FromGateway(GatewayId("gateway"), message)])
    assert node.transfers.num_leases_of(WorkerId("store-0")) == 1
    node.store.receive([FromGateway(GatewayId("gateway"), Cancel(SeqId("a")))])
    node.settle()
    assert node.transfers.num_leases == 0
    node.store.validate()
    assert LeaseEnded not in map(type, node.sink.heard)
