"""Pages about the state of the server: health, readiness, load, metrics, version."""

import re
from collections.abc import Iterable
from typing import Literal
from urllib.parse import urlsplit

from msgspec import UNSET, Struct, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from router.gateway.metrics.meters import GatewayMetrics
from router.gateway.metrics.pools import PoolBoard
from router.gateway.metrics.siblings import Siblings
from router.gateway.pages.replies import json_reply
from router.gateway.versions import Versions
from router.inbox.api_errors import invalid_value

ANY_ADDRESS = ("0.0.0.0", "::")
_HOST = re.compile(r"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")


class Health(Struct):
    """The process is alive."""

    status: Literal["ok"] = "ok"


class Readiness(Struct):
    """States if requests can be served, or else the reason; and lists other broken parts."""

    status: Literal["ready", "not ready"]
    reason: str | UnsetType = UNSET
    troubles: list[str] | UnsetType = UNSET


class ServerLoad(Struct):
    """Requests of this process; `queued_s` are the predicted seconds to compute waiting prompts."""

    server_load: int
    queued_requests: int
    queued_s: float


class ServerVersion(Struct):
    """The version of Baton."""

    version: str


class StatusPages:
    """The handlers of the status pages."""

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

    def routes(self) -> list[Route]:
        """Returns the routes of all handlers."""
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/ping", self.ready, methods=["GET", "POST"]),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
            Route("/metrics/targets", self.targets),
            Route("/version", self.version),
        ]

    async def health(self, _: HttpRequest) -> Response:
        """GET /health: 200 while this process is alive."""
        return json_reply(200, Health())

    async def ready(self, _: HttpRequest) -> Response:
        """GET /ready, GET and POST /ping: 200 while requests can be served, otherwise 503 and the
        reason.

        `troubles` lists other broken parts, if there are any.
        """
        reason = self._versions.readiness()
        answer = Readiness("ready") if reason is None else Readiness("not ready", reason)
        if self._board is not None and self._board.troubles:
            answer.troubles = list(self._board.troubles)
        return json_reply(200 if reason is None else 503, answer)

    async def load(self, _: HttpRequest) -> Response:
        """GET /load: the number of requests of this process, named `server_load` as in vLLM."""
        versions = self._versions
        load = (versions.num_running.total(), versions.queue_len(), versions.queued_s())
        return json_reply(200, ServerLoad(*load))

    async def metrics(self, _: HttpRequest) -> Response:
        """GET /metrics: metrics of all gateway processes that share the port."""
        others = [] if self._siblings is None else await self._siblings.ask()
        headers = {"content-type": CONTENT_TYPE_LATEST}
        return Response(self._metrics.exposition(others), headers=headers)

    async def targets(self, request: HttpRequest) -> Response:
        """GET /metrics/targets: scrape targets for Prometheus' HTTP service discovery."""
        gateways = () if self._board is None else self._board.gateways
        asked = request.headers.get("host", "")
        return json_reply(200, targets_of(gateways, request.url.scheme, asked))

    async def version(self, _: HttpRequest) -> Response:
        """GET /version."""
        return json_reply(200, ServerVersion(self._version))


class TargetGroup(Struct):
    """Addresses to scrape, with labels for all of them."""

    targets: list[str]
    labels: dict[str, str]


def targets_of(urls: Iterable[str], scheme: str, asked: str) -> list[TargetGroup]:
    """Returns groups of scrape targets. `asked` is the header `host` of the request.

    There is one target for each gateway port, because a process returns the metrics of all
    processes on its port. Workers have no metrics port. An address that means "all addresses of
    this machine" is replaced by the host in `asked`.

    While no gateway is known, `asked` is the only target. Raises ApiError if `asked` is malformed.
    """
    if _HOST.fullmatch(asked) is None:
        raise invalid_value(f"host is {asked[:40]!r}; expected a name or address and a port", None)
    here = f"{scheme}://{asked}"
    groups: dict[str, TargetGroup] = {}
    for url in list(urls) or [here]:
        parts = urlsplit(url)
        host = urlsplit(here).hostname if parts.hostname in ANY_ADDRESS else parts.hostname
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = f"[{host}]:{port}" if ":" in (host or "") else f"{host}:{port}"
        labels = {"__scheme__": parts.scheme, "__metrics_path__": "/metrics"}
        groups[target] = TargetGroup([target], labels)
    return [groups[target] for target in sorted(groups)]
