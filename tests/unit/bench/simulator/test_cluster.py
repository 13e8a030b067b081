from dataclasses import replace
from random import Random

import msgspec
import pytest
from typer.testing import CliRunner

from bench.client.load import SloBounds
from bench.common.report import from_json
from bench.simulator.cluster import GATEWAY, SimulatedPools, SimulationSetup, in_order, simulate
from bench.simulator.cluster import _Cluster as Cluster
from bench.simulator.hardware import HardwareProfile
from bench.simulator.results import figures_of
from bench.simulator.traces import Chat, Trace, TraceRequest, synthetic, with_ids, write_trace
from bench.simulator.transfers import Future, Rank, Transfers
from deploy.commands.main import app
from engine.config import RouterConfig, RouterPolicy
from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    Incarnation,
    LeaseId,
    LeaseRef,
    Role,
    SeqId,
    SetRole,
    TransferAddress,
    WorkerId,
)
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from engine.worker.events import FromGateway, LeaseEnded, PullDone, PullFailed
from engine.worker.pace import StepPace
from router.cluster.estimates import Estimates
from router.machine.events import Arrived
from router.machine.machine import RouterMachine
from router.machine.requests import Finished

TINY = HardwareProfile(
    name="tiny",
    source="made up",
    layout=KVLayout(8, KVFormat.BF16, (KVSection(1, 1, 32),)),
    num_blocks=64,
    prefill=PrefillCost(1e-3, 1e-4, 1e-7),
    decode=DecodeCost(5e-3, 1e-4, 1e-6),
    pull=PullCost(1e-3, 1e-4, 1e6),
    max_batch_tokens=64,
    chunk_tokens=48,
    max_running=8,
)
ONE_AND_ONE = SimulatedPools(1, 1)
PRICES = WorkerCosts(TINY.prefill, TINY.decode, TINY.pull)


def trace_of(*requests, block_tokens=8):
    return Trace("t", block_tokens, tuple(TraceRequest(*fields) for fields in requests))


def busy_trace(num_requests, seed=0):
    """Returns a trace of conversations in blocks of 8 tokens that keeps a few tiny workers busy."""
    chat = Chat(20.0, 3.0, 0.5, system_tokens=512, input_tokens=1500, output_tokens=1500)
    made = synthetic(chat, num_requests, Random(seed)).shortened(64)
    short = tuple(replace(r, input_len=min(r.input_len, 300)) for r in made.requests)
    return replace(
        made,
        requests=tuple(replace(r, block_ids=r.block_ids[: -(-r.input_len // 8)]) for r in short),
    )


def run_of(trace, setup, policy=RouterPolicy.LEAST_LOADED, **config):
    return simulate(trace, setup, RouterMachine(RouterConfig(policy=policy, **config)))


# ---------------------------------------------------------------- single requests


def test_single_request_takes_the_price_of_its_steps_and_messages():
    latency_s = 1e-3
    run = run_of(trace_of((2.0, 40, 3)), SimulationSetup(TINY, ONE_AND_ONE, latency_s))
    [record] = run.records
    assert isinstance(record.outcome, Finished)
    first_s, second_s, third_s = record.times_s
    prefill_s = TINY.prefill.seconds(40)
    assert first_s == pytest.approx(2.0 + 2 * latency_s + prefill_s)
    assert third_s - second_s == pytest.approx(TINY.decode.seconds(1, 42))
    pull_s = TINY.pull.seconds(5, 5 * TINY.layout.block_bytes)
    decode_s = TINY.decode.seconds(1, 41)
    assert second_s == pytest.approx(2.0 + latency_s + prefill_s + pull_s + decode_s + latency_s)


def test_first_chunk_is_pulled_while_the_second_is_computed():
    pull = PullCost(1e-4, 1e-5, 1e8)
    quick = msgspec.structs.replace(TINY, pull=pull)
    run = run_of(trace_of((0.0, 64, 2)), SimulationSetup(quick, ONE_AND_ONE, 0.0))
    first_s, second_s = run.records[0].times_s
    assert first_s == pytest.approx(TINY.prefill.seconds(48) + TINY.prefill.seconds(64, 48))
    last_chunk_s = pull.seconds(2, 2 * TINY.layout.block_bytes) - pull.fixed_s
    assert second_s == pytest.approx(first_s + last_chunk_s + TINY.decode.seconds(1, 65))


def test_cached_prompt_is_not_computed_again():
    trace = trace_of((0.0, 40, 2, (1, 2, 3, 4, 5)), (1.0, 44, 2, (1, 2, 3, 4, 5, 6)))
    run = run_of(trace, SimulationSetup(TINY, ONE_AND_ONE, 0.0))
    assert run.records[1].timeline.num_cached_tokens == 40
    ttft_s = run.records[1].times_s[0] - 1.0
    assert ttft_s == pytest.approx(TINY.prefill.seconds(44, 40))


# ---------------------------------------------------------------- many requests


@pytest.mark.parametrize("stretch", [4.0, None])
def test_decode_workers_compute_prompts_if_allowed_and_faster(stretch):
    trace = busy_trace(60)
    setup = SimulationSetup(TINY, SimulatedPools(1, 2), stretch=stretch)
    run = run_of(trace, setup, RouterPolicy.SLO)
    assert all(isinstance(record.outcome, Finished) for record in run.records)
    roles = {worker.worker_id: worker.role for worker in run.workers}
    where = {roles[record.timeline.prefill_worker] for record in run.records}
    assert where == ({"prefill", "decode"} if stretch else {"prefill"})


@pytest.mark.parametrize("max_answer_tokens", [None, 500])
def test_simulated_workers_know_the_bound_on_their_steps(monkeypatch, max_answer_tokens):
    seen, start = set(), StepPace.start

    def noted(pace, rows):
        seen.update(row.tpot_s for row in rows)
        start(pace, rows)

    monkeypatch.setattr(StepPace, "start", noted)
    setup = SimulationSetup(
        TINY, SimulatedPools(1, 1), stretch=4.0, max_answer_tokens=max_answer_tokens
    )
    run_of(busy_trace(10), setup, RouterPolicy.SLO, slo_tpot_s=0.25)
    assert seen == {0.25}


def test_leaping_over_equal_steps_plans_fewer_events():
    pools, trace = SimulatedPools(2, 2), busy_trace(25)
    leaping, stepping = (
        run_of(trace, SimulationSetup(TINY, pools, leaps=leaps)) for leaps in (True, False)
    )
    assert leaping.num_events < 0.7 * stepping.num_events


def test_late_token_reports_change_figures_little():
    trace = busy_trace(30)
    exact, coarse = (
        figures_of(
            run_of(
                trace,
                SimulationSetup(TINY, SimulatedPools(2, 2), settles=settles),
                RouterPolicy.SLO,
            ),
            SloBounds(),
            usd_per_gpu_hour=1.0,
        )
        for settles in (True, False)
    )
    for name in ("ttft/mean", "tpot/mean"):
        assert coarse[name].value == pytest.approx(exact[name].value, rel=0.1)


def test_request_too_large_for_any_worker_fails_alone():
    trace = trace_of((0.0, 2000, 2), (0.0, 40, 2))
    run = run_of(trace, SimulationSetup(TINY, ONE_AND_ONE))
    kinds = [type(record.outcome).__name__ for record in run.records]
    assert kinds == ["Failed", "Finished"]


def test_refusal_by_a_full_queue_is_a_miss():
    trace = trace_of(*[(0.0, 200, 20)] * 12)
    run = run_of(trace, SimulationSetup(TINY, ONE_AND_ONE), max_queue=4)
    figures = figures_of(run, SloBounds(), usd_per_gpu_hour=2.0)
    rejected = figures["requests/rejected"].value
    assert rejected > 0
    assert figures["goodput/attainment"].value == (12 - rejected) / 12


# ---------------------------------------------------------------- results


def test_figures_follow_from_token_times():
    run = run_of(trace_of((0.0, 40, 3), (9.0, 40, 3)), SimulationSetup(TINY, ONE_AND_ONE))
    figures = figures_of(run, SloBounds(ttft_s=1e-4), usd_per_gpu_hour=3.6)
    first = run.records[0].times_s
    assert figures["ttft/p50"].value == pytest.approx(first[0] * 1000)
    assert figures["tpot/p50"].value == pytest.approx((first[2] - first[0]) / 2 * 1000)
    assert figures["goodput/attainment"].value == 0
    assert figures["goodput/mooncake_tbt_100ms"].value == 1
    assert figures["cost/total"].value == pytest.approx(2 * run.duration_s * 1e-3)
    assert figures["utilisation/prefill"].value == pytest.approx(
        2 * TINY.prefill.seconds(40) / run.duration_s
    )


def test_command_repeats_its_report(tmp_path):
    write_trace(busy_trace(12), tmp_path / "t.jsonl")
    (tmp_path / "tiny.json").write_bytes(msgspec.json.encode(TINY))
    command = ["simulate", "--trace", str(tmp_path / "t.jsonl"), "--prefill", "2", "--hardware"]
    command += [str(tmp_path / "tiny.json"), "--policy", "prefix", "--max-tokens", "8"]
    command += ["--json"]
    reports = []
    for name in ("a.json", "b.json"):
        result = CliRunner().invoke(app, [*command, str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert "ttft" in result.output
        reports.append(from_json((tmp_path / name).read_bytes()))
    assert reports[0].results == reports[1].results
    assert reports[0].value("requests/finished") == 12
    assert reports[0].config["policy"] == "prefix"


# ---------------------------------------------------------------- transfers


class Side:
    def __init__(self, name):
        self.worker_id = WorkerId(name)
        self.heard = []

    def receive(self, events):
        self.heard += events


def transfers_between():
    future = Future()
    # one second per block, and one second of overhead per pull
    cost = PullCost(1.0, 0.0, TINY.layout.block_bytes)
    return future, Transfers(future, cost, TINY.layout, latency_s=0.5), Side("p"), Side("d")


def ref(name, num_blocks):
    return LeaseRef(LeaseId(name), TransferAddress(WorkerId("p"), Incarnation("1"), ""), num_blocks)


def pull_all(transfers, source, sink, sizes):
    """Pulls one lease for each number of blocks. All blocks are ready."""
    for name, num_blocks in sizes.items():
        transfers.open(source, LeaseId(name))
        transfers.grow(LeaseId(name), num_blocks)
        transfers.hold(sink, SeqId(name), ref(name, num_blocks))
        transfers.start(sink, SeqId(name), tuple(range(num_blocks)))


def test_pulls_over_one_link_share_it():
    future, transfers, source, sink = transfers_between()
    ends = []
    sink.receive = lambda events: ends.append((future.now_s, *events))
    pull_all(transfers, source, sink, {"long": 9, "short": 1})
    future.run()
    # alone, the short pull takes 2 s; beside the long pull 4 s; then the long pull has 8 of 10 s
    # left
    assert [(at_s, done.seq_id, done.transfer_s) for at_s, done in ends] == [
        (4.0, "short", 4.0),
        (12.0, "long", 12.0),
    ]
    assert all(isinstance(done, PullDone) for _, done in ends)
    assert source.heard == [LeaseEnded("short", "released"), LeaseEnded("long", "released")]
    assert transfers.num_leases == 0


def test_a_pull_goes_at_the_speed_of_its_busier_link():
    future, transfers, source, sink = transfers_between()
    other_source, other_sink, ends = Side("q"), Side("e"), {}
    for side in (sink, other_sink):
        side.receive = lambda events: ends.update({events[0].seq_id: future.now_s})
    pull_all(transfers, source, sink, {"a": 3, "b": 3})
    pull_all(transfers, other_source, sink, {"c": 3})
    pull_all(transfers, source, other_sink, {"d": 1})
    future.run()
    # a, b and c share the sink; a, b and d share the source: each takes three times as long
    assert ends == {"d": 6.0, "a": 12.0, "b": 12.0, "c": 12.0}


def test_revoked_lease_fails_its_pull_with_arrived_blocks():
    future, transfers, source, sink = transfers_between()
    transfers.open(source, LeaseId("a"))
    transfers.grow(LeaseId("a"), 1)
    transfers.hold(sink, SeqId("a"), ref("a", 3))
    transfers.start(sink, SeqId("a"), (0, 1, 2))
    future.plan(2.5, Rank.MESSAGE, transfers.revoke, LeaseId("a"))
    future.run()
    assert source.heard == [LeaseEnded("a", "revoked")]
    assert sink.heard == [PullFailed(SeqId("a"), "revoked", (0,))]


def test_aborted_pull_releases_its_lease():
    future, transfers, source, sink = transfers_between()
    transfers.open(source, LeaseId("a"))
    transfers.hold(sink, SeqId("a"), ref("a", 3))
    transfers.abort(sink, SeqId("a"))
    transfers.grow(LeaseId("a"), 1)  # the source has not yet received the request
    future.run()
    assert source.heard == [LeaseEnded("a", "released")]
    assert sink.heard == [PullFailed(SeqId("a"), "aborted", ())]


# ---------------------------------------------------------------- role changes


def with_roles(trace, setup, changes, policy=RouterPolicy.SLO):
    """Runs a trace with role changes (time, worker, role). Returns the run and its counters."""
    machine = RouterMachine(RouterConfig(policy=policy), estimates=Estimates(PRICES))
    trace, records = with_ids(trace), {}
    cluster = Cluster(trace, in_order(trace.requests), setup, machine, records.__setitem__)
    for at_s, worker_id, role in changes:
        events = [FromGateway(GATEWAY, SetRole(role))]
        worker = cluster._workers[WorkerId(worker_id)]
        cluster._future.plan(at_s, Rank.MESSAGE, worker.receive, events)
    cluster.run()
    cluster.validate()
    machine.validate()
    run = replace(cluster.result(), records=[records[i] for i in range(len(records))])
    return run, machine.counters


CHANGES = [
    (0.5, "worker-3", Role.PREFILL),
    (0.8, "worker-0", Role.DECODE),
    (1.1, "worker-1", Role.DRAINED),
    (1.3, "worker-1", Role.MIXED),
]


@pytest.mark.parametrize("max_answer_tokens", [None, 200])
@pytest.mark.parametrize("policy", [RouterPolicy.SLO, RouterPolicy.LEAST_LOADED])
def test_all_requests_are_answered_while_roles_change(policy, max_answer_tokens):
    trace = busy_trace(60)
    setup = SimulationSetup(TINY, SimulatedPools(1, 3), max_answer_tokens=max_answer_tokens)
    run, counters = with_roles(trace, setup, CHANGES, policy)
    for record in run.records:
        assert isinstance(record.outcome, Finished)
        assert len(record.times_s) == record.asked.output_len
        assert list(record.times_s) == sorted(record.times_s)
    assert sum(n for (name, _), n in counters.items() if name == "moved") > 0
    assert counters["fallback", "copy failed"] == 0


def test_leaping_equals_stepping_while_roles_change():
    trace = busy_trace(40)
    setup = SimulationSetup(TINY, SimulatedPools(1, 3))
    ends = [
        [record.ended_s for record in run.records]
        for leaps in (True, False)
        for run, _ in [
            with_roles(trace, replace(setup, leaps=leaps), CHANGES, RouterPolicy.LEAST_LOADED)
        ]
    ]
    assert ends[0] == pytest.approx(ends[1])


def test_answers_end_as_in_the_trace_below_the_client_limit():
    trace = busy_trace(30)
    told = []

    class Machine(RouterMachine):
        def handle(self, event, now_s):
            if isinstance(event, Arrived):
                limits = event.request.limits
                told.append(limits.max_len - limits.prompt_len)
            return super().handle(event, now_s)

    setup = SimulationSetup(TINY, SimulatedPools(2, 2), max_answer_tokens=200)
    run = simulate(trace, setup, Machine(RouterConfig(queue_timeout_s=1e4)))
    assert set(told) == {200}
    for record in run.records:
        assert isinstance(record.outcome, Finished)
        assert len(record.times_s) == record.asked.output_len < 200
