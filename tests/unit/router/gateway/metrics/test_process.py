"""The metrics of a gateway process."""

import asyncio

from engine.clock import MonotonicClock
from router.gateway.metrics.process import ProcessMeter


def test_a_process_reports_its_memory_and_cpu():
    names = {family.name for family in ProcessMeter(MonotonicClock()).families()}
    assert names >= {
        "process_cpu_seconds",
        "process_resident_memory_bytes",
        "process_open_fds",
        "baton_event_loop_lag_seconds",
    }


def test_the_lag_of_the_loop_is_sampled_until_it_is_closed(monkeypatch):
    monkeypatch.setattr("router.gateway.metrics.process.LAG_EVERY_S", 0.0)
    meter = ProcessMeter(MonotonicClock())

    def num_samples() -> float:
        lag = next(family for family in meter.families() if "lag" in family.name)
        return next(s.value for s in lag.samples if s.name.endswith("_count"))

    async def run() -> None:
        meter.open()
        async with asyncio.timeout(5):
            while not num_samples():
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0)
        await meter.close()

    asyncio.run(run())
    assert num_samples() >= 1
