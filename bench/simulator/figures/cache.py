"""A prefix cache that never forgets, and how much of each prompt it would have held."""

from collections.abc import Iterable, Iterator

from bench.simulator.traces import Trace, TraceRequest

PAGE_BITS = 16  # ids of one page


class InfiniteCache:
    """The blocks of all requests so far: one bit each, in pages of neighbouring ids."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._pages: dict[int, bytearray] = {}
        self._num_hit = self._num_tokens = 0  # prompt tokens

    @property
    def hits(self) -> float:
        """The share of prompt tokens that it held when they came."""
        return self._num_hit / self._num_tokens if self._num_tokens else 0.0

    def see(self, request: TraceRequest) -> None:
        """Counts the hits of a request, then holds its full blocks.

        A prompt's last token never hits, since it must be computed for the answer to begin.
        """
        usable = (request.input_len - 1) // self._block_tokens
        leading = 0
        for block_id in request.block_ids[:usable]:
            if not self._holds(block_id):
                break
            leading += 1
        self._num_hit += leading * self._block_tokens
        self._num_tokens += request.input_len
        for block_id in request.block_ids[leading : request.input_len // self._block_tokens]:
            self._add(block_id)

    def watch(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Passes requests on, and sees each of them."""
        for request in requests:
            self.see(request)
            yield request

    def _holds(self, block_id: int) -> bool:
        page = self._pages.get(block_id >> PAGE_BITS)
        at = block_id & (1 << PAGE_BITS) - 1
        return page is not None and bool(page[at >> 3] & 1 << (at & 7))

    def _add(self, block_id: int) -> None:
        page = self._pages.setdefault(block_id >> PAGE_BITS, bytearray(1 << PAGE_BITS - 3))
        at = block_id & (1 << PAGE_BITS) - 1
        page[at >> 3] |= 1 << (at & 7)


def infinite_cache_hits(trace: Trace) -> float:
    """Returns the share of prompt tokens that an infinite cache would hold."""
    cache = InfiniteCache(trace.block_tokens)
    for request in trace.requests:
        cache.see(request)
    return cache.hits
