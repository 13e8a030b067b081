"""A worker that computes nothing: `python -m bench.lab.gateway.worker`, for `bench gateway`.

It uses a worker's protocol over a worker's socket, so the gateway in front of it runs unchanged. A
client's waiting time is the pace plus the gateway's own time. The worker reacts as follows:

    Generate            sends the first token at once, as if the prefill took no time
    every `pace_s`      sends one token of every sequence in a frame for each gateway: a decode step
    Cancel, last token  removes the sequence
    every 100 steps     reports its load, with the time of a step

For its first prompts, it reports begin and end in two separate frames. From these reports the
gateway learns the cost of prompts. After that, it treats this worker like a worker whose costs it
has measured.

In a request's sampling, `seed` is the index in a list of token ids at which the answer begins, so
that texts differ. `top_k` is the number of steps between two tokens. `bench.processes.driven`
describes how the process is driven. It ends when its standard input is closed.
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

NUM_BLOCKS = 2**20  # enough blocks that memory is never short
MAX_RUNNING = 2**16
BLOCK_SIZE = 16
NUM_SHOWN = 16  # number of prompts whose begin and end are reported separately
REPORT_EVERY = 100  # steps between two load reports


class NullWorkerOptions(msgspec.Struct, frozen=True):
    """The process's only argument, as a JSON object."""

    token: str
    pace_s: float
    token_ids: tuple[int, ...]
    worker_id: str = "null"
    kernels: str = ""  # name of the kernels that the worker reports


@dataclass(slots=True)
class _Sequence:
    """A running answer: `num_left` tokens remain, from index `place` of the token list."""

    place: int
    num_left: int
    every: int  # steps between two tokens
    phase: int


@dataclass(slots=True)
class _Session:
    """The sequences of one gateway, and the messages for it."""

    line: Line
    running: dict[SeqId, _Sequence] = field(default_factory=dict)

    def say(self, messages: list[ToGateway]) -> None:
        if messages:
            with suppress(ConnectionError):  # the gateway has closed its connection
                self.line.post(encode_frame(messages))


class NullWorker:
    """A worker that computes nothing. It serves any number of gateways."""

    def __init__(self, options: NullWorkerOptions) -> None:
        self._options = options
        self._clock = MonotonicClock()
        self._sessions: list[_Session] = []
        self._server = SessionServer(self._serve, Secret(options.token))
        self._stop = asyncio.Event()
        self._num_steps = 0
        self._num_prompts = 0

    async def open(self) -> str:
        """Listens on a socket and starts to step. Returns the address."""
        self._stepping = asyncio.create_task(self._step_for_ever())
        return await self._server.open()

    async def close(self) -> None:
        """Closes the sessions of all gateways."""
        self._stop.set()
        await self._stepping
        await self._server.close()

    async def _serve(self, line: Line) -> None:
        [hello] = decode_to_worker(await anext(line))
        assert isinstance(hello, Hello)
        line.post(encode_frame([_welcome(self._options)]))
        session = _Session(line)
        # Without this report, the gateway would not know the cost of steps at first.
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
            # if a step is late, the later steps are late too
            due_s = max(due_s + self._options.pace_s, now_s)
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
        """Returns the load report of a worker that always has room."""
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
