"""The router's shell on loopback, with scripted workers."""

import asyncio
import logging
from contextlib import aclosing

import msgspec
import pytest

from engine.clock import MonotonicClock
from engine.config import RouterConfig
from engine.layout import KVFormat
from engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    DecodeStarted,
    EventsAddress,
    FirstToken,
    Generate,
    Hello,
    LoadReport,
    Prefill,
    Role,
    StepReport,
    StillStepping,
)
from engine.net.sessions import SessionClient
from engine.net.trust import Secret
from router import links
from router.machine.events import Arrived, RouterEffect, RouterEvent, Tick
from router.machine.requests import Cancelled, Failed, Finished
from router.service import Router
from tests.kits.router.scripted_workers import (
    DEADLINE_S,
    LAYOUT,
    SECRET,
    ScriptedWorker,
    answer,
    follow,
    request,
    run,
    serving,
    until,
    updates_of,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(links, "RETRY_EVERY_S", 0.05)
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT_S", 0.3)


# ---------------------------------------------------------------- joining


def test_a_router_is_ready_when_a_worker_of_each_role_has_joined():
    async def test() -> None:
        p0, d0 = ScriptedWorker("p0", Role.PREFILL), ScriptedWorker("d0", Role.DECODE)
        router = Router([], config=RouterConfig(), secret=SECRET, clock=MonotonicClock())
        assert router.readiness() == "no prefill worker is connected"
        assert router.fingerprint() == ""
        async with serving(p0) as router:
            assert router.readiness() == "no decode worker is connected"
        p0 = ScriptedWorker("p0", Role.PREFILL)
        async with serving(p0, d0) as router:
            assert router.readiness() is None
            assert router.fingerprint() == "model-fp32"
            assert {i: w.role for i, w in router.workers().items()} == {
                "p0": Role.PREFILL,
                "d0": Role.DECODE,
            }
            # The message is sent once, or a second time if the first got no answer in time.
            assert set(p0.hellos) == {Hello(PROTOCOL_VERSION, router.gateway_id)}

    run(test())


def test_wait_for_a_router_is_bounded():
    async def test() -> None:
        worker = ScriptedWorker("m0")
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


def test_gateway_without_the_secret_gets_no_welcome(caplog):
    async def test() -> None:
        worker = ScriptedWorker()
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
def test_worker_without_block_events_serves(events, counted):
    async def test() -> None:
        worker = ScriptedWorker(events=events)
        async with serving(worker) as router:
            assert router.counters()["block events", counted] == 1
            assert router.readiness() is None
            token_ids, _ = await follow(router, request())
            assert len(token_ids) == 6

    run(test())


def test_kv_formats_of_pools_may_differ_and_are_in_the_fingerprint():
    async def test() -> None:
        int8 = msgspec.structs.replace(LAYOUT, kv_format=KVFormat.INT8)
        p0 = ScriptedWorker("p0", Role.PREFILL)
        d0 = ScriptedWorker("d0", Role.DECODE, layout=int8)
        async with serving(p0, d0) as router:
            assert router.readiness() is None
            assert router.fingerprint() == "model-decode_int8-prefill_fp32"

    run(test())


def test_a_store_fixes_neither_model_nor_layout():
    async def test() -> None:
        int8 = msgspec.structs.replace(LAYOUT, kv_format=KVFormat.INT8)
        store = ScriptedWorker("s0", Role.STORE, layout=int8, fingerprint="another model")
        async with serving(store) as router:
            assert router.readiness() == "no prefill worker is connected"
            assert router.fingerprint() == ""
            worker = ScriptedWorker("m0")
            router.follow({*router._links.addresses, await worker.open()})
            assert await router.wait_until_ready(5.0) is None
            assert router.fingerprint() == "model-fp32"
            token_ids, _ = await follow(router, request())
            assert token_ids == answer([1, 2, 3], 6)
        await worker.close()

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
        ({"worker_id": "s0|disk"}, "no worker may be called 's0|disk'"),
        ({"role": Role.STORE, "fingerprint": "another model"}, "fingerprint differs"),
        ({"role": Role.STORE, "layout": OTHER_LAYOUT}, "layout.block_size differs"),
        ({"version": PROTOCOL_VERSION + 1}, "protocol version differs"),
    ],
)
def test_worker_that_does_not_fit_is_refused_and_the_reason_logged(caplog, difference, reason):
    async def test() -> None:
        first = ScriptedWorker("m0")
        async with serving(first) as router:
            second = ScriptedWorker("m1", **difference)
            address = await second.open()
            router.follow({*router._links.addresses, address})
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
        first, second = ScriptedWorker("m0"), ScriptedWorker("m1")
        first.patience = 2
        async with serving(first) as router:
            address = await second.open()
            updates = updates_of(router, request())
            news = await anext(updates)
            router.follow([address])
            await until(lambda: len(router.workers()) == 2, "the new one joined")
            assert not first.session.ended  # a request still runs on this session
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
def test_failed_handshake_is_repeated(greeting):
    async def test() -> None:
        worker = ScriptedWorker()
        worker.greeting = greeting
        async with serving(worker, joined=0) as router:
            await until(lambda: len(worker.hellos) >= 2, "it is tried again")
            assert router.workers() == {}
            worker.greeting = None
            await until(lambda: len(router.workers()) == 1, "it joins in the end")

    run(test())


def test_absent_worker_is_dialled_until_the_router_closes_quickly(monkeypatch):
    tries: list[str] = []

    class CountingClient(SessionClient):
        async def open(self) -> None:
            tries.append(self._address)
            await super().open()

    monkeypatch.setattr(links, "SessionClient", CountingClient)

    async def test() -> None:
        gone = ScriptedWorker()
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


def test_an_answer_of_two_workers():
    async def test() -> None:
        p0, d0 = ScriptedWorker("p0", Role.PREFILL), ScriptedWorker("d0", Role.DECODE)
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
        p0, d0 = ScriptedWorker("p0", Role.PREFILL), ScriptedWorker("d0", Role.DECODE)
        async with serving(p0, d0, ScriptedWorker("m0")) as router:
            asks = [request(f"r{i}", (i, i + 1), max_tokens=1 + i % 9) for i in range(60)]
            answers = await asyncio.gather(*(follow(router, ask) for ask in asks))
            for i, (token_ids, _) in enumerate(answers):
                assert token_ids == answer([i, i + 1], 1 + i % 9)

    run(test())


def test_closed_stream_is_cancelled_at_the_worker():
    async def test() -> None:
        worker = ScriptedWorker()
        worker.patience = 2
        async with serving(worker) as router:
            updates = updates_of(router, request())
            await anext(updates)
            await updates.aclose()
            await until(lambda: Cancel("r.0") in worker.received, "the worker is told")
            assert router.machine.num_flights == 0
            assert router.counters()["ended", "cancelled"] == 1
            assert router._clients._clients == {}

    run(test())


# ---------------------------------------------------------------- broken sessions


def broken_by_end(worker: ScriptedWorker) -> None:
    worker.session.broken.set()


def broken_by_garbage(worker: ScriptedWorker) -> None:
    worker.tasks.append(asyncio.create_task(worker.session.line.send(b"\xc1")))  # type: ignore[arg-type]


def broken_by_death(worker: ScriptedWorker) -> None:
    worker.tasks.append(asyncio.create_task(worker.close()))


@pytest.mark.parametrize("break_it", [broken_by_end, broken_by_garbage, broken_by_death])
def test_an_answer_goes_on_elsewhere_when_a_stream_breaks(break_it):
    async def test() -> None:
        first, second = ScriptedWorker("m0"), ScriptedWorker("m1")
        first.patience = 2  # three tokens, counting the first token of the prefill
        async with serving(first, second) as router:
            router.machine.state.rng.choice = lambda workers: workers[0]  # the first worker by name
            token_ids: list[int] = []
            outcome = None
            async with (
                asyncio.timeout(DEADLINE_S),
                aclosing(updates_of(router, request())) as updates,
            ):
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


def test_request_fails_if_no_worker_replaces_its_last_one_in_time():
    async def test() -> None:
        worker = ScriptedWorker()
        worker.patience = 2
        async with (
            serving(worker, queue_timeout_s=0.2) as router,
            aclosing(updates_of(router, request())) as updates,
        ):
            await anext(updates)
            await worker.close()
            async with asyncio.timeout(DEADLINE_S):
                last = [update async for update in updates][-1]
            assert last.outcome == Failed("no prefill worker came in time")

    run(test())


def test_cut_off_worker_joins_again():
    async def test() -> None:
        worker = ScriptedWorker()
        async with serving(worker) as router:
            for number in range(3):
                worker.session.broken.set()
                await until(lambda: worker.sessions[number].ended, "the session ended")  # noqa: B023
                await until(lambda: len(worker.sessions) == number + 2, "another began")  # noqa: B023
                await until(lambda: len(router.workers()) == 1, "the worker joined again")
                token_ids, _ = await follow(router, request(f"r{number}"))
                assert token_ids == answer([1, 2, 3], 6)

    run(test())


def test_worker_that_answers_but_hangs_in_a_step_is_lost():
    async def test() -> None:
        stuck, other = ScriptedWorker("m0"), ScriptedWorker("m1")
        stuck.patience = other.patience = 0
        async with serving(stuck, other) as router:
            router.machine.state.workers.fleet = None
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


def test_worker_lost_for_a_stuck_step_joins_again_with_the_next_step():
    """A worker may join during a long step, except during the step for which it was removed."""

    async def test() -> None:
        worker = ScriptedWorker(step=StillStepping(20.0))
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


def test_router_wakes_at_deadlines_and_not_before():
    async def test() -> None:
        worker = ScriptedWorker()
        worker.patience = 0
        async with serving(worker, progress_timeout_s=0.2, max_attempts=2) as router:
            ticks: list[tuple[float, float | None]] = []  # times of ticks, and their next wake-ups
            handle = router.machine.handle

            def noting(event: RouterEvent, now_s: float) -> list[RouterEffect]:
                effects = handle(event, now_s)
                if isinstance(event, Tick):
                    ticks.append((now_s, router.machine.next_wake_s()))
                return effects

            router.machine.handle = noting  # type: ignore[method-assign]
            _, updates = await follow(router, request())
            assert isinstance(updates[-1].outcome, Failed)  # both attempts have failed
            (_, wanted_s), (last_s, nothing) = ticks[0], ticks[-1]
            assert nothing is None
            assert len(ticks) <= 6  # polling would need ten ticks or more
            assert wanted_s is not None
            # Only the load of the machine may delay the tick.
            assert 0 <= last_s - ticks[0][0] - 0.2 < DEADLINE_S / 10

    run(test())


def test_gateways_have_a_seed_each_unless_one_is_set():
    def seed(**config: int) -> int | None:
        router = Router([], config=RouterConfig(**config), secret=SECRET, clock=MonotonicClock())
        return router.machine.state.config.seed  # the recording has this seed too

    assert len({seed() for _ in range(8)}) == 8
    assert seed(seed=5) == seed(seed=5) == 5


# ---------------------------------------------------------------- shutdown


def test_closing_ends_requests_and_sessions():
    async def test() -> None:
        worker = ScriptedWorker()
        worker.patience = 2
        async with serving(worker) as router:
            updates = updates_of(router, request())
            await anext(updates)
            await router.close()
            async with asyncio.timeout(DEADLINE_S):
                last = [update async for update in updates][-1]
            assert isinstance(last.outcome, Failed | Cancelled)
            await until(lambda: worker.session.ended, "the worker sees the end")

    run(test())


def test_a_router_that_has_lost_a_task_to_a_bug_is_not_ready(caplog):
    async def test() -> None:
        worker = ScriptedWorker()
        worker.patience = 0
        async with serving(worker, progress_timeout_s=0.1) as router:
            assert router.readiness() is None
            handle = router.machine.handle

            def broken(event: RouterEvent, now_s: float) -> list[RouterEffect]:
                if isinstance(event, Tick):
                    raise ZeroDivisionError("a bug")
                return handle(event, now_s)

            async with aclosing(updates_of(router, request())) as updates:
                await anext(updates)
                router.machine.handle = broken  # type: ignore[method-assign]
                await until(lambda: router.readiness() is not None, "it is noticed")
                assert "a bug" in str(router.readiness())

    run(test())
    assert "a router task died" in caplog.text


# ---------------------------------------------------------------- arrival of requests


def test_requests_of_one_turn_are_handed_to_the_machine_together(monkeypatch):
    async def test() -> None:
        worker = ScriptedWorker()
        async with serving(worker) as router:
            arrived: list[Arrived] = []
            handle = router.machine.handle

            def noting(event: RouterEvent, now_s: float) -> list[RouterEffect]:
                if isinstance(event, Arrived):
                    arrived.append(event)
                return handle(event, now_s)

            monkeypatch.setattr(router.machine, "handle", noting)
            asks = [follow(router, request(str(number))) for number in range(3)]
            answers = await asyncio.gather(*asks)
            assert [token_ids for token_ids, _ in answers] == [answer([1, 2, 3], 6)] * 3
            assert [event.more_come for event in arrived] == [True, True, False]

    run(test())


def test_request_that_is_withdrawn_in_its_first_turn_ends_as_cancelled():
    async def test() -> None:
        worker = ScriptedWorker()
        async with serving(worker) as router:
            first = asyncio.create_task(follow(router, request("first")))
            await asyncio.sleep(0)
            assert not router.machine.state.flights
            router.withdraw(["first"])
            _, [*_, last] = await first
            assert isinstance(last.outcome, Cancelled)

    run(test())
