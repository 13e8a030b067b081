"""Pages about the state of the server: health, readiness, load, metrics, version."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from router.gateway.metrics.meters import GatewayMetrics
from router.gateway.metrics.pools import PoolBoard
from router.gateway.metrics.siblings import Siblings
from router.gateway.pages.replies import json_reply
from router.gateway.pages.targets import targets_of
from router.gateway.versions import Versions


class StatusPages:
    """Their handlers."""

    def __init__(
        self,
        versions: Versions,
        metrics: GatewayMetrics,
        version: str,
        siblings: Siblings | None,
        board: PoolBoard | None,
    ) -> None:
        self._versions = versions
        self._metrics = metrics
        self._version = version
        self._siblings = siblings
        self._board = board

    async def health(self, _: HttpRequest) -> Response:
        """GET /health: 200 while this process is alive."""
        return json_reply(200, {"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        """GET /ready, GET and POST /ping: 200 while requests can be served, else 503 and why.

        `troubles` are what is broken beside, where there is something.
        """
        reason = self._versions.readiness()
        answer: dict[str, object] = {"status": "ready"}
        if reason is not None:
            answer = {"status": "not ready", "reason": reason}
        if self._board is not None and self._board.troubles:
            answer["troubles"] = self._board.troubles
        return json_reply(200 if reason is None else 503, answer)

    async def load(self, _: HttpRequest) -> Response:
        """GET /load: requests of this process, `server_load` as vLLM calls it."""
        versions = self._versions
        load = {
            "server_load": versions.num_in_flight(),
            "queued_requests": versions.queue_len(),
            "queued_s": versions.queued_s(),
        }
        return json_reply(200, load)

    async def metrics(self, _: HttpRequest) -> Response:
        """GET /metrics, for all gateway processes that share the port."""
        others = [] if self._siblings is None else await self._siblings.ask()
        headers = {"content-type": CONTENT_TYPE_LATEST}
        return Response(self._metrics.exposition(others), headers=headers)

    async def targets(self, request: HttpRequest) -> Response:
        """GET /metrics/targets: what to scrape, as Prometheus' HTTP service discovery wants it."""
        gateways = () if self._board is None else self._board.gateways
        asked = request.headers.get("host", "")
        return json_reply(200, targets_of(gateways, request.url.scheme, asked))

    async def version(self, _: HttpRequest) -> Response:
        """GET /version."""
        return json_reply(200, {"version": self._version})
