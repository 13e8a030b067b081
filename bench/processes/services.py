"""Single workers and gateways as processes, without `baton serve` around them."""

import sys
from contextlib import ExitStack
from typing import Literal

from bench.processes.driven import Driven, begun

SERVICE = "deploy.local.process_main"
STOP_TIMEOUT_S = 30.0


def launched(kind: Literal["worker", "gateway"], stack: ExitStack) -> Driven:
    """Starts a process that ends with the stack. It waits for its spec (`deploy.services.spec`)."""
    command = [sys.executable, "-m", SERVICE, kind]
    return begun(Driven(kind, command, close_timeout_s=STOP_TIMEOUT_S), stack)
