"""A client of the operator's API. The client finds the deployment that runs on this machine."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpx
import msgspec

from deploy.admin.schema import (
    Declaration,
    Difference,
    DifferencesAnswer,
    DropAnswer,
    DropBody,
    ErrorAnswer,
    FinishBody,
    LogsAnswer,
    PlannerAnswer,
    PoolCounts,
    PoolsAnswer,
    PreviewAnswer,
    RequestsAnswer,
    StoreInfo,
    StoresAnswer,
    UpdateBody,
)
from deploy.base.run_dir import AdminAccess, announced, ended, remove, run_directory
from engine.errors import BatonError, ConfigError

TIMEOUT_S = 10.0
UPDATE_TIMEOUT_S = 120.0  # the controller may first ask the hub for the commit of a branch

T = TypeVar("T")


class AdminError(BatonError):
    """The deployment did not answer, or refused an order; the message is the reason."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


def find_deployment(
    url: str | None, key: str | None, environment: Mapping[str, str], name: str | None = None
) -> tuple[str, str]:
    """Returns the URL and key of the API: the given ones, or those of a deployment on this machine.

    `name` is a deployment's name, or the port of its gateway or of this API. Without a name or URL
    there must be exactly one deployment, and no file of a crashed deployment. Otherwise an order
    for the crashed deployment would reach the running one. With a name, files of crashed
    deployments are ignored. Raises ConfigError.
    """
    if url is not None and key is not None and name is None:
        return url, key
    directory = run_directory(environment)
    running, dead = announced(directory), ended(directory)
    found = [
        each
        for each in running
        if url in (None, each.admin_url) and (name is None or _is_called(each, name))
    ]
    is_named = name is not None or url is not None
    if len(found) > 1 or (found and dead and not is_named):
        what = "several deployments run" if len(found) > 1 else f"{_listed(dead)} has ended"
        raise ConfigError(f"{what}: choose one with --deployment or --admin-url: {_listed(found)}")
    if found:
        if is_named:
            remove(directory, dead)
        return found[0].admin_url, key or found[0].key
    where = f"at {url}" if url is not None else f"in {directory}"
    called = "" if name is None else f" as {name}"
    others = f" (running: {_listed(running)})" if running else ""
    raise ConfigError(
        f"no deployment of yours is announced {where}{called}{others}: start one with"
        " `baton serve`, or give --admin-url and --admin-key"
    )


def _is_called(access: AdminAccess, name: str) -> bool:
    ports = {str(urlsplit(url).port) for url in (access.url, access.admin_url)}
    return name == access.name or name in ports


def _listed(deployments: Sequence[AdminAccess]) -> str:
    return ", ".join(
        f"{f'{each.name} at ' if each.name else ''}{each.admin_url} (serving {each.url})"
        for each in deployments
    )


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

    def pools(self, since: int = 0, *, timeout_s: float = TIMEOUT_S) -> PoolsAnswer:
        """Returns the pools, with the steps after number `since`. Raises AdminError."""
        return self._ask("GET", f"/v1/pools?since={since}", PoolsAnswer, timeout_s=timeout_s)

    def requests(self) -> RequestsAnswer:
        """Returns the requests in service. Raises AdminError."""
        return self._ask("GET", "/v1/requests", RequestsAnswer)

    def logs(
        self, service: str | None, lines: int | None = None, after: str | None = None
    ) -> LogsAnswer:
        """Returns the last kept log lines, or the lines after a cursor. Raises AdminError."""
        asked = {"service": service, "lines": lines, "after": after}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        return self._ask("GET", f"/v1/logs?{query}", LogsAnswer)

    def set_pools(self, counts: Mapping[str, int], version: str | None = None) -> PoolsAnswer:
        """Orders the number of workers of each role, by default for the current version.

        Raises AdminError.
        """
        return self._ask("POST", "/v1/pools", PoolsAnswer, {**counts, "version": version})

    def order(self, worker_id: str, what: str, body: Any = None) -> PoolsAnswer:
        """Orders one worker to flip, drain or stop. Raises AdminError."""
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

    def differences(self, body: Declaration) -> tuple[Difference, ...]:
        """Returns the settings whose declared and running values differ. Raises AdminError."""
        wanted, path = msgspec.to_builtins(body), "/v1/config/differences"
        answer = self._ask("POST", path, DifferencesAnswer, wanted, timeout_s=UPDATE_TIMEOUT_S)
        return answer.differences

    def declare(self, body: Declaration) -> PoolsAnswer:
        """Orders all declared changes that need no restart. Raises AdminError."""
        wanted = msgspec.to_builtins(body)
        return self._ask("POST", "/v1/config", PoolsAnswer, wanted, timeout_s=UPDATE_TIMEOUT_S)

    def set_weights(self, weights: Mapping[str, int]) -> PoolsAnswer:
        """Orders the weights of versions. Raises AdminError."""
        return self._ask("POST", "/v1/weights", PoolsAnswer, {"weights": dict(weights)})

    def finish(self, version: str, pools: PoolCounts | None = None) -> PoolsAnswer:
        """Orders that a version replaces all others. Raises AdminError."""
        body = msgspec.to_builtins(FinishBody(pools))
        return self._ask("POST", f"/v1/versions/{quote(version)}/finish", PoolsAnswer, body)

    def abort(self, version: str) -> PoolsAnswer:
        """Orders the removal of a version. Raises AdminError."""
        return self._ask("POST", f"/v1/versions/{quote(version)}/abort", PoolsAnswer)

    def rollback(self, version: str | None = None) -> PoolsAnswer:
        """Orders a rollback to a former version. Raises AdminError."""
        return self._ask("POST", "/v1/rollback", PoolsAnswer, {"name": version})

    def stores(self) -> list[StoreInfo]:
        """Returns the stores of KV. Raises AdminError."""
        return self._ask("GET", "/v1/stores", StoresAnswer).stores

    def drop_stores(self, body: DropBody, *, preview: bool = False) -> list[str]:
        """Orders stores to drop all blocks.

        In a preview, only returns the names of the stores. Raises AdminError.
        """
        path = f"/v1/stores/drop?preview={int(preview)}"
        return self._ask("POST", path, DropAnswer, msgspec.to_builtins(body)).stores

    def give(self, path: str, body: object = None) -> PoolsAnswer:
        """Sends an order to any path of the API. Raises AdminError."""
        return self._ask("POST", path, PoolsAnswer, body)

    def preview(self, path: str, body: object = None) -> PreviewAnswer:
        """Returns the immediate effects that an order would have.

        The order is not carried out. Raises AdminError.
        """
        return self._ask("POST", f"{path}?preview=1", PreviewAnswer, body)

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


def connect(url: str | None, key: str | None, name: str | None = None) -> AdminClient:
    """Returns a client of the deployment that `find_deployment` chooses. Raises ConfigError."""
    return AdminClient(*find_deployment(url, key, os.environ, name))
