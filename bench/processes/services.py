"""Single workers and gateways as processes, without `baton serve` around them."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal

from bench.processes.driven import Answer, Driven, begun

SERVICE = "deploy.local.process_main"
STOP_TIMEOUT_S = 30.0


def launched(kind: Literal["worker", "gateway"], stack: ExitStack) -> Driven:
    """Starts a process that ends with the stack. It waits for its spec (`deploy.base.spec`)."""
    command = [sys.executable, "-m", SERVICE, kind]
    return begun(Driven(kind, command, close_timeout_s=STOP_TIMEOUT_S), stack)


def listening(service: Driven, spec: Mapping[str, object], *, timeout_s: float) -> Answer:
    """Sends a service its spec; returns its answer once it listens. Raises DrivenFailed."""
    answer = service.tell(spec, timeout_s=timeout_s)
    while "type" in answer:  # news of the start, such as how long it may take
        answer = service.answer(timeout_s)
    return answer
