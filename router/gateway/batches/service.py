"""Files and batches of one gateway process: their pages, their runner and their metrics."""

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.routing import Route

from router.access.limits import UNLIMITED, KeyAccounts
from router.gateway.answering import AnswerService, GatewayParts
from router.gateway.answers.writing import CHAT, COMPLETION, EMBEDDING
from router.gateway.batches.endpoints import (
    BatchEndpoint,
    completions_of,
    responses_of,
)
from router.gateway.batches.idleness import Idleness
from router.gateway.batches.pages import BatchPages
from router.gateway.batches.runner import BatchRunner
from router.gateway.batches.stepping import BatchGate, SteppingPort
from router.gateway.metrics.collectors import counter_of
from router.gateway.metrics.meters import GatewayMetrics
from router.gateway.requests.chat import ChatBody
from router.gateway.requests.completion import CompletionBody
from router.gateway.requests.embedding import EmbeddingBody
from router.gateway.responses.service import ResponseService
from router.gateway.versions import ServedVersion


class Batches:
    """The files and batches of a gateway process; a `BackgroundPart`."""

    def __init__(self, parts: GatewayParts) -> None:
        self._versions = parts.versions
        self._gate = BatchGate()
        # Batch requests count neither towards a key's limits nor in the latencies of clients.
        self._quiet = GatewayMetrics(parts.versions, version="")
        self._quiet.key_usage = parts.metrics.key_usage  # but batches count as usage of their key
        own = replace(parts, metrics=self._quiet, accounts=KeyAccounts(UNLIMITED))
        chat = AnswerService(own, CHAT, ChatBody, self._port_of)
        completions = AnswerService(own, COMPLETION, CompletionBody, self._port_of)
        embeddings = AnswerService(own, EMBEDDING, EmbeddingBody, self._port_of)
        endpoints: dict[str, BatchEndpoint] = {
            "/v1/chat/completions": completions_of(chat),
            "/v1/completions": completions_of(completions),
            "/v1/embeddings": completions_of(embeddings),
            "/v1/responses": responses_of(ResponseService(own, self._port_of)),
        }
        config = parts.settings.gateway
        self._runner = BatchRunner(
            parts,
            endpoints,
            gate=self._gate,
            idleness=Idleness(share=config.batch_share, idle_s=config.batch_idle_s),
            quiet=self._quiet,
        )
        self._pages = BatchPages(
            parts.storage,
            config,
            endpoints=endpoints,
            rng=parts.rng,
            wake=self._runner.wake,
        )
        parts.metrics.watch(self._families)

    def routes(self) -> list[Route]:
        """The routes of `/v1/files` and `/v1/batches`."""
        return self._pages.routes()

    async def open(self) -> None:
        """Starts to run batches."""
        await self._runner.open()

    def stop_draining(self) -> None:
        """Does nothing, because `close` never waits for requests."""

    async def close(self, timeout_s: float) -> None:
        """Stops running batches at once. The batches continue after a restart."""
        await self._runner.close()

    def _port_of(self, served: ServedVersion) -> SteppingPort:
        return SteppingPort(served.port, self._gate, lambda: self._versions.takes(served))

    def _families(self) -> Iterator[Metric]:
        runner, gate, quiet = self._runner, self._gate, self._quiet
        yield GaugeMetricFamily(
            "baton_batches", "Batches that are not over, run by this process", runner.num_batches
        )
        states = GaugeMetricFamily(
            "baton_batch_requests", "Requests of batches without a result", labels=["state"]
        )
        states.add_metric(["running"], gate.num_running)
        states.add_metric(["paused"], gate.num_waiting)
        states.add_metric(["waiting"], max(runner.num_lines_waiting - gate.num_requests, 0))
        yield states
        yield counter_of(
            "baton_batch_results", "Requests of batches", "outcome", runner.num_by_outcome
        )
        yield CounterMetricFamily(
            "baton_batch_pauses", "Times that a request of a batch stepped aside", gate.num_paused
        )
        tokens = {"prompt": quiet.num_prompt_tokens, "generation": quiet.num_generation_tokens}
        yield counter_of("baton_batch_tokens", "Tokens of requests of batches", "kind", tokens)
        yield counter_of(
            "baton_batch_events", "Ends of batches, faults", "event", dict(runner.events)
        )
