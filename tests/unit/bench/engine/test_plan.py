"""The jobs of `baton bench engine`, and options that it must refuse."""

from dataclasses import replace

from bench.engine.jobs import EngineJob, prompts_of
from bench.engine.plan import is_comparable, jobs_of, kv_format_of, warm_up_jobs
from engine.config import WeightFormat
from engine.layout import KVFormat
from tests.kits.bench.engine import PLAN


def test_the_jobs_for_peers_are_those_that_the_goals_name():
    named = [job for job in jobs_of(PLAN) if job.for_peers]
    assert named == [
        EngineJob("prefill", 8, 512, 0, for_peers=True),
        EngineJob("decode_b32", 32, 8, 32, for_peers=True),
        EngineJob("decode_b1", 1, 8, 32, for_peers=True),
    ]
    assert [job.num_tokens for job in named] == [4096, 1024, 32]


def test_peers_do_not_run_the_decode_grid():
    names = [job.name for job in jobs_of(PLAN) if not job.for_peers]
    assert names == ["prefill_len2048", "decode_b8_ctx2048", "decode_b8_ctx128"]


def test_quick_plan_keeps_the_jobs_for_peers():
    few = PLAN.quick()
    assert few.repeat == 1
    assert jobs_of(few)[:3] == jobs_of(PLAN)[:3]
    assert [job.name for job in jobs_of(few)[3:]] == ["decode_b8_ctx128"]
    alone = replace(PLAN, peer=None)
    plans = (alone.quick(), alone)
    work = [sum(job.kv_tokens for job in warm_up_jobs(plan)) for plan in plans]
    assert work[0] < work[1] / 10


def test_kv_format_follows_the_weights_unless_given():
    assert kv_format_of(PLAN, WeightFormat.INT8) is KVFormat.INT8
    assert kv_format_of(PLAN, WeightFormat.FP32) is KVFormat.FP32
    asked = replace(PLAN, kv_dtype=KVFormat.INT4)
    assert {kv_format_of(asked, weights) for weights in PLAN.formats} == {KVFormat.INT4}
    assert PLAN.config()["kv_of_int8"] == "int8"


def test_fp32_is_compared_with_fp32_peers_and_int8_with_all():
    assert is_comparable("fp32", "f32")
    assert not is_comparable("fp32", "q8_0")
    assert is_comparable("int8", "f32")
    assert is_comparable("int8", "q8_0")


def test_prompts_are_equal_for_all_engines_and_new_in_each_repetition():
    job = EngineJob("decode_b32", 32, 8, 32, for_peers=True)
    prompts = prompts_of(job, 512, seed=0, repeat=0)
    assert prompts == prompts_of(job, 512, seed=0, repeat=0)
    assert prompts != prompts_of(job, 512, seed=0, repeat=1)
    assert prompts != prompts_of(job, 512, seed=1, repeat=0)
    assert len(prompts) == 32
    assert {len(prompt) for prompt in prompts} == {8}
    assert all(0 <= token < 512 for prompt in prompts for token in prompt)
