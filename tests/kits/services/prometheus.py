"""Debian's Prometheus with the shipped configuration, which scrapes a deployment."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.kits.services.served import poll_until
from tests.kits.tree.documents import ROOT

SHIPPED = ROOT / "deploy" / "observability"
START_S = 60.0
STOP_S = 30.0


def missing_programs() -> list[str]:
    return [name for name in ("prometheus", "promtool") if shutil.which(name) is None]


def promtool(*arguments: str, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["promtool", *arguments], input=stdin, capture_output=True, text=True, timeout=60
    )


def in_haste(folder: Path, targets_url: str) -> Path:
    """Copies the shipped files, with scrapes every second and alerts that wait for one second."""
    copy = folder / "observability"
    shutil.copytree(SHIPPED, copy)
    for path in copy.rglob("*.yml"):
        text = path.read_text()
        text = re.sub(r"_interval: \w+", "_interval: 1s", text)
        text = re.sub(r"( +for:) \w+", r"\1 1s", text)
        text = re.sub(r"url: http\S+", f"url: {targets_url}", text)
        path.write_text(text)
    return copy / "prometheus.yml"


@dataclass(slots=True)
class Prometheus:
    """A running Prometheus server."""

    client: httpx.Client  # shared by all queries, because each new client loads certificates

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series of an expression at this moment.

        An invalid expression fails the test.
        """
        reply = self.client.get("/api/v1/query", params={"query": expression})
        assert reply.status_code == 200, f"{expression}: {reply.text}"
        found: list[dict[str, Any]] = reply.json()["data"]["result"]
        return found

    def firing(self) -> set[str]:
        return {s["metric"]["alertname"] for s in self.query('ALERTS{alertstate="firing"}')}


@contextmanager
def prometheus(folder: Path, targets_url: str) -> Iterator[Prometheus]:
    """Runs Prometheus until the end of the block."""
    config = in_haste(folder, targets_url)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = (folder / "prometheus.log").open("wb")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        poll_until(lambda: _is_ready(f"http://{address}"), "Prometheus is ready", START_S)
        with httpx.Client(base_url=f"http://{address}", timeout=10, trust_env=False) as client:
            yield Prometheus(client)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            log.close()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def dashboard_queries() -> list[tuple[str, str]]:
    """Returns all queries of the shipped dashboards: (panel, expression over a window of
    seconds)."""
    found = []
    for path in sorted((SHIPPED / "grafana").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"].replace("$__rate_interval", "5s").replace("$job", ".*")
                assert "$" not in expression
                found.append((f"{path.name}: {panel['title']}", expression))
    return found
