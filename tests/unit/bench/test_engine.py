import io
import json
import os
import select
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from bench.cli import app
from bench.common import background
from bench.common.driven import Driven, DrivenFailed
from bench.common.plots import bars_figure, plot_bars
from bench.common.report import Hardware, Report, from_json, to_json
from bench.common.roofline import (
    Ceilings,
    Memory,
    ModelSize,
    Work,
    decode_work,
    least_time_s,
    model_size,
    prefill_work,
)
from bench.common.shapes import SHAPES, make_checkpoint
from bench.common.tables import print_pivot, print_speeds
from bench.engine import run as bench_engine
from bench.engine.ours import prefill_steps, tables_of
from bench.engine.plan import (
    EnginePlan,
    Job,
    Peer,
    check,
    config_of,
    is_comparable,
    jobs_of,
    kv_format_of,
    limits_of,
    peers_of,
    prompts_of,
    quick,
    warm_up_jobs,
)
from bench.engine.results import (
    Failed,
    Measured,
    Ours,
    Repetition,
    Sample,
    limit_s,
    results,
    warnings,
    work_of,
)
from bench.engine.run import Contest
from bench.peers import driver
from engine.config import WeightFormat
from engine.errors import CheckpointError, ConfigError
from engine.layout import KVFormat

PYTHON = Path(sys.executable)
SIZE = ModelSize(num_layers=2, attention_size=16, layer_weights=1000, head_weights=100)
MEMORY = Memory(weights_bytes=1100.0, kv_token_bytes=10.0)
CEILINGS = Ceilings(read_bytes_per_s=1e6, fp32_flops_per_s=1e7, int8_flops_per_s=4e7)
PLAN = EnginePlan(
    shape="88m",
    checkpoint=None,
    weights=(WeightFormat.FP32, WeightFormat.INT8),
    kv_format=None,
    num_threads=2,
    prefill_lens=(512, 2048),
    batches=(8,),
    contexts=(2048, 128),
    num_repeats=2,
    peers=(
        Peer("transformers", "transformers", "f32", PYTHON),
        Peer("llamacpp_q8_0", "llamacpp", "q8_0", PYTHON),
    ),
)
HARDWARE = Hardware(cpu="a cpu", num_cores=2, memory_bytes=None, gpus=(), python="3.11")


# The roofline


def test_a_step_reads_all_weights_and_all_contexts():
    work = decode_work(SIZE, MEMORY, [5, 7])
    assert work == Work(
        matrix_flops=2 * 1100 * 2, attention_flops=4 * 2 * 16 * 12, read_bytes=1100 + 120
    )


def test_a_prefill_multiplies_the_output_matrix_once_a_prompt():
    work = prefill_work(SIZE, MEMORY, [3, 1])
    assert work.matrix_flops == 2 * (1000 * 4 + 100 * 2)
    assert work.attention_flops == 4 * 2 * 16 * (1 + 2 + 3 + 1)
    assert work.read_bytes == 1100 + 40


@given(st.integers(1, 50))
def test_a_prefill_does_the_attention_of_its_tokens_one_by_one(length):
    together = prefill_work(SIZE, MEMORY, [length])
    one_by_one = [decode_work(SIZE, MEMORY, [n]) for n in range(1, length + 1)]
    assert together.attention_flops == sum(work.attention_flops for work in one_by_one)


def test_the_least_time_is_that_of_the_scarcer_resource():
    by_memory = Work(matrix_flops=1e6, attention_flops=1e6, read_bytes=1e6)
    by_compute = replace(by_memory, matrix_flops=1e8)
    assert least_time_s(by_memory, CEILINGS, "fp32") == 1.0
    assert least_time_s(by_compute, CEILINGS, "fp32") == pytest.approx(10.1)


def test_int8_speeds_up_matrices_but_not_attention():
    work = Work(matrix_flops=4e8, attention_flops=1e8, read_bytes=0)
    assert least_time_s(work, CEILINGS, "fp32") == pytest.approx(50)
    assert least_time_s(work, CEILINGS, "int8") == pytest.approx(20)
    assert least_time_s(work, CEILINGS, "bf16") == pytest.approx(50)  # computed in fp32


def test_the_size_of_a_model_comes_from_its_files(tmp_path):
    shape = SHAPES["tiny"]
    make_checkpoint(tmp_path / "model", shape, seed=0)
    hidden, ffn = shape.hidden_size, shape.ffn_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = 2 * hidden * heads + 2 * hidden * kv_heads + 3 * hidden * ffn
    assert model_size(tmp_path / "model") == ModelSize(
        num_layers=shape.num_layers,
        attention_size=heads,
        layer_weights=shape.num_layers * layer,
        head_weights=shape.vocab_size * hidden,
    )


def test_no_limit_is_claimed_for_a_model_with_experts(tmp_path):
    make_checkpoint(tmp_path / "model", SHAPES["tiny"], seed=0)
    rewrite_config(tmp_path / "model", num_local_experts=8)
    assert model_size(tmp_path / "model") is None


def test_a_config_without_layers_is_refused(tmp_path):
    make_checkpoint(tmp_path / "model", SHAPES["tiny"], seed=0)
    rewrite_config(tmp_path / "model", num_hidden_layers=None)
    with pytest.raises(CheckpointError, match="num_hidden_layers is missing"):
        model_size(tmp_path / "model")


def rewrite_config(path, **changes):
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


# The plan


def test_the_jobs_for_peers_are_those_that_the_goals_name():
    named = [job for job in jobs_of(PLAN) if job.for_peers]
    assert named == [
        Job("prefill", 8, 512, 0, for_peers=True),
        Job("decode_b32", 32, 8, 32, for_peers=True),
        Job("decode_b1", 1, 8, 32, for_peers=True),
    ]
    assert [job.num_tokens for job in named] == [4096, 1024, 32]


def test_the_grid_is_ours_alone():
    names = [job.name for job in jobs_of(PLAN) if not job.for_peers]
    assert names == ["prefill_len2048", "decode_b8_ctx2048", "decode_b8_ctx128"]


def test_a_quick_plan_keeps_the_named_jobs_as_they_are():
    few = quick(PLAN)
    assert few.num_repeats == 1
    assert jobs_of(few)[:3] == jobs_of(PLAN)[:3]
    assert [job.name for job in jobs_of(few)[3:]] == ["decode_b8_ctx128"]
    alone = replace(PLAN, peers=())
    plans = (quick(alone), alone)
    work = [sum(job.kv_tokens for job in warm_up_jobs(plan)) for plan in plans]
    assert work[0] < work[1] / 10


def test_peers_are_always_warmed_up_with_all_that_they_will_do():
    assert warm_up_jobs(quick(PLAN)) == [job for job in jobs_of(PLAN) if job.for_peers]


def test_kv_is_held_as_suits_the_weights_unless_it_is_asked_for():
    assert kv_format_of(PLAN, WeightFormat.INT8) is KVFormat.INT8
    assert kv_format_of(PLAN, WeightFormat.FP32) is KVFormat.FP32
    asked = replace(PLAN, kv_format=KVFormat.INT4)
    assert {kv_format_of(asked, weights) for weights in PLAN.weights} == {KVFormat.INT4}
    assert config_of(PLAN)["kv_of_int8"] == "int8"


def test_fp32_is_compared_with_fp32_and_int8_with_all():
    assert is_comparable("fp32", "f32")
    assert not is_comparable("fp32", "q8_0")
    assert is_comparable("int8", "f32")
    assert is_comparable("int8", "q8_0")


def test_every_engine_gets_the_same_prompts_and_every_repetition_others():
    job = Job("decode_b32", 32, 8, 32, for_peers=True)
    prompts = prompts_of(job, 512, seed=0, repeat=0)
    assert prompts == prompts_of(job, 512, seed=0, repeat=0)
    assert prompts != prompts_of(job, 512, seed=0, repeat=1)
    assert prompts != prompts_of(job, 512, seed=1, repeat=0)
    assert len(prompts) == 32
    assert {len(prompt) for prompt in prompts} == {8}
    assert all(0 <= token < 512 for prompt in prompts for token in prompt)


def test_drivers_are_told_the_most_that_will_come():
    jobs = [Job("a", 8, 512, 0, for_peers=True), Job("b", 32, 8, 32, for_peers=True)]
    assert limits_of(jobs) == {"--max-sequences": 32, "--max-len": 513, "--max-tokens": 8 * 513}


def test_a_peer_option_may_stand_for_several_engines():
    assert [peer.name for peer in peers_of("llamacpp=/x/python")] == [
        "llamacpp_f32",
        "llamacpp_q8_0",
    ]
    assert peers_of("vllm=/a=b/python") == [Peer("vllm", "vllm", "f32", Path("/a=b/python"))]


@pytest.mark.parametrize("option", ["vllm", "sglang=/x/python", "=/x/python"])
def test_a_peer_that_is_not_known_is_refused(option):
    with pytest.raises(ConfigError, match="transformers, vllm, llamacpp"):
        peers_of(option)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": (WeightFormat.FP8,)}, "--weights must be out of fp32, bf16, int8: fp8"),
        ({"weights": ()}, "none given"),
        ({"contexts": (0,)}, "--contexts must be positive"),
        ({"prefill_lens": (-1,)}, "--prefill-lens must be positive"),
        ({"peers": (PLAN.peers[0], PLAN.peers[0])}, "twice"),
        ({"peers": (replace(PLAN.peers[0], python=Path("/none")),)}, "there is no /none"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_says_why(change, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(PLAN, **change))


def test_a_plan_that_can_be_carried_out_is_left_as_it_is():
    assert check(PLAN) is PLAN


# Steps as a worker takes them


@given(
    lens=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunk=st.integers(1, 16),
    budget=st.integers(1, 32),
)
def test_prefill_steps_compute_every_token_once_and_sample_at_each_end(lens, chunk, budget):
    prompts = [[100 * i + n for n in range(length)] for i, length in enumerate(lens)]
    tables = tables_of(lens, 4)
    done = [[] for _ in lens]
    sampled = []
    for rows in prefill_steps(prompts, tables, chunk_tokens=chunk, budget_tokens=budget):
        assert 0 < sum(len(row.token_ids) for row in rows) <= budget
        for row in rows:
            mine = done[int(row.seq_id)]
            assert row.start == len(mine)
            assert len(row.token_ids) <= chunk
            mine += row.token_ids
            if row.sampling is not None:
                sampled.append(int(row.seq_id))
                assert mine == prompts[int(row.seq_id)]
    assert done == prompts
    assert sorted(sampled) == list(range(len(lens)))


def test_block_tables_do_not_overlap():
    assert tables_of([1, 4, 5], 4) == [[0], [1], [2, 3]]


# Results


def sample(seconds, tokens=(), outside_s=None):
    return Sample(seconds, tuple(tokens), outside_s)


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
        repetitions.append(Repetition(samples, CEILINGS, background=0.01))
    ours = Ours(MEMORY, resident_bytes=2**30, load_s=1.5, warm_up_s=0.5)
    found = Measured(SIZE, {"fp32": ours, "int8": ours}, tuple(repetitions))
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


def test_each_speed_stands_beside_what_the_machine_allows():
    found = by_name(results(PLAN, measured()))
    for job in jobs_of(PLAN):
        result = found[f"{job.name}/int8"]
        expected = job.num_tokens / limit_s(job, SIZE, MEMORY, CEILINGS, "int8")
        assert result.limit == pytest.approx(expected)
        assert result.of_limit == pytest.approx(result.value / expected)


def test_the_limit_of_decoding_sums_steps_of_growing_contexts():
    job = Job("decode", 2, 10, 3, for_peers=False)
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


def test_peers_are_compared_by_medians_where_they_are_comparable():
    found = by_name(results(PLAN, measured()))
    assert set(found["prefill/fp32"].peers) == {"transformers"}
    assert set(found["prefill/int8"].peers) == {"transformers", "llamacpp_q8_0"}
    peer = found["prefill/int8"].peers["llamacpp_q8_0"]
    assert peer.value == pytest.approx(4096 / 6)
    assert peer.ratio == pytest.approx(found["prefill/int8"].value / peer.value)
    assert found["decode_b8_ctx128/fp32"].peers == {}


def test_a_peer_that_failed_midway_is_compared_by_what_it_did():
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


def test_a_report_says_what_was_not_measured_and_that_others_were_busy():
    assert warnings(measured()) == []
    failed = Failed("vllm", "no answer in 300 s", ("last words",))
    busy = tuple(replace(r, background=0.2) for r in measured().repetitions)
    lines = warnings(measured(failed=(failed,), repetitions=busy))
    assert lines[0] == "vllm was not measured: no answer in 300 s"
    assert "20% of the CPU" in lines[1]


def test_without_a_reading_of_the_cpu_nothing_is_claimed_of_it():
    blind = tuple(replace(r, background=None) for r in measured().repetitions)
    found = by_name(results(PLAN, measured(repetitions=blind)))
    assert "background/cpu" not in found
    assert found["ceiling/int8"].value == pytest.approx(0.04)


def report_of(found, name="engine"):
    return Report(name, "abc", HARDWARE, 0, config_of(PLAN), tuple(found))


def printed(show, report):
    console = Console(file=io.StringIO(), width=120)
    show(console, report, title="a title")
    return console.file.getvalue()


def test_tables_show_speeds_limits_rates_and_ratios():
    report = report_of(results(PLAN, measured()))
    assert from_json(to_json(report)) == report
    text = printed(print_speeds, report)
    for expected in ("prefill/fp32", "GFLOP/s", "transformers", "× 2.25", "ceiling/read", "1,024"):
        assert expected in text
    assert "_bandwidth" not in text  # stands in the speed's own row


def test_a_pivot_has_a_row_for_each_setting():
    found = [r for r in results(PLAN, measured()) if r.name.startswith(("load/", "warm_up/"))]
    lines = printed(print_pivot, report_of(found)).splitlines()
    assert sum("fp32" in line and "1.50" in line and "0.500" in line for line in lines) == 1


def test_speeds_can_be_plotted(tmp_path):
    pytest.importorskip("matplotlib", reason="plots are optional")
    panels = {f"panel {i}": {"a": 1.0, "b": 2.0 + i} for i in range(4)}
    limits = {"panel 0": {"a": 3.0}}
    axes = bars_figure(panels, title="t", limits=limits).axes
    assert [axis.get_title() for axis in axes] == list(panels)
    assert [[bar.get_height() for bar in axis.patches] for axis in axes] == [
        list(bars.values()) for bars in panels.values()
    ]
    assert [len(axis.collections) for axis in axes] == [1, 0, 0, 0]
    plot_bars(panels, tmp_path / "x" / "plot.png", title="t", limits=limits)
    assert (tmp_path / "x" / "plot.png").read_bytes().startswith(b"\x89PNG")


# Processes


def driven(script, name="peer"):
    """A process that runs this script; it has `say` and `hear`."""
    prelude = """
        import json, sys, time
        def say(**answer): print(json.dumps(answer), flush=True)
        def hear(): return json.loads(sys.stdin.readline())
    """
    source = dedent(prelude) + dedent(script)
    return Driven(name, [sys.executable, "-S", "-E", "-c", source])


def started(script, name="peer"):
    engine = driven(script, name)
    engine.start()
    return engine


ECHO = """
    say(ready={"version": "1.0"})
    for line in sys.stdin:
        say(heard=json.loads(line))
"""


def test_commands_go_in_and_answers_come_out():
    with started(ECHO) as engine:
        assert engine.ready(10) == {"version": "1.0"}
        for number in range(3):
            answer = engine.ask("count", timeout_s=10, number=number)
            assert answer == {"heard": {"do": "count", "number": number}}


def test_a_process_ends_when_it_is_closed():
    engine = started(ECHO)
    engine.ready(10)
    process = engine._process
    engine.close()
    assert process.returncode == 0
    engine.close()  # a second time does nothing
    with pytest.raises(DrivenFailed, match="not running"):
        engine.ask("count", timeout_s=10)


def test_an_error_in_one_command_leaves_the_process_as_it_is():
    script = 'say(ready={}); hear(); say(error="ValueError: no"); hear(); say(fine=1)'
    with started(script) as engine:
        engine.ready(10)
        with pytest.raises(DrivenFailed, match="peer: ValueError: no"):
            engine.ask("a", timeout_s=10)
        assert engine.ask("b", timeout_s=10) == {"fine": 1}


def test_a_process_that_dies_is_told_with_its_status_and_its_last_words():
    with started('sys.stderr.write("out of\\nmemory\\n"); sys.exit(3)') as engine:
        with pytest.raises(DrivenFailed, match="ended with status 3") as caught:
            engine.ready(10)
        assert caught.value.last_lines == ("out of", "memory")


def test_a_process_that_hangs_is_ended():
    with started('say(ready={}); sys.stderr.write("busy\\n"); time.sleep(60)') as engine:
        engine.ready(10)
        process = engine._process
        with pytest.raises(DrivenFailed, match=r"no answer in 0\.05 s"):
            engine.ask("a", timeout_s=0.05)
        assert process.returncode is not None


def test_a_process_that_does_not_read_is_ended_too():
    with started("say(ready={}); time.sleep(60)") as engine:
        engine.ready(10)
        with pytest.raises(DrivenFailed, match="no answer"):
            engine.ask("a", timeout_s=0.05, prompt="x" * 2**20)  # more than a pipe holds


def test_a_process_that_ignores_its_end_is_killed_with_what_it_started(monkeypatch):
    monkeypatch.setattr("bench.common.driven.CLOSE_TIMEOUT_S", 0.1)
    script = """
        import subprocess
        child = subprocess.Popen(["/bin/sleep", "60"])
        say(ready={"child": child.pid})
        while True:
            time.sleep(60)
    """
    with started(script) as engine:
        child = os.pidfd_open(engine.ready(10)["child"])
        process = engine._process
    assert process.returncode == -9
    ended, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert ended


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"other": 1}'])
def test_a_process_that_says_what_is_not_an_answer_is_ended(line):
    with (
        started(f"print({line!r}, flush=True); time.sleep(60)") as engine,
        pytest.raises(DrivenFailed, match="it said"),
    ):
        engine.ready(10)


def test_a_command_that_does_not_exist_is_told_when_an_answer_is_waited_for():
    engine = Driven("peer", ["/no/such/python"])
    engine.start()
    with pytest.raises(DrivenFailed, match="could not be started") as caught:
        engine.ready(10)
    assert "No such file" in caught.value.last_lines[0]


# The other end of the protocol


class Counter:
    def __init__(self):
        self.facts = {"version": "7"}

    def generate(self, prompts, num_steps):
        watch = driver.Stopwatch()
        watch.stamp_first()
        return watch.answer([[len(prompt)] * (num_steps + 1) for prompt in prompts])

    def fail(self):
        raise RuntimeError("no\nway")


def answers_to(load, *commands):
    out = io.StringIO()
    driver.drive(load, [json.dumps(command) for command in commands], out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_driver_answers_each_command_in_a_line():
    ready, answer = answers_to(
        Counter, {"do": "generate", "prompts": [[1], [1, 2]], "num_steps": 1}
    )
    assert ready == {"ready": {"version": "7"}}
    assert answer["answers"] == [[1, 1], [2, 2]]
    assert answer["decode_s"] == 0
    assert answer["prefill_s"] >= 0


def test_a_driver_survives_a_command_that_fails():
    _, failed, unknown, fine = answers_to(
        Counter,
        {"do": "fail"},
        {"do": "dance"},
        {"do": "generate", "prompts": [], "num_steps": 0},
    )
    assert failed == {"error": "RuntimeError: no way"}
    assert "dance" in unknown["error"]
    assert fine["answers"] == []


def test_a_driver_that_cannot_load_says_so_and_ends():
    def load():
        raise ValueError("no variant x")

    out = io.StringIO()
    with pytest.raises(ValueError, match="no variant x"):
        driver.drive(load, [], out)
    assert json.loads(out.getvalue()) == {"error": "ValueError: no variant x"}


def test_a_driver_runs_as_a_script_without_this_package_and_keeps_stdout_to_itself(tmp_path):
    script = Path(driver.__file__)
    (tmp_path / "driver.py").write_text(script.read_text())
    (tmp_path / "fake_peer.py").write_text(
        dedent("""
            import sys
            class Fake:
                def __init__(self, options):
                    print("a library's banner")
                    self.facts = {"version": options.variant, "baton": "bench" in sys.modules}
                def generate(self, prompts, num_steps):
                    print("progress")
                    return {"prefill_s": 1.0, "decode_s": 2.0, "answers": prompts}
            load = Fake
        """)
    )
    options = ["--checkpoint", "x", "--variant", "f32", "--threads", "1"]
    limits = ["--max-sequences", "1", "--max-len", "1", "--max-tokens", "1"]
    command = [sys.executable, str(tmp_path / "driver.py"), "fake", *options, *limits]
    with Driven("fake", command, {}) as engine:
        engine.start()
        assert engine.ready(10) == {"version": "f32", "baton": False}
        answer = engine.ask("generate", timeout_s=10, prompts=[[1]], num_steps=0)
        assert answer["answers"] == [[1]]


# The contest

JOB = Job("prefill", 1, 4, 0, for_peers=True)
WORKS = """
    say(ready={"version": "1"})
    for line in sys.stdin:
        command = json.loads(line)
        say(prefill_s=0.5, decode_s=0.0, answers=[[7] for _ in command["prompts"]])
"""


def contest_of(peer_script, our_script=WORKS):
    return Contest(
        ours={"fp32": started(our_script, "fp32")},
        peers={"other": started(peer_script, "other"), "last": started(WORKS, "last")},
        ceilings=started(WORKS, "ceilings"),
    )


def all_of(contest):
    return [*contest.ours.values(), *contest.peers.values(), contest.ceilings]


def run_round(contest, monkeypatch, *, job=JOB, repeat=0):
    monkeypatch.setattr(bench_engine, "SETTLE_S", 0.0)
    everyone = all_of(contest)
    try:
        for engine in everyone:
            engine.ready(10)
        return bench_engine._round(contest, job, 100, seed=0, repeat=repeat)
    finally:
        for engine in everyone:
            engine.close()


def test_a_job_goes_round_all_engines_and_turns_round_the_next_time(monkeypatch):
    for repeat, order in ((0, ["fp32", "other", "last"]), (1, ["last", "other", "fp32"])):
        samples = run_round(contest_of(WORKS), monkeypatch, repeat=repeat)
        assert [engine for engine, _ in samples] == order
        assert set(samples.values()) == {Sample(0.5, (7,))}


def test_a_job_that_is_ours_alone_is_not_asked_of_peers(monkeypatch):
    job = replace(JOB, for_peers=False)
    assert list(run_round(contest_of(WORKS), monkeypatch, job=job)) == [("fp32", "prefill")]


def test_a_peer_that_dies_is_named_and_the_rest_goes_on(monkeypatch):
    contest = contest_of('say(ready={}); hear(); sys.stderr.write("bad luck\\n"); sys.exit(1)')
    samples = run_round(contest, monkeypatch)
    assert [engine for engine, _ in samples] == ["fp32", "last"]
    assert contest.failed == [Failed("other", "it ended with status 1", ("bad luck",))]
    assert list(contest.peers) == ["last"]


def test_our_own_engine_may_not_fail(monkeypatch):
    with pytest.raises(DrivenFailed, match="fp32: it ended"):
        run_round(contest_of(WORKS, our_script="say(ready={}); hear()"), monkeypatch)


# Others on the same machine


def process(pid, session, ticks, name="a name"):
    """A line of /proc/<pid>/stat."""
    before = f"{pid} ({name}) S 1 {pid} {session} 0 -1 0 0 0 0 0"
    return before + " " + " ".join(map(str, ticks)) + " 20 0 1 0"


def write_proc(proc, cpu, processes):
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, cpu))}\ncpu0 1 2 3\n")
    for pid, session, ticks in processes:
        (proc / str(pid)).mkdir(exist_ok=True)
        (proc / str(pid) / "stat").write_text(process(pid, session, ticks))


def test_others_are_what_was_busy_less_what_is_ours(tmp_path):
    write_proc(tmp_path, (100, 0, 100, 700, 100, 0, 0, 0, 5, 0), [(7, 7, (1, 1, 0, 0))])
    before = background.read({7}, tmp_path)
    write_proc(
        tmp_path,
        (160, 0, 110, 715, 105, 0, 0, 10, 9, 0),  # 100 ticks, 80 busy, 10 of these stolen
        [(7, 7, (31, 1, 5, 5)), (8, 7, (10, 0, 0, 0)), (9, 9, (20, 0, 0, 0))],
    )
    after = background.read({7}, tmp_path)
    assert background.share_of_others(before, after) == pytest.approx(0.3)
    assert background.share_of_others(before, before) is None


def test_a_process_may_be_named_anything():
    odd = process(3, 7, (1, 2, 3, 4), name="a) S 1 (b")
    assert background.session_ticks([odd], frozenset({7})) == 10
    assert background.session_ticks([odd], frozenset({8})) == 0


def test_where_there_is_no_proc_nothing_is_known_of_others(tmp_path):
    assert background.read({7}, tmp_path / "none") is None
    assert background.share_of_others(None, None) is None


# The command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--weights", "fp64"], "fp64"),
        (["--peer", "sglang=/x"], "NAME=PYTHON"),
        (["--contexts", "12,x"], "--contexts: '12,x' is not a list of numbers"),
        (["--shape", "9b"], "9b"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(arguments, said):
    result = CliRunner().invoke(app, ["engine", *arguments])
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_quality_says_what_to_install_where_there_is_no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "bench.quality.run", raising=False)
    result = CliRunner().invoke(app, ["quality", "--quick"])
    assert result.exit_code == 1
    assert "pip install 'baton-serve[worker]'" in result.stderr
