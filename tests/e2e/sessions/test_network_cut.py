"""Workers on both sides of a bad link, which is cut while KV crosses it. No token changes, every
request ends in time, and no block leaks.

    near   prefill-0
    far    prefill-1, decode-2: requests can finish here without the link

The gateway is in the hub and always reaches every worker. It does not know the sides: among equal
workers it chooses the first name, prefill-0, which is on the near side.
"""

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count

import pytest

from bench.chaos.netns import NetworkPlace, Unavailable
from deploy.base.defaults import BUNDLED_MODEL
from deploy.base.spec import WorkerReady, WorkerSpec
from deploy.local.launcher import ProcessLauncher
from engine.config import DeviceKind, Transport, WorkerConfig
from engine.devices.settings import resolve
from engine.messages import Role, Sampling, SeqId, WorkerId
from engine.worker.batch import BatchPlan, Row
from engine.worker.blocks import BlockId
from router.machine.requests import Finished, Request
from router.service import Router
from tests.kits.services.cluster import TOKEN, Workers, ask, is_clean, request, router, until
from tests.kits.services.netns import Link, NetemLink, RelayedLink, network

pytestmark = pytest.mark.torch

CONFIG = WorkerConfig(
    kv_mib=24, chunk_tokens=64, max_batch_tokens=128, max_running=16, kv_transport=Transport.ZMQ
)
SETTINGS = resolve(CONFIG, DeviceKind.CPU)
NUM_PROMPTS = 6
NUM_NEW_TOKENS = 16
DEADLINE_S = 40.0  # seconds per request; a silent source is given up after six seconds
HEALED_WITHIN_S = 45.0
MUCH_BYTES = 300_000  # bytes: less than the KV of one prompt


@pytest.mark.long
@pytest.mark.parametrize(
    "make_link",
    [
        pytest.param(lambda: RelayedLink(random.Random(7)), id="relayed"),
        pytest.param(NetemLink, id="netem"),
    ],
)
def test_a_link_cut_in_the_middle_of_pulls_costs_time_but_no_token_and_no_block(make_link):
    link: Link = make_link()
    answers: dict[tuple[int, ...], list[int]] = {}

    async def ask_at_once(r: Router, seed: int, num_prompts: int = NUM_PROMPTS) -> None:
        """Sends new prompts together. Every answer must arrive in time."""
        prompts = _prompts(seed, num_prompts)
        requests = [_request(f"{seed}-{i}", prompt) for i, prompt in enumerate(prompts)]
        async with asyncio.timeout(DEADLINE_S):
            found = await asyncio.gather(*(ask(r, each) for each in requests))
        outcomes = [answer.outcome for answer in found]
        assert all(isinstance(outcome, Finished) for outcome in outcomes), outcomes
        answers.update((q.token_ids, a.token_ids) for q, a in zip(requests, found, strict=True))

    async def run(running: Workers) -> None:
        async with router(running) as r:
            await ask_at_once(r, seed=0)
            much = link.carried_bytes() + MUCH_BYTES
            assert link.carried_bytes() > MUCH_BYTES
            assert not _failed_pulls(r)

            asking = asyncio.create_task(ask_at_once(r, seed=1))
            await until(lambda: link.carried_bytes() > much, "pulls are under way")
            link.cut()
            await asking
            assert _failed_pulls(r)
            await _all_clean(r)

            link.heal()
            much = link.carried_bytes() + MUCH_BYTES
            async with asyncio.timeout(HEALED_WITHIN_S):
                for seed in count(2):
                    await ask_at_once(r, seed, num_prompts=1)
                    if link.carried_bytes() > much:  # KV crosses the link again
                        break
            await _all_clean(r)

    with _network_or_skip(link) as (near, far):
        places = {
            WorkerId("prefill-0"): (Role.PREFILL, near),
            WorkerId("prefill-1"): (Role.PREFILL, far),
            WorkerId("decode-2"): (Role.DECODE, far),
        }
        with _workers(places) as running:
            asyncio.run(run(running))
    assert answers == _alone(answers)


@contextmanager
def _network_or_skip(link: Link) -> Iterator[tuple[NetworkPlace, NetworkPlace]]:
    with ExitStack() as stack:
        try:
            ends = stack.enter_context(network(link))
        except Unavailable as error:
            pytest.skip(str(error))
        yield ends


@contextmanager
def _workers(places: Mapping[WorkerId, tuple[Role, NetworkPlace]]) -> Iterator[Workers]:
    """Starts each worker in its namespace; at the end all workers are gone."""
    launcher = ProcessLauncher(place_of=lambda kind, name: places[WorkerId(name)][1])

    def start(worker_id: WorkerId) -> WorkerReady:
        role, _ = places[worker_id]
        spec = WorkerSpec(worker_id, role, str(BUNDLED_MODEL), SETTINGS, TOKEN, threads=1)
        return launcher.start(spec)

    try:
        with ThreadPoolExecutor(len(places)) as threads:
            yield Workers(launcher, dict(zip(places, threads.map(start, places), strict=True)))
    finally:
        launcher.close()


async def _all_clean(r: Router) -> None:
    """Waits until new load reports show that no worker holds blocks or sequences."""
    assert len(r.workers()) == 3

    def clean() -> bool:
        return all(
            is_clean(worker.load)
            and worker.load.free_blocks + worker.load.cached_blocks == worker.info.num_blocks
            for worker in r.machine.view.workers.values()
        )

    await until(clean, "every block is free or cached, and no lease open")
    assert r.machine.num_flights == 0
    r.machine.validate()


def _failed_pulls(r: Router) -> int:
    """Returns the number of attempts that failed because KV did not arrive."""
    return sum(
        times
        for (event, reason), times in r.counters().items()
        if event == "retried" and reason.startswith("pull failed")
    )


def _prompts(seed: int, num_prompts: int) -> list[list[int]]:
    """Returns prompts with about a megabyte of KV each, which takes the link a second."""
    rng = random.Random(seed)
    lengths = [rng.randint(120, 180) for _ in range(num_prompts)]
    return [[rng.randrange(5, 4096) for _ in range(length)] for length in lengths]


def _request(name: str, prompt: Sequence[int]) -> Request:
    return request(name, prompt, max_tokens=NUM_NEW_TOKENS, sampling=_sampling(prompt))


def _sampling(prompt: Sequence[int]) -> Sampling:
    return Sampling(temperature=0.7, seed=prompt[0])


def _alone(prompts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """Returns the answer to each prompt, computed alone in this process."""
    from engine.model.runner import TorchRunner

    runner = TorchRunner(BUNDLED_MODEL, num_blocks=16)
    runner.open()
    table = [BlockId(i) for i in range(16)]
    answers = {}
    for prompt in prompts:
        token_ids = list(prompt)
        num_computed = 0
        while len(token_ids) < len(prompt) + NUM_NEW_TOKENS:
            new = token_ids[num_computed:]
            row = Row(SeqId("alone"), new, num_computed, table, _sampling(prompt))
            num_computed = len(token_ids)
            token_ids += runner.run(BatchPlan([row])).tokens
        answers[prompt] = token_ids[len(prompt) :]
    runner.close()
    return answers
