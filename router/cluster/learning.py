"""Learns from the requests of this router: lengths of answers, conversations, load, moved KV. Pure.

`AnswerLengths` predicts lengths. A client may bound the length of its answer; without a bound, only
the context limits it. Past answers with a similar bound predict the length better than the bound
itself. Memory is reserved for nearly the longest of them. The remaining length of a running answer
is predicted from past answers that became longer than it is now. Bounds are similar if they have
the same number of binary digits.

`Conversations` finds prompts that continue a conversation. The next prompt of a conversation
repeats the last prompt and adds an answer and a question. So a prompt continues an earlier prompt
if it begins with all full blocks of the earlier prompt, and if these are most of the new prompt. In
many loads, such a prompt is more likely to be continued again than the first prompt of a
conversation, or than a prompt that adds much. While this holds, the blocks of such a prompt are
*likely reused*: workers keep them longer (`engine.worker.blocks`). Only the hash of a prompt's last
full block is remembered, as it covers all blocks before.

`PromptLoad` measures how busy the workers that prefill were lately, and how much their caches
saved. `PairTransfers` counts the KV that moved between each pair of workers. Hand-overs, prefixes
and moves are all counted when their last block has arrived.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from itertools import accumulate
from math import exp

import msgspec

from engine.messages import WorkerId
from engine.worker.blocks import BlockHash

MEMORY = 256  # number of latest answers that are remembered, per kind
ENOUGH = 16  # with fewer answers, each is predicted to reach its bound
NEARLY_ALL = 0.95  # share of answers for which the reserved memory suffices
REFRESH_EVERY = 16  # number of answers between two sorts, as sorting costs time


class AnswerLengths:
    """Observed lengths of answers in tokens, by their bounds."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}

    def observe(self, max_tokens: int, num_tokens: int) -> None:
        """Records that an answer with the bound `max_tokens` ended with `num_tokens`."""
        kind = self._kinds.get(max_tokens.bit_length())
        if kind is None:
            kind = self._kinds[max_tokens.bit_length()] = _Kind()
        kind.observe(num_tokens)

    def nearly_longest(self, max_tokens: int) -> int:
        """Returns a length in tokens that nearly no answer with this bound exceeds."""
        known = self._known(max_tokens)
        if not known:
            return max_tokens
        return min(known[min(int(len(known) * NEARLY_ALL), len(known) - 1)], max_tokens)

    def mean(self, max_tokens: int) -> float:
        """Returns the mean length in tokens of answers with this bound."""
        return self.left(max_tokens, 0)

    def left(self, max_tokens: int, so_far: int) -> float:
        """Returns the mean number of remaining tokens of an answer that has `so_far` tokens."""
        known = self._known(max_tokens)
        longer = len(known) - bisect_right(known, so_far)
        if not longer:
            return float(max(max_tokens - so_far, 1))
        total = self._kinds[max_tokens.bit_length()].sums[longer]
        return min(total / longer - so_far, float(max(max_tokens - so_far, 1)))

    def survival(self, max_tokens: int, so_far: int, more: float) -> float:
        """Returns the share of answers with `so_far` tokens that reach `more` further tokens."""
        if so_far + more >= max_tokens:
            return 0.0
        known = self._known(max_tokens)
        longer = len(known) - bisect_right(known, so_far)
        if not longer:
            return 1.0
        return (len(known) - bisect_right(known, so_far + more)) / longer

    def _known(self, max_tokens: int) -> list[int]:
        kind = self._kinds.get(max_tokens.bit_length())
        return [] if kind is None else kind.ordered


class _Kind:
    def __init__(self) -> None:
        self.ordered: list[int] = []  # sorted lengths; empty with fewer than ENOUGH answers
        self.sums: list[int] = []  # at index n: the sum of the n longest lengths
        self._latest: deque[int] = deque(maxlen=MEMORY)
        self._num_new = 0

    def observe(self, num_tokens: int) -> None:
        self._latest.append(num_tokens)
        self._num_new += 1
        if len(self._latest) >= ENOUGH and (self._num_new >= REFRESH_EVERY or not self.ordered):
            self._num_new = 0
            self.ordered = sorted(self._latest)
            self.sums = list(accumulate(reversed(self.ordered), initial=0))


MAX_PROMPTS = 65_536  # maximum number of remembered prompts; then all counts are halved
MOST = 0.7  # minimum share of a prompt that an earlier prompt covers
ENOUGH_PROMPTS = 64  # minimum number of continuing prompts for a prediction
FOLLOWED_MORE = 1.3  # factor over the share of other prompts that were continued


class Conversations:
    """The latest prompts of this gateway, and how often they were continued."""

    def __init__(self) -> None:
        # Hashes of prompts' ends, oldest first. True: the prompt continued another one. None: the
        # prompt itself was continued.
        self._ends: OrderedDict[BlockHash, bool | None] = OrderedDict()
        self._num = [0.0, 0.0]  # number of prompts: other ones, and those that continue another
        self._num_followed = [0.0, 0.0]  # number of these prompts that were continued

    def record(self, hashes: Sequence[BlockHash]) -> bool:
        """Records a prompt by its full blocks. Returns True if these are likely reused."""
        if not hashes:
            return False
        ends, goes_on = self._ends, False
        if not ends.keys().isdisjoint(hashes):
            at = next(i for i in reversed(range(len(hashes))) if hashes[i] in ends)
            goes_on = at >= int(MOST * len(hashes))
            if (went_on := ends[hashes[at]]) is not None:
                self._num_followed[went_on] += 1
                ends[hashes[at]] = None
        ends[hashes[-1]] = goes_on
        ends.move_to_end(hashes[-1])
        if len(ends) > MAX_PROMPTS:
            ends.popitem(last=False)
        self._num[goes_on] += 1
        if sum(self._num) > MAX_PROMPTS:
            self._num = [number / 2 for number in self._num]
            self._num_followed = [number / 2 for number in self._num_followed]
        return goes_on and self._are_followed_more()

    def _are_followed_more(self) -> bool:
        """True if prompts that continue another prompt were continued more often than others."""
        (others, went_on), (others_followed, followed) = self._num, self._num_followed
        return (
            went_on >= ENOUGH_PROMPTS
            and followed * others >= FOLLOWED_MORE * others_followed * went_on
        )


MEMORY_S = 5.0  # seconds after which the weight of a prompt has fallen to 1/e
KEPT = 0.98  # factor on the weight of all earlier prompts, for each new prompt


class PromptLoad:
    """The seconds of recently placed prompts. Older prompts have a lower weight."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._noted_s = 0.0
        self._compute_s = self._num_computed = self._num_cached = 0.0  # decaying sums

    def record(self, seconds: float, now_s: float, *, num_computed: int, num_cached: int) -> None:
        """Adds a prompt: `num_computed` tokens take `seconds`, `num_cached` tokens are cached."""
        self._seconds = self._left(now_s) + seconds
        self._noted_s = now_s
        self._compute_s = KEPT * self._compute_s + seconds
        self._num_computed = KEPT * self._num_computed + num_computed
        self._num_cached = KEPT * self._num_cached + num_cached

    @property
    def cached_token_s(self) -> float:
        """Returns the seconds saved per cached token, times the share of tokens found cached."""
        if self._num_computed <= 0.0:
            return 0.0
        found = self._num_cached / (self._num_cached + self._num_computed)
        return found * self._compute_s / self._num_computed

    def share(self, num_workers: int, now_s: float) -> float:
        """Returns the share of time in which `num_workers` workers computed prompts.

        A share above 1 means that prompts had to queue.
        """
        return self._left(now_s) / (MEMORY_S * max(num_workers, 1))

    def _left(self, now_s: float) -> float:
        return self._seconds * exp((self._noted_s - now_s) / MEMORY_S)


MAX_PAIRS = 1024  # maximum number of pairs; the least recently used pair is removed


class MovedKv(msgspec.Struct):
    """The KV that one worker has pulled from another worker."""

    source: WorkerId
    sink: WorkerId
    num_transfers: int = 0
    num_bytes: int = 0
    timed_bytes: int = 0  # number of bytes whose transfer time is known
    seconds: float = 0.0  # total transfer time of these bytes
    exposed_s: float = 0.0  # the part of this time that was not hidden behind prefill
    last_s: float = 0.0  # time at which the last transfer ended


class PairTransfers:
    """The transfer totals of all pairs of workers."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[WorkerId, WorkerId], MovedKv] = OrderedDict()

    @property
    def pairs(self) -> Collection[MovedKv]:
        """The totals of each pair, the last used pair last. Read only."""
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
        """Adds a finished transfer to the totals of its pair."""
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
