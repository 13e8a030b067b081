"""A worker that computes nothing: `python -m bench.lab.gateway.worker`, for `bench gateway`.

It speaks a worker's protocol over a worker's socket, so the gateway in front of it is the real one.
All that a client waits for beside the pace is the gateway's own time. The worker answers:

    Generate            sends the first token at once, as after a prefill of no time
    every `pace_s`      sends one token of every sequence in a frame for each gateway: a decode step
    Cancel, last token  removes the sequence
    now and then        reports its load, with the time of a step

For its first prompts it reports in two frames when they begin and end. From these the gateway
learns their cost, and then decides as it does for workers that it has known for a while.

In a request's sampling, `seed` is the place in a list of token ids where its answer begins, so that
texts differ. `top_k` is the number of steps from token to token. Driven as `bench.processes.driven`
describes; the process ends with its stdin.
"""

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import uvloop

from bench.processes.driven import answer_parent
from engine.clock import MonotonicClock
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    FinishReason,
    Generate,
    Hello,
    Incarnation,
    LoadReport,
    PrefillDone,
    PrefillStarted,
    Role,
    SeqId,
    StepReport,
    ToGateway,
    Tokens,
    ToWorker,
    Welcome,
    WorkerId,
    decode_to_worker,
    encode_frame,
)
from engine.net.sessions import Line, SessionServer
from engine.net.trust import Secret

NUM_BLOCKS = 2**20  # memory is never short
MAX_RUNNING = 2**16
BLOCK_SIZE = 16
NUM_SHOWN = 16  # prompts
REPORT_EVERY = 100  # steps


class NullWorkerOptions(msgspec.Struct, frozen=True):
    """The process's only argument, a JSON object."""

    token: str
    pace_s: float
    token_ids: tuple[int, ...]
    worker_id: str = "null"
    kernels: str = ""  # the kernels that it claims to use


@dataclass(slots=True)
class _Sequence:
    """An answer in flight: `num_left` tokens are left, from index `place` of the list on."""

    place: int
    num_left: int
    every: int  # steps
    phase: int


@dataclass(slots=True)
class _Session:
    """One gateway's sequences, and the frames for it."""

    line: Line
    running: dict[SeqId, _Sequence] = field(default_factory=dict)

    def say(self, messages: list[ToGateway]) -> None:
        if messages:
            with suppress(ConnectionError):  # the gateway is leaving
                self.line.post(encode_frame(messages))


class NullWorker:
    """A worker that computes nothing, for any number of gateways."""

    def __init__(self, options: NullWorkerOptions) -> None:
        self._options = options
        self._clock = MonotonicClock()
        self._sessions: list[_Session] = []
        self._server = SessionServer(self._serve, Secret(options.token))
        self._stop = asyncio.Event()
        self._num_steps = 0
        self._num_prompts = 0

    async def open(self) -> str:
        """Listens and begins to step; returns the address."""
        self._stepping = asyncio.create_task(self._step_for_ever())
        return await self._server.open()

    async def close(self) -> None:
        """Ends all sessions."""
        self._stop.set()
        await self._stepping
        await self._server.close()

    async def _serve(self, line: Line) -> None:
        [hello] = decode_to_worker(await anext(line))
        assert isinstance(hello, Hello)
        line.post(encode_frame([_welcome(self._options)]))
        session = _Session(line)
        # Without this report the cost of steps would be unknown for a while.
        session.say([self._load(num_rows=1)])
        self._sessions.append(session)
        try:
            async for frame in line:
                messages = decode_to_worker(frame)
                session.say([n for message in messages for n in self._receive(session, message)])
        finally:
            self._sessions.remove(session)

    def _receive(self, session: _Session, message: ToWorker) -> list[ToGateway]:
        match message:
            case Generate():
                return self._submit(session, message)
            case Cancel(seq_id):
                session.running.pop(seq_id, None)
        return []

    def _submit(self, session: _Session, message: Generate) -> list[ToGateway]:
        num_tokens = message.limits.max_len - len(message.token_ids)
        sampling = message.sampling
        every = max(1, sampling.top_k)
        sequence = _Sequence(sampling.seed, num_tokens, every, phase=sampling.seed % every)
        token, finish = self._next(sequence)
        if finish is None:
            session.running[message.seq_id] = sequence
        started = PrefillStarted(message.seq_id, 0, None)
        self._num_prompts += 1
        if self._num_prompts <= NUM_SHOWN:
            session.say([started])
            return [PrefillDone(message.seq_id, token, finish)]
        return [started, PrefillDone(message.seq_id, token, finish)]

    def _next(self, sequence: _Sequence) -> tuple[int, FinishReason | None]:
        token_ids = self._options.token_ids
        sequence.place += 1
        sequence.num_left -= 1
        token = token_ids[sequence.place % len(token_ids)]
        return token, None if sequence.num_left else FinishReason.LENGTH

    async def _step_for_ever(self) -> None:
        due_s = self._clock.now_s()
        while not self._stop.is_set():
            now_s = self._clock.now_s()
            due_s = max(due_s + self._options.pace_s, now_s)  # a late step delays the later ones
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), due_s - now_s)
            self._num_steps += 1
            for session in self._sessions:
                self._step(session)

    def _step(self, session: _Session) -> None:
        messages: list[ToGateway] = []
        for seq_id, sequence in list(session.running.items()):
            if (self._num_steps + sequence.phase) % sequence.every:
                continue
            token, finish = self._next(sequence)
            messages.append(Tokens(seq_id, [token], finish))
            if finish is not None:
                del session.running[seq_id]
        if messages and self._num_steps % REPORT_EVERY == 0:
            messages.append(self._load(len(messages)))
        session.say(messages)

    def _load(self, num_rows: int) -> LoadReport:
        """A load report of a worker that is never short of anything."""
        step = StepReport(self._options.pace_s, num_rows=num_rows, num_context_tokens=num_rows)
        return LoadReport(NUM_BLOCKS, 0, 0, 0, 0, 0, 0, 0, steps=[step])


def _welcome(options: NullWorkerOptions) -> Welcome:
    return Welcome(
        version=PROTOCOL_VERSION,
        worker_id=WorkerId(options.worker_id),
        incarnation=Incarnation("null"),
        role=Role.MIXED,
        fingerprint="null",
        layout=KVLayout(BLOCK_SIZE, KVFormat.FP32, (KVSection(1, 1, head_dim=2),)),
        num_blocks=NUM_BLOCKS,
        max_running=MAX_RUNNING,
        kernels=options.kernels,
    )


async def _main(options: NullWorkerOptions) -> None:
    worker = NullWorker(options)
    address = await worker.open()
    answer_parent({"ready": {"address": address, "pid": os.getpid()}})
    await asyncio.to_thread(sys.stdin.read)
    await worker.close()


if __name__ == "__main__":
    uvloop.run(_main(msgspec.json.decode(sys.argv[1], type=NullWorkerOptions)))
