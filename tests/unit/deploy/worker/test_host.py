"""Parts of a worker host that need no thread or socket: schedulers, roles, sessions."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from decode.arrivals import HOLD_S
from deploy.worker import host as worker_host
from deploy.worker.core import WorkerCore
from deploy.worker.gateway_sessions import MAX_UNSENT_BYTES
from deploy.worker.host import ModelFacts, WorkerHost, WorkerIdentity
from engine.config import DeviceKind, WorkerConfig
from engine.devices.settings import resolve
from engine.messages import (
    PROTOCOL_VERSION,
    GatewayId,
    Hello,
    Refused,
    Role,
    Welcome,
    WorkerId,
    decode_to_gateway,
    encode_frame,
)
from engine.net.trust import Secret
from engine.worker.batch import BatchResult, RowResult
from engine.worker.events import GatewayLost
from engine.worker.pace import FIRST_TOKENS
from engine.worker.steps import StepWatch
from tests.kits.fakes.model import VOCAB_SIZE, FakeGuides, FakeRunner
from tests.kits.worker_core import HERE, decode, generate, given_back, hold, prefill

EVENTS = {"prefill": prefill("a", 5), "generate": generate("a", 5), "decode": decode("a", 5)}
TAKEN = {"prefill": [], "generate": [], "decode": [hold("a", 2)]}


class SetClock:
    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def host(role: Role, counters: dict[str, float] | None = None, **config: object) -> WorkerHost:
    return WorkerHost(
        WorkerIdentity(WorkerId("w"), role, "model", Secret("token")),
        config=msgspec.structs.replace(resolve(WorkerConfig(), DeviceKind.CPU), **config),
        runner=FakeRunner(50),
        model=ModelFacts(VOCAB_SIZE, 1000, False, FakeGuides(), counters=counters or {}),
        memory=None,
        clock=None,
        on_crash=None,
    )


def step(core: WorkerCore) -> list[tuple[str, int]]:
    """Runs one step. Returns the number of tokens in the step, by sequence."""
    plan, _ = core.plan(0.0)
    results = [RowResult((1,) if row.sampling is not None else ()) for row in plan.rows]
    core.finish(BatchResult(results), 0.0)
    return [(row.seq_id, len(row.token_ids)) for row in plan.rows]


@pytest.mark.parametrize(
    ("role", "stretch", "takes"),
    [
        (Role.PREFILL, 4.0, {"prefill", "generate", "decode"}),
        (Role.PREFILL, None, {"prefill"}),
        (Role.DECODE, 4.0, {"generate", "decode"}),
        (Role.DECODE, None, {"decode"}),
        (Role.MIXED, 4.0, {"prefill", "generate", "decode"}),
        (Role.MIXED, None, {"prefill", "generate", "decode"}),
    ],
)
def test_worker_accepts_the_work_of_its_announced_role(role, stretch, takes):
    for name, event in EVENTS.items():
        worker = host(role, stretch=stretch)
        worker._events = None
        core = worker._open_core(HERE)
        effects = TAKEN[name] if name in takes else [given_back("a", "wrong role")]
        assert core.handle(event) == effects
        assert worker._welcome().generates == ("generate" in takes)


def test_fluid_worker_computes_short_chunks_beside_decodes_until_steps_were_timed():
    core = host(Role.DECODE, stretch=4.0)._open_core(HERE)
    core.handle(generate("a", 3))
    assert step(core) == [("a", 3)]
    core.handle(generate("b", [1] * 100))
    core.handle(generate("c", [2] * 40))
    assert step(core) == [("a", 1), ("b", FIRST_TOKENS)]


def test_mixed_worker_computes_prompts_in_chunks_after_decodes():
    config = {"max_batch_tokens": 64, "chunk_tokens": 32, "max_running": 4}
    core = host(Role.MIXED, stretch=4.0, **config)._open_core(HERE)
    core.handle(generate("a", 3))
    assert step(core) == [("a", 3)]
    core.handle(generate("b", [1] * 100))
    core.handle(generate("c", [2] * 40))
    assert step(core) == [("a", 1), ("b", 32), ("c", 31)]
    assert step(core) == [("a", 1), ("b", 32), ("c", 9)]
    assert step(core) == [("a", 1), ("c", 1), ("b", 32)]
    assert step(core) == [("a", 1), ("c", 1), ("b", 4)]


def test_held_step_begins_in_time_without_events():
    clock = SetClock()
    worker = host(Role.DECODE)
    core = worker._core = worker._open_core(HERE)
    worker._clock = clock
    assert worker._idle_s() == worker_host.REPORT_EVERY_S
    core.handle(decode("a", 5, is_moved=True))
    core.plan(0.0)
    clock.at_s = 0.75 * HOLD_S
    assert worker._idle_s() == pytest.approx(0.25 * HOLD_S)
    clock.at_s = 2 * HOLD_S
    assert worker._idle_s() == 0.0
    core.plan(clock.at_s)
    assert worker._idle_s() == worker_host.REPORT_EVERY_S


def test_an_idle_worker_looks_for_leaks_once_until_something_happens():
    worker, looks = host(Role.MIXED), []
    worker._core = SimpleNamespace(
        held_until_s=None, validate=lambda: looks.append(1), handle=lambda event: []
    )
    worker._clock = SetClock()
    for _ in range(3):
        worker._handle_events(0.0)
    assert len(looks) == 1
    worker._inbox.put(GatewayLost(GatewayId("g")))
    worker._handle_events(0.0)
    worker._handle_events(None)  # like the call between two steps
    assert len(looks) == 1
    worker._handle_events(0.0)
    assert len(looks) == 2


# ---------------------------------------------------------------- asyncio thread


async def test_failed_watch_ends_the_worker(monkeypatch):
    """Otherwise no code would notice a hanging step."""
    crashes: list[BaseException] = []
    monkeypatch.setattr(worker_host, "REPORT_EVERY_S", 0.0)

    worker = host(Role.MIXED)
    worker._on_crash, worker._loop = crashes.append, asyncio.get_running_loop()
    worker._watch = StepWatch(None, 0.0)
    worker._clock = None  # the watch then fails as if it had a bug
    async with asyncio.timeout(5):
        await worker._watch_steps()
    assert [type(crash) for crash in crashes] == [AttributeError]


class FakeGateway:
    """A gateway's connection that says hello, and reads nothing once it `stalls`."""

    def __init__(self) -> None:
        self.num_unsent_bytes = 0
        self.heard: list[object] = []
        self.session: asyncio.Task[None] | None = None
        self._hello: bytes | None = encode_frame([Hello(PROTOCOL_VERSION, GatewayId("g"))])

    async def receive(self) -> bytes:
        hello, self._hello = self._hello, None
        if hello is None:
            await asyncio.Event().wait()
        assert hello is not None
        return hello

    def post(self, frame: bytes) -> None:
        self.heard += decode_to_gateway(frame)

    def stall(self) -> None:
        self.num_unsent_bytes = MAX_UNSENT_BYTES + 1

    def fail(self, _: Exception) -> None:
        assert self.session is not None
        self.session.cancel()

    def begin(self, worker: WorkerHost) -> "asyncio.Task[None]":
        self.session = asyncio.create_task(worker._sessions._session(self))  # type: ignore[arg-type]
        return self.session


async def test_cut_off_gateway_reconnects_after_its_sequences_are_cancelled():
    """A new session before the cancellation would be cancelled together with the old sequences."""

    worker = host(Role.MIXED)
    worker._events = None
    old, early, new = FakeGateway(), FakeGateway(), FakeGateway()
    async with asyncio.timeout(5):
        first = old.begin(worker)
        await asyncio.sleep(0)
        beginning = early.begin(worker)
        old.stall()
        worker._sessions.post(GatewayId("g"), b"")
        await beginning
        assert early.heard == [Refused("a session of this gateway is open")]
        await asyncio.gather(first, return_exceptions=True)
        assert worker._inbox.get_nowait() == GatewayLost(GatewayId("g"))
        second = new.begin(worker)
        await asyncio.sleep(0)
        assert isinstance(new.heard[0], Welcome)
        assert worker._inbox.empty()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)


def test_parts_that_the_model_does_without_are_reported():
    worker = host(Role.DECODE, counters={"fallbacks:triton": 1})
    worker._core = worker._open_core(HERE)
    worker._endpoint = SimpleNamespace(counters=dict, source=SimpleNamespace(num_leases=0))
    worker._publisher = SimpleNamespace(counters={}, num_batches=0)
    worker._loop = SimpleNamespace(call_soon_threadsafe=lambda call, *given: call(*given))
    sent = []
    worker._sessions.post_all = sent.append
    worker._report()
    [load] = decode_to_gateway(sent[0])
    assert load.counters["fallbacks:triton"] == 1
