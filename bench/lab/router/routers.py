"""The simulated cluster of `bench router`, and two routers that place prompts in it: `Fleet` and a
peer.

A case is a number of workers and a number of different blocks. Three in four workers prefill.
Blocks form chains of 24, and three workers hold each chain. A prompt has 12 blocks; its first 0 to
12 blocks are the begin of a chain. The costs are those of Qwen3-32B on two H200s (fitted to
AIConfigurator's tables), with blocks of 512 tokens.

A decision is timed as a whole: match, costs of all workers, choice, reservation, and the call from
Python. The hash objects are made right before the decision, as if the prompt had just been hashed.
The router also claims the chosen workers in its view and releases them at the end of prompt and
answer. It reports each change to the fleet. `requests` includes all of this.

The peer is an efficient router in plain Python, under the same load. A dict maps a block's hash to
an integer with a bit for each worker, so one AND per block finds the holders of a prefix. Heaps
find the prefill worker that is ready first and the decode worker with the shortest step. Outdated
heap entries are dropped when they reach the top. It considers the holders of the longest prefix and
the worker that is ready first. `router.native.fleet` also considers shorter prefixes.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from engine.config import PoolsConfig
from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    HASH_BYTES,
    PROTOCOL_VERSION,
    Incarnation,
    Role,
    SeqId,
    Welcome,
    WorkerId,
)
from engine.worker.blocks import BlockHash
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import PULL_OVERHEAD_S, Estimates
from router.cluster.view import ClusterView
from router.native.fleet import Fleet
from router.native.index import PrefixIndex
from router.policies.base import Decision, Need

T = TypeVar("T")
Run = tuple[float, ...]  # seconds of each decision in a run

CHAIN_BLOCKS = 24
PROMPT_BLOCKS = 12
NUM_REPLICAS = 3
POOL_BLOCKS = 100_000  # blocks of a worker's pool: enough that no request is refused
MAX_RUNNING = 100_000
ANSWER_TOKENS = 343  # mean answer length of Mooncake's conversation trace
BUSY = 0.7  # share of time in which a prefill worker computes
IN_FLIGHT_PER_WORKER = 4  # mean number of running requests per worker
MAIN_BLOCKS = 1_000_000


@dataclass(frozen=True, slots=True)
class RouterCase:
    """A number of workers, and the number of different blocks that they hold."""

    num_workers: int
    num_blocks: int

    @property
    def name(self) -> str:
        """Returns the case's name in results: only the number of workers if the blocks are as in
        the goals.
        """
        if self.num_blocks == MAIN_BLOCKS:
            return str(self.num_workers)
        return f"{self.num_workers}/{self.num_blocks:.0e}".replace("e+0", "e")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. `packed` has the hashes of its blocks as bytes."""

    packed: bytes
    num_tokens: int

    def hashes(self) -> list[BlockHash]:
        """Returns the hashes as new objects, like a hash function."""
        return _cut(self.packed)


class World:
    """The workers of a case, the chains of blocks, and the workers that hold each chain."""

    def __init__(self, case: RouterCase, rng: random.Random) -> None:
        self.prefills = [i % 4 != 0 for i in range(case.num_workers)]
        self.names = [WorkerId(f"worker-{i}") for i in range(case.num_workers)]
        prefillers = [i for i, is_prefill in enumerate(self.prefills) if is_prefill]
        num_chains = case.num_blocks // CHAIN_BLOCKS
        self._rng = rng
        self._chains = rng.randbytes(num_chains * CHAIN_BLOCKS * HASH_BYTES)
        self.holders = [rng.sample(prefillers, NUM_REPLICAS) for _ in range(num_chains)]

    @property
    def rate_per_s(self) -> float:
        """Returns the arrivals/s that keep prefill workers busy for the share `BUSY`, if half of a
        prompt is cached.
        """
        assert COSTS.prefill is not None
        num_tokens = (PROMPT_BLOCKS + 1) * BLOCK_SIZE
        work_s = COSTS.prefill.fixed_s + COSTS.prefill.token_s * num_tokens / 2
        return BUSY * sum(self.prefills) / work_s

    def chain(self, number: int) -> list[BlockHash]:
        """Returns the block hashes of a chain."""
        size = CHAIN_BLOCKS * HASH_BYTES
        return _cut(self._chains[number * size : (number + 1) * size])

    def prompts(self, count: int) -> list[Prompt]:
        """Returns `num` prompts, all different."""
        return [self._prompt() for _ in range(count)]

    def _prompt(self) -> Prompt:
        rng = self._rng
        start = rng.randrange(len(self.holders)) * CHAIN_BLOCKS * HASH_BYTES
        num_cached = rng.randint(0, PROMPT_BLOCKS)
        cached = self._chains[start : start + num_cached * HASH_BYTES]
        packed = cached + rng.randbytes((PROMPT_BLOCKS - num_cached) * HASH_BYTES)
        return Prompt(packed, PROMPT_BLOCKS * BLOCK_SIZE + rng.randint(1, BLOCK_SIZE - 1))


class OurRouter:
    """A fleet under load. As in the real router, each decision is claimed in the view.

    A prompt takes as long as predicted. An answer ends after a fixed number of other requests.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.view, self.index = ClusterView(), PrefixIndex(seed=seed)
        self.fleet = Fleet(self.view, self.index, Estimates(COSTS), backlog_s=math.inf, seed=seed)
        self._world = world
        for name, is_prefill in zip(world.names, world.prefills, strict=True):
            role = Role.PREFILL if is_prefill else Role.DECODE
            self.index.add(name, POOL_BLOCKS)
            self.fleet.add(self.view.add(_info(name, role)))
        # heap of running prompts by their end
        self._computing: list[tuple[float, SeqId, WorkerId]] = []
        self._in_flight: deque[tuple[SeqId, WorkerId]] = deque()
        self._num_asked = 0
        self._now_s = 0.0

    def ingest(self) -> float:
        """Adds all chains to the fleet. Returns the block events/s."""
        return ingested_per_s(self._world, self._world.names, self.index.stored)

    def run(self, prompts: Sequence[Prompt]) -> tuple[Run, Run]:
        """Runs the requests. Returns the seconds of each decision, and of each whole request as in
        the result `requests`.
        """
        fleet, decisions, requests = self.fleet, [], []
        step_s = 1 / self._world.rate_per_s
        max_in_flight = IN_FLIGHT_PER_WORKER * len(self._world.names)
        for prompt in prompts:
            self._now_s += step_s
            hashes, now_s = prompt.hashes(), self._now_s
            need = Need(prompt.num_tokens, prompt.num_tokens + ANSWER_TOKENS)
            begin_s = perf_counter()
            decision = fleet.decide(need, hashes, now_s)
            decisions.append(perf_counter() - begin_s)
            choice = fleet.choice(decision, now_s)
            assert isinstance(choice, Decision)
            self._claim(choice, need)
            self._release(max_in_flight)
            fleet.update()
            requests.append(perf_counter() - begin_s)
        return tuple(decisions), tuple(requests)

    def _claim(self, choice: Decision, need: Need) -> None:
        self._num_asked += 1
        seq_id, now_s = SeqId(str(self._num_asked)), self._now_s
        prefill, decode = choice.prefill_worker, choice.decode_worker
        assert choice.predicted_ttft_s is not None
        worker = self.view.workers[prefill]
        work_s = choice.predicted_ttft_s - worker.ready_s(now_s)
        worker.reserve_prefill(seq_id, need.num_tokens, seconds=work_s, now_s=now_s)
        heapq.heappush(self._computing, (now_s + choice.predicted_ttft_s, seq_id, prefill))
        num_blocks = LAYOUT.num_blocks_for(need.end_len)
        self.view.workers[decode].reserve_decode(seq_id, num_blocks, context_tokens=need.num_tokens)
        self._in_flight.append((seq_id, decode))

    def _release(self, max_in_flight: int) -> None:
        workers = self.view.workers
        while self._computing and self._computing[0][0] <= self._now_s:
            end_s, seq_id, prefill = heapq.heappop(self._computing)
            workers[prefill].release_prefill(seq_id, end_s)
        if len(self._in_flight) > max_in_flight:
            seq_id, decode = self._in_flight.popleft()
            workers[decode].release_decode(seq_id)


def _info(name: WorkerId, role: Role) -> Welcome:
    return Welcome(
        PROTOCOL_VERSION,
        name,
        Incarnation("only"),
        role,
        "model",
        LAYOUT,
        POOL_BLOCKS,
        MAX_RUNNING,
        stretch=PoolsConfig().stretch,
    )


class PeerRouter:
    """The peer router under the same load."""

    def __init__(self, world: World) -> None:
        self._router = BitmaskRouter(world.prefills, POOL_BLOCKS, COSTS)
        self._world = world
        for number, holders in enumerate(world.holders):
            self._router.stored_by_all(holders, world.chain(number))
        self._in_flight: deque[int] = deque()
        self._num_asked = 0
        self._now_s = 0.0

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Runs the requests. Returns the seconds of each decision."""
        router, seconds = self._router, []
        step_s = 1 / self._world.rate_per_s
        max_in_flight = IN_FLIGHT_PER_WORKER * len(self._world.names)
        for prompt in prompts:
            self._num_asked += 1
            self._now_s += step_s
            request_id, now_s = self._num_asked, self._now_s
            hashes, num_tokens = prompt.hashes(), prompt.num_tokens
            end_tokens = num_tokens + ANSWER_TOKENS
            begin_s = perf_counter()
            decision = router.decide(
                request_id, hashes, num_tokens=num_tokens, end_tokens=end_tokens, now_s=now_s
            )
            seconds.append(perf_counter() - begin_s)
            assert decision is not None
            self._in_flight.append(request_id)
            if len(self._in_flight) > max_in_flight:
                router.release(self._in_flight.popleft())
        return tuple(seconds)


def ingested_per_s(
    world: World, names: Sequence[T], stored: Callable[[T, list[BlockHash]], object]
) -> float:
    """Calls `stored` for all chains and each of their holders. Returns the block events/s."""
    busy_s, num_events = 0.0, 0
    for number, holders in enumerate(world.holders):
        for worker in holders:
            name, hashes = names[worker], world.chain(number)
            begin_s = perf_counter()
            stored(name, hashes)
            busy_s += perf_counter() - begin_s
            num_events += len(hashes)
    return num_events / busy_s


def _cut(packed: bytes) -> list[BlockHash]:
    return [BlockHash(packed[i : i + HASH_BYTES]) for i in range(0, len(packed), HASH_BYTES)]


Entry = tuple[float, int]

BLOCK_SIZE = 512
LAYOUT = KVLayout(BLOCK_SIZE, KVFormat.BF16, (KVSection(64, 8, 128),))
COSTS = WorkerCosts(
    prefill=PrefillCost(fixed_s=3.405e-3, token_s=4.921e-5, square_s=8.41e-10),
    decode=DecodeCost(fixed_s=10.71e-3, row_s=2.053e-5, context_s=3.006e-8),
    pull=PullCost(fixed_s=2e-3, block_s=0.0, bytes_per_s=25e9),
)


@dataclass(slots=True)
class _Reservation:
    prefill: int
    decode: int
    work_s: float
    num_tokens: int
    num_blocks: int


class BitmaskRouter:
    """A router in Python. A worker is a number; it prefills if `prefills` is true for it, else it
    decodes.
    """

    def __init__(self, prefills: Sequence[bool], num_blocks: int, costs: WorkerCosts) -> None:
        """Sets up the router. All workers have these costs, which are known from the start."""
        self.owners: dict[BlockHash, int] = {}
        assert costs.prefill is not None
        assert costs.decode is not None
        assert costs.pull is not None
        self._prefill, self._decode = costs.prefill, costs.decode
        self._pull_s = PULL_OVERHEAD_S + costs.pull.fixed_s
        self._pull_block_s = costs.pull.block_s + LAYOUT.block_bytes / costs.pull.bytes_per_s
        self._busy_until_s = [0.0] * len(prefills)
        self._tokens = [0] * len(prefills)
        self._running = [0] * len(prefills)
        self._room = [num_blocks] * len(prefills)
        self._ready: list[Entry] = [(0.0, i) for i, is_prefill in enumerate(prefills) if is_prefill]
        self._steps: list[Entry] = [
            (self._decode.fixed_s, i) for i, is_prefill in enumerate(prefills) if not is_prefill
        ]
        self._reserved: dict[int, _Reservation] = {}

    def stored(self, worker: int, hashes: Sequence[BlockHash]) -> None:
        """Records that a worker holds these blocks."""
        bit = 1 << worker
        owners = self.owners
        for block_hash in hashes:
            owners[block_hash] = owners.get(block_hash, 0) | bit

    def stored_by_all(self, workers: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Records that several workers hold these blocks. The blocks share one integer, which saves
        memory.
        """
        mask = 0
        for worker in workers:
            mask |= 1 << worker
        self.owners.update(dict.fromkeys(hashes, mask))

    def decide(
        self,
        request_id: int,
        hashes: Sequence[BlockHash],
        *,
        num_tokens: int,
        end_tokens: int,
        now_s: float,
    ) -> tuple[int, int] | None:
        """Reserves a prefill worker and a decode worker. Returns None if no decode worker has
        room.
        """
        num_blocks = -(-end_tokens // BLOCK_SIZE)
        decode = self._least_step(num_blocks)
        if decode is None:
            return None
        depth, mask = self._longest(hashes)
        prefill, work_s = self._cheapest(num_tokens, depth * BLOCK_SIZE, depth, mask, now_s)
        self._busy_until_s[prefill] = max(self._busy_until_s[prefill], now_s) + work_s
        heapq.heappush(self._ready, (self._busy_until_s[prefill], prefill))
        self._join(decode, 1, end_tokens, num_blocks)
        self._reserved[request_id] = _Reservation(prefill, decode, work_s, end_tokens, num_blocks)
        return prefill, decode

    def release(self, request_id: int) -> None:
        """Releases what a finished request had reserved."""
        reserved = self._reserved.pop(request_id)
        self._join(reserved.decode, -1, -reserved.num_tokens, -reserved.num_blocks)

    def _longest(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Returns the length in blocks of the longest prefix that any worker holds, and the holders
        as bits.
        """
        owners = self.owners
        mask, depth = -1, 0
        for block_hash in hashes:
            found = owners.get(block_hash)
            if found is None or not mask & found:
                break
            mask &= found
            depth += 1
        return depth, mask if depth else 0

    def _cheapest(
        self, num_tokens: int, best_tokens: int, depth: int, mask: int, now_s: float
    ) -> tuple[int, float]:
        busy_until_s = self._busy_until_s
        alone_s = self._prefill_s(num_tokens, 0)
        cached_s = self._prefill_s(num_tokens, best_tokens)
        pulled_s = self._pull_s + depth * self._pull_block_s + cached_s if depth else alone_s
        prefill, work_s = self._first_ready(), min(alone_s, pulled_s)
        least = max(busy_until_s[prefill] - now_s, 0.0) + work_s
        while mask:
            bit = mask & -mask
            worker = bit.bit_length() - 1
            mask ^= bit
            total = max(busy_until_s[worker] - now_s, 0.0) + cached_s
            if total <= least:
                least, prefill, work_s = total, worker, cached_s
        return prefill, work_s

    def _prefill_s(self, num_tokens: int, cached: int) -> float:
        cost = self._prefill
        squares = num_tokens * num_tokens - cached * cached
        linear_s = cost.token_s * (num_tokens - cached)
        return cost.fixed_s + linear_s + cost.square_s * squares

    def _first_ready(self) -> int:
        ready, busy_until_s = self._ready, self._busy_until_s
        while busy_until_s[ready[0][1]] != ready[0][0]:
            heapq.heappop(ready)
        return ready[0][1]

    def _least_step(self, num_blocks: int) -> int | None:
        steps, full, found = self._steps, [], None
        while steps:
            step_s, worker = steps[0]
            if step_s != self._step_s(worker):
                heapq.heappop(steps)
            elif self._room[worker] < num_blocks:
                full.append(heapq.heappop(steps))
            else:
                found = worker
                break
        for entry in full:
            heapq.heappush(steps, entry)
        return found

    def _step_s(self, worker: int) -> float:
        cost = self._decode
        rows_s = cost.row_s * self._running[worker]
        return cost.fixed_s + rows_s + cost.context_s * self._tokens[worker]

    def _join(self, worker: int, num_running: int, num_tokens: int, num_blocks: int) -> None:
        self._running[worker] += num_running
        self._tokens[worker] += num_tokens
        self._room[worker] -= num_blocks
        heapq.heappush(self._steps, (self._step_s(worker), worker))
