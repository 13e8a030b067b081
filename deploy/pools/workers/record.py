"""The record of one worker."""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.control import FIRST_VERSION, by_role
from engine.layout import KVFormat
from engine.messages import LoadReport, Role, WorkerId


class WorkerState(StrEnum):
    """The stage of a worker's life."""

    WAITING = "waiting"  # no process; is started when its restart is due
    STARTING = "starting"
    JOINING = "joining"  # runs, but has no session with the controller yet
    SERVING = "serving"
    FLIPPING = "flipping"  # has been sent a new role and has not confirmed it
    DRAINING = "draining"  # has been ordered to drain, and still has work
    DRAINED = "drained"  # has no work, and gets none until another order
    STOPPING = "stopping"
    SPARE = "spare"  # used only for display: a drained spare


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
    target: Role | None  # wanted role; DRAINED if it leaves; None: role unknown
    since_s: float  # time at which the worker entered its state
    state: WorkerState = WorkerState.WAITING
    version: str = FIRST_VERSION
    context_len: int = 0  # tokens; 0 until the worker runs
    start: int = 0  # number of its latest start
    address: str | None = None  # None while the worker does not run
    role: Role | None = None  # the latest role that the worker reported
    kv_format: KVFormat | None = None
    kernels: str = ""  # the latest kernels that the worker reported
    load: LoadReport | None = None
    is_connected: bool = False
    lost_s: float | None = None  # time at which its session ended; None during a session
    died_s: float | None = None  # time of its last death; None once it serves again
    failures: int = 0  # ends and failed starts in a row
    restarts_now: bool = False  # True if its next start is due at once
    leaves: bool = False  # True if the worker is stopped once it is drained
    is_spare: bool = False  # True if it waits to replace a dead worker; its target is DRAINED
    refuses: set[Role] = field(default_factory=set)  # roles that the worker has refused
    has_run: bool = False  # True if it has run before, so its machine has the model
    moves_since_s: float | None = None  # flip after which decoding sequences move away

    @property
    def runs(self) -> bool:
        """True if the worker's process listens and has not been ordered to stop."""
        return self.state in RUNNING

    @property
    def is_ready_spare(self) -> bool:
        """True if the worker can replace another worker at once."""
        return self.is_spare and self.is_connected and self.state is WorkerState.DRAINED

    @property
    def shown_state(self) -> WorkerState:
        """The state to display."""
        return WorkerState.SPARE if self.is_ready_spare else self.state

    @property
    def shown_role(self) -> Role | None:
        """The role to display. Before the worker runs, this is its future role."""
        return self.role or self.target

    def order(self) -> tuple[int, tuple[str, int, str]]:
        """Returns the key that sorts workers for display: by role, then by number."""
        return by_role(self.shown_role, self.worker_id)

    @property
    def num_seqs(self) -> int:
        """The number of the worker's sequences in its latest load report."""
        return 0 if self.load is None else self.load.waiting_seqs + self.load.running_seqs

    @property
    def num_leaving_seqs(self) -> int:
        """The number of sequences that still decode here although the worker's role does not
        decode.

        These sequences are being moved away.
        """
        decodes = self.role is None or self.role.decodes
        return 0 if self.load is None or decodes else self.load.decode_seqs

    @property
    def is_idle(self) -> bool:
        """True if the worker has no sequence, no lease and no pull."""
        load = self.load
        return load is not None and not (
            load.waiting_seqs or load.running_seqs or load.open_leases or load.in_flight_blocks
        )

    @property
    def work_tokens(self) -> int:
        """The number of prompt tokens to compute, plus the context tokens of decoding sequences."""
        return 0 if self.load is None else self.load.prompt_tokens + self.load.context_tokens

    def prefills(self) -> bool:
        """True if the worker serves, and its present and its wanted role both compute prompts."""
        return self._serves() and _both(self.role, self.target, "prefills")

    def decodes(self) -> bool:
        """True if the worker serves, and its present and its wanted role both generate tokens."""
        return self._serves() and _both(self.role, self.target, "decodes")

    def _serves(self) -> bool:
        return self.is_connected and self.state in (WorkerState.SERVING, WorkerState.FLIPPING)


def _both(role: Role | None, target: Role | None, what: str) -> bool:
    return all(each is not None and getattr(each, what) for each in (role, target))
