"""The Ray of `baton serve` after its raylet has died, in a process whose parent is init."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.ray

DEADLINE_S = 300.0  # a start of Ray takes 30 s on a busy machine
# The first process exits at once, so init becomes the launcher's parent, as under systemd.
ORPHAN = (
    "import os, sys; os.fork() or os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
)
PROGRAM = """
    import os, queue, signal, sys
    from deploy.ray import own_ray
    own_ray.prepare(os.environ)
    from deploy.ray.gcs_keeper import RAYLET, running
    from deploy.ray.launcher import OwnRayLauncher
    from tests.kits.nurseries import nursery_of

    came = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda number, _: came.put(number))
    launcher = OwnRayLauncher(nursery_of("pass"))
    launcher.open()
    [raylet] = [each for each in running(RAYLET) if each.session == launcher._session]
    descriptor = os.pidfd_open(raylet.pid)
    os.kill(raylet.pid, signal.SIGKILL)
    os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
    assert launcher.dead() == {}  # it had no services; a new Ray runs on return
    assert launcher.health() == {"gcs": True, "raylet": True}
    os.kill(os.getpid(), signal.SIGTERM)
    print("came", came.get(timeout=10), flush=True)
    launcher.close()
    print("closed", flush=True)
"""


def test_a_ray_that_replaces_a_dead_one_leaves_sigterm_and_this_process_alone():
    orphan = subprocess.run(
        [sys.executable, "-c", ORPHAN, textwrap.dedent(PROGRAM)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,  # returns when no process has the pipes open
        check=False,
    )
    came = f"came {int(signal.SIGTERM)}"
    said = orphan.stdout.decode().splitlines()
    kept = [line for line in said if line.startswith(("came", "closed"))]
    assert kept == [came, "closed"], orphan.stderr.decode()
