"""Declarations of a file compared with the running deployment, and the orders that apply them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.admin.declared import APPLY, HIDDEN, PLANNER, POOLS, UPDATE, Declared, read_declaration
from deploy.admin.schema import RESTART, Declaration, Difference, PoolCounts, UpdateBody
from deploy.pools.orders import Adjust, SetPlanner, SetPools
from engine.config import (
    AdminConfig,
    Config,
    GatewayConfig,
    ModelConfig,
    PlannerConfig,
    PlannerMode,
    PoolsConfig,
    RouterConfig,
    UpdateConfig,
    WorkerConfig,
)
from engine.control import NO_WORKERS, Asleep, Intent, Pools, Version
from engine.errors import ConfigError

STARTED = Config(
    worker=WorkerConfig(kv_mib=1),  # the earlier version had this memory
    router=RouterConfig(slo_ttft_s=1.0),
    gateway=GatewayConfig(processes=2),
    pools=PoolsConfig(prefill=1, decode=1, num_gpus=0.5),
    admin=AdminConfig(key="secret"),
)
WORKER = WorkerConfig(kv_mib=64)
INTENT = Intent((Version("v2", "/m", "tiny", WORKER, Pools(1, 2)),))


def declared(model: str | None = None, **settings) -> Declared:
    return Declared(Declaration(model, settings), STARTED, INTENT)


def test_keys_missing_from_a_file_keep_their_running_values():
    assert declared().differences == []
    same = declared(
        "/m",
        worker={"kv_mib": 64},
        pools={"prefill": 1, "decode": 2, "num_gpus": 0.5},
        router={"slo_ttft_s": 1.0},
        gateway={"model_name": "tiny", "processes": None},
        admin={"key": "secret"},
    )
    assert same.differences == []
    assert same.orders() == []


def test_each_setting_that_differs_names_both_values_and_the_order():
    found = declared(
        "/other",
        worker={"kv_mib": 128, "step_timeout_s": "none"},
        router={"slo_ttft_s": 2.0},
        gateway={"model_name": "large"},
        pools={"decode": 3, "spares": 1},
        update={"hold_s": 5.0},
        planner={"mode": "dry-run", "max_workers": 8},
        admin={"key": "other"},
    )
    assert found.differences == [
        Difference("model", "/m", "/other", UPDATE),
        Difference("worker.kv_mib", 64, 128, UPDATE),
        Difference("worker.step_timeout_s", 60.0, None, UPDATE),
        Difference("router.slo_ttft_s", 1.0, 2.0, RESTART),
        Difference("gateway.model_name", "tiny", "large", UPDATE),
        Difference("pools.decode", 2, 3, POOLS),
        Difference("pools.spares", 0, 1, APPLY),
        Difference("update.hold_s", 60.0, 5.0, APPLY),
        Difference("planner.mode", "off", "dry-run", PLANNER),
        Difference("planner.max_workers", None, 8, APPLY),
        Difference("admin.key", HIDDEN, HIDDEN, RESTART),
    ]
    adjust, planner, update = found.orders()
    assert isinstance(adjust, Adjust)
    assert (adjust.settings.pools.spares, adjust.settings.pools.num_gpus) == (1, 0.5)
    assert adjust.settings.update == UpdateConfig(hold_s=5.0)
    assert adjust.settings.planner == PlannerConfig(max_workers=8)
    assert planner == SetPlanner(PlannerMode.DRY_RUN)
    assert update == UpdateBody(
        model="/other",
        model_name="large",
        worker={"kv_mib": 128, "step_timeout_s": None},
        pools=PoolCounts(1, 3, 0),
    )


def test_numbers_of_workers_that_a_file_leaves_out_stay():
    assert declared(pools={"decode": 4}).orders() == [SetPools(Pools(1, 4))]
    assert declared(pools={"prefill": None, "decode": "none"}).differences == []
    assert declared(pools={"prefill": None, "decode": 4}).orders() == [SetPools(Pools(1, 4))]
    assert declared(pools={"prefill": 0, "decode": 0, "mixed": 2}).orders() == [
        SetPools(Pools(0, 0, 2))
    ]


def test_the_planner_decides_on_the_pools_while_it_is_on():
    found = declared(pools={"decode": 3}, planner={"mode": "on"})
    assert [each.key for each in found.differences] == ["planner.mode"]


def test_settings_that_need_a_restart_are_not_carried_out_with_others():
    found = declared(pools={"num_gpus": 1.0, "spares": 1})
    assert [each.order for each in found.differences] == [RESTART, APPLY]
    [order] = found.orders()
    assert isinstance(order, Adjust)
    assert (order.settings.pools.num_gpus, order.settings.pools.spares) == (0.5, 1)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"worker": {"kv_mob": 1}}, "did you mean worker.kv_mib"),
        ({"nonsense": {"a": 1}}, "unknown field `nonsense`"),
        ({"pools": {"prefill": 0}}, "need a prefill and a decode worker"),
        ({"planner": {"min_workers": 0}}, "min_workers"),
    ],
)
def test_what_cannot_be_declared_is_refused(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        declared(**settings)


def test_a_file_is_read_without_defaults_or_environment(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATON_WORKER__KV_MIB", "7")
    path = tmp_path / "baton.toml"
    path.write_text('[pools]\ndecode = 2\n[worker]\nstep_timeout_s = "none"\n')
    settings = {"pools": {"decode": 2}, "worker": {"step_timeout_s": None}}
    assert read_declaration(path) == Declaration(None, settings)
    path = tmp_path / "baton.yaml"
    path.write_text(f"address: auto\nmodel: {tmp_path}\ngateway: {{api_key: k}}\n")
    pytest.importorskip("yaml")
    found = read_declaration(path)
    assert found.model == str(tmp_path)
    assert found.settings["gateway"]["api_key"][0].startswith("sha256:")


SMALL = Version("small-v1", "/data/small", "small", WORKER, NO_WORKERS, line="small")
ASLEEP = msgspec.structs.replace(SMALL, asleep=Asleep(Pools(0, 0, 1), 4096))


def of_models(**models: dict[str, Any]) -> Declared:
    small = ModelConfig("small", mixed=1, idle_s=60.0, worker=WORKER)
    started = msgspec.structs.replace(STARTED, models={"small": small})
    intent = Intent((*INTENT.versions, ASLEEP))
    return Declared(Declaration(None, {"models": models}), started, intent)


def test_a_model_that_sleeps_is_as_declared():
    same = {"model": "small", "mixed": 1, "idle_s": 60.0, "worker": {"kv_mib": 64}}
    assert of_models(small=same).differences == []


def test_differences_of_a_model_become_orders_about_its_versions():
    more = {"model": "small", "mixed": 2, "idle_s": 60.0, "worker": {"kv_mib": 64}}
    assert of_models(small=more).differences == [Difference("models.small.mixed", 1, 2, POOLS)]
    assert of_models(small=more).orders() == [SetPools(Pools(0, 0, 2), version="small-v1")]
    other = {"model": "/new", "mixed": 1, "worker": {"kv_mib": 32}}
    found = of_models(small=other)
    assert {each.key: each.order for each in found.differences} == {
        "models.small.model": UPDATE,
        "models.small.idle_s": RESTART,
        "models.small.worker.kv_mib": UPDATE,
    }
    [order] = found.orders()
    assert order == UpdateBody(
        of="small", model="/new", worker={"kv_mib": 32}, pools=PoolCounts(0, 0, 1)
    )


def test_a_model_that_is_added_needs_a_restart():
    found = of_models(large={"model": "/large"})
    assert found.differences == [Difference("models.large", None, "/large", RESTART)]
    assert found.orders() == []


def test_one_version_takes_over_at_a_time_after_all_that_needs_none():
    other = {"model": "/new", "mixed": 1, "worker": {"kv_mib": 64}}
    small = ModelConfig("small", mixed=1, worker=WORKER)
    started = msgspec.structs.replace(STARTED, models={"small": small})
    settings = {"worker": {"kv_mib": 8}, "update": {"hold_s": 1.0}, "models": {"small": other}}
    intent = Intent((*INTENT.versions, ASLEEP))
    adjust, update = Declared(Declaration(None, settings), started, intent).orders()
    assert isinstance(adjust, Adjust)
    assert update == UpdateBody(worker={"kv_mib": 8})


def test_the_planner_decides_on_the_pools_of_all_models():
    more = {"model": "small", "mixed": 2, "idle_s": 60.0, "worker": {"kv_mib": 64}}
    small = ModelConfig("small", mixed=1, idle_s=60.0, worker=WORKER)
    started = msgspec.structs.replace(STARTED, models={"small": small})
    intent = Intent((*INTENT.versions, ASLEEP), planner=PlannerMode.ON)
    assert Declared(Declaration(None, {"models": {"small": more}}), started, intent).orders() == []
