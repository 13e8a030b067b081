"""A client of the operator's API, which finds the deployment on this machine by itself."""

import os
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from deploy.admin.schema import (
    ErrorAnswer,
    FinishBody,
    PlannerAnswer,
    PoolCounts,
    PoolsAnswer,
    RequestsAnswer,
    UpdateBody,
)
from deploy.local.run_dir import announced, run_directory
from engine.errors import BatonError, ConfigError

TIMEOUT_S = 10.0
UPDATE_TIMEOUT_S = 120.0  # the hub may be asked first for the commit of a branch

T = TypeVar("T")


class AdminError(BatonError):
    """The deployment did not answer, or refused an order; the message is the reason."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


def find_deployment(
    url: str | None, key: str | None, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Returns the URL and key of the API: as given, or of the only deployment on this machine.

    Raises ConfigError if there is none, or more than one.
    """
    if url is not None and key is not None:
        return url, key
    directory = run_directory(environment)
    found = [each for each in announced(directory) if url is None or each.admin_url == url]
    if len(found) == 1:
        return found[0].admin_url, key or found[0].key
    if not found:
        where = f"at {url}" if url is not None else f"in {directory}"
        raise ConfigError(
            f"no deployment of yours is announced {where}: start one with `baton serve`, or give "
            "--admin-url and --admin-key"
        )
    several = ", ".join(f"{each.admin_url} (serving {each.url})" for each in found)
    raise ConfigError(f"several deployments run: choose one with --admin-url: {several}")


class AdminClient:
    """Sends requests to one deployment."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def pools(self, since: int = 0) -> PoolsAnswer:
        """Returns the pools, with the steps after number `since`. Raises AdminError."""
        return self._ask("GET", f"/v1/pools?since={since}", PoolsAnswer)

    def requests(self) -> RequestsAnswer:
        """Returns the requests in service. Raises AdminError."""
        return self._ask("GET", "/v1/requests", RequestsAnswer)

    def set_pools(self, counts: Mapping[str, int], version: str | None = None) -> PoolsAnswer:
        """Orders numbers of workers, by default of the current version. Raises AdminError."""
        return self._ask("POST", "/v1/pools", PoolsAnswer, {**counts, "version": version})

    def order(self, worker_id: str, what: str, body: Any = None) -> PoolsAnswer:
        """Orders a flip, drain or stop of one worker. Raises AdminError."""
        return self._ask("POST", f"/v1/workers/{worker_id}/{what}", PoolsAnswer, body)

    def planner(self) -> PlannerAnswer:
        """Returns the planner and its decisions. Raises AdminError."""
        return self._ask("GET", "/v1/planner", PlannerAnswer)

    def set_planner(self, mode: str) -> PoolsAnswer:
        """Sets the planner's mode. Raises AdminError."""
        return self._ask("POST", "/v1/planner", PoolsAnswer, {"mode": mode})

    def update(self, body: UpdateBody) -> PoolsAnswer:
        """Orders a new version. Raises AdminError."""
        wanted = msgspec.to_builtins(body)
        return self._ask("POST", "/v1/versions", PoolsAnswer, wanted, timeout_s=UPDATE_TIMEOUT_S)

    def set_weights(self, weights: Mapping[str, int]) -> PoolsAnswer:
        """Orders the weights of versions. Raises AdminError."""
        return self._ask("POST", "/v1/weights", PoolsAnswer, {"weights": dict(weights)})

    def finish(self, version: str, pools: PoolCounts | None = None) -> PoolsAnswer:
        """Orders that a version replaces all others. Raises AdminError."""
        body = msgspec.to_builtins(FinishBody(pools))
        return self._ask("POST", f"/v1/versions/{quote(version)}/finish", PoolsAnswer, body)

    def abort(self, version: str) -> PoolsAnswer:
        """Orders that a version is removed. Raises AdminError."""
        return self._ask("POST", f"/v1/versions/{quote(version)}/abort", PoolsAnswer)

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: Any = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> T:
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise AdminError(f"{self.url} does not answer: {reason}") from error
        try:
            if answer.is_success:
                return msgspec.json.decode(answer.content, type=kind)
            reason = msgspec.json.decode(answer.content, type=ErrorAnswer).error.message
        except msgspec.MsgspecError as error:
            raise AdminError(f"{self.url} is no admin API: status {answer.status_code}") from error
        raise AdminError(reason, status=answer.status_code)


def connect(url: str | None, key: str | None) -> AdminClient:
    """Returns a client of the deployment that `find_deployment` chooses. Raises ConfigError."""
    return AdminClient(*find_deployment(url, key, os.environ))
