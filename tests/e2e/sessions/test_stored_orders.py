"""Orders survive `kill -9` of all processes, and are removed by an orderly stop."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.admin.client import AdminClient
from deploy.base.run_dir import AdminAccess, announced
from tests.kits.services.served import (
    MARK,
    START_TIMEOUT_S,
    marked_pids,
    marked_processes,
    poll_until,
)

NULL_SERVE = (sys.executable, "-m", "tests.kits.services.null_serve", "1", "0.001", "fleet")


@contextmanager
def served(run_dir: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str, AdminClient]]:
    """Runs a deployment without computation.

    Yields its process, its mark and its operator's API.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "BATON_RUN_DIR": str(run_dir)}
    process = subprocess.Popen(NULL_SERVE, env=environment, stderr=subprocess.DEVNULL)
    try:

        def access() -> list[AdminAccess]:
            assert process.poll() is None, "it ended"
            return [each for each in announced(run_dir) if each.pid == process.pid and each.url]

        poll_until(lambda: bool(access()), "it serves", START_TIMEOUT_S)
        [found] = access()
        with AdminClient(found.admin_url, found.key) as client:
            yield process, mark, client
    finally:
        process.kill()
        process.wait()


def mixed_serving(client: AdminClient) -> int:
    return sum(worker.state == "serving" for worker in client.pools().workers)


def test_orders_outlive_the_end_of_everything_and_not_an_orderly_stop(tmp_path: Path):
    stored = tmp_path / "fleet.orders"
    with served(tmp_path) as (_, mark, client):
        client.set_pools({"mixed": 2})
        poll_until(lambda: mixed_serving(client) == 2, "two workers serve")
        poll_until(lambda: b'"mixed":2' in stored.read_bytes(), "the order is stored")
        for pid in marked_pids(mark):
            os.kill(pid, signal.SIGKILL)
        poll_until(lambda: not marked_processes(mark), "nothing is left")
    with served(tmp_path) as (process, mark, client):
        assert client.pools().wanted.mixed == 2
        assert mixed_serving(client) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        poll_until(lambda: not marked_processes(mark), "nothing is left")
    assert not stored.exists()
