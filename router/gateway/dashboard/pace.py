"""Measures the pace of running answers once a second, without an event for each token.

An answer *stalls* if no token has come for `STALL_S`. The stall ends at the first look that finds
new tokens, so its length is known to about a second.
"""

from collections.abc import Mapping
from typing import NamedTuple

from engine.messages import RequestId
from router.gateway.dashboard.records import RunningAnswer, RunningChoice, TimeSpread
from router.gateway.dashboard.segments import Stall
from router.machine.requests import Request

STALL_S = 1.5
MAX_STALLS = 32  # the latest stalls of an answer are kept


class PaceSeen(NamedTuple):
    """The result of one look."""

    ttft: TimeSpread | None
    tpot: TimeSpread | None
    waiting_s: float
    num_stalled: int


class _Progress:
    """The state of one running answer at the last look."""

    __slots__ = ("is_stalled", "looked_s", "num_tokens", "stalls")

    def __init__(self, looked_s: float, num_tokens: int) -> None:
        self.looked_s = looked_s
        self.num_tokens = num_tokens
        self.is_stalled = False
        self.stalls: list[Stall] = []

    def check(self, answer: RunningAnswer, now_s: float) -> float:
        """Returns the seconds for each token since the last look; without tokens, the silence."""
        num_tokens, silent_s = answer.num_tokens, now_s - answer.last_s
        num_new, lasted_s = num_tokens - self.num_tokens, now_s - self.looked_s
        if silent_s >= STALL_S:
            if not self.is_stalled:
                began_s = answer.last_s - answer.request.received_s
                self.stalls = [*self.stalls[1 - MAX_STALLS :], (began_s, began_s)]
            self.stalls[-1] = (self.stalls[-1][0], now_s - answer.request.received_s)
        self.is_stalled = silent_s >= STALL_S
        self.looked_s, self.num_tokens = now_s, num_tokens
        return lasted_s / num_new if num_new else max(silent_s, lasted_s)


class Paces:
    """The progress of running answers, and the times to first token since the last look."""

    def __init__(self) -> None:
        self._progress: dict[RequestId, _Progress] = {}
        self._ttfts_s: list[float] = []  # answers that began and ended since the last look

    def check(self, running: Mapping[RequestId, RunningChoice], now_s: float) -> PaceSeen:
        """Looks at all answers that run. Batches do not count."""
        ttfts_s, self._ttfts_s = self._ttfts_s, []
        tpots_s: list[float] = []
        waiting_s, num_stalled = 0.0, 0
        for request_id, (_, _, answer) in running.items():
            request = answer.request
            if not answer.num_tokens:
                if not request.is_background:
                    waiting_s = max(waiting_s, now_s - request.received_s)
                continue
            known = self._progress.get(request_id)
            if known is None:
                self._progress[request_id] = _Progress(now_s, answer.num_tokens)
                if answer.timeline is not None and not request.is_background:
                    ttfts_s.append(answer.timeline.ttft_s)
                continue
            pace_s = known.check(answer, now_s)
            num_stalled += known.is_stalled
            if not request.is_background:
                tpots_s.append(pace_s)
        return PaceSeen(spread_of(ttfts_s), spread_of(tpots_s), waiting_s, num_stalled)

    def stalls_of(self, request_id: RequestId) -> list[Stall]:
        """The times in which a running answer stood still, in seconds since its request."""
        known = self._progress.get(request_id)
        return [] if known is None else known.stalls

    def end(self, request: Request, ttft_s: float | None) -> list[Stall]:
        """Forgets an answer that is over, and returns its stalls."""
        known = self._progress.pop(request.request_id, None)
        if known is not None:
            return known.stalls
        if ttft_s is not None and not request.is_background:
            self._ttfts_s.append(ttft_s)
        return []


def spread_of(times_s: list[float]) -> TimeSpread | None:
    """The median and the 95th percentile; None without times."""
    if not times_s:
        return None
    ordered, last = sorted(times_s), len(times_s) - 1
    return TimeSpread(ordered[last // 2], ordered[round(last * 0.95)])
