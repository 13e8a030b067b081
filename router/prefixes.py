"""Which worker holds which prefix, as far as one gateway knows, and when pulling one pays.

A gateway learns what workers hold from what it had them do: who computed or pulled a prompt holds
its full blocks. It is not told of evictions, nor of what other gateways do. So each worker is
credited with the blocks it was last seen to use, as many as fit into its pool; a wrong guess costs
one unanswered question. `PrefixMap` is the seam: an index fed by the workers' own news of stored
and evicted blocks can take its place and answer `longest` truly.

Whether a pull pays is predicted from rates measured in passing, and no rate means no.

Sources: cache-aware placement, Qin et al., Mooncake, FAST 2025, §6; the block hashes are those of
`engine.blocks`.
"""

from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import takewhile

from engine.blocks import BlockHash, hash_block
from engine.layout import KVLayout
from engine.messages import WorkerId

# What a pull costs beside its bytes: the offer, its answer, the connection and the confirmation,
# each of which may wait until a step of a worker ends.
PULL_OVERHEAD_S = 0.02

RATE_MEMORY = 0.9  # weight of all earlier observations against the latest


class PrefixMap:
    """The blocks that each worker was last seen to use, by hash, latest last."""

    def __init__(self) -> None:
        self._held: dict[WorkerId, OrderedDict[BlockHash, None]] = {}
        self._num_blocks: dict[WorkerId, int] = {}

    @property
    def workers(self) -> Set[WorkerId]:
        """Those that have been added and not forgotten."""
        return self._held.keys()

    def add(self, worker_id: WorkerId, num_blocks: int) -> None:
        """A worker with so large a pool has come; nothing is known of it yet."""
        self._held[worker_id] = OrderedDict()
        self._num_blocks[worker_id] = num_blocks

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is gone with all it held."""
        self._held.pop(worker_id, None)
        self._num_blocks.pop(worker_id, None)

    def record(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """A worker holds these leading blocks of a prompt. Unknown workers are ignored."""
        held = self._held.get(worker_id)
        if held is None:
            return
        for block_hash in reversed(hashes):  # like the pool, it drops the end of a prefix first
            held[block_hash] = None
            held.move_to_end(block_hash)
        while len(held) > self._num_blocks[worker_id]:
            held.popitem(last=False)

    def retract(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """A worker was asked for these blocks and does not hold them."""
        held = self._held.get(worker_id)
        if held is None:
            return
        for block_hash in hashes:
            held.pop(block_hash, None)

    def longest(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """How many leading blocks of a prompt each worker holds, without those that hold none."""
        if not hashes:
            return {}
        return {
            worker_id: sum(1 for _ in takewhile(held.__contains__, hashes))
            for worker_id, held in self._held.items()
            if hashes[0] in held
        }

    def validate(self) -> None:
        """Asserts that no worker is credited with more than it can hold."""
        assert set(self._held) == set(self._num_blocks)
        for worker_id, held in self._held.items():
            assert len(held) <= self._num_blocks[worker_id]


class PrefixHashes:
    """Block hashes of one prompt and its answer, each computed once and only when asked for."""

    def __init__(self) -> None:
        self._hashes: dict[int, list[BlockHash]] = {}  # by block size

    def leading(
        self, token_ids: Sequence[int], *, num_tokens: int, block_size: int
    ) -> list[BlockHash]:
        """Hashes of the full blocks among the first `num_tokens`; `token_ids` may only grow."""
        num_blocks = num_tokens // block_size
        hashes = self._hashes.setdefault(block_size, [])
        for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block(parent, token_ids[start : start + block_size]))
        return hashes[:num_blocks]


@dataclass(slots=True)
class Rate:
    """Seconds per unit of work: a quotient of two sums in which older observations count less."""

    _seconds: float = 0.0
    _units: float = 0.0

    def observe(self, units: float, seconds: float) -> None:
        """So much work took so long. No work says nothing."""
        if units > 0:
            self._seconds = RATE_MEMORY * self._seconds + seconds
            self._units = RATE_MEMORY * self._units + units

    @property
    def s_per_unit(self) -> float | None:
        """None until there was an observation."""
        return self._seconds / self._units if self._units else None


class Rates:
    """How fast this gateway's prompts are computed and pulled, over all workers."""

    def __init__(self) -> None:
        self._prefill = Rate()  # per token
        self._pull = Rate()  # per byte

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """So many tokens, cached ones not counted, were computed from first chunk to last."""
        self._prefill.observe(num_tokens, seconds)

    def observe_pull(self, num_bytes: int, seconds: float) -> None:
        """So many bytes were on their way for so long; zero seconds mean that nobody measured."""
        if seconds > 0:
            self._pull.observe(num_bytes, seconds)

    def pull_pays(self, num_blocks: int, layout: KVLayout) -> bool:
        """Whether to pull so many blocks is predicted to be quicker than to compute them."""
        return pull_pays(
            pulled_bytes=num_blocks * layout.block_bytes,
            pull_s_per_byte=self._pull.s_per_unit,
            saved_tokens=num_blocks * layout.block_size,
            compute_s_per_token=self._prefill.s_per_unit,
        )


def pull_pays(
    *,
    pulled_bytes: int,
    pull_s_per_byte: float | None,
    saved_tokens: int,
    compute_s_per_token: float | None,
) -> bool:
    """Whether pulling blocks is predicted to be quicker than computing their tokens."""
    if pull_s_per_byte is None or compute_s_per_token is None:
        return False
    pull_s = PULL_OVERHEAD_S + pulled_bytes * pull_s_per_byte
    return pull_s < saved_tokens * compute_s_per_token
