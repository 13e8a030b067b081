"""The interface of an index of cached prefixes, as the request machine uses it."""

from collections.abc import Sequence, Set
from typing import Protocol

from engine.messages import WorkerId
from engine.worker.blocks import BlockHash


class Prefixes(Protocol):
    """Cached prefixes of all workers: a `PrefixMap`, or a `PrefixIndex` in C++."""

    @property
    def workers(self) -> Set[WorkerId]:
        """Workers that were added and not forgotten."""
        ...

    def add(self, worker_id: WorkerId, num_blocks: int) -> None:
        """Adds a worker with a pool of `num_blocks`, of which nothing is known yet."""
        ...

    def forget(self, worker_id: WorkerId) -> None:
        """Removes a worker and all that it held."""
        ...

    def record(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Notes that a worker was seen to hold these leading blocks of a prompt."""
        ...

    def retract(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Notes that a worker was asked for these blocks and does not hold them."""
        ...

    def stored(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Notes a worker's event: it holds these blocks."""
        ...

    def removed(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """Notes a worker's event: it no longer holds these blocks."""
        ...

    def cleared(self, worker_id: WorkerId) -> None:
        """Forgets all blocks of a worker."""
        ...

    def longest(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Returns how many leading blocks each worker holds, without workers that hold none."""
        ...

    def validate(self) -> None:
        """Asserts the invariants."""
        ...
