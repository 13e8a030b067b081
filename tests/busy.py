"""Runs a command while other processes keep every core busy: `python -m tests.busy make test`.

A test that waits for time instead of an event passes only on a quiet machine, and fails here. The
busy processes have the same priority as the command and end with it.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

SPIN = "while True: pass"


@contextlib.contextmanager
def busy_cores(num: int) -> Iterator[None]:
    """Keeps `num` cores busy until the block ends."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(num)]
    try:
        yield
        assert all(each.poll() is None for each in spinning), "the cores were not kept busy"
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def main(command: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    with busy_cores(len(os.sched_getaffinity(0))):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
