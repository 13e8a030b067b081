"""A `FrameTaker` takes tokens early; the machine gets these tokens before any later event."""

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


class Taker:
    """A sink, and its `FrameTaker`, which takes all offered frames."""

    def __init__(self) -> None:
        self.open: set[SeqId] = set()
        self.token_ids: list[int] = []  # token ids of the answer
        self.num_taken = 0  # messages taken from frames

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        self.token_ids += token_ids
        self.open = {self.handle.offer_frames(self)}

    def update(self, update: Update) -> None:
        self.open.clear()
        self.token_ids += update.token_ids
        if update.outcome is not None:
            self.end.set_result(update)

    def fail(self, error: Exception) -> None:
        self.end.set_exception(error)

    def close(self, seq_id: SeqId) -> None:
        self.open.discard(seq_id)

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
        """Submits a request and returns its last update."""
        self.end: asyncio.Future[Update] = asyncio.get_running_loop().create_future()
        self.handle = router.submit(req, self)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self.end
        finally:
            self.handle.cancel()


def test_most_tokens_of_a_running_answer_are_taken_from_frames():
    async def test() -> None:
        taker = Taker()
        async with serving(ScriptedWorker()) as router:
            asked = request(max_tokens=60)
            last = await taker.follow(router, asked)
            assert isinstance(last.outcome, Finished)
            assert taker.token_ids == answer(asked.token_ids, 60)
            assert taker.num_taken > 40
            assert not taker.open

    run(test())


def test_an_answer_goes_on_behind_taken_tokens_when_its_worker_is_lost():
    async def test() -> None:
        workers = ScriptedWorker("m0"), ScriptedWorker("m1")
        for worker in workers:
            worker.patience = 12
        taker = Taker()
        async with serving(*workers) as router:
            asked = request(max_tokens=30)
            following = asyncio.create_task(taker.follow(router, asked))
            await until(lambda: len(taker.token_ids) == 13, "the worker waits")
            assert taker.num_taken
            [busy] = [worker for worker in workers if worker.received]
            [other] = [worker for worker in workers if worker is not busy]
            other.patience = 1000
            busy.session.broken.set()
            await following
            assert taker.token_ids == answer(asked.token_ids, 30)
            [again] = other.received
            assert list(again.token_ids) == [*asked.token_ids, *taker.token_ids[:13]]

    run(test())


def test_tokens_of_an_attempt_that_is_over_go_nowhere():
    async def test() -> None:
        worker = ScriptedWorker()
        worker.patience = 12
        taker = Taker()
        async with serving(worker) as router:
            asked = request(max_tokens=30)
            following = asyncio.create_task(taker.follow(router, asked))
            await until(lambda: len(taker.token_ids) == 13, "the worker waits")
            [seq_id] = taker.open
            worker.patience = 1000
            await worker.session.say(GivenBack(seq_id, "preempted"), Tokens(seq_id, [99]))
            await worker.session.say(Tokens(seq_id, [99]))
            await following
            assert taker.token_ids == answer(asked.token_ids, 30)

    run(test())
