"""The figures that `baton bench engine` makes of its samples."""

from dataclasses import replace

import pytest

from bench.common.report import Missing
from bench.common.roofline import (
    Ceilings,
    ModelMemory,
    ModelSize,
    decode_work,
    least_time_s,
)
from bench.engine.plan import (
    EngineJob,
    jobs_of,
)
from bench.engine.results import (
    EngineMeasured,
    JobTime,
    OurMemory,
    Repetition,
    limit_s,
    results,
    warnings,
    work_of,
)
from tests.kits.bench.engine import PLAN

SIZE = ModelSize(num_layers=2, attention_size=16, layer_weights=1000, head_weights=100)
MEMORY = ModelMemory(weights_bytes=1100.0, kv_token_bytes=10.0)
CEILINGS = Ceilings(read_bytes_per_s=1e6, fp32_flops_per_s=1e7, int8_flops_per_s=4e7)


def sample(seconds, tokens=(), outside_s=None):
    return JobTime(seconds, tuple(tokens), outside_s)


def measured(**changes):
    """Two repetitions: fp32 takes 2 and 4 s for each job, int8 half, peers 6 s."""
    repetitions = []
    for slow in (1, 2):
        samples = {}
        for job in jobs_of(PLAN):
            tokens = [1, 2, 3, 4] if job.name == "prefill" else []
            samples["fp32", job.name] = sample(2.0 * slow, tokens, outside_s=0.1)
            samples["int8", job.name] = sample(1.0 * slow, [*tokens[:3], 9][: len(tokens)], 0.1)
            if job.for_peers:
                samples["transformers", job.name] = sample(6.0, tokens)
                samples["llamacpp_q8_0", job.name] = sample(6.0, tokens)
        repetitions.append(Repetition(samples, CEILINGS))
    ours = OurMemory(MEMORY, resident_bytes=2**30, load_s=1.5, warm_up_s=0.5)
    found = EngineMeasured(SIZE, {"fp32": ours, "int8": ours}, tuple(repetitions), (0.01, 0.02))
    return replace(found, **changes)


def by_name(found):
    return {result.name: result for result in found}


def test_speeds_are_medians_in_tokens_a_second():
    found = by_name(results(PLAN, measured()))
    assert found["prefill/fp32"].runs == (2048.0, 1024.0)
    assert found["prefill/fp32"].value == 1536.0
    assert found["decode_b1/int8"].runs == (32.0, 16.0)
    assert {result.unit for name, result in found.items() if name.startswith("prefill/")} == {
        "tokens/s"
    }


def test_each_speed_has_the_roofline_as_its_limit():
    found = by_name(results(PLAN, measured()))
    for job in jobs_of(PLAN):
        result = found[f"{job.name}/int8"]
        expected = job.num_tokens / limit_s(job, SIZE, MEMORY, CEILINGS, "int8")
        assert result.limit == pytest.approx(expected)
        assert result.of_limit == pytest.approx(result.value / expected)


def test_the_limit_of_decoding_sums_steps_of_growing_contexts():
    job = EngineJob("decode", 2, 10, 3, for_peers=False)
    steps = [decode_work(SIZE, MEMORY, [context] * 2) for context in (11, 12, 13)]
    expected_s = sum(least_time_s(step, CEILINGS, "fp32") for step in steps)
    assert limit_s(job, SIZE, MEMORY, CEILINGS, "fp32") == pytest.approx(expected_s)
    assert work_of(job, SIZE, MEMORY).read_bytes == 3 * 1100 + 10 * 2 * (11 + 12 + 13)


def test_rates_say_how_much_of_each_resource_was_used():
    found = by_name(results(PLAN, measured()))
    job = jobs_of(PLAN)[1]
    work = work_of(job, SIZE, MEMORY)
    assert found["decode_b32_compute/fp32"].runs[0] == pytest.approx(work.flops / 2 / 1e9)
    assert found["decode_b32_bandwidth/fp32"].runs[0] == pytest.approx(work.read_bytes / 2 / 1e9)
    assert found["decode_b32_bandwidth/fp32"].limit == pytest.approx(1e6 / 1e9)
    assert "prefill_bandwidth/fp32" not in found
    assert found["decode_b32_compute/fp32"].limit == pytest.approx(1e7 / 1e9)


def test_comparable_peers_are_compared_by_medians():
    found = by_name(results(PLAN, measured()))
    assert set(found["prefill/fp32"].peers) == {"transformers"}
    assert set(found["prefill/int8"].peers) == {"transformers", "llamacpp_q8_0"}
    peer = found["prefill/int8"].peers["llamacpp_q8_0"]
    assert peer.value == pytest.approx(4096 / 6)
    assert peer.ratio == pytest.approx(found["prefill/int8"].value / peer.value)
    assert found["decode_b8_ctx128/fp32"].peers == {}


def test_peer_that_failed_midway_is_compared_by_its_finished_jobs():
    complete = measured()
    first, second = complete.repetitions
    rest = {key: s for key, s in second.samples.items() if key[0] != "transformers"}
    cut = replace(complete, repetitions=(first, replace(second, samples=rest)))
    found = by_name(results(PLAN, cut))
    assert found["prefill/fp32"].peers["transformers"].value == pytest.approx(4096 / 6)


def test_overhead_is_the_share_of_the_steps_outside_the_forward_pass():
    found = by_name(results(PLAN, measured()))
    assert found["decode_b32_overhead/fp32"].runs == pytest.approx((5.0, 2.5))
    assert found["decode_b32_overhead/fp32"].unit == "%"


def test_a_model_of_unknown_size_has_speeds_without_limits():
    found = by_name(results(PLAN, measured(size=None)))
    assert found["prefill/fp32"].limit is None
    assert found["prefill/fp32"].peers
    assert not any("_compute" in name for name in found)


def test_engines_are_checked_to_choose_the_same_tokens():
    found = by_name(results(PLAN, measured()))
    assert found["same_tokens/transformers"].value == 100
    assert found["same_tokens/int8"].value == 75
    assert "same_tokens/fp32" not in found


def test_warnings_name_failed_peers_and_a_busy_machine():
    assert warnings(measured()) == []
    failed = Missing("vllm", "no answer in 300 s")
    lines = warnings(measured(failed=(failed,), background=(0.1, 0.2)))
    assert lines[0] == "vllm was not measured: no answer in 300 s"
    assert "20% of the CPU" in lines[1]


def test_background_cpu_is_left_out_without_a_reading():
    assert by_name(results(PLAN, measured()))["background/cpu"].runs == (1.0, 2.0)
    found = by_name(results(PLAN, measured(background=())))
    assert "background/cpu" not in found
    assert found["ceiling/int8"].value == pytest.approx(0.04)
