"""An operator and a client of a running deployment, for tests."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx

CHANGE_S = 240.0  # the longest change of pools on a busy machine


class Trickle:
    """A client that sends one request after another. Every answer must be complete."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: list[str] = []
        self.wrong: list[str] = []

    def __enter__(self) -> "Trickle":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(CHANGE_S)

    def _run(self) -> None:
        body = {"prompt": "def f(", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=self._url, timeout=CHANGE_S, trust_env=False) as client:
            while not self._stop.is_set():
                answer = client.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    self.answers.append(answer.json()["choices"][0]["text"])
                else:
                    self.wrong.append(answer.text)

    def check(self) -> None:
        assert not self.wrong
        assert self.answers
        assert len(set(self.answers)) == 1, "an answer changed"


def baton(run_dir: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs a `baton` command against the deployment in `run_dir`."""
    return subprocess.run(
        [sys.executable, "-m", "deploy.commands.main", *arguments],
        capture_output=True,
        text=True,
        timeout=CHANGE_S,
        env={**os.environ, "BATON_RUN_DIR": str(run_dir), "COLUMNS": "200"},
    )
