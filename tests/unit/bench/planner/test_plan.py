from dataclasses import replace

import pytest
from typer.testing import CliRunner

from bench.client.load import SloBounds
from bench.common.report import from_json
from bench.planner.load import ExpectedLoad, disaggregated
from bench.planner.model import MODELS
from bench.planner.plan import CannotPlan, PlanInput, SizedPools, plan_of, size
from bench.planner.pricing import GPUS, ModelOptions, Platform, Speculation, worker_of
from bench.planner.search import NEEDED, Depth, Search, cells_of
from bench.simulator.cluster import SimulatedPools
from deploy.commands.main import app
from engine.config import WeightFormat
from engine.layout import KVFormat

SLO = SloBounds(1.0, 0.02)
ASK = PlanInput(
    model=MODELS["qwen3-8b"],
    platform=Platform("h200", GPUS["h200"], None, 3.0),
    options=ModelOptions(),
    load=ExpectedLoad(60.0, 2000, 30),
    slo=SLO,
    max_gpus=64,
    depth=None,
)
SHALLOW = Depth(num_requests=60, seed=0)
COMMAND = [
    *("plan", "--model", "qwen3-8b", "--rps", "12", "--input", "2000", "--output", "20"),
    *("--slo-ttft", "1000", "--slo-tpot", "25", "--requests", "40"),
]


# ---------------------------------------------------------------- plans by formulas


def test_a_worker_has_as_many_gpus_as_the_model_needs():
    small = replace(
        ASK, platform=Platform("l40s", GPUS["l40s"], None, 1.0), slo=SloBounds(5.0, 0.1)
    )
    assert size(small, apart=True).ranks == 1
    large = replace(small, model=MODELS["llama-3.1-70b"], load=ExpectedLoad(1.0, 2000, 30))
    assert size(large, apart=True).ranks >= 4
    assert size(replace(large, options=ModelOptions(WeightFormat.INT8)), apart=True).ranks >= 2


def test_model_too_large_is_an_error_with_its_size():
    tiny = Platform("tiny", replace(GPUS["l40s"], memory_bytes=8e9), None, 1.0)
    ask = replace(ASK, model=MODELS["llama-3.1-70b"], platform=tiny)
    with pytest.raises(CannotPlan, match=r"does not fit: 141\.1 GB of weights"):
        size(ask, apart=True)


def test_an_option_that_makes_it_fit_is_named():
    small = replace(GPUS["l40s"], memory_bytes=17e9)
    ask = replace(
        ASK,
        model=MODELS["llama-3.1-70b"],
        slo=SloBounds(60.0, 1.0),
        load=ExpectedLoad(0.1, 2000, 30),
    )
    plan = plan_of(replace(ask, platform=Platform("small", small, None, 1.0)))
    assert isinstance(plan.colocated, CannotPlan)
    with pytest.raises(CannotPlan, match=r"does not fit.*it can be done with weights in fp8"):
        plan.best  # noqa: B018


def test_impossible_bounds_are_an_error_with_the_floor():
    with pytest.raises(CannotPlan, match=r"at best .* ms with 1, .* with 8 × h200 a worker"):
        size(replace(ASK, slo=SloBounds(0.001, 0.02)), apart=True)
    with pytest.raises(CannotPlan, match="no number of workers"):
        size(replace(ASK, slo=SloBounds(1.0, 0.0001)), apart=False)


def test_options_are_stacked_and_costly_ones_left_out():
    options = ModelOptions(WeightFormat.INT8, KVFormat.INT8, Speculation(1.5, 4))
    load = ExpectedLoad(200.0, 2000, 200, 0.37)
    plan = plan_of(replace(ASK, options=options, load=load, max_gpus=999))
    labels = [step.label.split(",")[0] for step in plan.steps]
    assert labels == [
        "bf16",
        "weights in int8",
        "KV in int8",
        "speculation",
        "prefix cache",
        "separate pools",
    ]
    kept = [step.outcome.gpus for step in plan.steps if step.kept]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0]
    for step in plan.steps[1:]:
        assert step.kept == (step.saves >= 0)
    if plan.steps[-1].kept:
        assert plan.steps[-1].outcome == plan.disaggregated


# ---------------------------------------------------------------- plans by simulation


def simulated_worker():
    found = worker_of(ASK.model, ASK.platform, ModelOptions(), ranks=1, block_size=128)
    assert found is not None
    return found


def test_a_large_load_is_cut_into_cells_of_a_few_workers():
    load, depth = ExpectedLoad(100.0, 2000, 400), Depth(num_requests=300)
    # At 100 requests/s, four times 1 s + 400 · 20 ms makes 3,600 requests.
    assert cells_of(load, SLO, depth, smallest_pool=100).number == 12
    few = cells_of(load, SLO, depth, smallest_pool=6)
    assert (few.number, few.num_requests, few.spans) == (2, 1200, pytest.approx(1200 / 450))
    one = cells_of(ExpectedLoad(1.0, 2000, 400), SLO, depth, smallest_pool=1)
    assert (one.number, one.num_requests) == (1, 300)


def test_search_ends_where_one_worker_less_misses_the_bounds():
    load = ExpectedLoad(60.0, 2000, 30)
    cells = cells_of(load, SLO, SHALLOW, smallest_pool=1)
    search = Search(load, simulated_worker(), SLO, cells=cells, seed=0)
    start = disaggregated(load, simulated_worker(), SLO, max_workers=32)
    for pools in (SimulatedPools(1, 1), SimulatedPools(3, 2)):
        found = search.smallest(replace(start, pools=pools), max_workers=32)
        assert found.attainment >= NEEDED
        assert found.pools.prefill > 1
        assert found.pools.decode == 1
        fewer = replace(found.pools, prefill=found.pools.prefill - 1)
        assert not search.check(fewer).passes


def test_search_beyond_max_workers_is_none():
    load = ExpectedLoad(200.0, 2000, 30)
    cells = cells_of(load, SLO, SHALLOW, smallest_pool=1)
    search = Search(load, simulated_worker(), SLO, cells=cells, seed=0)
    start = disaggregated(load, simulated_worker(), SLO, max_workers=32)
    assert search.smallest(replace(start, pools=SimulatedPools(1, 1)), max_workers=2) is None


def test_command_repeats_its_plan(tmp_path):
    runs = [
        CliRunner().invoke(app, [*COMMAND, "--json", str(tmp_path / f"{i}.json")]) for i in "ab"
    ]
    assert runs[0].exit_code == 0, runs[0].output
    assert runs[0].output == runs[1].output
    for words in ("by simulation", "formula", "weights in fp8", "separate pools", "assumed:"):
        assert words in runs[0].output
    report = from_json((tmp_path / "a.json").read_bytes())
    assert report.results == from_json((tmp_path / "b.json").read_bytes()).results
    assert report.value("memory/kv_token") == 144 * 1024
    assert report.value("separate_pools/attainment/simulated") >= NEEDED
    gpus = [report.value(f"{way}/gpus/simulated") for way in ("separate_pools", "one_pool")]
    assert report.value("gpus") == min(gpus)


def test_formula_only_has_no_simulated_column():
    result = CliRunner().invoke(app, [*COMMAND, "--formula-only", "--no-savings"])
    assert result.exit_code == 0
    assert "by formula" in result.output
    assert "simulated" not in result.output
    assert isinstance(size(ASK, apart=True), SizedPools)
