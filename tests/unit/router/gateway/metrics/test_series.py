"""The usage of API keys, by name and bounded in number, and the resources of the process."""

import asyncio

from engine.clock import MonotonicClock
from router.gateway.metrics.process import ProcessMeter
from router.gateway.metrics.series import OTHER, KeyUsage
from tests.kits.router.gateway import LENGTH, FakeRouter, make_app, post, samples, tokens


def series(usage: KeyUsage, name: str) -> dict[str, float]:
    families = {family.name: family for family in usage.families()}
    return {sample.labels["key"]: sample.value for sample in families[name].samples}


def test_keys_beyond_the_bound_share_a_series():
    usage = KeyUsage(max_shown=2)
    for key in ("a", "b", "c", "d", "a"):
        usage.of(key).num_requests += 1
    assert series(usage, "baton_key_requests") == {"a": 2, "b": 1, OTHER: 2}
    assert usage.of("e") is usage.of("f")


def test_a_request_counts_as_the_use_of_its_key():
    router = FakeRouter([tokens("ab"), tokens("c", outcome=LENGTH)])
    app = make_app(router)
    post(app, "/v1/completions", {"prompt": "yo", "n": 2})
    post(app, "/v1/completions", {"prompt": "yo", "temperature": "hot"})  # an invalid request
    found = samples(app)
    anonymous = ("key", "")
    assert found["baton_key_requests_total"] == {(anonymous,): 1.0}
    assert found["baton_key_tokens_total"] == {
        (anonymous, ("kind", "prompt")): 2.0,
        (anonymous, ("kind", "generation")): 6.0,
    }


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
