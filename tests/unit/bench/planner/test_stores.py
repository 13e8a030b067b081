from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.client.load import SloBounds
from bench.common.report import from_json
from bench.planner.load import ExpectedLoad, PoolEstimate
from bench.planner.model import MODELS
from bench.planner.plan import CannotPlan, CapacityPlan, PlanInput, SizedPools, plan_of
from bench.planner.pricing import GPUS, ModelOptions, Platform, worker_of
from bench.planner.report import figures_of, print_plan
from bench.planner.search import Cells, Depth, Search
from bench.planner.stores import StorePrices, cheapest, offers, take_bytes_per_s
from bench.simulator.cluster import SimulatedPools
from bench.simulator.tiers import StoreSizes
from deploy.commands.main import app

SMALL_GPU = replace(GPUS["a100"], memory_bytes=22e9)  # little room for KV beside the weights
SIZES = (StoreSizes(64), StoreSizes(64, 512))
ASK = PlanInput(
    model=MODELS["qwen3-8b"],
    platform=Platform("small", SMALL_GPU, None, 3.0),
    options=ModelOptions(),
    load=ExpectedLoad(20.0, 3000, 8, prefix_hit=0.85, pause_s=60.0),
    slo=SloBounds(1.0, 0.1),
    max_gpus=16,
    depth=Depth(num_requests=120, seed=0),
    store_prices=StorePrices(),
)


@pytest.fixture(scope="module")
def plan():
    """Returns the plan for `ASK` without a search: it uses the minimum of three prefill workers."""
    worker = worker_of(ASK.model, ASK.platform, ASK.options, ranks=1, block_size=256)
    cells = Cells(1, 120, 8.0)
    search = Search(ASK.load, worker, ASK.slo, cells=cells, seed=0)
    start = PoolEstimate(SimulatedPools(3, 1), 0.5, 0.5, 0.05, 1.0, 0.5)
    found = search.smallest(start, max_workers=4)
    assert found.pools == start.pools
    cost = 4 * 3.0 / 3600 / ASK.load.tokens_per_s * 1e6
    sized = SizedPools(worker, start, found, cost)
    offered = offers(search, start, worker, ASK.store_prices, usd=3.0, tried=SIZES)
    return CapacityPlan(ASK, sized, CannotPlan("not tried"), (), offered)


def test_every_size_is_tried_and_priced(plan):
    assert [offer.sizes for offer in plan.stores] == list(SIZES)
    for offer in plan.stores:
        assert offer.gpus <= plan.best.gpus
        store_usd = offer.num_stores * StorePrices().usd_per_hour(offer.sizes)
        assert offer.usd_per_hour == pytest.approx(offer.gpus * 3.0 + store_usd)
        per_token = offer.usd_per_hour / 3600 / ASK.load.tokens_per_s
        assert offer.usd_per_million_tokens == pytest.approx(per_token * 1e6)


def test_stores_find_prefixes_that_workers_have_forgotten(plan):
    with_store = plan.stores[0].simulated
    assert with_store is not None
    assert with_store.prefix_hits > plan.best.simulated.prefix_hits + 0.05


def text_of(plan):
    console = Console(width=200, record=True)
    print_plan(console, plan)
    return console.export_text()


def test_store_that_spares_a_gpu_saves_its_price_less_its_own(plan):
    cheap = cheapest(plan.stores)
    assert cheap.sizes == StoreSizes(64)
    assert cheap.gpus == plan.best.gpus - 1
    assert "stores: 64 GiB of memory on each of 1 nodes saves" in text_of(plan)
    saved = 1 - cheap.usd_per_million_tokens / plan.best.usd_per_million_tokens
    assert saved == pytest.approx((3.0 - 64 * 0.004) / (plan.best.gpus * 3.0))
    assert figures_of(plan)["stores/saved"].value == pytest.approx(saved)


def test_dear_store_is_advised_against(plan):
    dear = [replace(o, usd_per_hour=99.0, usd_per_million_tokens=99.0) for o in plan.stores]
    assert "stores: none lowers the cost" in text_of(replace(plan, stores=tuple(dear)))
    missed = [replace(o, simulated=None) for o in plan.stores]
    assert "stores: no tried size meets the bounds" in text_of(replace(plan, stores=tuple(missed)))


@pytest.mark.parametrize(
    "ask",
    [
        replace(ASK, depth=None),
        replace(ASK, depth=Depth(10), store_prices=None),
        replace(ASK, depth=Depth(40), load=ExpectedLoad(2.0, 3000, 8)),
    ],
)
def test_no_stores_are_tried_where_they_cannot_be_judged(ask):
    assert plan_of(ask, steps=False).stores == ()


def test_store_has_to_take_what_workers_compute(plan):
    made = 3000 * 0.15 + 8
    bytes_per_s = 20.0 * made * MODELS["qwen3-8b"].kv_token_bytes(ASK.options.kv_format)
    assert take_bytes_per_s(ASK.load, plan.best.worker, 2) == pytest.approx(bytes_per_s / 2)


def test_command_says_whether_a_store_lowers_the_cost(tmp_path):
    command = (
        "plan --model qwen3-8b --hardware l40s --rps 3 --input 4000 --output 10 --slo-ttft 2500"
        " --slo-tpot 60 --requests 80 --prefix-hit 0.85 --pause 60 --no-savings"
        f" --memory-gib-hour-usd 5 --disk-gib-hour-usd 0.5 --json {tmp_path}/p.json"
    )
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert "stores: none lowers the cost" in result.output
    assert "80 requests hold turns 3 s apart, not 60 s" in result.output
    report = from_json((tmp_path / "p.json").read_bytes())
    assert report.config["memory_gib_hour_usd"] == 5
    assert report.config["pause_s"] == 60
    assert report.value("stores/64_GiB_of_memory/stores") >= 1
    assert report.value("stores/saved") < 0
