"""The resources of this gateway process: CPU, memory, open files, and the lag of its event loop.

CPU, memory and open files are collected by prometheus_client, under the usual names (`process_…`),
when Prometheus scrapes. The lag is sampled: a task sleeps for a fixed time, and measures how late
it wakes up. A request may be delayed by the lag at each step, in addition to the workers' time.
"""

import asyncio
from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from engine.clock import Clock
from router.gateway.metrics.series import LAG_BUCKETS_S, Histogram

LAG_EVERY_S = 0.25


class ProcessMeter:
    """Measures one process and its event loop, from `open` to `close`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process = ProcessCollector(registry=None)
        self._lag = Histogram(
            "baton_event_loop_lag_seconds", "Delay of a wake-up of the event loop", LAG_BUCKETS_S
        )
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Starts to sample the lag of the running loop."""
        self._task = asyncio.create_task(self._sample())

    async def close(self) -> None:
        """Stops sampling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def families(self) -> Iterator[Metric]:
        """Yields the metrics of this process."""
        yield from self._process.collect()
        yield from self._lag.collect()

    async def _sample(self) -> None:
        never = asyncio.get_running_loop().create_future()
        while True:
            due_s = self._clock.now_s() + LAG_EVERY_S
            await asyncio.wait([never], timeout=LAG_EVERY_S)
            self._lag.observe(max(self._clock.now_s() - due_s, 0.0))
