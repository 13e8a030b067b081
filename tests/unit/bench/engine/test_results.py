"""The results that `baton bench engine` computes from its samples."""

from dataclasses import astuple, replace

import pytest

from bench.common.roofline import (
    Ceilings,
    ModelMemory,
    ModelSize,
    decode_work,
    least_time_s,
)
from bench.engine.jobs import EngineJob
from bench.engine.plan import jobs_of
from bench.engine.results import (
    CeilingExceeded,
    EngineMeasured,
    JobTime,
    OurMemory,
    Repetition,
    check_limits,
    limit_s,
    results,
    step_bytes,
    work_of,
)
from tests.kits.bench.engine import PLAN

SIZE = ModelSize(num_layers=2, attention_size=16, layer_weights=1000, head_weights=100)
MEMORY = ModelMemory(weights_bytes=1100.0, kv_token_bytes=10.0)
CEILINGS = Ceilings(read_bytes_per_s=1e6, fp32_flops_per_s=1e7, int8_flops_per_s=4e7)


def sample(seconds, tokens=(), outside_s=None, ceilings=None):
    return JobTime(seconds, tuple(tokens), outside_s, ceilings)


def ours(seconds, tokens):
    return sample(seconds, tokens, 0.1, CEILINGS)


def measured(**changes):
    """Returns two repetitions: a job takes 2 and 4 s in fp32, half of that in int8, and 6 s on
    peers."""
    repetitions = []
    for slow in (1, 2):
        samples = {}
        for job in jobs_of(PLAN):
            tokens = [1, 2, 3, 4] if job.name == "prefill" else []
            samples["fp32", job.name] = ours(2.0 * slow, tokens)
            samples["int8", job.name] = ours(1.0 * slow, [*tokens[:3], 9][: len(tokens)])
            if job.for_peers:
                samples["transformers", job.name] = sample(6.0, tokens)
                samples["llamacpp_q8_0", job.name] = sample(6.0, tokens)
        repetitions.append(Repetition(samples))
    memory = OurMemory(MEMORY, resident_bytes=2**30, load_s=1.5, warm_up_s=0.5)
    both = {"fp32": memory, "int8": memory}
    found = EngineMeasured(SIZE, both, tuple(repetitions), (0.01, 0.02))
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
        expected = job.num_tokens / limit_s(job, SIZE, MEMORY, CEILINGS, ("int8", "int8"))
        assert result.limit == pytest.approx(expected)
        assert result.of_limit == pytest.approx(result.value / expected)


def test_limits_are_of_the_highest_peaks_and_of_the_bandwidth_beside_each_run():
    complete = measured()
    first, second = complete.repetitions
    half = Ceilings(*(peak / 2 for peak in astuple(CEILINGS)))
    slower = {key: replace(s, ceilings=s.ceilings and half) for key, s in second.samples.items()}
    throttled = replace(complete, repetitions=(first, replace(second, samples=slower)))
    found, whole = by_name(results(PLAN, throttled)), by_name(results(PLAN, complete))
    for name, share in (("prefill_compute/fp32", 1.0), ("decode_b1_bandwidth/fp32", 0.75)):
        assert found[name].limit == pytest.approx(share * whole[name].limit)


def test_a_run_without_ceilings_has_no_limits():
    complete = measured()
    bare = [
        Repetition({key: replace(s, ceilings=None) for key, s in r.samples.items()})
        for r in complete.repetitions
    ]
    found = results(PLAN, replace(complete, repetitions=tuple(bare)))
    assert all(result.limit is None for result in found)
    check_limits(found)


def test_a_result_above_its_limit_fails_the_run():
    first, _ = measured().repetitions
    slow = {key: replace(s, seconds=1e6) for key, s in first.samples.items()}
    check_limits(results(PLAN, measured(repetitions=(Repetition(slow),))))
    wrong = slow | {("int8", "prefill"): replace(first.samples["int8", "prefill"], seconds=1e-9)}
    with pytest.raises(CeilingExceeded, match=r"prefill/int8 \(\d+%\)") as raised:
        check_limits(results(PLAN, measured(repetitions=(Repetition(wrong),))))
    assert "fp32" not in str(raised.value)


def test_ceilings_are_read_over_as_many_bytes_as_a_step_reads():
    prefill, decode = (
        EngineJob("p", 2, 10, 0, for_peers=True),
        EngineJob("d", 2, 10, 3, for_peers=True),
    )
    assert step_bytes(prefill, SIZE, MEMORY) == 1100 + 10 * 20
    assert step_bytes(decode, SIZE, MEMORY) == 1100 + 10 * 2 * 13


def test_the_limit_of_decoding_sums_steps_of_growing_contexts():
    job = EngineJob("decode", 2, 10, 3, for_peers=False)
    steps = [decode_work(SIZE, MEMORY, [context] * 2) for context in (11, 12, 13)]
    expected_s = sum(least_time_s(step, CEILINGS, "fp32", "fp32") for step in steps)
    assert limit_s(job, SIZE, MEMORY, CEILINGS, ("fp32", "fp32")) == pytest.approx(expected_s)
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


def test_overhead_is_the_share_of_the_steps_outside_the_forward_pass():
    found = by_name(results(PLAN, measured()))
    assert found["decode_b32_overhead/fp32"].runs == pytest.approx((5.0, 2.5))
    assert found["decode_b32_overhead/fp32"].unit == "%"


def test_engines_are_checked_to_choose_the_same_tokens():
    found = by_name(results(PLAN, measured()))
    assert found["same_tokens/transformers"].value == 100
    assert found["same_tokens/int8"].value == 75
    assert "same_tokens/fp32" not in found
