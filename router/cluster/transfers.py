"""KV that moved between each pair of workers, as one router has learned it.

Hand-overs, prefixes and moves count alike, when their last block has come. Pure and bounded.
"""

from collections import OrderedDict
from collections.abc import Collection

import msgspec

from engine.messages import WorkerId

MAX_PAIRS = 1024  # of workers; the least recently used pair is dropped


class MovedKv(msgspec.Struct):
    """KV that one worker pulled from another one."""

    source: WorkerId
    sink: WorkerId
    num_transfers: int = 0
    num_bytes: int = 0
    timed_bytes: int = 0  # bytes of the transfers whose time is known
    seconds: float = 0.0  # that these were on the way
    exposed_s: float = 0.0  # seconds of transfers that prefill did not hide
    last_s: float = 0.0  # when the latest one ended


class PairTransfers:
    """The sums of all pairs."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[WorkerId, WorkerId], MovedKv] = OrderedDict()

    @property
    def pairs(self) -> Collection[MovedKv]:
        """A record for each pair, the pair that was used last at the end. Read only."""
        return self._pairs.values()

    def record(
        self,
        source: WorkerId,
        sink: WorkerId,
        num_bytes: int,
        now_s: float,
        *,
        seconds: float = 0.0,
        exposed_s: float = 0.0,
    ) -> None:
        """Adds a transfer that has ended."""
        moved = self._pairs.get((source, sink))
        if moved is None:
            moved = self._pairs[source, sink] = MovedKv(source, sink)
            if len(self._pairs) > MAX_PAIRS:
                self._pairs.popitem(last=False)
        else:
            self._pairs.move_to_end((source, sink))
        moved.num_transfers += 1
        moved.num_bytes += num_bytes
        moved.timed_bytes += num_bytes if seconds else 0
        moved.seconds += seconds
        moved.exposed_s += exposed_s
        moved.last_s = now_s
