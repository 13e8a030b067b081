"""The number of gateways, and the options with which they start."""

import msgspec
import pytest

from deploy.base.gpus import FoundGpus, HostGpu
from deploy.controller.plan import ControllerPlan, gateway_processes
from deploy.local.deployment import check_gpus, plan_of
from deploy.pools.events import StartWorker
from engine.config import (
    Config,
    DeviceKind,
    GatewayConfig,
    ModelConfig,
    PlannerConfig,
    PlannerMode,
    PoolsConfig,
    WorkerConfig,
)
from engine.control import Intent, Members, Pools
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.messages import Role, WorkerId

PLAN = ControllerPlan("model", Config(), Pools(1, 1), "token", cores=8, ports="/run/ports")
MEMBERS = Members(1, (), Intent())


@pytest.mark.parametrize(
    ("gateway", "cores", "number"),
    [
        (GatewayConfig(), 2, 1),
        (GatewayConfig(), 4, 2),
        (GatewayConfig(processes=3), 1, 3),
        (GatewayConfig(processes=1), 64, 1),
        (GatewayConfig(requests_per_s=5), 64, 2),
        (GatewayConfig(keys_file="/keys.json"), 64, 2),
    ],
)
def test_two_gateways_run_where_cores_allow(gateway, cores, number):
    assert gateway_processes(gateway, cores) == number


def test_gateways_of_a_machine_keep_their_files_in_one_store():
    alone = PLAN.gateway_spec("gateway", MEMBERS, ())
    assert (alone.gateway.store, alone.ports) == (None, "/run/ports")
    config = Config(gateway=GatewayConfig(processes=2))
    two = msgspec.structs.replace(PLAN, config=config, siblings="/run/siblings")
    stores = {two.gateway_spec(name, MEMBERS, ()).gateway.store for name in two.gateways}
    assert stores == {"/run/store.sqlite"}
    config = Config(gateway=GatewayConfig(processes=2, store="/var/own"))
    named = msgspec.structs.replace(two, config=config)
    assert named.gateway_spec("gateway-0", MEMBERS, ()).gateway.store == "/var/own"


def planned(config: Config, num_gpus: int) -> ControllerPlan:
    return plan_of("/", config, cores=8, memory_bytes=None, num_gpus=num_gpus)


def spec_of(plan: ControllerPlan, role: Role = Role.DECODE):
    wanted = StartWorker(WorkerId("w"), role, 1, plan.first_versions[0])
    return plan.worker_spec(wanted, num_workers=2)


def test_workers_get_the_settings_of_their_device():
    spec = spec_of(planned(Config(), num_gpus=0))
    assert (spec.num_gpus, spec.config.kv_dtype, spec.config.max_running) == (0, "fp32", 64)
    spec = spec_of(planned(Config(), num_gpus=2))
    assert (spec.num_gpus, spec.config.kv_dtype, spec.config.max_running) == (1, "bf16", 256)
    assert spec.config.device is DeviceKind.CUDA


def test_nothing_is_written_back_to_the_configuration():
    config = Config()
    plan = planned(config, num_gpus=2)
    assert plan.config.worker == config.worker == plan.first_versions[0].worker
    assert config.worker.kv_dtype is None


def test_parts_of_gpus_reach_the_workers():
    config = Config(pools=PoolsConfig(num_gpus=0.5))
    assert spec_of(planned(config, num_gpus=1)).num_gpus == 0.5
    cpu = Config(worker=WorkerConfig(device=DeviceKind.CPU))
    assert spec_of(planned(cpu, num_gpus=1)).num_gpus == 0


def test_a_machine_with_one_gpu_gets_one_worker_for_both():
    assert planned(Config(), num_gpus=1).pools == Pools(0, 0, 1)
    assert planned(Config(), num_gpus=2).pools == Pools(1, 1)
    asked = Config(pools=PoolsConfig(prefill=1, decode=1))
    assert planned(asked, num_gpus=1).pools == Pools(1, 1)
    shared = Config(pools=PoolsConfig(num_gpus=0.5))
    assert planned(shared, num_gpus=1).pools == Pools(1, 1)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            FoundGpus((HostGpu("GPU-a"),)),
            r"2 workers need 1 GPU each, and this machine has 1: start",
        ),
        (FoundGpus((), "no nvidia-smi"), "2 workers need 1 GPU each, and no nvidia-smi: start"),
    ],
)
def test_too_few_gpus_are_refused_before_any_start(found, says):
    worker = WorkerConfig(device=DeviceKind.CUDA)
    config = Config(worker=worker, pools=PoolsConfig(prefill=1, decode=1))
    with pytest.raises(ConfigError, match=says):
        check_gpus(planned(config, len(found.gpus)), found)


def test_gpus_are_counted_over_all_models():
    three = FoundGpus(tuple(map(HostGpu, "abc")))
    config = Config(models={"small": ModelConfig("/", mixed=1)})
    check_gpus(planned(config, 3), three)
    config = Config(models={"small": ModelConfig("/", mixed=2)})
    with pytest.raises(ConfigError, match="4 workers need 1 GPU each"):
        check_gpus(planned(config, 3), three)
    check_gpus(planned(Config(worker=WorkerConfig(device=DeviceKind.CPU)), 0), FoundGpus())


@pytest.mark.parametrize(
    ("decode", "num_gpus", "is_refused"),
    [
        (KVFormat.FP32, 0, False),
        (KVFormat.BF16, 2, False),
        (KVFormat.FP32, 2, True),  # the other workers use bf16
    ],
)
def test_planner_needs_the_formats_of_the_device_to_be_equal(decode, num_gpus, is_refused):
    worker = WorkerConfig(decode_kv_dtype=decode)
    config = Config(worker=worker, planner=PlannerConfig(mode=PlannerMode.ON))
    if is_refused:
        with pytest.raises(ConfigError, match="workers that can be flipped"):
            planned(config, num_gpus)
    else:
        planned(config, num_gpus)
