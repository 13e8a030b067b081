"""An operator changes pools under load: no request fails, and no process is left over."""

import os
import random
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from deploy.admin.client import AdminClient, AdminError
from tests.kits.operator import CHANGE_S, Trickle, baton
from tests.kits.services.served import HTTP, Served, poll_until, serve

pytestmark = pytest.mark.torch

MAX_RUNNING = 8  # sequences of a worker; a few requests are enough to load it


class Crowd:
    """Several clients, each of which sends one request after another."""

    def __init__(self, url: str, num_clients: int, *, prompt_tokens: int, max_tokens: int) -> None:
        self._url = url
        self._lengths = prompt_tokens, max_tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]
        self.statuses: list[int] = []

    def __enter__(self) -> "Crowd":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(CHANGE_S)

    def _run(self) -> None:
        prompt_tokens, max_tokens = self._lengths
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            while not self._stop.is_set():
                prompt = [random.randrange(4096) for _ in range(prompt_tokens)]
                body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
                self.statuses.append(client.post("/v1/completions", json=body).status_code)


@pytest.fixture(scope="module")
def served(lent, run_dir) -> Iterator[Served]:
    with serve(
        "--launcher",
        "process",
        command=lent,
        BATON_RUN_DIR=str(run_dir),
        BATON_WORKER__MAX_RUNNING=str(MAX_RUNNING),
        BATON_PLANNER__COOL_DOWN_S="1",
    ) as running:
        yield running


def settle(admin: AdminClient) -> None:
    def told() -> str:
        answer = admin.pools()
        return f"{answer.workers}\n{answer.steps[-12:]}"

    poll_until(lambda: admin.pools().settled, told, CHANGE_S)


def serving(admin: AdminClient) -> dict[str, str]:
    return {w.worker_id: str(w.role) for w in admin.pools().workers if w.state == "serving"}


def test_pool_grows_flips_and_shrinks_under_load(served, admin, run_dir):
    with Trickle(served.url) as trickle:
        grown = baton(run_dir, "pools", "set", "prefill=2")
        assert grown.returncode == 0, grown.stderr
        assert "worker-2 (prefill) was started" in grown.stdout
        assert "done" in grown.stdout
        assert serving(admin) == {
            "worker-0": "prefill",
            "worker-1": "decode",
            "worker-2": "prefill",
        }

        admin.set_pools({"prefill": 1, "decode": 2})
        settle(admin)
        assert sorted(serving(admin).values()) == ["decode", "decode", "prefill"]
        assert admin.pools().counters["flips"] == 1

        decoding = [name for name, role in serving(admin).items() if role == "decode"]
        drained = baton(run_dir, "drain", decoding[0])
        assert drained.returncode == 0, drained.stderr
        assert f"{decoding[0]} is drained" in drained.stdout
        admin.order(decoding[0], "flip", {"role": "decode"})
        settle(admin)

        admin.set_pools({"prefill": 1, "decode": 1})
        settle(admin)
        assert len(serving(admin)) == 2
    trickle.check()
    assert "drains timed out" not in admin.pools().counters


def test_killed_worker_is_replaced_and_no_request_fails(served, admin, run_dir):
    admin.set_pools({"decode": 2})
    settle(admin)
    with Trickle(served.url) as trickle:
        poll_until(lambda: len(trickle.answers) > 0, "requests run", CHANGE_S)
        victim = next(w for w in admin.pools().workers if w.target == "decode")
        os.kill(victim.pid, signal.SIGKILL)
        poll_until(lambda: not admin.pools().settled, "its end is seen", CHANGE_S)
        settle(admin)
        before = len(trickle.answers)
        poll_until(lambda: len(trickle.answers) > before + 1, "requests go on", CHANGE_S)
    trickle.check()
    again = {w.worker_id: w.pid for w in admin.pools().workers}
    assert again[victim.worker_id] not in (None, victim.pid)
    told = baton(run_dir, "logs", "controller", "--json").stdout
    assert f"{victim.worker_id} (decode) ended with status -9" in told
    told = baton(run_dir, "logs").stdout
    assert f"worker {victim.worker_id} is lost" in told
    admin.set_pools({"decode": 1})
    settle(admin)


@pytest.mark.long  # real load takes time; test_planning tests each part
def test_planner_follows_a_changing_load(served, admin, run_dir):
    """The load changes from long prompts to long answers: a worker changes its role, and back."""

    def wanted() -> tuple[int, int]:
        pools = admin.pools().wanted
        return pools.prefill, pools.decode

    admin.set_pools({"prefill": 1, "decode": 2})
    settle(admin)
    admin.set_planner("on")
    with Crowd(served.url, 16, prompt_tokens=1900, max_tokens=2) as reading:
        poll_until(lambda: wanted() == (2, 1), lambda: str(admin.planner()), CHANGE_S)
    with Crowd(served.url, 4 * MAX_RUNNING, prompt_tokens=8, max_tokens=100) as writing:
        poll_until(lambda: wanted() == (1, 2), lambda: str(admin.planner()), CHANGE_S)
    assert {*reading.statuses, *writing.statuses} == {200}
    answer = admin.planner()
    flips = [(d.before.prefill, d.after.prefill) for d in answer.decisions if d.outcome == "done"]
    assert flips[:2] == [(1, 2), (2, 1)]
    shown = baton(run_dir, "planner", "off").stdout
    assert "planner off" in shown
    assert "prefill 1 → 2, decode 2 → 1: done" in shown
    admin.set_pools({"prefill": 1, "decode": 1})
    settle(admin)


def test_workers_and_requests_are_listed(served, admin, run_dir):
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}

    def is_listed() -> bool:
        """Sends a new request at each attempt, because the last one may have finished too early."""
        with HTTP.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as stream:
            assert stream.status_code == 200, stream.read()
            # keeps the iterator, because its deletion closes the connection
            lines = stream.iter_lines()
            next(lines)
            listed = admin.requests()
            shown = baton(run_dir, "requests").stdout
        assert listed.num_requests == len(listed.requests)
        decoding = [each.request for each in listed.requests if each.request.decode is not None]
        return any(request.request_id in shown for request in decoding)

    poll_until(is_listed, "`baton requests` lists a request in service", CHANGE_S)
    for command in ("pools", "workers"):
        shown = baton(run_dir, command)
        assert "worker-" in shown.stdout, shown.stderr


def test_impossible_orders_and_wrong_keys_are_refused(admin, run_dir):
    with AdminClient(admin.url, "guess") as stranger, pytest.raises(AdminError) as caught:
        stranger.pools()
    assert caught.value.status == 401
    with pytest.raises(AdminError, match="more than the") as caught:
        admin.set_pools({"prefill": 90})
    assert caught.value.status == 409
    last = next(w.worker_id for w in admin.pools().workers if w.target == "decode")
    for command in (["drain", last], ["flip", last], ["stop-worker", last]):
        refused = baton(run_dir, *command)
        assert refused.returncode == 1
        assert f"{last} is the last worker that decodes" in refused.stderr
    with pytest.raises(AdminError, match="Invalid enum value 'sometimes'"):
        admin.set_planner("sometimes")
