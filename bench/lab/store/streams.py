"""Measures the gaps of running streams with and without a store beside them.

Two deployments are up, one of them idle. In each, streams decode while prompts come one after the
other. With a store, the blocks of these prompts are taken and written to disk meanwhile.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

import uvloop

from bench.common.progress import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.lab.experiment import rounds
from bench.lab.store.clients import StoreClient, StoreNotReady, served_with_store, store_client
from bench.lab.store.plan import ON, PROMPTS, SERVED, STORE_MIB, STREAM_ARMS, STREAMS, StorePlan
from bench.lab.streams import (
    WARM_UP_TOKENS,
    BesideRun,
    StreamAsk,
    bodies,
    linked_checkpoint,
    run_beside,
)
from bench.processes.serving import ServedDeployment
from engine.clock import MonotonicClock

TAKEN = "taken_blocks_total"
WRITTEN = "tier_writes_total:disk"
CPU = "cpu_seconds_total"
LEAST_WRITTEN = 32  # blocks of all runs with a store, or it had nothing to do


@dataclass(frozen=True, slots=True)
class StreamsMeasured:
    """All runs, and what the store did meanwhile."""

    runs: tuple[BesideRun, ...]
    taken_blocks: float
    written_blocks: float
    store_cpu: float = 0.0  # share of one core, while streams ran beside the store


def measure(plan: StorePlan, folder: Path, say: Say = say_nothing) -> StreamsMeasured:
    """Carries it out with the store's files in `folder`. Raises BatonError."""
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
    """Runs streams and prompts once; `name` keeps its prompts apart from other runs'."""
    rng = Random(f"{seed}/{name}")
    streams, load = (bodies(ask, vocab, model=client.model, rng=rng) for ask in (asked, PROMPTS))
    some = [*islice(streams, asked.at_once)]
    answers, others = await run_beside(client.send, some, load, num_loaders=PROMPTS.at_once)
    return BesideRun(name, answers, tuple(others))
