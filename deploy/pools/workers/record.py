"""The record of one worker."""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.control import FIRST_VERSION, by_role
from engine.layout import KVFormat
from engine.messages import LoadReport, Role, WorkerId


class WorkerState(StrEnum):
    """The stage of a worker's life."""

    WAITING = "waiting"  # does not run; is started when its restart is due
    STARTING = "starting"
    JOINING = "joining"  # runs, but has no session with the controller yet
    SERVING = "serving"
    FLIPPING = "flipping"  # was told its new role and has not confirmed it
    DRAINING = "draining"  # was told to drain, and still holds work
    DRAINED = "drained"  # holds no work; stays so until the operator orders something else
    STOPPING = "stopping"
    SPARE = "spare"  # only shown: a spare that is drained


RUNNING = (
    WorkerState.JOINING,
    WorkerState.SERVING,
    WorkerState.FLIPPING,
    WorkerState.DRAINING,
    WorkerState.DRAINED,
)


@dataclass(slots=True)
class PoolWorker:
    """The controller's record of a worker."""

    worker_id: WorkerId
    target: Role | None  # its wanted role; DRAINED if it is to go; None: found, role not known yet
    since_s: float  # when it entered its state
    state: WorkerState = WorkerState.WAITING
    version: str = FIRST_VERSION
    context_len: int = 0  # tokens; 0 until it runs
    start: int = 0  # the number of its latest start
    address: str | None = None  # None while it does not run
    role: Role | None = None  # as it last reported
    kv_format: KVFormat | None = None
    kernels: str = ""  # what computes there, as it last reported
    load: LoadReport | None = None
    is_connected: bool = False
    lost_s: float | None = None  # when its session ended; None while it has one
    died_s: float | None = None  # when it last ended by itself; None once it serves again
    failures: int = 0  # ends and failed starts in a row
    restarts_now: bool = False  # its next start does not wait
    leaves: bool = False  # is stopped once it is drained
    is_spare: bool = False  # its target is DRAINED: it waits to take the place of a dead worker
    refuses: set[Role] = field(default_factory=set)  # roles that it did not take
    has_run: bool = False  # so its model is on its machine
    moves_since_s: float | None = None  # since this flip, sequences that decode here move away

    @property
    def runs(self) -> bool:
        """True if its process listens and was not told to stop."""
        return self.state in RUNNING

    @property
    def is_ready_spare(self) -> bool:
        """True if it can take another worker's place at once."""
        return self.is_spare and self.is_connected and self.state is WorkerState.DRAINED

    @property
    def shown_state(self) -> WorkerState:
        """Its state as people see it."""
        return WorkerState.SPARE if self.is_ready_spare else self.state

    @property
    def shown_role(self) -> Role | None:
        """Its role as people see it: until it runs, the one that it will have."""
        return self.role or self.target

    def order(self) -> tuple[int, tuple[str, int, str]]:
        """Key that sorts workers for people: by role, then by number."""
        return by_role(self.shown_role, self.worker_id)

    @property
    def num_seqs(self) -> int:
        """Sequences that it holds, by its last report."""
        return 0 if self.load is None else self.load.waiting_seqs + self.load.running_seqs

    @property
    def num_leaving_seqs(self) -> int:
        """Sequences that decode here although its role does not decode: they are moved away."""
        decodes = self.role is None or self.role.decodes
        return 0 if self.load is None or decodes else self.load.decode_seqs

    @property
    def is_idle(self) -> bool:
        """True if it holds no sequence, no lease and no pull."""
        load = self.load
        return load is not None and not (
            load.waiting_seqs or load.running_seqs or load.open_leases or load.in_flight_blocks
        )

    @property
    def work_tokens(self) -> int:
        """Its work: tokens of prompts to compute, and of contexts that it decodes."""
        return 0 if self.load is None else self.load.prompt_tokens + self.load.context_tokens

    def prefills(self) -> bool:
        """True if it computes prompts now, and its wanted role does too."""
        return self._serves() and _both(self.role, self.target, "prefills")

    def decodes(self) -> bool:
        """True if it generates tokens now, and its wanted role does too."""
        return self._serves() and _both(self.role, self.target, "decodes")

    def _serves(self) -> bool:
        return self.is_connected and self.state in (WorkerState.SERVING, WorkerState.FLIPPING)


def _both(role: Role | None, target: Role | None, what: str) -> bool:
    return all(each is not None and getattr(each, what) for each in (role, target))
