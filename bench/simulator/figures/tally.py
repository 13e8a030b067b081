"""What ended requests add up to: columns of latencies, and counts."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from math import isnan, nan

from bench.client.load import SloBounds
from bench.simulator.cluster import SimulatedRequest
from bench.simulator.figures.latencies import latencies_of


class RequestTally:
    """The results of all requests added so far. Columns hold finished answers, in one order."""

    def __init__(self) -> None:
        self.number = 0  # requests of all outcomes
        self.ttft_s = array("d")
        self.e2e_s = array("d")
        self._tpot_s = array("d")  # not a number for one token
        self._tbt_s = array("d")  # the same
        self.kinds: Counter[str] = Counter()  # outcomes by kind
        self.num_retried = 0
        self.num_input_tokens = 0  # in all prompts
        self.num_prefilled_tokens = 0  # in prompts with a first token, cached tokens included
        self.num_cached_tokens = 0  # among the prefilled tokens
        self.num_output_tokens = 0

    @classmethod
    def of(cls, records: Iterable[SimulatedRequest]) -> "RequestTally":
        """Returns the tally of these requests."""
        tally = cls()
        for record in records:
            tally.add(record)
        return tally

    def add(self, record: SimulatedRequest) -> None:
        """Adds a request that has ended."""
        self.number += 1
        self.kinds[type(record.outcome).__name__.lower()] += 1
        asked, timeline, num_tokens = record.asked, record.timeline, len(record.times_s)
        self.num_input_tokens += asked.input_len
        self.num_output_tokens += num_tokens
        if timeline is not None:
            self.num_retried += timeline.attempts > 1
        if timeline is not None and num_tokens:
            self.num_prefilled_tokens += asked.input_len
            self.num_cached_tokens += timeline.num_cached_tokens
        latencies = latencies_of(record)
        if latencies is not None:
            self.ttft_s.append(latencies.ttft_s)
            self.e2e_s.append(latencies.e2e_s)
            self._tpot_s.append(nan if latencies.tpot_s is None else latencies.tpot_s)
            self._tbt_s.append(nan if latencies.tbt_s is None else latencies.tbt_s)

    @property
    def tpot_s(self) -> list[float]:
        """TPOT of each answer of more than one token."""
        return [value_s for value_s in self._tpot_s if not isnan(value_s)]

    def num_within(self, slo: SloBounds) -> int:
        """Counts the answers with TTFT and TPOT inside the bounds."""
        return sum(map(slo.hold, self.ttft_s, _or_none(self._tpot_s)))

    def num_effective(self, slo: SloBounds) -> int:
        """Counts the answers with TTFT and the mean of the longest gaps inside the bounds."""
        return sum(map(slo.hold, self.ttft_s, _or_none(self._tbt_s)))


def _or_none(column: Iterable[float]) -> Iterator[float | None]:
    return (None if isnan(value_s) else value_s for value_s in column)
