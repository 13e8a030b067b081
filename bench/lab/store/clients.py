"""A deployment with a store, started as a user starts it, and a client that looks at the store."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp

from bench.client.answers import Answer, Endpoint, Failure, request_body
from bench.client.http import http_session
from bench.client.load import RequestsFailed
from bench.common.waiting import holds_within, pause
from bench.lab.store.samples import read_store_samples
from bench.processes.serving import Options, ServedDeployment, serving
from bench.serve.plan import ServeTarget
from bench.serve.run import Send, ServeClient
from engine.clock import Clock, MonotonicClock
from engine.errors import BatonError

REQUEST_TIMEOUT_S = 120.0
STORED_WITHIN_S = 60.0
SERVED_WITHIN_S = 90.0
RETRY_EVERY_S = 0.5


class StoreNotReady(BatonError):
    """The store does not hold in time what it should."""


@contextmanager
def served_with_store(
    checkpoint: Path, options: Options, *, store_mib: int, disk: Path | None = None
) -> Iterator[ServedDeployment]:
    """Runs `baton serve`, with a store unless `store_mib` is 0. Raises ServerFailed."""
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
        """Returns the answer. Raises RequestsFailed."""
        result = await self.send(self._body(prompt, output_len))
        if isinstance(result, Failure):
            raise RequestsFailed("a prompt", [result])
        return result

    async def ask_until_served(self, prompt: list[int]) -> Answer:
        """Repeats a request of both pools until workers are there. Raises RequestsFailed."""
        end_s = self._clock.now_s() + SERVED_WITHIN_S
        while True:
            result = await self.send(self._body(prompt, 2))
            if isinstance(result, Answer):
                return result
            if self._clock.now_s() > end_s:
                raise RequestsFailed("a prompt after a restart", [result])
            await pause(RETRY_EVERY_S)

    async def samples(self) -> dict[str, float]:
        """Returns the store's samples, which are up to a second old."""
        return await read_store_samples(self._session, self.served.url)

    async def until(self, holds: Callable[[Mapping[str, float]], bool], what: str) -> None:
        """Waits until the store's samples are so. Raises StoreNotReady."""

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
    """Opens a client. Raises ServerUnreachable."""
    async with http_session(REQUEST_TIMEOUT_S) as session:
        client = ServeClient(session, ServeTarget(served.url), MonotonicClock())
        yield StoreClient(session, served, client.send, await client.first_model())
