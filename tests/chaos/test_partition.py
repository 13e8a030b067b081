"""A network that falls apart under load, again and again: no request is lost or changed.

    near   the gateway, worker-0 (prefill), worker-2 (decode)
    far    worker-1 (prefill), worker-3 (decode)

The controller and the clients are on neither side. A cut takes two workers from the gateway and
half of all hand-overs their way, without a word to anybody: packets vanish.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest

from bench.chaos.asks import chaos_requests
from bench.chaos.checker import RequestEnd, judge, reply_of
from bench.chaos.client import ReconnectingClient, open_loop, undisturbed
from bench.chaos.netns import Unavailable
from bench.chaos.plan import ChaosPlan, due_times_s
from bench.common.prompts import plain_token_ids
from bench.common.waiting import pause
from deploy.admin.client import AdminClient
from deploy.base.defaults import BUNDLED_MODEL
from deploy.local.deployment import Deployment
from deploy.local.launcher import ProcessLauncher
from engine.clock import MonotonicClock
from engine.config import (
    AdminConfig,
    Config,
    GatewayConfig,
    PoolsConfig,
    Transport,
    WeightFormat,
    WorkerConfig,
)
from tests.kits.services.netns import Link, RelayedLink, network
from tests.kits.services.served import poll_until

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400)]

KEY = "operator"
PLAN = ChaosPlan(num_requests=120, rate_per_s=3.0, seed=4)
CUTS_S = ((6.0, 1.5), (16.0, 14.0))  # (when, for how long): unnoticed, and noticed
WHOLE_WITHIN_S = 60.0


@contextmanager
def deployment(link: Link) -> Iterator[tuple[str, AdminClient]]:
    """The gateway's URL, and its operator."""
    config = Config(
        worker=WorkerConfig(kv_mib=24, weights=WeightFormat.INT8, kv_transport=Transport.ZMQ),
        gateway=GatewayConfig(port=0, model_name="m", open_to_all=True),
        pools=PoolsConfig(prefill=2, decode=2),
        admin=AdminConfig(key=KEY),
    )
    with network(link) as (near, far):
        far_workers = ("worker-1", "worker-3")
        launcher = ProcessLauncher(place_of=lambda _, name: far if name in far_workers else near)
        running = Deployment(launcher, model=BUNDLED_MODEL, config=config)
        url = running.open().url
        try:
            with AdminClient(running.admin_url, KEY) as admin:
                yield url, admin
        finally:
            running.close()


async def disturbed(url: str, link: Link) -> tuple[list, list, list]:
    """Requests, and their answers before and during the partition."""
    clock = MonotonicClock()
    vocab = plain_token_ids(BUNDLED_MODEL)
    asked = chaos_requests(PLAN.num_requests, vocab=vocab, model="m", seed=PLAN.seed)

    async def cut() -> None:
        begun_s = clock.now_s()
        for at_s, lasts_s in CUTS_S:
            await pause(begun_s + at_s - clock.now_s())
            link.cut()
            await pause(lasts_s)
            link.heal()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        client = ReconnectingClient(session, url, clock)
        calm = await undisturbed(client, asked)
        cutting = asyncio.create_task(cut())
        streams = await open_loop(client, asked, due_times_s(PLAN), clock)
        await cutting
    return asked, calm, streams


def is_whole(admin: AdminClient) -> bool:
    """True if all workers are there and hold nothing."""
    pools = admin.pools()
    return pools.settled and not any(
        w.waiting_seqs or w.running_seqs or w.open_leases or w.free_blocks != w.num_blocks
        for w in pools.workers
    )


def test_a_partitioned_network_loses_and_changes_no_answer():
    link = RelayedLink(random.Random(7))
    try:
        with deployment(link) as (url, admin):
            poll_until(lambda: is_whole(admin), "all workers are there", WHOLE_WITHIN_S)
            asked, calm, streams = asyncio.run(disturbed(url, link))
            poll_until(
                lambda: is_whole(admin), lambda: f"nothing is held: {admin.pools()}", WHOLE_WITHIN_S
            )
    except Unavailable as error:
        pytest.skip(str(error))
    verdicts = [
        judge(reply_of(before, ask.num_choices), after, [])
        for ask, before, after in zip(asked, calm, streams, strict=True)
    ]
    wrong = [
        (i, asked[i].kind, verdict)
        for i, verdict in enumerate(verdicts)
        if verdict.end is not RequestEnd.SAME
    ]
    assert not wrong, wrong
    attempts = [stream.num_attempts for each in streams for stream in each]
    assert max(attempts) > 1, "the cuts hit nobody"
