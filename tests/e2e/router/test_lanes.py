"""Tokens that go past the router's machine: it knows of them before anything else happens."""

import asyncio
from collections.abc import Sequence

from engine.messages import GivenBack, SeqId, Tokens, decode_to_gateway
from router.machine.requests import Finished, Request, Update
from router.service import Router
from tests.kits.router.scripted_workers import (
    DEADLINE_S,
    ScriptedWorker,
    answer,
    request,
    run,
    serving,
    until,
)


class Lanes:
    """A `StepTaker` in Python for one request, which takes whatever it is offered."""

    def __init__(self) -> None:
        self.open: set[SeqId] = set()
        self.token_ids: list[int] = []  # of the answer
        self.num_taken = 0  # messages that came through a lane
        self.num_closed = 0

    def take_at_once(self, update: Update) -> bool:
        if update.outcome is None:
            self.token_ids += update.token_ids
        return update.outcome is None

    def take_tokens(self, token_ids: Sequence[int], now_s: float) -> bool:
        assert not self.open
        self.token_ids += token_ids
        return True

    def open_lane(self, seq_id: SeqId) -> "Lanes":
        self.open.add(seq_id)
        return self

    def close_lane(self, seq_id: SeqId) -> None:
        self.open.discard(seq_id)
        self.num_closed += 1

    def take_frame(self, frame: bytes, now_s: float) -> Sequence[int] | None:
        messages = decode_to_gateway(frame)
        held = set[SeqId]()
        left: list[int] = []
        for place, message in enumerate(messages):
            seq_id = getattr(message, "seq_id", SeqId(""))
            if not isinstance(message, Tokens) or message.finish:
                held.add(seq_id)
            if seq_id in held or seq_id not in self.open:
                left.append(place)
                continue
            self.token_ids += message.token_ids
            self.num_taken += 1
        return None if len(left) == len(messages) else left

    async def follow(self, router: Router, req: Request) -> Update:
        """Asks and returns the last update."""
        async with asyncio.timeout(DEADLINE_S):
            updates = router.submit(req, self.take_at_once, self.take_tokens, self.open_lane)
            async for update in updates:
                self.token_ids += update.token_ids
                if update.outcome is not None:
                    return update
        raise AssertionError("no outcome")


def test_running_answers_get_their_tokens_through_a_lane():
    async def test() -> None:
        lanes = Lanes()
        async with serving(ScriptedWorker()) as router:
            asked = request(max_tokens=60)
            last = await lanes.follow(router, asked)
            assert isinstance(last.outcome, Finished)
            assert lanes.token_ids == answer(asked.token_ids, 60)
            assert lanes.num_taken > 40
            assert not lanes.open

    run(test())


def test_an_answer_goes_on_behind_the_tokens_of_a_lane_when_its_worker_is_lost():
    async def test() -> None:
        workers = ScriptedWorker("m0"), ScriptedWorker("m1")
        for worker in workers:
            worker.patience = 12
        lanes = Lanes()
        async with serving(*workers) as router:
            asked = request(max_tokens=30)
            following = asyncio.create_task(lanes.follow(router, asked))
            await until(lambda: len(lanes.token_ids) == 13, "the worker waits")
            assert lanes.num_taken
            [busy] = [worker for worker in workers if worker.received]
            [other] = [worker for worker in workers if worker is not busy]
            other.patience = 1000
            busy.session.broken.set()
            await following
            assert lanes.token_ids == answer(asked.token_ids, 30)
            [again] = other.received
            assert list(again.token_ids) == [*asked.token_ids, *lanes.token_ids[:13]]

    run(test())


def test_tokens_of_an_attempt_that_is_over_go_nowhere():
    async def test() -> None:
        worker = ScriptedWorker()
        worker.patience = 12
        lanes = Lanes()
        async with serving(worker) as router:
            asked = request(max_tokens=30)
            following = asyncio.create_task(lanes.follow(router, asked))
            await until(lambda: len(lanes.token_ids) == 13, "the worker waits")
            [seq_id] = lanes.open
            worker.patience = 1000
            await worker.session.say(GivenBack(seq_id, "preempted"), Tokens(seq_id, [99]))
            await worker.session.say(Tokens(seq_id, [99]))
            await following
            assert lanes.token_ids == answer(asked.token_ids, 30)

    run(test())


def test_a_client_that_leaves_closes_its_lane():
    async def test() -> None:
        worker = ScriptedWorker()
        worker.patience = 12
        lanes = Lanes()
        async with serving(worker) as router:
            following = asyncio.create_task(lanes.follow(router, request(max_tokens=30)))
            await until(lambda: len(lanes.token_ids) == 13, "the worker waits")
            following.cancel()
            await asyncio.wait([following])
            await until(lambda: not router.machine.num_flights, "the request ended")
            assert not lanes.open

    run(test())
