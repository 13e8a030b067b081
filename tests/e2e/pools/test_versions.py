"""A deployment is updated under load: each request finishes in the version in which it began."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deploy.commands.views import DIFFERS
from tests.kits.operator import CHANGE_S, baton
from tests.kits.services.served import HTTP, Served, poll_until, serve

pytestmark = pytest.mark.torch

NUM_ASKED = 60
NUM_LATE = 8  # more late requests than a canary needs to be judged
GIVE_UP_S = 90.0  # seconds; processes with a stop order wait for a stream of 1,500 tokens
LONG = {"prompt": "def f(", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(lent, run_dir) -> Iterator[Served]:
    with serve("--launcher", "process", command=lent, BATON_RUN_DIR=str(run_dir)) as running:
        yield running


class LongAnswer(threading.Thread):
    """Reads a stream of a version to its end; by default of the current version."""

    def __init__(self, url: str, version: str | None = None) -> None:
        super().__init__()
        self._url = url
        self._headers = {} if version is None else {"x-baton-version": version}
        self.text = ""
        self.fingerprints: set[str] = set()
        self.has_begun = threading.Event()

    def run(self) -> None:
        body = {**LONG, "stream": True}
        url, headers = f"{self._url}/v1/completions", self._headers
        with HTTP.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = httpx.Response(200, content=line.removeprefix("data: ")).json()
                self.text += chunk["choices"][0]["text"] if chunk["choices"] else ""
                self.fingerprints.add(chunk["system_fingerprint"])
                self.has_begun.set()


def ask(url: str, **headers: str) -> str:
    """Sends a request and returns the fingerprint of the version that answered."""
    body = {"prompt": "a", "max_tokens": 1}
    answer = HTTP.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["system_fingerprint"]


def test_version_shares_load_then_takes_over_and_no_answer_changes(
    served, admin, run_dir, tmp_path
):
    first = ask(served.url)
    whole = HTTP.post(f"{served.url}/v1/completions", json=LONG, timeout=60).json()
    config = tmp_path / "int8.toml"
    config.write_text('[worker]\nkv_dtype = "int8"\nkv_mib = 64\n')

    begun = baton(run_dir, "update", "-c", str(config), "--weight", "0")
    assert begun.returncode == 0, begun.stderr
    assert {version.name for version in admin.pools().versions} == {"v1", "v2"}
    second = ask(served.url, **{"x-baton-version": "v2"})
    assert second == f"{first.removesuffix('-fp32')}-int8"
    assert {ask(served.url) for _ in range(10)} == {first}

    admin.set_weights({"v1": 60, "v2": 40})
    poll_until(lambda: ask(served.url) == second, "the gateway has heard", CHANGE_S)
    counts = Counter(ask(served.url) for _ in range(NUM_ASKED))
    assert set(counts) == {first, second}
    # the range is more than four standard deviations wide
    assert 0.1 < counts[second] / NUM_ASKED < 0.7

    admin.set_weights({"v1": 100, "v2": 0})
    version = admin.pools().version
    poll_until(
        lambda: admin.pools().gateways[0].members_version >= version, "it has them", CHANGE_S
    )
    stream = LongAnswer(served.url)
    stream.start()
    assert stream.has_begun.wait(CHANGE_S)
    finished = baton(run_dir, "versions", "finish", "v2")
    assert finished.returncode == 0, finished.stderr
    assert "v1 is gone" in finished.stdout
    stream.join(CHANGE_S)
    assert stream.fingerprints == {first}
    assert stream.text == whole["choices"][0]["text"]
    pools = admin.pools()
    assert {worker.version for worker in pools.workers} == {"v2"}
    assert [version.name for version in pools.versions] == ["v2"]
    assert "drains timed out" not in pools.counters
    served.num_blocks = sum(worker.num_blocks for worker in pools.workers)


def ask_in_time(url: str, version: str) -> int:
    """Requests two tokens with a TTFT bound that no worker can meet. Returns the status.

    The status is 404 if the version has been removed already.
    """
    body = {"prompt": "a", "max_tokens": 2, "slo_ttft_ms": 1, "slo_tpot_ms": 50}
    headers = {"x-baton-version": version}
    return HTTP.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code


def test_canary_that_is_late_ends_itself_and_no_stream_is_lost_or_changed(
    served, admin, run_dir, tmp_path
):
    """The canary's worker decodes one sequence at a time. All other requests queue behind a stream
    and are late. The delay does not depend on the duration of the stream.
    """
    whole = HTTP.post(f"{served.url}/v1/completions", json=LONG, timeout=60).json()
    [current] = [version.name for version in admin.pools().versions]
    declared = tmp_path / "declared.toml"
    declared.write_text("[update]\nmin_requests = 5\n[router]\nmax_queue = 7\n")
    applied = baton(run_dir, "apply", "-c", str(declared))
    assert applied.returncode == DIFFERS, applied.stderr
    assert "needs a restart: router.max_queue" in applied.stdout
    config = tmp_path / "narrow.toml"
    config.write_text("[worker]\nmax_running = 1\n")
    order = ("--canary", "50", "--hold", "1m", "--name", "narrow", "--no-wait")
    begun = baton(run_dir, "update", "-c", str(config), *order)
    assert begun.returncode == 0, begun.stderr

    def weight() -> int:
        return next((each.weight for each in admin.pools().versions if each.name == "narrow"), 0)

    poll_until(lambda: weight() == 50, "it has half of the requests", CHANGE_S)
    streams = [LongAnswer(served.url, version) for version in (current, "narrow", current)]
    for stream in streams:
        stream.start()
    assert streams[1].has_begun.wait(CHANGE_S)

    def is_given_up() -> bool:
        """Sends more requests if not: requests finished before the controller's first look do not
        count."""
        if weight() == 0:
            return True
        with ThreadPoolExecutor(NUM_LATE) as threads:
            asked = [threads.submit(ask_in_time, served.url, "narrow") for _ in range(NUM_LATE)]
        assert {each.result() for each in asked} <= {200, 404, 429}
        return False

    poll_until(is_given_up, "it is given up", GIVE_UP_S)
    for stream in streams:
        stream.join(CHANGE_S)
    assert {stream.text for stream in streams} == {whole["choices"][0]["text"]}
    poll_until(lambda: admin.pools().settled, "the pools have settled", CHANGE_S)
    pools = admin.pools()
    assert [version.name for version in pools.versions] == [current]
    assert pools.counters["updates given up"] == 1
    assert any("answers were late" in step.why for step in pools.steps)


@pytest.mark.long  # three failing starts; test_rollout tests the same without processes
def test_failed_update_changes_nothing(served, admin, run_dir, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Nothing"]}')
    before = ask(served.url), [version.name for version in admin.pools().versions]
    refused = baton(run_dir, "update", "--model", str(tmp_path), "--name", "bad")
    assert refused.returncode == 1
    assert "bad was given up; the version before it serves all requests" in refused.stderr
    assert "failed 3 times in a row" in refused.stdout
    assert before == (ask(served.url), [version.name for version in admin.pools().versions])
