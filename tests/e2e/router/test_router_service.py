"""The router's shell on loopback, against workers that are a gRPC server and a few lines.

A fake worker computes each token from all tokens before it, so an answer that goes on elsewhere is
right only if nothing was lost, repeated or changed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from engine.clock import MonotonicClock
from engine.config import RouterConfig
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    DecodeStarted,
    EventsAddress,
    FirstToken,
    Generate,
    Hello,
    KvReady,
    LeaseRef,
    Limits,
    LoadReport,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Role,
    Sampling,
    StepReport,
    StillStepping,
    ToGateway,
    Tokens,
    ToWorker,
    TransferAddress,
    Welcome,
    decode_to_worker,
    encode_frame,
)
from engine.net.rpc import Send, SessionClient, SessionServer
from engine.net.trust import Secret
from router import service
from router.machine.machine import RouterEffect, RouterEvent, Tick
from router.machine.requests import Cancelled, Failed, Finished, Request, Update
from router.service import Router

SECRET = Secret("internal token")
LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
DEADLINE_S = 30.0
LEASE = LeaseRef("lease", TransferAddress("p0", "life", "tcp://nowhere"), 1)


def next_token(token_ids: list[int]) -> int:
    return (31 * len(token_ids) + sum(token_ids)) % 101


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass
class Session:
    """One gateway's session with a fake worker."""

    send: Send
    received: list[ToWorker] = field(default_factory=list)
    ended: bool = False
    broken: asyncio.Event = field(default_factory=asyncio.Event)

    async def say(self, *messages: ToGateway) -> None:
        await self.send(encode_frame(messages))


class FakeWorker:
    """Welcomes gateways and generates; `patience` tokens of an answer, then it waits."""

    def __init__(self, name: str = "m0", role: Role = Role.MIXED, **welcome: Any) -> None:
        self.welcome = Welcome(
            version=PROTOCOL_VERSION,
            worker_id=name,
            incarnation="life",
            role=role,
            fingerprint="model",
            layout=LAYOUT,
            num_blocks=100,
            max_running=8,
        )
        self.welcome = msgspec.structs.replace(self.welcome, **welcome)
        self.patience = 1000
        self.greeting: list[ToGateway] | None = None  # None: the welcome, [] for silence
        self.hellos: list[Hello] = []
        self.sessions: list[Session] = []
        self.tasks: list[asyncio.Task[None]] = []  # of tests
        self.refused: list[str] = []  # sessions that could not begin: why
        self._server = SessionServer(self._session, SECRET, on_refused=self.refused.append)

    async def open(self) -> str:
        return await self._server.open()

    async def close(self) -> None:
        await self._server.close()

    @property
    def session(self) -> Session:
        """The latest one."""
        return self.sessions[-1]

    @property
    def received(self) -> list[ToWorker]:
        return self.session.received

    async def _session(self, frames: AsyncIterator[bytes], send: Send) -> None:
        (hello,) = decode_to_worker(await anext(frames))
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        greeting = [self.welcome] if self.greeting is None else self.greeting
        if greeting:
            await send(encode_frame(greeting))
        session = Session(send)
        self.sessions.append(session)
        reader = asyncio.create_task(self._read(frames, session))
        broken = asyncio.create_task(session.broken.wait())
        try:
            await asyncio.wait([reader, broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            broken.cancel()
            session.ended = True

    async def _read(self, frames: AsyncIterator[bytes], session: Session) -> None:
        async for frame in frames:
            for message in decode_to_worker(frame):
                session.received.append(message)
                await self._serve(session, message)

    async def _serve(self, session: Session, message: ToWorker) -> None:
        match message:
            case Prefill(seq_id, token_ids, _, limits):
                token = next_token(token_ids)
                finish = limits.finish_reason(len(token_ids) + 1, token)
                await session.say(PrefillStarted(seq_id, 0, None if finish else LEASE))
                await session.say(PrefillDone(seq_id, token, finish))
            case Generate(seq_id, token_ids, _, limits):
                token = next_token(token_ids)
                finish = limits.finish_reason(len(token_ids) + 1, token)
                done = PrefillDone(seq_id, token, finish)
                await session.say(PrefillStarted(seq_id, 0, None), done)
                if finish is None:
                    await self._generate(session, seq_id, [*token_ids, token], limits)
            case Decode(seq_id):
                await session.say(KvReady(seq_id, 1, 0, "fake"))
            case FirstToken(seq_id, token):
                [decode] = [
                    m for m in session.received if isinstance(m, Decode) and m.seq_id == seq_id
                ]
                await session.say(DecodeStarted(seq_id))
                token_ids = [*decode.token_ids, token]
                await self._generate(session, seq_id, token_ids, decode.limits)

    async def _generate(
        self, session: Session, seq_id: str, token_ids: list[int], limits: Limits
    ) -> None:
        for _ in range(self.patience):
            token = next_token(token_ids)
            token_ids.append(token)
            finish = limits.finish_reason(len(token_ids), token)
            await session.say(Tokens(seq_id, [token], finish))
            if finish is not None:
                return


# ---------------------------------------------------------------- a router in a test


@asynccontextmanager
async def serving(
    *workers: FakeWorker, secret: Secret = SECRET, joined: int | None = None, **config: Any
) -> AsyncIterator[Router]:
    """A router that so many workers have joined: all of them, if nothing is said."""
    addresses = [await worker.open() for worker in workers]
    router = Router(addresses, config=RouterConfig(**config), secret=secret, clock=MonotonicClock())
    await router.open()
    try:
        num_joined = len(workers) if joined is None else joined
        await until(lambda: len(router.workers()) == num_joined, "the workers joined")
        yield router
        router.machine.validate()
    finally:
        await router.close()
        for worker in workers:
            await worker.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    end_s = MonotonicClock().now_s() + DEADLINE_S
    while not holds():
        assert MonotonicClock().now_s() < end_s, f"not in time: {what}"
        await asyncio.sleep(0.005)


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6) -> Request:
    limits = Limits(max_len=len(prompt) + max_tokens)
    return Request(RequestId(name), prompt, Sampling(), limits, MonotonicClock().now_s())


async def follow(router: Router, req: Request) -> tuple[list[int], list[Update]]:
    token_ids: list[int] = []
    updates: list[Update] = []
    async with asyncio.timeout(DEADLINE_S):
        async for update in router.submit(req):
            updates.append(update)
            token_ids += update.token_ids
    return token_ids, updates


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(service, "RETRY_EVERY_S", 0.05)
    monkeypatch.setattr(service, "HANDSHAKE_TIMEOUT_S", 0.3)


# ---------------------------------------------------------------- joining


def test_a_router_is_ready_when_a_worker_of_each_role_has_joined():
    async def test() -> None:
        p0, d0 = FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)
        router = Router([], config=RouterConfig(), secret=SECRET, clock=MonotonicClock())
        assert router.readiness() == "no prefill worker is connected"
        assert router.fingerprint() == ""
        async with serving(p0) as router:
            assert router.readiness() == "no decode worker is connected"
        p0 = FakeWorker("p0", Role.PREFILL)
        async with serving(p0, d0) as router:
            assert router.readiness() is None
            assert router.fingerprint() == "model-fp32"
            assert {i: w.role for i, w in router.workers().items()} == {
                "p0": Role.PREFILL,
                "d0": Role.DECODE,
            }
            # Once, or again where the first was not answered in time.
            assert set(p0.hellos) == {Hello(PROTOCOL_VERSION, router.gateway_id)}

    run(test())


def test_a_router_can_be_waited_for_but_not_for_ever():
    async def test() -> None:
        worker = FakeWorker("m0")
        address = await worker.open()
        clock = MonotonicClock()
        for addresses, missing in (([], "no prefill worker is connected"), ([address], None)):
            router = Router(addresses, config=RouterConfig(), secret=SECRET, clock=clock)
            await router.open()
            timeout_s = DEADLINE_S if addresses else 0.05
            assert await router.wait_until_ready(timeout_s) == missing
            assert router.readiness() == missing
            await router.close()
        await worker.close()

    run(test())


def test_a_worker_tells_a_gateway_without_the_secret_nothing(caplog):
    async def test() -> None:
        worker = FakeWorker()
        async with serving(worker, secret=Secret("a guess"), joined=0) as router:
            await until(lambda: len(worker.refused) >= 2, "it tries again")
            assert worker.hellos == []
            assert router.workers() == {}
            assert router.readiness() == "no prefill worker is connected"

    with caplog.at_level(logging.WARNING):
        run(test())
    assert "untrusted: wrong secret or address" in caplog.text


@pytest.mark.parametrize(
    ("events", "counted"),
    [
        (EventsAddress("nowhere", "nowhere"), "not followed"),
        (EventsAddress("tcp://127.0.0.1:9", "nowhere"), "ask failed"),
    ],
)
def test_a_worker_whose_block_events_cannot_be_had_serves_all_the_same(events, counted):
    async def test() -> None:
        worker = FakeWorker(events=events)
        async with serving(worker) as router:
            assert router.counters()["block events", counted] == 1
            assert router.readiness() is None
            token_ids, _ = await follow(router, request())
            assert len(token_ids) == 6

    run(test())


def test_pools_may_differ_in_the_format_of_kv_and_so_does_the_fingerprint_then():
    async def test() -> None:
        int8 = msgspec.structs.replace(LAYOUT, kv_format=KVFormat.INT8)
        p0 = FakeWorker("p0", Role.PREFILL)
        d0 = FakeWorker("d0", Role.DECODE, layout=int8)
        async with serving(p0, d0) as router:
            assert router.readiness() is None
            assert router.fingerprint() == "model-decode_int8-prefill_fp32"

    run(test())


OTHER_LAYOUT = msgspec.structs.replace(LAYOUT, block_size=8)
OTHER_FORMAT = msgspec.structs.replace(LAYOUT, kv_format=KVFormat.INT8)
OTHER_POOL = {"role": Role.DECODE, "layout": OTHER_LAYOUT}


@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        ({"fingerprint": "another model"}, "fingerprint differs"),
        ({"layout": OTHER_LAYOUT}, "layout.block_size differs: ours 4, theirs 8"),
        ({"layout": OTHER_FORMAT}, "layout.kv_format differs: ours <KVFormat.FP32"),
        (OTHER_POOL, "layout.block_size differs: ours 4, theirs 8"),
        ({"worker_id": "m0"}, "two workers are called m0"),
        ({"version": PROTOCOL_VERSION + 1}, "protocol version differs"),
    ],
)
def test_a_worker_that_does_not_fit_is_left_out_and_the_reason_is_logged(
    caplog, difference, reason
):
    async def test() -> None:
        first = FakeWorker("m0")
        async with serving(first) as router:
            second = FakeWorker("m1", **difference)
            address = await second.open()
            router.follow({*router._addresses, address})
            await until(lambda: len(second.hellos) >= 2, "it was asked twice")
            assert list(router.workers()) == ["m0"]
            token_ids, _ = await follow(router, request())
            assert token_ids == answer([1, 2, 3], 6)
        await second.close()

    with caplog.at_level(logging.WARNING):
        run(test())
    assert reason in caplog.text


def test_leaving_worker_finishes_its_sequences():
    async def test() -> None:
        first, second = FakeWorker("m0"), FakeWorker("m1")
        first.patience = 2
        async with serving(first) as router:
            address = await second.open()
            updates = router.submit(request())
            news = await anext(updates)
            router.follow([address])
            await until(lambda: len(router.workers()) == 2, "the new one joined")
            assert not first.session.ended  # it has a request yet
            await updates.aclose()
            await until(lambda: first.session.ended, "it is let go")
            assert list(router.workers()) == ["m1"]
            assert news.token_ids
            router.follow([])
            await until(lambda: second.session.ended, "the other one too")
            assert router.readiness() is not None
            router.follow([address])
            await until(lambda: len(router.workers()) == 1, "and it is back")
            token_ids, _ = await follow(router, request())
            assert token_ids == answer([1, 2, 3], 6)
        await second.close()

    run(test())


@pytest.mark.parametrize(
    "greeting",
    [[], [DecodeStarted("s")], [LoadReport(0, 0, 0, 0, 0, 0, 0, 0)] * 2],
    ids=["nothing", "something else", "too much"],
)
def test_a_worker_that_does_not_shake_hands_is_tried_again(greeting):
    async def test() -> None:
        worker = FakeWorker()
        worker.greeting = greeting
        async with serving(worker, joined=0) as router:
            await until(lambda: len(worker.hellos) >= 2, "it is tried again")
            assert router.workers() == {}
            worker.greeting = None
            await until(lambda: len(router.workers()) == 1, "it joins in the end")

    run(test())


def test_absent_worker_is_dialled_for_ever_and_closing_is_quick(monkeypatch):
    tries: list[str] = []

    class CountingClient(SessionClient):
        async def open(self) -> None:
            tries.append(self._address)
            await super().open()

    monkeypatch.setattr(service, "SessionClient", CountingClient)

    async def test() -> None:
        gone = FakeWorker()
        address = await gone.open()
        await gone.close()
        config = RouterConfig()
        router = Router([address], config=config, secret=SECRET, clock=MonotonicClock())
        await router.open()
        await until(lambda: len(tries) > 3, "it is tried again")
        assert router.readiness() == "no prefill worker is connected"
        async with asyncio.timeout(2.0):
            await router.close()

    run(test())


# ---------------------------------------------------------------- serving


def test_an_answer_of_one_worker():
    async def test() -> None:
        worker = FakeWorker()
        async with serving(worker) as router:
            token_ids, updates = await follow(router, request())
            assert token_ids == answer([1, 2, 3], 6)
            assert isinstance(updates[-1].outcome, Finished)
            assert updates[-1].timeline is not None
            assert [u for u in updates if u.outcome is not None] == updates[-1:]
            assert router.machine.num_flights == 0

    run(test())


def test_an_answer_of_two_workers():
    async def test() -> None:
        p0, d0 = FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)
        async with serving(p0, d0) as router:
            token_ids, updates = await follow(router, request())
            assert token_ids == answer([1, 2, 3], 6)
            assert [type(m) for m in p0.received] == [Prefill]
            assert [type(m) for m in d0.received] == [Decode, FirstToken]
            timeline = updates[-1].timeline
            assert timeline is not None
            assert (timeline.prefill_worker, timeline.decode_worker) == ("p0", "d0")

    run(test())


def test_many_answers_at_once():
    async def test() -> None:
        p0, d0 = FakeWorker("p0", Role.PREFILL), FakeWorker("d0", Role.DECODE)
        async with serving(p0, d0, FakeWorker("m0")) as router:
            asks = [request(f"r{i}", (i, i + 1), max_tokens=1 + i % 9) for i in range(60)]
            answers = await asyncio.gather(*(follow(router, ask) for ask in asks))
            for i, (token_ids, _) in enumerate(answers):
                assert token_ids == answer([i, i + 1], 1 + i % 9)

    run(test())


def test_a_client_that_reads_slowly_gets_larger_pieces():
    async def test() -> None:
        worker = FakeWorker()
        async with serving(worker) as router, aclosing(router.submit(request())) as updates:
            first = await anext(updates)
            await until(lambda: router.machine.num_flights == 0, "the answer is complete")
            second = await anext(updates)
            assert [*first.token_ids, *second.token_ids] == answer([1, 2, 3], 6)
            assert isinstance(second.outcome, Finished)
            assert second.timeline is not None

    run(test())


def test_a_client_that_leaves_is_cancelled_at_the_worker():
    async def test() -> None:
        worker = FakeWorker()
        worker.patience = 2
        async with serving(worker) as router:
            updates = router.submit(request())
            await anext(updates)
            await updates.aclose()
            await until(lambda: Cancel("r.0") in worker.received, "the worker is told")
            assert router.machine.num_flights == 0
            assert router.counters()["ended", "cancelled"] == 1
            assert router._clients == {}

    run(test())


def test_a_load_report_reaches_the_status_of_its_worker():
    async def test() -> None:
        worker = FakeWorker()
        report = LoadReport(1, 2, 3, 4, 5, 6, 7, 8, {"pulls_done": 3.0})
        async with serving(worker) as router:
            await worker.session.say(report)
            await until(lambda: router.workers()["m0"].load is not None, "it arrived")
            assert router.workers()["m0"].load == report
            assert router.queue_len() == 0

    run(test())


# ---------------------------------------------------------------- broken streams


def broken_by_end(worker: FakeWorker) -> None:
    worker.session.broken.set()


def broken_by_garbage(worker: FakeWorker) -> None:
    worker.tasks.append(asyncio.create_task(worker.session.send(b"\xc1")))  # type: ignore[arg-type]


def broken_by_death(worker: FakeWorker) -> None:
    worker.tasks.append(asyncio.create_task(worker.close()))


@pytest.mark.parametrize("break_it", [broken_by_end, broken_by_garbage, broken_by_death])
def test_an_answer_goes_on_elsewhere_when_a_stream_breaks(break_it):
    async def test() -> None:
        first, second = FakeWorker("m0"), FakeWorker("m1")
        first.patience = 2  # and so three tokens with that of the prefill
        async with serving(first, second) as router:
            router.machine.state.rng.choice = lambda workers: workers[0]  # the first by name
            token_ids: list[int] = []
            outcome = None
            async with asyncio.timeout(DEADLINE_S), aclosing(router.submit(request())) as updates:
                async for update in updates:
                    token_ids += update.token_ids
                    outcome = update.outcome
                    if len(token_ids) == 3:
                        break_it(first)
            assert isinstance(outcome, Finished)
            assert token_ids == answer([1, 2, 3], 6)
            [again] = second.received
            assert isinstance(again, Generate)
            assert again.token_ids == [1, 2, 3, *token_ids[:3]]
            assert router.counters()["retried", "worker lost"] == 1

    run(test())


def test_a_request_whose_last_worker_is_lost_fails_when_none_comes_in_time():
    async def test() -> None:
        worker = FakeWorker()
        worker.patience = 2
        async with (
            serving(worker, queue_timeout_s=0.2) as router,
            aclosing(router.submit(request())) as updates,
        ):
            await anext(updates)
            await worker.close()
            async with asyncio.timeout(DEADLINE_S):
                last = [update async for update in updates][-1]
            assert last.outcome == Failed("no prefill worker came in time")

    run(test())


def test_a_worker_that_was_cut_off_comes_back():
    async def test() -> None:
        worker = FakeWorker()
        async with serving(worker) as router:
            for number in range(3):
                worker.session.broken.set()
                await until(lambda: worker.sessions[number].ended, "the session ended")  # noqa: B023
                await until(lambda: len(worker.sessions) == number + 2, "another began")  # noqa: B023
                await until(lambda: len(router.workers()) == 1, "the worker joined again")
                token_ids, _ = await follow(router, request(f"r{number}"))
                assert token_ids == answer([1, 2, 3], 6)

    run(test())


def test_a_worker_that_says_nothing_in_time_loses_the_request():
    async def test() -> None:
        worker = FakeWorker()
        worker.patience = 0  # and so every attempt brings the token of its prefill
        async with serving(worker, progress_timeout_s=0.5) as router:
            token_ids, updates = await follow(router, request(max_tokens=3))
            assert isinstance(updates[-1].outcome, Finished)
            assert token_ids == answer([1, 2, 3], 3)
            cancelled = [m for m in worker.received if isinstance(m, Cancel)]
            assert cancelled[:2] == [Cancel("r.0"), Cancel("r.1")]
            assert router.counters()["retried", "no news in time"] == 2

    run(test())


def test_a_worker_that_answers_and_computes_nothing_any_more_is_lost():
    async def test() -> None:
        stuck, other = FakeWorker("m0"), FakeWorker("m1")
        stuck.patience = other.patience = 0
        async with serving(stuck, other) as router:
            router.machine.state.fleet = None
            router.machine.state.estimates.observe_steps(
                router.machine.view.workers["m0"], [StepReport(0.3, num_rows=1)]
            )
            task = asyncio.create_task(follow(router, request()))
            await until(lambda: bool(stuck.received or other.received), "it is placed")
            if other.received:
                stuck, other = other, stuck
            other.patience = 1000
            await stuck.session.say(StillStepping(6.1, is_early=True))
            await stuck.session.say(StillStepping(6.1))
            token_ids, _ = await task
            assert token_ids == answer([1, 2, 3], 6)
            assert router.counters()["worker lost", "StepStuck"] == 1

    run(test())


def test_stuck_worker_joins_when_it_computes_again():
    async def test() -> None:
        worker = FakeWorker(step=StillStepping(61.0))
        async with serving(worker, joined=0) as router:
            await until(lambda: len(worker.hellos) > 2, "it is tried")
            assert not router.workers()
            worker.welcome = msgspec.structs.replace(worker.welcome, step=None)
            await until(lambda: len(router.workers()) == 1, "it joins")

    run(test())


def test_a_worker_whose_step_lasts_joins_and_one_that_was_lost_for_it_when_the_step_is_over():
    """It may be slow; but who found it stuck does not take it back for as good as new."""

    async def test() -> None:
        worker = FakeWorker(step=StillStepping(20.0))
        async with serving(worker) as router:
            await worker.session.say(StillStepping(61.0))
            await until(lambda: not router.workers(), "it is lost")
            worker.welcome = msgspec.structs.replace(worker.welcome, step=StillStepping(61.0))
            tried = len(worker.hellos)
            router.machine.state.config = RouterConfig(progress_timeout_s=100.0)
            await until(lambda: len(worker.hellos) > tried + 1, "it is tried")
            assert not router.workers()
            worker.welcome = msgspec.structs.replace(worker.welcome, step=StillStepping(20.0))
            await until(lambda: len(router.workers()) == 1, "another step joins")

    run(test())


def test_the_router_wakes_when_something_falls_due_and_not_before():
    async def test() -> None:
        worker = FakeWorker()
        worker.patience = 0
        async with serving(worker, progress_timeout_s=0.2, max_attempts=2) as router:
            ticks: list[tuple[float, float | None]] = []  # when, and when one is wanted next
            handle = router.machine.handle

            def noting(event: RouterEvent, now_s: float) -> list[RouterEffect]:
                effects = handle(event, now_s)
                if isinstance(event, Tick):
                    ticks.append((now_s, router.machine.next_wake_s()))
                return effects

            router.machine.handle = noting  # type: ignore[method-assign]
            _, updates = await follow(router, request())
            assert isinstance(updates[-1].outcome, Failed)  # after two attempts
            (_, wanted_s), (last_s, nothing) = ticks[0], ticks[-1]
            assert nothing is None
            assert len(ticks) <= 6  # it polled: ten times and more
            assert wanted_s is not None
            # Late by as much as whatever else runs here takes, and no more.
            assert 0 <= last_s - ticks[0][0] - 0.2 < DEADLINE_S / 10

    run(test())


def test_gateways_have_a_seed_each_unless_one_is_set():
    def seed(**config: int) -> int | None:
        router = Router([], config=RouterConfig(**config), secret=SECRET, clock=MonotonicClock())
        return router.machine.state.config.seed  # which a recording of it holds

    assert len({seed() for _ in range(8)}) == 8
    assert seed(seed=5) == seed(seed=5) == 5


# ---------------------------------------------------------------- the end


def test_closing_ends_requests_and_sessions():
    async def test() -> None:
        worker = FakeWorker()
        worker.patience = 2
        async with serving(worker) as router:
            updates = router.submit(request())
            await anext(updates)
            await router.close()
            async with asyncio.timeout(DEADLINE_S):
                last = [update async for update in updates][-1]
            assert isinstance(last.outcome, Failed | Cancelled)
            await until(lambda: worker.session.ended, "the worker sees the end")

    run(test())


def test_a_router_that_has_lost_a_task_to_a_bug_is_not_ready(caplog):
    async def test() -> None:
        worker = FakeWorker()
        worker.patience = 0
        async with serving(worker, progress_timeout_s=0.1) as router:
            assert router.readiness() is None
            handle = router.machine.handle

            def broken(event: RouterEvent, now_s: float) -> list[RouterEffect]:
                if isinstance(event, Tick):
                    raise ZeroDivisionError("a bug")
                return handle(event, now_s)

            async with aclosing(router.submit(request())) as updates:
                await anext(updates)
                router.machine.handle = broken  # type: ignore[method-assign]
                await until(lambda: router.readiness() is not None, "it is noticed")
                assert "a bug" in str(router.readiness())

    run(test())
    assert "a router task died" in caplog.text


# ---------------------------------------------------------------- the session beneath


def test_frame_to_an_ended_session_is_a_connection_error():
    async def test() -> None:
        worker = FakeWorker()
        worker.greeting = []
        client = SessionClient(await worker.open(), SECRET)
        await client.open()
        await client.send(encode_frame([Hello(PROTOCOL_VERSION, "gateway")]))
        await until(lambda: len(worker.sessions) == 1, "it is greeted")
        worker.session.broken.set()
        assert await client.receive() is None
        with pytest.raises(ConnectionError, match="session ended"):
            await client.send(b"too late")
        await client.close()
        await worker.close()

    run(test())


def test_an_address_where_nothing_listens_is_a_connection_error():
    async def test() -> None:
        gone = FakeWorker()
        address = await gone.open()
        await gone.close()
        client = SessionClient(address, SECRET)
        with pytest.raises(ConnectionError, match="failed to connect"):
            await client.open()
        await client.close()

    run(test())
