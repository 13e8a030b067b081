"""`bench gateway` with real processes, and as little load as says something."""

from dataclasses import replace

from bench.gateway.plan import BARE, OURS, WRITES, plan_of, quick
from bench.gateway.results import results
from bench.gateway.run import measure


def test_all_servers_are_measured_with_all_loads():
    plan = quick(plan_of(prompt_words=4, num_tokens=8, num_repeats=1, peers=(), seed=0))
    loads = tuple(replace(load, num_streams=8) for load in plan.loads)
    plan = replace(plan, loads=loads)
    measured = measure(plan)
    for server in (OURS, BARE, WRITES):
        for load in (plan.serial, *loads):
            [run] = measured.of(server, load)
            assert len(run.ttft_s) == load.num_requests
            if server == OURS:  # begins with an event that gives the role, and joins late tokens
                most = load.total_tokens + load.num_requests
                assert 2 * load.num_requests <= run.num_events <= most
            else:
                assert run.num_events == load.total_tokens
            if load is not plan.serial:
                assert run.wall_s >= load.pace_s * (load.num_tokens - 2)
    found = {result.name: result.value for result in results(plan, measured)}
    assert found["gateway/added_ttft_ms"] > 0
    assert found["gateway/tok_per_cpu_s"] > 0
