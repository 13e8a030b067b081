"""Measures the TTFT of long prompts: computed, and pulled from the store after restarts.

1. Prompts are computed, one at a time. The store takes their blocks, and writes them to disk.
2. All workers are killed. Others start, and compute one other prompt, as a start must.
3. Each prompt again: its blocks can only come from the store's memory. Then once more, now cached
   in the worker: that is what remains if the pull took no time.
4. Everything is stopped and started again. The store's memory is empty now.
5. Each prompt again: its blocks can only come from disk.

If a prompt's prefix came from another place than intended, the run ends with an error.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.client.answers import Answer
from bench.common.progress import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.common.shapes import cached_checkpoint
from bench.lab.store.clients import StoreClient, served_with_store, store_client
from bench.lab.store.plan import BLOCK_TOKENS, SERVED, STORE_MIB, StorePlan, store_prompts
from bench.processes.serving import ServedDeployment
from engine.errors import BatonError

KV_MIB = 512
READS = "tier_reads_total:disk"
OFFERED = "offered_blocks_total:host"


class PrefixElsewhere(BatonError):
    """A prompt's prefix was not pulled from where it should be."""


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """The answers to the same prompts, in the same order."""

    cold: tuple[Answer, ...]
    memory: tuple[Answer, ...]
    worker: tuple[Answer, ...]  # cached in the worker itself
    disk: tuple[Answer, ...]


Prompts = list[list[int]]


def measure(plan: StorePlan, folder: Path, say: Say = say_nothing) -> RestartTimes:
    """Measures, with the store's files in `folder`. Raises BatonError, PrefixElsewhere."""
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
    """Sends the prompts one at a time. Raises PrefixElsewhere if another number of tokens was
    cached.
    """
    answers = tuple([await client.ask(prompt) for prompt in prompts])
    found = [answer.num_cached_tokens for answer in answers]
    if any(number != num_cached for number in found):
        raise PrefixElsewhere(f"{num_cached} tokens of each prompt should be cached, not {found}")
    return answers


def _written(samples: Mapping[str, float]) -> float:
    return min(samples.get("blocks:disk", 0.0), samples.get("blocks:host", 0.0))
