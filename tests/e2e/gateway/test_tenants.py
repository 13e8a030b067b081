"""Two API keys on real workers: no key can find out the prompts of the other key."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Any

import httpx
import pytest

from deploy.base.defaults import BUNDLED_MODEL
from engine.clock import MonotonicClock
from engine.config import WeightFormat, WorkerConfig
from engine.messages import Role
from engine.net.trust import Secret
from engine.worker.blocks import hash_blocks
from router.access.file import KeyFile, change_keys
from router.gateway.requests.calls import GatewaySettings
from router.gateway.versions import ServedVersion, Versions
from router.service import Router
from router.text.tokenizer import load_text_model
from tests.kits.router.access import record
from tests.kits.router.gateway import create_app
from tests.kits.services.cluster import TOKEN, Workers, router, until, workers

pytestmark = pytest.mark.torch

BLOCK_SIZE = 16
CONTEXT_LEN = 2048
# prefill of these tokens takes dozens of times as long as a cache hit
NUM_TOKENS = 75 * BLOCK_SIZE + 5
NUM_PROMPTS = 16
KEYS = {"ann": None, "bob": None, "cid": "team", "dan": "team"}
DEBUG = "dan"
SURE = 1e-3  # a correct server fails in one of 1000 runs


@pytest.fixture(scope="module")
def running() -> Iterator[Workers]:
    config = WorkerConfig(kv_mib=512, weights=WeightFormat.FP32)
    with workers((Role.PREFILL, Role.DECODE), config=config) as started:
        yield started


@pytest.fixture
def keys(tmp_path) -> KeyFile:
    path = tmp_path / "keys.json"
    records = [record(n, n, group=group, debug=n == DEBUG) for n, group in KEYS.items()]
    change_keys(path, lambda _: records)
    file = KeyFile(path, MonotonicClock())
    file.open()
    return file


def some_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(5, 4096) for _ in range(NUM_TOKENS)]


class Api:
    """A gateway in this process, and requests with several API keys."""

    def __init__(self, client: httpx.AsyncClient, r: Router) -> None:
        self._client = client
        self.router = r

    async def ask(self, key: str, prompt: Sequence[int], **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "x-baton-decision": "1"}
        body = {"prompt": list(prompt), "max_tokens": 1, "seed": 1, **fields}
        answer = await self._client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def cached(self, key: str, prompt: Sequence[int], **fields: Any) -> int:
        answer = await self.ask(key, prompt, **fields)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def seconds(self, key: str, prompt: Sequence[int]) -> float:
        """Returns the seconds until the only token."""
        begin_s = time.perf_counter()
        await self.ask(key, prompt)
        return time.perf_counter() - begin_s

    def known(self, prompt: Sequence[int], salt: bytes) -> int:
        """Returns the blocks of a prompt that the gateway knows from the block events of all
        workers."""
        hashes = hash_blocks(prompt, BLOCK_SIZE, salt)
        return max(self.router.machine.prefixes.longest(hashes).values(), default=0)


@asynccontextmanager
async def api(running: Workers, keys: KeyFile) -> AsyncIterator[Api]:
    async with router(running) as r:
        text = load_text_model(Path(BUNDLED_MODEL))
        app = create_app(
            Versions(ServedVersion("v1", r, text, ("m",), CONTEXT_LEN)),
            settings=GatewaySettings(Secret(TOKEN)),
            clock=MonotonicClock(),
            keys=keys,
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield Api(client, r)


def test_only_tenants_that_share_a_prefix_find_it(running, keys):
    prompt = some_prompt(random.Random(1))
    full = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE

    async def run() -> None:
        async with api(running, keys) as server:
            assert await server.cached("ann", prompt) == 0
            assert await server.cached("ann", prompt) == full
            assert await server.cached("bob", prompt) == 0
            assert await server.cached("cid", prompt) == 0
            assert await server.cached("dan", prompt) == full  # dan shares a group with cid
            assert await server.cached("ann", prompt, cache_salt="mine") == 0
            assert await server.cached("ann", prompt, cache_salt="mine") == full
            assert await server.cached("bob", prompt, cache_salt="mine") == 0
            assert await server.cached("dan", prompt, cache_salt="mine") == 0
            assert await server.cached("ann", prompt, n=3, seed=2) == full
            await only_keyed_hashes_are_heard(server, prompt)

    asyncio.run(run())


async def only_keyed_hashes_are_heard(server: Api, prompt: Sequence[int]) -> None:
    secret, hashes_of = Secret(TOKEN), keys_sharing()
    salts = [secret.salt(sharing) for sharing in hashes_of]
    await until(
        lambda: all(server.known(prompt, salt) for salt in salts), "the gateway knows the blocks"
    )
    for salt in (b"", secret.salt(""), Secret("guess").salt(hashes_of[0])):
        assert server.known(prompt, salt) == 0


def keys_sharing() -> list[str]:
    """Returns the keys with their sharing of `router.access.keys`: ann, bob, and a group of two."""
    ann, bob = (record(name, name).hash for name in ("ann", "bob"))
    return [f"key:{ann}", f"key:{bob}", "group:team"]


def test_only_a_debug_key_sees_workers(running, keys):
    prompt = some_prompt(random.Random(2))

    async def run() -> None:
        async with api(running, keys) as server:
            for key in KEYS:
                headers = (await server.ask(key, prompt)).headers
                assert ("x-baton-decision" in headers) == (key == DEBUG)

    asyncio.run(run())


# ---------------------------------------------------------------- timing


def p_of_no_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """Mann-Whitney test, two-sided, with the normal approximation; times have no ties."""
    n, m = len(some), len(others)
    u = sum(a < b for a in some for b in others)
    z = (abs(u - n * m / 2) - 0.5) / (n * m * (n + m + 1) / 12) ** 0.5
    return 2 * (1 - NormalDist().cdf(z))


async def times(
    server: Api, key: str, asked: Sequence[Sequence[int]], rng: random.Random
) -> tuple[list[float], list[float]]:
    """Returns the times of prompts that ann sent before and of new prompts, in random order."""
    fresh = [some_prompt(rng) for _ in asked]
    order = [(0, prompt) for prompt in asked] + [(1, prompt) for prompt in fresh]
    rng.shuffle(order)
    found: tuple[list[float], list[float]] = ([], [])
    for which, prompt in order:
        found[which].append(await server.seconds(key, prompt))
    return found


@pytest.mark.long
@pytest.mark.timeout(240)
def test_waiting_times_do_not_reveal_other_keys_prompts(running, keys):
    rng = random.Random(3)
    asked = [some_prompt(rng) for _ in range(NUM_PROMPTS)]

    async def run() -> tuple[float, float]:
        async with api(running, keys) as server:
            for prompt in asked:
                await server.ask("ann", prompt)
            own = p_of_no_difference(*await times(server, "ann", asked, rng))
            another = p_of_no_difference(*await times(server, "bob", asked, rng))
            return own, another

    own, another = asyncio.run(run())
    assert own < SURE, "the statistic does not see a hit"
    assert another > SURE, "the time reveals the prompts of another key"
