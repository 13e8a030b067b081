"""`bench interference` with real deployments of a tiny model, once."""

import pytest

from bench.interference.plan import InterferencePlan, InterferenceRequests, PoolSetting
from bench.interference.results import promises, results, warnings
from bench.interference.run import measure

pytestmark = [pytest.mark.torch, pytest.mark.long]

PLAN = InterferencePlan(
    "tiny",
    streams=InterferenceRequests(2, 8, 512),
    load=InterferenceRequests(1, 256, 1),
    num_repeats=1,
)


def test_all_settings_are_measured_on_real_deployments():
    runs = measure(PLAN)
    assert {run.setting for run in runs} == set(PoolSetting)
    for run in runs:
        assert [stream.num_output_tokens for stream in run.streams] == [512, 512]
        assert run.gateway_cpu_s > 0
        assert run.failures == ()
        has_load = run.setting is not PoolSetting.IDLE
        assert bool(run.prompts) == has_load
        assert {prompt.num_prompt_tokens for prompt in run.prompts} == (
            {256} if has_load else set()
        )
    found = {result.name: result.value for result in results(runs)}
    assert all(found[f"itl_p99/{setting}"] > 0 for setting in PoolSetting)
    assert len(promises(results(runs))) == 2
    assert not [line for line in warnings(runs) if "cached" in line]
