"""Every engine runs all jobs of a round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.common.report import Missing
from bench.common.roofline import Ceilings, ModelMemory, ModelSize
from bench.engine import run as bench_engine
from bench.engine.jobs import EngineJob
from bench.engine.ours import prefill_steps, tables_of
from bench.engine.results import (
    JobTime,
)
from bench.engine.run import Contest
from bench.processes.driven import Driven, DrivenFailed
from tests.kits.driven import started


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


SIZE = ModelSize(num_layers=2, attention_size=16, layer_weights=1000, head_weights=100)
JOB = EngineJob("prefill", 1, 4, 0, for_peers=True)
WORKS = """
    say(ready={"version": "1"})
    for line in sys.stdin:
        command = json.loads(line)
        say(prefill_s=0.5, decode_s=0.0, answers=[[7] for _ in command["prompts"]])
"""


PEAKS = """
    say(ready={"version": "1"})
    for line in sys.stdin:
        peak = json.loads(line)["read_bytes"]
        say(read_bytes_per_s=peak, fp32_flops_per_s=2.0, int8_flops_per_s=3.0)
"""


def contest_of(peer_script, our_script=WORKS):
    return Contest(
        ours={"fp32": started(our_script, "fp32")},
        peers={"other": started(peer_script, "other"), "last": started(WORKS, "last")},
        ceilings=started(PEAKS, "ceilings"),
        size=SIZE,
    )


def all_of(contest):
    engines = [*contest.ours.values(), *contest.peers.values(), contest.ceilings]
    return [engine for engine in engines if engine is not None]


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


def test_order_of_engines_is_reversed_in_the_next_repetition(monkeypatch):
    for repeat, order in ((0, ["fp32", "other", "last"]), (1, ["last", "other", "fp32"])):
        samples = run_round(contest_of(WORKS), monkeypatch, repeat=repeat)
        assert [engine for engine, _ in samples] == order
        assert set(samples.values()) == {JobTime(0.5, (7,))}


def test_our_samples_have_the_ceilings_beside_them(monkeypatch):
    contest = contest_of(WORKS)
    contest.memory["fp32"] = ModelMemory(weights_bytes=100.0, kv_token_bytes=5.0)
    samples = run_round(contest, monkeypatch)
    assert samples["fp32", "prefill"].ceilings == Ceilings(100 + 4 * 5, 2.0, 3.0)
    assert samples["other", "prefill"].ceilings is None


def test_without_ceilings_jobs_are_timed_all_the_same(monkeypatch):
    contest = contest_of(WORKS)
    contest.ceilings.close()
    contest.ceilings = Driven("ceilings", ["no-such-program"])
    bench_engine._load_ceilings(contest, lambda _: None)
    assert contest.failed == [Missing("ceilings", "it could not be started")]
    samples = run_round(contest, monkeypatch)
    assert samples["fp32", "prefill"] == JobTime(0.5, (7,))


def test_dead_peer_is_reported_and_the_others_continue(monkeypatch):
    contest = contest_of('say(ready={}); hear(); sys.stderr.write("bad luck\\n"); sys.exit(1)')
    samples = run_round(contest, monkeypatch)
    assert [engine for engine, _ in samples] == ["fp32", "last"]
    assert contest.failed == [Missing("other", "it ended with status 1")]
    assert list(contest.peers) == ["last"]


def test_failure_of_our_own_engine_ends_the_benchmark(monkeypatch):
    with pytest.raises(DrivenFailed, match="fp32: it ended"):
        run_round(contest_of(WORKS, our_script="say(ready={}); hear()"), monkeypatch)
