"""Code that studies of running streams share: deployments with clients, requests, windows and gaps.

Times are measured by the client. The client shares the cores with the deployments, so the CPU time
of both is reported. No two prompts share a prefix, so prefix caches have no effect.
"""

import asyncio
import os
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import process_time

import aiohttp
from tokenizers import Tokenizer

from bench.client.answers import Answer, Endpoint, Failure, request_body
from bench.client.load import kinds_of, whole
from bench.common import background
from bench.common.background import busy_warning
from bench.common.shapes import SPECIAL_TOKENS, cached_checkpoint, shape_named, tokenizer_over
from bench.processes.deployment import ServedDeployment
from bench.serve.plan import ServeTarget
from bench.serve.run import Send, ServeClient
from engine.clock import MonotonicClock
from engine.errors import BatonError

REQUEST_TIMEOUT_S = 120.0
FAILED_PAUSE_S = 1.0
TOKENIZER = "tokenizer.json"
WARM_UP_TOKENS = 16  # tokens of each warm-up stream; longer streams would not change the result
# if there are more tokens per chunk, gaps are between chunks, not between tokens
TOKENS_PER_CHUNK = 1.002


class StreamsApart(BatonError):
    """The streams of a run were never all decoding at the same time."""


@dataclass(frozen=True, slots=True)
class StreamAsk:
    """Requests of one length, of which `at_once` run concurrently."""

    at_once: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class BesideRun:
    """Streams on one arm, and the requests that ran meanwhile. All times are seconds on one
    clock.
    """

    arm: str
    streams: tuple[Answer, ...]  # answers with at least three chunks each
    others: tuple[Answer | Failure, ...] = ()
    wall_s: float = 0.0
    gateway_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    others_share: float | None = None  # share of all cores that other programs used
    repeat: int = 0

    @property
    def window_s(self) -> tuple[float, float]:
        """Returns the window: from the second chunk of the stream that began last, until the first
        stream's end.
        """
        begin_s = max(stream.chunk_times_s[1] for stream in self.streams)
        return begin_s, min(stream.chunk_times_s[-1] for stream in self.streams)

    @property
    def gaps_s(self) -> list[float]:
        """Returns the seconds between the chunks of all streams in the window."""
        return gaps_within(self.streams, self.window_s)

    @property
    def prompts(self) -> list[Answer]:
        """Returns the answers to the requests that ran while the streams decoded."""
        return [one for one in self.others if isinstance(one, Answer)]

    @property
    def answered(self) -> list[Answer]:
        """Returns the answered requests whose first token arrived in the window."""
        begin_s, end_s = self.window_s
        return [one for one in self.prompts if begin_s <= one.chunk_times_s[0] <= end_s]

    def together(self) -> "BesideRun":
        """Returns the run. Raises StreamsApart if its streams were never all decoding at the same
        time.
        """
        begin_s, end_s = self.window_s
        if begin_s >= end_s:
            raise StreamsApart(f"{self.arm}: the streams did not run at the same time")
        return self


def gaps_within(streams: Sequence[Answer], window_s: tuple[float, float]) -> list[float]:
    """Returns the gaps between chunks of these answers, for gaps inside the window."""
    begin_s, end_s = window_s
    return [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.chunk_times_s)
        if begin_s <= earlier and later <= end_s
    ]


def answered_per_s(answers: Iterable[Sequence[float]], begin_s: float, end_s: float) -> float:
    """Returns the answered requests/s in a window. An answer counts by the share of its chunks in
    the window.

    `answers` are the arrival times of each answer's chunks.
    """
    num = sum(sum(begin_s <= at_s < end_s for at_s in times) / len(times) for times in answers)
    return num / (end_s - begin_s)


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A running deployment and a client for it."""

    served: ServedDeployment
    send: Send
    model: str
    workers: tuple[int, ...]  # session ids of the workers

    @property
    def sessions(self) -> list[int]:
        """Returns the session ids of all processes of the deployment."""
        return [self.served.pid, *self.served.sessions()]

    def gateway_cpu_s(self) -> float:
        """Returns the CPU seconds of the gateways."""
        return sum(map(background.session_seconds, self.served.services("gateway")))

    def worker_seconds(self) -> list[float]:
        """Returns the CPU seconds of each worker."""
        return [background.session_seconds(session) for session in self.workers]


async def live_server(served: ServedDeployment, session: aiohttp.ClientSession) -> LiveServer:
    """Opens a client for a running deployment. Raises ServerUnreachable."""
    client = ServeClient(session, ServeTarget(served.url), MonotonicClock())
    model = await client.first_model()
    return LiveServer(served, client.send, model, tuple(served.services("worker")))


def our_sessions(servers: Mapping[str, LiveServer]) -> list[int]:
    """Returns the session ids of this process and of all servers. Other programs' CPU time excludes
    them.
    """
    return [os.getsid(0), *(session for one in servers.values() for session in one.sessions)]


@contextmanager
def linked_checkpoint(shape: str, *, seed: int) -> Iterator[Path]:
    """Makes a folder with links to the weights of this shape, and with an `ascii_tokenizer`.
    Returns the folder.
    """
    with TemporaryDirectory(prefix="baton-") as folder:
        path = Path(folder)
        for file in cached_checkpoint(shape, seed).iterdir():
            if file.name != TOKENIZER:
                (path / file.name).symlink_to(file)
        ascii_tokenizer(shape_named(shape).vocab_size).save(str(path / TOKENIZER))
        yield path


def ascii_tokenizer(vocab_size: int) -> Tokenizer:
    """Builds a tokenizer in which every id, except special tokens, is a complete text.

    If a token is half a character, its text is sent with the next token, so the client would see
    one gap for two steps. The tokenizer of `bench.common.shapes` has such tokens: nearly 1 % of its
    ids.
    """
    letters = string.digits + string.ascii_letters + string.punctuation
    return tokenizer_over(letters, vocab_size - len(SPECIAL_TOKENS) - len(letters))


def bodies(ask: StreamAsk, vocab: Sequence[int], *, model: str, rng: Random) -> Iterator[bytes]:
    """Yields request bodies without end. Each has a different prompt."""
    while True:
        yield body_of(ask.input_len, ask.output_len, vocab, model=model, rng=rng)


def body_of(
    input_len: int, output_len: int, vocab: Sequence[int], *, model: str, rng: Random
) -> bytes:
    """Returns the body of a request with a random prompt and an answer of this length."""
    prompt = rng.choices(vocab, k=input_len)
    return request_body(
        Endpoint.COMPLETIONS, prompt, model=model, output_len=output_len, temperature=0.0
    )


async def measured_beside(
    server: LiveServer,
    streams: Iterator[bytes],
    load: Iterator[bytes],
    *,
    at_once: tuple[int, int],
    sessions: Sequence[int],
    arm: str,
) -> BesideRun:
    """Runs streams, and loaders that send requests meanwhile; measures the CPU time. `at_once` has
    the numbers of streams and of loaders.
    """
    num_streams, num_loaders = at_once
    before, cpu_s = background.read(sessions), (server.gateway_cpu_s(), process_time())
    clock = MonotonicClock()
    begin_s = clock.now_s()
    answers, others = await run_beside(
        server.send, [*islice(streams, num_streams)], load, num_loaders=num_loaders
    )
    return BesideRun(
        arm,
        answers,
        tuple(others),
        wall_s=clock.now_s() - begin_s,
        gateway_cpu_s=server.gateway_cpu_s() - cpu_s[0],
        client_cpu_s=process_time() - cpu_s[1],
        others_share=background.share_of_others(before, background.read(sessions)),
    )


async def run_beside(
    send: Send, streams: Sequence[bytes], load: Iterator[bytes], *, num_loaders: int
) -> tuple[tuple[Answer, ...], list[Answer | Failure]]:
    """Runs all streams. Meanwhile each loader sends one request after the other, until all streams
    end.

    Raises RequestsFailed if a stream fails.
    """
    others: list[Answer | Failure] = []
    ended = asyncio.Event()

    async def loader() -> None:
        while not ended.is_set():
            others.append(result := await send(next(load)))
            # without this pause, a refused loader would send its next request at once
            if isinstance(result, Failure):
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), FAILED_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(send(body)) for body in streams]
        for _ in range(num_loaders):
            group.create_task(loader())
        results = await asyncio.gather(*running)
        ended.set()
    return whole(results), others


async def run_beside_arrivals(
    send: Send,
    streams: Sequence[bytes],
    prompts: Iterator[bytes],
    arrivals: Iterator[float],
    *,
    now_s: Callable[[], float],
) -> tuple[tuple[Answer, ...], list[Answer | Failure]]:
    """Runs all streams. Meanwhile sends prompts at the given times, counted from now, until all
    streams end.

    Waits for the answers to the prompts that were sent. Raises RequestsFailed if a stream fails.
    """
    start_s = now_s()
    ended = asyncio.Event()
    sent: list[asyncio.Task[Answer | Failure]] = []

    async def arrive(group: asyncio.TaskGroup) -> None:
        for due_s in arrivals:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(0.0, start_s + due_s - now_s()))
            if ended.is_set():
                return
            sent.append(group.create_task(send(next(prompts))))

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(send(body)) for body in streams]
        group.create_task(arrive(group))
        results = await asyncio.gather(*running)
        ended.set()
    return whole(results), [task.result() for task in sent]


def answer_warnings(
    streams: Sequence[Answer], others: Sequence[Answer | Failure], shares: Sequence[float | None]
) -> list[str]:
    """Returns facts about requests and machine that a reader needs before trusting the results."""
    failures = [one for one in others if isinstance(one, Failure)]
    lines = [f"failed: {kind}" for kind in kinds_of(failures)]
    lines += busy_warning(share or 0.0 for share in shares)
    num_tokens = sum(stream.num_output_tokens for stream in streams)
    num_chunks = sum(len(stream.chunk_times_s) for stream in streams)
    if num_tokens > TOKENS_PER_CHUNK * num_chunks:
        lines.append(f"{num_tokens / num_chunks:.2f} tokens came in a chunk: gaps are of chunks")
    answers = [one for one in others if isinstance(one, Answer)]
    num_cached = sum(answer.num_cached_tokens or 0 for answer in answers)
    if num_cached:
        lines.append(f"{num_cached} tokens of prompts were cached: another --seed asks anew")
    return lines
