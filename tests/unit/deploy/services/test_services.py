"""Services: which services download a model, and the deadlines of their starts."""

import asyncio
import sys
from concurrent.futures import Future

import msgspec
import pytest

from deploy.base.spec import READY_TIMEOUT_S, SLOWEST_BYTES_PER_S, GatewaySpec, WorkerSpec
from deploy.base.thread import LateStart, ServiceThread
from deploy.services.model import has_to_fetch, start_limit_s
from engine.config import DeviceKind, GatewayConfig, RouterConfig, WorkerConfig
from engine.control import Intent, Members, Version
from engine.devices.settings import resolve
from engine.messages import Role, WorkerId

SPEC = GatewaySpec(Members(1, (), Intent()), GatewayConfig(), RouterConfig(), "token")
SETTINGS = resolve(WorkerConfig(), DeviceKind.CPU)


@pytest.mark.parametrize(
    ("kind", "model", "has_to"),
    [
        ("worker", "hf://org/name", True),
        ("worker", "s3://models/name", True),
        ("worker", "/models/name", False),
        ("gateway", "hf://org/name", False),
    ],
)
def test_only_workers_with_a_remote_model_fetch(kind, model, has_to):
    version = Version(model=model)
    spec = msgspec.structs.replace(SPEC, members=Members(1, (), Intent((version,))))
    worker = WorkerSpec(WorkerId("w"), Role.PREFILL, model, SETTINGS, "token", threads=1)
    assert has_to_fetch(worker if kind == "worker" else spec) is has_to


def test_late_open_is_a_typed_error():
    class Slow:
        drain_timeout_s = 0.0

        async def open(self) -> None:
            await asyncio.get_running_loop().create_future()

        async def close(self) -> None:
            pass

    thread = ServiceThread(Slow(), "slow", open_timeout_s=0.01)
    with pytest.raises(LateStart, match=r"did not start in 0\.01 s"):
        thread.open()
    thread.close()


def test_a_loop_that_ends_by_itself_ends_the_process(monkeypatch):
    class Broken:
        drain_timeout_s = 0.0

        async def open(self) -> None:
            asyncio.get_running_loop().call_soon(sys.exit, 3)

        async def close(self) -> None:
            pass

    ended: Future[BaseException] = Future()
    monkeypatch.setattr("deploy.base.thread.die", ended.set_result)
    ServiceThread(Broken(), "broken").open()
    assert isinstance(ended.result(10), SystemExit)


def test_a_large_model_may_take_long_to_start(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(int(1000 * SLOWEST_BYTES_PER_S))  # a sparse file, which needs no disk space
    who = (WorkerId("w"), Role.PREFILL, str(tmp_path), SETTINGS, "token")
    spec = WorkerSpec(*who, threads=1)
    assert start_limit_s(spec) == pytest.approx(READY_TIMEOUT_S + 1000, abs=0.01)
    assert start_limit_s(SPEC) == READY_TIMEOUT_S
