"""Child processes that run a short script and exchange messages with the test."""

import sys
from textwrap import dedent

from bench.processes.driven import CLOSE_TIMEOUT_S, Driven

PRELUDE = """
    import json, sys, time
    def say(**answer): print(json.dumps(answer), flush=True)
    def hear(): return json.loads(sys.stdin.readline())
"""


def started(script: str, name: str = "peer", close_timeout_s: float = CLOSE_TIMEOUT_S) -> Driven:
    """Starts a process that runs this script. The script can call `say` and `hear`."""
    command = [sys.executable, "-S", "-E", "-c", dedent(PRELUDE) + dedent(script)]
    engine = Driven(name, command, close_timeout_s=close_timeout_s)
    engine.start()
    return engine
