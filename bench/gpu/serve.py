"""Runs the whole server on one GPU: compares two workers with one, and searches for stale KV.

reference   one mixed worker answers prompts one after the other; no KV moves
separate    a prefill and a decode worker share the GPU and answer the same prompts
storm       many prompts at once, in several rounds; some requests are cancelled in the middle.
            Some prompts share prefixes, so blocks are freed, cached, moved and reused all the time
speeds      concurrent streams: TTFT, TPOT, tokens per second

An answer that differs from the reference is judged at its first different token. On a GPU the last
bits of logits depend on the batch, so of two tokens with nearly equal probability, either may be
chosen; such cases are counted. Any other difference is a failure: it means that the KV belonged to
another prompt. On a CPU all tokens must be equal.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from bench.client.stream import DONE, ChunkLogprobs, SseParser, decode_chunk, http_session
from bench.common.report import Scalar
from bench.common.shapes import SHAPES, make_checkpoint
from bench.engine.jobs import GPU_SHAPES
from bench.gpu.run import conclude, config_of_run
from bench.gpu.session import GpuSession
from bench.processes.deployment import ServedDeployment, serving
from engine.clock import Clock, MonotonicClock

REQUEST_TIMEOUT_S = 120.0
START_TIMEOUT_S = 240.0  # each of two servers compiles and captures once in this time
NUM_TOP = 5  # number of likeliest tokens that each token's log-probabilities include
TIE = 0.3  # difference of log-probabilities up to which a GPU may choose either token
FIRST_ID = 16  # first id for prompts; lower ids are special tokens
SEED = 0
COUNTERS = ("pulls_done", "pulled_bytes", "pulls_failed", "fallbacks")  # workers' counters to print
REPORTED_WITHIN_S = 5.0  # workers report their counters once a second
LOOK_EVERY_S = 0.2

SERVED = {  # shapes of the checkpoints that are made if DIR has none; their tokenizers are small
    "8b": replace(GPU_SHAPES["8b"].model, vocab_size=65_536, max_positions=8192),
    "1b": replace(GPU_SHAPES["1b"].model, vocab_size=32_768, max_positions=8192),
    "tiny": SHAPES["tiny"],
}


@dataclass(frozen=True, slots=True)
class StalePlan:
    """The sizes of the load."""

    num_prompts: int = 48
    num_prefixes: int = 6
    # tokens, without the shared prefix that some prompts have
    prompt_lens: tuple[int, int] = (3, 600)
    prefix_lens: tuple[int, int] = (16, 1500)
    num_tokens: int = 48
    num_rounds: int = 8
    cancelled: float = 0.3  # share of the requests of a storm that are cancelled
    streams: tuple[int, ...] = (1, 8, 32)


QUICK = StalePlan(
    num_prompts=10,
    num_prefixes=2,
    prompt_lens=(3, 60),
    prefix_lens=(16, 100),
    num_tokens=8,
    num_rounds=2,
    streams=(1, 4),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as token ids, and its sampling. Without a seed the answer is greedy."""

    ids: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """An answer: its tokens, the likeliest tokens at each position, and the arrival times."""

    tokens: tuple[str, ...]
    tops: tuple[dict[str, float], ...]
    sent_s: float = 0.0
    times_s: tuple[float, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Returns the seconds to the first token."""
        return self.times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Returns the mean seconds per token after the first."""
        return (self.times_s[-1] - self.times_s[0]) / max(len(self.tokens) - 1, 1)


def questions_of(plan: StalePlan, vocab_size: int, rng: Random) -> list[Question]:
    """Returns prompts. Half of them start with one of a few prefixes; a quarter is sampled."""

    def ids(lens: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_ID, vocab_size) for _ in range(rng.randint(*lens)))

    prefixes = [ids(plan.prefix_lens) for _ in range(plan.num_prefixes)]
    found = []
    for i in range(plan.num_prompts):
        prefix = rng.choice(prefixes) if i % 2 else ()
        found.append(Question(prefix + ids(plan.prompt_lens), seed=i if i % 4 == 3 else None))
    return found


def difference(reference: StreamedReply, found: StreamedReply) -> tuple[int, float] | None:
    """Returns the first position that differs from the reference. Also returns how much less likely
    the answer's token was there.

    Returns None if all tokens are equal. The difference is infinity if the token was not among the
    likeliest, or is missing.
    """
    for i, wanted in enumerate(reference.tokens):
        got = found.tokens[i] if i < len(found.tokens) else None
        if got != wanted:
            top = reference.tops[i]
            if got is None or got not in top or wanted not in top:
                return i, float("inf")
            return i, abs(top[wanted] - top[got])
    if len(found.tokens) > len(reference.tokens):
        return len(reference.tokens), float("inf")
    return None


class TokenJudge:
    """Compares answers with the reference, and counts equal and different answers."""

    def __init__(self, session: GpuSession, tie: float) -> None:
        self.num_equal = 0
        self.num_tied = 0
        self.num_resampled = 0  # number of sampled answers that differ from the reference on a GPU
        self._session = session
        self._tie = tie

    def judge(
        self, what: str, question: Question, reference: StreamedReply, found: StreamedReply
    ) -> None:
        """Counts an answer; adds a failure to the session if the answer is wrong."""
        differs = difference(reference, found)
        if differs is None:
            self.num_equal += 1
            return
        place, gap = differs
        if gap <= self._tie:
            self.num_tied += 1
        elif self._tie and question.seed is not None:
            self.num_resampled += 1
        else:
            about = f"{len(question.ids)} tokens of prompt, token {place} of the answer"
            self._session.fail(f"{what}: {about}: another one than without hand-over ({gap:.2f})")

    @property
    def summary(self) -> str:
        """Returns the counts as text."""
        return (
            f"{self.num_equal} answers equal, {self.num_tied} exchanged tokens that are nearly"
            f" equally likely, {self.num_resampled} sampled ones differ"
        )


class ServeBench:
    """One run of all sections on one device."""

    def __init__(
        self,
        session: GpuSession,
        folder: Path,
        device: str,
        plan: StalePlan,
        tp: int | None = None,
    ) -> None:
        """Sets up the benchmark. With `tp`, a worker of `tp` ranks is compared too."""
        self._tp = tp
        self._session = session
        self._folder = folder
        self._device = device
        self._plan = plan
        self._references: list[StreamedReply] = []

    def run(self, shape_name: str) -> None:
        """Runs all sections."""
        self._session.section("checkpoint", lambda: self._make(shape_name))
        if not (self._folder / "config.json").exists():
            return
        config = msgspec.json.decode((self._folder / "config.json").read_bytes())
        questions = questions_of(self._plan, config["vocab_size"], Random(SEED))
        self._served("one worker", {"--mixed": 1}, partial(self._refer, questions))
        if not self._references:
            self._session.skip("two workers", "there is no reference")
            return
        pools = {"--prefill": 1, "--decode": 1}
        self._served("two workers", pools, partial(self._compare, questions))
        if self._tp is not None:
            ranks = {"--mixed": 1, "--tp": self._tp}
            self._served("one worker of ranks", ranks, partial(self._compare_ranks, questions))

    def _make(self, shape_name: str) -> None:
        if (self._folder / "config.json").exists():
            self._session.say(f"   {self._folder} is there")
            return
        make_checkpoint(self._folder, SERVED[shape_name], SEED)

    def _served(
        self,
        name: str,
        pools: dict[str, int],
        ask: Callable[["ServedModel"], Awaitable[None]],
    ) -> None:
        """Runs a server during the context of one section."""

        def work() -> None:
            options: dict[str, Scalar] = {**pools, "--device": self._device}
            environment = {"BATON_POOLS__FLUID": "false"}  # without lending, all KV is handed over
            if self._device == "cpu":
                options["--kv-mib"] = 64
            elif "--tp" not in pools:  # all workers use the same GPU
                environment["BATON_POOLS__NUM_GPUS"] = str(1 / sum(pools.values()))
            begin_s = self._session.clock.now_s()
            with tempfile.TemporaryDirectory(prefix="baton-run-") as run_dir:
                environment["BATON_RUN_DIR"] = run_dir
                with serving(
                    self._folder, options, environment, start_timeout_s=START_TIMEOUT_S
                ) as server:
                    start_s = self._session.clock.now_s() - begin_s
                    self._session.add(f"start/{name.replace(' ', '_')}", [start_s], "s")
                    for line in facts_of(environment):
                        self._session.say(f"   {line}")
                    asyncio.run(self._ask(server, ask))
                    for line in troubles_of(environment):
                        self._session.fail(f"{name}: {line}")

        self._session.section(name, work, needs_s=60)

    async def _ask(
        self, server: ServedDeployment, ask: Callable[["ServedModel"], Awaitable[None]]
    ) -> None:
        async with http_session(REQUEST_TIMEOUT_S) as http:
            await ask(ServedModel(http, server.url, self._folder.name, self._session.clock))

    async def _refer(self, questions: Sequence[Question], model: "ServedModel") -> None:
        references = [await model.answer(q, self._plan.num_tokens) for q in questions]
        again = [await model.answer(q, self._plan.num_tokens) for q in questions]
        judge = self._judge()
        for asked, reference, reply in zip(questions, references, again, strict=True):
            judge.judge("one worker, asked again", asked, reference, reply)
        self._session.say(f"   asked again: {judge.summary}")
        self._references = references

    async def _compare(self, questions: Sequence[Question], model: "ServedModel") -> None:
        plan, judge = self._plan, self._judge()
        for asked, reference in zip(questions, self._references, strict=True):
            reply = await model.answer(asked, plan.num_tokens)
            judge.judge("one by one", asked, reference, reply)
        self._session.say(f"   one by one: {judge.summary}")
        rng = Random(SEED + 1)
        for number in range(plan.num_rounds):
            if not self._session.has_time(f"storm {number + 1}", 30):
                break
            await self._storm(questions, model, rng)
        for streams in plan.streams:
            if self._session.has_time(f"speeds of {streams} streams", 20):
                await self._measure(questions, model, streams)
        moved = await model.counters(COUNTERS, within_s=REPORTED_WITHIN_S)
        self._session.say(f"   {', '.join(f'{name} {value:g}' for name, value in moved.items())}")
        if not moved["pulls_done"]:
            self._session.fail("two workers: no KV was moved, so nothing was compared")

    async def _compare_ranks(self, questions: Sequence[Question], model: "ServedModel") -> None:
        """Compares a worker of several ranks with the reference. Ranks add partial sums in another
        order.
        """
        judge = TokenJudge(self._session, TIE)
        for asked, reference in zip(questions, self._references, strict=True):
            reply = await model.answer(asked, self._plan.num_tokens)
            judge.judge("several ranks", asked, reference, reply)
        self._session.say(f"   several ranks: {judge.summary}")
        for streams in self._plan.streams:
            if self._session.has_time(f"speeds of {streams} streams", 20):
                await self._measure(questions, model, streams, f"serve_tp{self._tp}")

    async def _storm(
        self, questions: Sequence[Question], model: "ServedModel", rng: Random
    ) -> None:
        """Sends all prompts at once, in a new order each round. Cancels some requests."""
        plan, judge = self._plan, self._judge()
        order = rng.sample(range(len(questions)), len(questions))
        cancelled = {
            i: rng.randrange(plan.num_tokens) for i in order if rng.random() < plan.cancelled
        }
        async with asyncio.TaskGroup() as group:
            tasks = {
                i: group.create_task(
                    model.answer(questions[i], plan.num_tokens, cancel_after=cancelled.get(i))
                )
                for i in order
            }
        for i, task in tasks.items():
            reference, reply = self._references[i], task.result()
            if i in cancelled:  # the tokens before the cancellation must equal the reference
                num = len(reply.tokens)
                reference = replace(
                    reference, tokens=reference.tokens[:num], tops=reference.tops[:num]
                )
            judge.judge("storm", questions[i], reference, reply)
        self._session.say(f"   storm, {len(cancelled)} cancelled: {judge.summary}")

    async def _measure(
        self,
        questions: Sequence[Question],
        model: "ServedModel",
        streams: int,
        name: str = "serve",
    ) -> None:
        """Times answers with temperature and top-p, with `streams` concurrent requests."""
        rng = Random(SEED + 2)
        vocab_size = max(max(q.ids) for q in questions)
        shape = (*self._plan.prompt_lens,)

        async def stream(number: int) -> list[StreamedReply]:
            replies = []
            for i in range(3):
                ids = tuple(rng.randrange(FIRST_ID, vocab_size) for _ in range(rng.randint(*shape)))
                question = Question(ids, seed=1000 * number + i)
                replies.append(await model.answer(question, self._plan.num_tokens, tops=False))
            return replies

        begin_s = self._session.clock.now_s()
        replies = [r for each in await asyncio.gather(*map(stream, range(streams))) for r in each]
        seconds = self._session.clock.now_s() - begin_s
        num_tokens = sum(len(reply.tokens) for reply in replies)
        self._session.add(f"{name}/{streams}/tokens", [num_tokens / seconds], "tokens/s")
        self._session.add(f"{name}/{streams}/ttft", [1000 * r.ttft_s for r in replies], "ms")
        self._session.add(f"{name}/{streams}/tpot", [1000 * r.tpot_s for r in replies], "ms")

    def _judge(self) -> TokenJudge:
        return TokenJudge(self._session, 0.0 if self._device == "cpu" else TIE)


class ServedModel:
    """A client of the server."""

    def __init__(self, http: aiohttp.ClientSession, url: str, name: str, clock: Clock) -> None:
        self._http = http
        self._url = url
        self._name = name
        self._clock = clock

    async def answer(
        self,
        question: Question,
        num_tokens: int,
        *,
        cancel_after: int | None = None,
        tops: bool = True,
    ) -> StreamedReply:
        """Sends a prompt. Returns the answer, or the part that arrived before the cancellation."""
        body: dict[str, Any] = {
            "model": self._name,
            "prompt": list(question.ids),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0.0 if question.seed is None else 0.9,
        }
        if question.seed is not None:
            body |= {"seed": question.seed, "top_p": 0.95, "top_k": 50}
        body["logprobs"] = NUM_TOP if tops else 0
        tokens: list[str] = []
        likeliest: list[dict[str, float]] = []
        times_s: list[float] = []
        parser, sent_s = SseParser(), self._clock.now_s()
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"{response.status}: {(await response.text())[:300]}")
            async for piece in response.content.iter_any():
                events = [event for event in parser.feed(piece) if event.data != DONE]
                for choice in (one for e in events for one in decode_chunk(e.data).choices or ()):
                    given = choice.logprobs or ChunkLogprobs()
                    tokens += given.tokens
                    likeliest += given.top_logprobs or [{}] * len(given.tokens)
                    times_s += [self._clock.now_s()] * len(given.tokens)
                if cancel_after is not None and len(tokens) > cancel_after:
                    break
        return StreamedReply(tuple(tokens), tuple(likeliest), sent_s, tuple(times_s))

    async def counters(self, names: Sequence[str], within_s: float) -> dict[str, float]:
        """Returns the counters, summed over all workers, once the first counter is above zero."""
        end_s = self._clock.now_s() + within_s
        never = asyncio.get_running_loop().create_future()
        while True:
            found = await self._counters(names)
            if found[names[0]] or self._clock.now_s() >= end_s:
                return found
            await asyncio.wait([never], timeout=LOOK_EVERY_S)

    async def _counters(self, names: Sequence[str]) -> dict[str, float]:
        async with self._http.get(f"{self._url}/metrics") as response:
            text = await response.text()
        found = dict.fromkeys(names, 0.0)
        for line in text.splitlines():
            for name in names:
                if line.startswith(f"baton_worker_{name}_total"):
                    found[name] += float(line.rpartition(" ")[2])
        return found


def facts_of(environment: dict[str, str]) -> list[str]:
    """Returns the facts that each worker reports about its engine."""
    return [f"{w['worker_id']}: {_facts_line(w['facts'])}" for w in _workers(environment)]


def troubles_of(environment: dict[str, str]) -> list[str]:
    """Returns the workers that ended while the server ran, for example after a failed invariant."""
    return [
        f"{w['worker_id']} {w['state']} after {w['failures']} failures {w['why']}".rstrip()
        for w in _workers(environment)
        if w["failures"] or w["state"] != "serving"
    ]


def _workers(environment: dict[str, str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "deploy.commands.main", "workers", "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment},
    )
    found: list[dict[str, Any]] = msgspec.json.decode(done.stdout)
    return found


def _facts_line(facts: dict[str, Any] | None) -> str:
    return "no facts" if facts is None else ", ".join(f"{k} {v}" for k, v in facts.items())


def serve(  # noqa: PLR0913 - the options of the command
    folder: Path,
    *,
    shape_name: str,
    device: str,
    is_quick: bool,
    budget_s: float,
    json: Path | None,
    tp: int | None = None,
) -> int:
    """Runs all sections for which there is time. Returns the exit status.

    Uses the checkpoint in `folder`. If there is none, makes one with random weights.
    """
    session = GpuSession(MonotonicClock(), budget_s, sys.stdout)
    plan = QUICK if is_quick else StalePlan()
    ServeBench(session, folder.resolve(), device, plan, tp).run(shape_name)
    config = config_of_run(shape_name, device, budget_s, is_quick=is_quick)
    return conclude("gpu_serve", session, config, json)
