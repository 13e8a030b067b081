"""Runs `bench interference` once, with real deployments of a tiny model."""

import pytest

from bench.client.answers import Failure
from bench.common.command import say_nothing
from bench.lab.interference import ARMS, IDLE, InterferenceStudy, promises, results, warnings

pytestmark = [pytest.mark.torch, pytest.mark.long]

STUDY = InterferenceStudy(
    shape="tiny", streams=2, stream_input=8, stream_output=512, load_input=256, repeat=1
)


def test_all_arms_are_measured_on_real_deployments():
    runs = STUDY.runs(say_nothing)
    assert {run.arm for run in runs} == set(ARMS)
    for run in runs:
        assert [stream.num_output_tokens for stream in run.streams] == [512, 512]
        assert run.gateway_cpu_s > 0
        assert not any(isinstance(one, Failure) for one in run.others)
        lengths = set() if run.arm == IDLE else {256}
        assert {prompt.num_prompt_tokens for prompt in run.prompts} == lengths
    found = {result.name: result.value for result in results(runs)}
    assert all(found[f"itl_p99/{arm}"] > 0 for arm in ARMS)
    assert len(promises(results(runs))) == 2
    assert not [line for line in warnings(runs) if "cached" in line]
