"""The parts of `bench store` that run a deployment, started with `baton serve`.

`measure_restarts` measures the TTFT of long prompts: computed, and pulled from the store.

1. Prompts are computed, one at a time. The store takes in their blocks and writes them to disk.
2. All workers are killed. New workers start and compute one other prompt, as a warm-up.
3. Each prompt is sent again: its blocks can only be pulled from the store's memory. Then it is sent
   once more and is cached in the worker: this TTFT is the limit for a pull that takes no time.
4. Everything is stopped and started again. The store's memory is empty now.
5. Each prompt is sent again: its blocks can only be pulled from disk.

If a prompt's prefix is from another source than intended, the run fails.

`measure_streams` measures the gaps of running streams with and without a store. Two deployments
run, and one is idle. In the other, streams decode while prompts are sent one after the other. A
store, if there is one, takes in the blocks of these prompts and writes them to disk meanwhile.

`measure_turns` measures clients whose histories grow and do not all fit into the workers' memory.
The same load is sent to a deployment without a store and to one with a store. It is a closed loop:
it measures the service for a fixed number of clients, not the capacity of a server.
"""

import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

import aiohttp
import uvloop

from bench.client.answers import Answer, Endpoint, Failure, request_body
from bench.client.load import LoadRun, RequestsFailed
from bench.client.stream import http_session
from bench.common.command import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.common.shapes import cached_checkpoint
from bench.common.waiting import holds_within, pause
from bench.lab.experiment import rounds
from bench.lab.store.plan import (
    BLOCK_TOKENS,
    ON,
    PROMPTS,
    SERVED,
    STORE_MIB,
    STREAM_ARMS,
    STREAMS,
    TURNS,
    StorePlan,
    store_prompts,
)
from bench.lab.streams import (
    WARM_UP_TOKENS,
    BesideRun,
    StreamAsk,
    bodies,
    linked_checkpoint,
    run_beside,
)
from bench.processes.deployment import Options, ServedDeployment, serving
from bench.serve.lengths import TalkShape, fixed
from bench.serve.plan import ServeAsk, ServeLoad, ServePlan, ServeTarget
from bench.serve.run import Send, ServeClient, ServeMeasured
from bench.serve.run import measure as measure_server
from engine.clock import Clock, MonotonicClock
from engine.errors import BatonError

SAMPLE = re.compile(r"baton_store_(\w+)\{(.*)\} (\S+)")
LABEL = re.compile(r'(state|medium|reason)="(\w+)"')
STATES = ("free", "cached", "owned", "leased", "in_flight")


def store_samples(text: str) -> dict[str, float]:
    """Returns the samples, summed over all stores, by `name` or `name:label`. Pure.

    So `slots:free` are free slots of memory, and `tier_reads_total:disk` the blocks read from disk.
    If a tier counts by reason, the sum over all reasons is returned.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = SAMPLE.fullmatch(line)
        if sample is None:
            continue
        label = LABEL.search(sample[2])
        key = sample[1] if label is None else f"{sample[1]}:{label[2]}"
        found[key] = found.get(key, 0.0) + float(sample[3])
    return found


def num_slots(samples: dict[str, float]) -> float:
    """Returns the number of the stores' memory slots, in any state."""
    return sum(samples.get(f"slots:{state}", 0.0) for state in STATES)


async def read_store_samples(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Requests the samples of a gateway. Returns an empty mapping if it does not answer or knows no
    store.
    """
    try:
        async with session.get(f"{url}/metrics") as response:
            return store_samples(await response.text())
    except (aiohttp.ClientError, TimeoutError):
        return {}


REQUEST_TIMEOUT_S = 120.0
STORED_WITHIN_S = 60.0
SERVED_WITHIN_S = 90.0
RETRY_EVERY_S = 0.5


class StoreNotReady(BatonError):
    """The store did not reach the expected state in time."""


@contextmanager
def served_with_store(
    checkpoint: Path, options: Options, *, store_mib: int, disk: Path | None = None
) -> Iterator[ServedDeployment]:
    """Runs `baton serve` during the context. Without a store if `store_mib` is 0. Raises
    ServerFailed.
    """
    environment = {"BATON_STORE__MEMORY_MIB": str(store_mib)}
    if disk is not None:
        environment["BATON_STORE__DISK"] = str(disk)
    with serving(checkpoint, options, environment) as served:
        yield served


class StoreClient:
    """Sends prompts of token ids to one deployment, and reads its store's samples."""

    def __init__(
        self, session: aiohttp.ClientSession, served: ServedDeployment, send: Send, model: str
    ) -> None:
        self._session = session
        self._clock: Clock = MonotonicClock()
        self.served = served
        self.send = send
        self.model = model

    async def ask(self, prompt: list[int], output_len: int = 1) -> Answer:
        """Sends a prompt and returns the answer. Raises RequestsFailed."""
        result = await self.send(self._body(prompt, output_len))
        if isinstance(result, Failure):
            raise RequestsFailed("a prompt", [result])
        return result

    async def ask_until_served(self, prompt: list[int]) -> Answer:
        """Sends a request that needs both pools, until workers answer it. Raises RequestsFailed."""
        end_s = self._clock.now_s() + SERVED_WITHIN_S
        while True:
            result = await self.send(self._body(prompt, 2))
            if isinstance(result, Answer):
                return result
            if self._clock.now_s() > end_s:
                raise RequestsFailed("a prompt after a restart", [result])
            await pause(RETRY_EVERY_S)

    async def samples(self) -> dict[str, float]:
        """Returns the store's samples, which may be one second old."""
        return await read_store_samples(self._session, self.served.url)

    async def until(self, holds: Callable[[Mapping[str, float]], bool], what: str) -> None:
        """Waits until a condition on the store's samples is true. Raises StoreNotReady."""

        async def is_so() -> bool:
            return holds(await self.samples())

        if not await holds_within(is_so, STORED_WITHIN_S, self._clock):
            raise StoreNotReady(f"{what}: not in {STORED_WITHIN_S:g} s")

    def _body(self, prompt: list[int], output_len: int) -> bytes:
        return request_body(
            Endpoint.COMPLETIONS,
            prompt,
            model=self.model,
            output_len=output_len,
            temperature=0.0,
        )


@asynccontextmanager
async def store_client(served: ServedDeployment) -> AsyncIterator[StoreClient]:
    """Opens a client for the context. Raises ServerUnreachable."""
    async with http_session(REQUEST_TIMEOUT_S) as session:
        client = ServeClient(session, ServeTarget(served.url), MonotonicClock())
        yield StoreClient(session, served, client.send, await client.first_model())


KV_MIB = 512
READS = "tier_reads_total:disk"
OFFERED = "offered_blocks_total:host"


class PrefixElsewhere(BatonError):
    """A prompt's prefix was not pulled from the intended source."""


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """The answers to the same prompts by source of the prefix, all in the same order."""

    cold: tuple[Answer, ...]
    memory: tuple[Answer, ...]
    worker: tuple[Answer, ...]  # prefix cached in the worker itself
    disk: tuple[Answer, ...]


Prompts = list[list[int]]


def measure_restarts(plan: StorePlan, folder: Path, say: Say = say_nothing) -> RestartTimes:
    """Measures the TTFT after restarts, with the store's files in `folder`. Raises BatonError,
    PrefixElsewhere.
    """
    checkpoint = cached_checkpoint(plan.shape, plan.seed)
    vocab = plain_token_ids(checkpoint)
    prompts = store_prompts(plan, vocab, plan.prompts, name="prompts")
    warm_ups = store_prompts(plan, vocab, 3, name="warm-up")
    options = {**SERVED, "--kv-mib": KV_MIB}
    with served_with_store(checkpoint, options, store_mib=STORE_MIB, disk=folder) as served:
        cold, memory, worker = uvloop.run(_from_memory(plan, served, prompts, warm_ups[:2], say))
    say("starting everything again")
    with served_with_store(checkpoint, options, store_mib=STORE_MIB, disk=folder) as served:
        disk = uvloop.run(_from_disk(plan, served, prompts, warm_ups[2], say))
    return RestartTimes(cold, memory, worker, disk)


async def _from_memory(
    plan: StorePlan, served: ServedDeployment, prompts: Prompts, warm_ups: Prompts, say: Say
) -> tuple[tuple[Answer, ...], ...]:
    async with store_client(served) as client:
        await client.ask_until_served(warm_ups[0])
        say(f"{len(prompts)} prompts computed")
        cold = await _ask_all(client, prompts, num_cached=0)
        computed = (len(prompts) + 1) * (plan.prompt_len // BLOCK_TOKENS)
        await client.until(
            lambda samples: _written(samples) >= computed, f"{computed} blocks on disk"
        )
        say("killing all workers")
        for pid in served.services("worker"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await client.ask_until_served(warm_ups[1])
        say(f"{len(prompts)} prompts from the store's memory")
        num_blocks = len(prompts) * plan.cached_len // BLOCK_TOKENS
        before = await client.samples()
        memory = await _ask_all(client, prompts, num_cached=plan.cached_len)
        worker = await _ask_all(client, prompts, num_cached=plan.cached_len)
        offered = before.get(OFFERED, 0.0) + num_blocks
        await client.until(
            lambda samples: samples.get(OFFERED, 0.0) >= offered, f"{num_blocks} blocks offered"
        )
        if (await client.samples()).get(READS, 0.0) > before.get(READS, 0.0):
            raise PrefixElsewhere("blocks that should be in the store's memory came from its disk")
        return cold, memory, worker


async def _from_disk(
    plan: StorePlan, served: ServedDeployment, prompts: Prompts, warm_up: list[int], say: Say
) -> tuple[Answer, ...]:
    async with store_client(served) as client:
        await client.ask_until_served(warm_up)
        num_blocks = len(prompts) * plan.cached_len // BLOCK_TOKENS
        await client.until(
            lambda samples: samples.get("tier_recovered_total:disk", 0.0) >= num_blocks,
            f"{num_blocks} blocks found on disk",
        )
        if (await client.samples()).get(READS, 0.0):
            raise PrefixElsewhere("the store read blocks before it was asked for any")
        say(f"{len(prompts)} prompts from the store's disk")
        answers = await _ask_all(client, prompts, num_cached=plan.cached_len)
        await client.until(
            lambda samples: samples.get(READS, 0.0) >= num_blocks, f"{num_blocks} blocks read"
        )
        return answers


async def _ask_all(client: StoreClient, prompts: Prompts, *, num_cached: int) -> tuple[Answer, ...]:
    """Sends the prompts one at a time. Raises PrefixElsewhere if an unexpected number of tokens was
    cached.
    """
    answers = tuple([await client.ask(prompt) for prompt in prompts])
    found = [answer.num_cached_tokens for answer in answers]
    if any(number != num_cached for number in found):
        raise PrefixElsewhere(f"{num_cached} tokens of each prompt should be cached, not {found}")
    return answers


def _written(samples: Mapping[str, float]) -> float:
    return min(samples.get("blocks:disk", 0.0), samples.get("blocks:host", 0.0))


TAKEN = "taken_blocks_total"
WRITTEN = "tier_writes_total:disk"
CPU = "cpu_seconds_total"
# if the store takes or writes fewer blocks in all runs, the measurement fails
LEAST_WRITTEN = 32


@dataclass(frozen=True, slots=True)
class StreamsMeasured:
    """All runs of the streams, and the work of the store meanwhile."""

    runs: tuple[BesideRun, ...]
    taken_blocks: float
    written_blocks: float
    store_cpu: float = 0.0  # share of one core that the store used while streams ran


def measure_streams(plan: StorePlan, folder: Path, say: Say = say_nothing) -> StreamsMeasured:
    """Measures the gaps of streams, with the store's files in `folder`. Raises BatonError."""
    with ExitStack() as stack:
        checkpoint = stack.enter_context(linked_checkpoint(plan.shape, seed=plan.seed))
        vocab = plain_token_ids(checkpoint)
        served = {}
        for is_on in (False, True):
            say(f"starting {'with' if is_on else 'without'} a store")
            one = served_with_store(
                checkpoint,
                SERVED,
                store_mib=STORE_MIB if is_on else 0,
                disk=folder if is_on else None,
            )
            served[is_on] = stack.enter_context(one)
        measured: StreamsMeasured = uvloop.run(_measure(plan, served, vocab, say))
    return measured


async def _measure(
    plan: StorePlan,
    served: Mapping[bool, ServedDeployment],
    vocab: Sequence[int],
    say: Say,
) -> StreamsMeasured:
    async with AsyncExitStack() as stack:
        clients = {
            is_on: await stack.enter_async_context(store_client(one))
            for is_on, one in served.items()
        }
        brief = replace(STREAMS, output_len=WARM_UP_TOKENS)
        for is_on, client in clients.items():
            await _run(brief, plan.seed, client, vocab, name=f"warm-up/{is_on}")
        before = await clients[True].samples()
        clock, with_store_s = MonotonicClock(), 0.0
        runs = []
        for repeat, arm in rounds(STREAM_ARMS, plan.repeat, plan.seed, say):
            sent_s = clock.now_s()
            found = await _run(
                STREAMS, plan.seed, clients[arm == ON], vocab, name=f"{arm}/{repeat}"
            )
            if arm == ON:
                with_store_s += clock.now_s() - sent_s
            runs.append(replace(found.together(), arm=arm, repeat=repeat))
        after = await clients[True].samples()
    counted = (after.get(n, 0.0) - before.get(n, 0.0) for n in (TAKEN, WRITTEN, CPU))
    taken, written, cpu_s = counted
    if min(taken, written) < LEAST_WRITTEN:
        raise StoreNotReady(f"the store took {taken:g} blocks and wrote {written:g} under load")
    return StreamsMeasured(tuple(runs), taken, written, cpu_s / with_store_s)


async def _run(
    asked: StreamAsk, seed: int, client: StoreClient, vocab: Sequence[int], *, name: str
) -> BesideRun:
    """Runs streams and prompts once. `name` makes the prompts different from other runs'
    prompts.
    """
    rng = Random(f"{seed}/{name}")
    streams, load = (bodies(ask, vocab, model=client.model, rng=rng) for ask in (asked, PROMPTS))
    some = [*islice(streams, asked.at_once)]
    answers, others = await run_beside(client.send, some, load, num_loaders=PROMPTS.at_once)
    return BesideRun(name, answers, tuple(others))


TURN_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class TurnsMeasured:
    """Runs of the same load, without and with a store."""

    without: LoadRun
    with_store: LoadRun


def measure_turns(plan: StorePlan, say: Say = say_nothing) -> TurnsMeasured:
    """Measures clients with growing histories. Raises BatonError."""
    runs = []
    for store_mib in (0, STORE_MIB):
        say(f"{TURNS.clients} clients {'with' if store_mib else 'without'} a store")
        runs.append(_measured(plan, store_mib))
    return TurnsMeasured(*runs)


def _measured(plan: StorePlan, store_mib: int) -> LoadRun:
    checkpoint = cached_checkpoint(plan.shape, plan.seed)
    options = {**SERVED, "--kv-mib": TURNS.worker_mib}
    with served_with_store(checkpoint, options, store_mib=store_mib) as served:
        asked = ServePlan(
            target=ServeTarget(served.url, timeout_s=TURN_TIMEOUT_S),
            load=ServeLoad(
                rate_per_s=float("inf"),
                num_requests=TURNS.num_requests,
                clients=TURNS.clients,
                num_warmup=1,
            ),
            ask=ServeAsk(fixed(TURNS.input_len), fixed(TURNS.output_len), tokenizer_dir=checkpoint),
            talk=TalkShape(turns=fixed(TURNS.turns)),
            seed=plan.seed,
        )
        measured: ServeMeasured = uvloop.run(measure_server(asked))
    return measured.runs[0]
