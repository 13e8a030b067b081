"""Batch requests that pause and resume: with the same tokens, in order, and without loss."""

import asyncio
import itertools
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import MAX_PRIORITY
from engine.messages import Limits, RequestId, Sampling
from router.gateway.batches.stepping import BatchGate, SteppingPort, VersionLeaves
from router.machine.requests import Finished, Request, Update
from tests.kits.router.batches import ComputingRouter, next_token
from tests.kits.router.scripted_workers import updates_of

PROMPT = (104, 105)


def request_of(name: str = "r", num_tokens: int = 6, seed: int = 1) -> Request:
    limits = Limits(max_len=len(PROMPT) + num_tokens, prompt_len=len(PROMPT))
    return Request(
        RequestId(name), PROMPT, Sampling(seed=seed), limits, 0.0, priority=3, has_key=True
    )


def undisturbed(request: Request) -> list[int]:
    found = list(request.token_ids)
    while len(found) < request.limits.max_len:
        found.append(next_token(found, request.sampling.seed))
    return found[len(request.token_ids) :]


async def turns(number: int = 8) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class Reader:
    """Reads one request's answer in a task."""

    def __init__(self, port: SteppingPort, request: Request) -> None:
        self.tokens: list[int] = []
        self.updates: list[Update] = []
        self.task = asyncio.ensure_future(self._read(port, request))

    async def _read(self, port: SteppingPort, request: Request) -> None:
        async with aclosing(updates_of(port, request)) as updates:
            async for update in updates:
                self.tokens += update.token_ids
                self.updates.append(update)


ACTIONS = st.lists(st.one_of(st.integers(0, 4), st.sampled_from(["step", "turn"])), max_size=30)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(1, 4))
def test_any_pauses_leave_every_answer_as_it_would_be(actions: list, number: int) -> None:
    async def run() -> None:
        router, gate = ComputingRouter(is_quick=False), BatchGate()
        port = SteppingPort(router, gate, lambda: True)
        requests = [request_of(f"r{i}", 3 + i, seed=i) for i in range(number)]
        readers = [Reader(port, request) for request in requests]
        for action in actions:
            if action == "step":
                router.step()
            elif action == "turn":
                await turns(1)
            else:
                gate.allow(action)
                assert gate.num_running <= action
                assert len(router.running) <= action
        gate.allow(number)
        while not all(reader.task.done() for reader in readers):
            await turns()
            router.step()
        for request, reader in zip(requests, readers, strict=True):
            await reader.task
            assert reader.tokens == undisturbed(request)
            assert [u.outcome for u in reader.updates if u.outcome] == [reader.updates[-1].outcome]
            assert isinstance(reader.updates[-1].outcome, Finished)
        assert gate.num_requests == 0

    asyncio.run(run())


async def test_a_paused_request_goes_on_from_its_tokens_behind_all_clients() -> None:
    router, gate = ComputingRouter(is_quick=False), BatchGate()
    gate.allow(1)
    reader = Reader(SteppingPort(router, gate, lambda: True), request_of())
    await turns()
    router.step()
    router.step()
    gate.allow(0)
    assert not router.running
    await turns()
    assert (gate.num_running, gate.num_waiting, gate.num_paused) == (0, 1, 1)
    gate.allow(1)
    await turns()
    first, second = router.requests
    assert second.token_ids == (*PROMPT, *reader.tokens)
    assert len(reader.tokens) == 2
    assert second.limits == first.limits  # limits count from the start of the prompt
    assert second.sampling == first.sampling
    assert second.request_id != first.request_id  # so late messages for the first id match nothing
    for request in (first, second):
        assert request.priority > MAX_PRIORITY
        assert request.is_background
        assert not request.has_key
    reader.task.cancel()
    await asyncio.gather(reader.task, return_exceptions=True)
    assert gate.num_requests == 0


async def test_the_youngest_step_aside_first_and_the_oldest_go_on_first() -> None:
    router, gate = ComputingRouter(is_quick=False), BatchGate()
    port = SteppingPort(router, gate, lambda: True)
    gate.allow(3)
    readers = [Reader(port, request_of(f"r{i}")) for i in range(3)]
    await turns()
    gate.allow(1)
    assert list(router.running) == ["r0"]
    await turns()
    gate.allow(2)
    await turns()
    assert list(router.running) == ["r0", "r1~1"]
    for reader in readers:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)


async def test_one_request_a_turn_is_let_in() -> None:
    router, gate = ComputingRouter(is_quick=False), BatchGate()
    port = SteppingPort(router, gate, lambda: True)
    readers = [Reader(port, request_of(f"r{i}")) for i in range(4)]
    await turns()
    gate.allow(4)
    seen = []
    for _ in range(8):
        await turns(1)
        seen.append(len(router.running))
    assert seen[-1] == 4
    assert all(after - before <= 1 for before, after in itertools.pairwise(seen))
    for reader in readers:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)


async def test_a_waiting_request_of_a_version_that_leaves_starts_again() -> None:
    router, gate, stays = ComputingRouter(is_quick=False), BatchGate(), True
    reader = Reader(SteppingPort(router, gate, lambda: stays), request_of())
    await turns()
    gate.dismiss_leaving()
    await turns()
    assert not reader.task.done()
    stays = False
    gate.dismiss_leaving()
    with pytest.raises(VersionLeaves):
        await reader.task
    assert gate.num_requests == 0


async def test_a_running_request_of_a_version_that_leaves_ends_there() -> None:
    router, gate = ComputingRouter(), BatchGate()
    gate.allow(1)
    reader = Reader(SteppingPort(router, gate, lambda: False), request_of())
    await turns(2)
    gate.dismiss_leaving()
    await reader.task
    assert reader.tokens == undisturbed(request_of())


async def test_the_next_request_is_let_in_when_the_prompt_of_the_last_is_computed() -> None:
    router, gate = ComputingRouter(is_quick=False), BatchGate()
    gate.has_time = lambda: all(len(r.token_ids) > len(PROMPT) for r, _ in router.running.values())
    port = SteppingPort(router, gate, lambda: True)
    gate.allow(3)
    readers = [Reader(port, request_of(f"r{i}")) for i in range(3)]
    for number in (1, 2, 3):
        await turns()
        assert len(router.running) == number
        router.step()
    gate.allow(0)
    for reader in readers:
        reader.task.cancel()
    await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
