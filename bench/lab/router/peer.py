"""The peer of `bench router`: a good router in plain Python, under the same load.

A dict maps a block's hash to an integer with a bit for each worker, so one AND a block finds the
holders of a prefix. Heaps find the worker that is ready first and the decode worker with the
shortest step; stale entries are dropped when they surface. It considers the holders of the longest
prefix and the worker that is ready first. `router.native.fleet` also considers shorter prefixes.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.worker.blocks import BlockHash
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import PULL_OVERHEAD_S

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
    """A router. Workers are numbers: where `prefills` is true they prefill, others decode."""

    def __init__(self, prefills: Sequence[bool], num_blocks: int, costs: WorkerCosts) -> None:
        """All workers have these costs, which are known from the start."""
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
        """Records the same for several workers: their blocks share one integer, which saves
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
        """Reserves a prefill and a decode worker; None if no decode worker has room."""
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
        """Frees what a finished request had reserved."""
        reserved = self._reserved.pop(request_id)
        self._join(reserved.decode, -1, -reserved.num_tokens, -reserved.num_blocks)

    def _longest(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Returns the length, in blocks, of the longest prefix that any worker holds, and its
        holders as bits.
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
