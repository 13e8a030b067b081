"""Chooses each worker in turn, for prefill and for decode, in order of name."""

from collections.abc import Sequence
from typing import ClassVar

from engine.messages import WorkerId
from router.policies.base import Asked, Busy, Decision, Worker


class RoundRobin:
    """Remembers the worker of each pool that was chosen last."""

    name: ClassVar[str] = "round-robin"
    binds_late: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    is_fluid: ClassVar[bool] = False

    def __init__(self) -> None:
        self._last_prefill = WorkerId("")
        self._last_decode = WorkerId("")

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns the next placement in turn."""
        prefillers = asked.candidates.prefillers
        prefill, worker = _after(self._last_prefill, prefillers)
        self._last_prefill = prefill
        decode = prefill
        if not worker.info.role.decodes:
            decode, _ = _after(self._last_decode, asked.candidates.partners(prefill))
            self._last_decode = decode
        return Decision(self.name, "its turn", prefill, decode, len(prefillers))


def _after(last: WorkerId, workers: Sequence[Worker]) -> Worker:
    """Returns the next worker by name; after the last worker, the first."""
    return min(workers, key=lambda item: (item[0] <= last, item[0]))
