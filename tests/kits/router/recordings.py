"""A script of events for the router's machine, and recordings of that script."""

from engine.config import RouterConfig, RouterPolicy
from engine.messages import (
    PROTOCOL_VERSION,
    FinishReason,
    GivenBack,
    KvReady,
    Limits,
    LoadReport,
    Logprobs,
    PrefillDone,
    PrefillStarted,
    Role,
    Sampling,
    Tokens,
    Welcome,
)
from engine.worker.block_events import AllBlocksCleared, BlockStored
from router.machine.events import (
    Arrived,
    BlockEventsMissed,
    BlocksChanged,
    ClientGone,
    FromWorker,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from router.machine.machine import RouterMachine
from router.machine.requests import Request
from router.recording.records import Recorder
from tests.kits.router.machine import LAYOUT, LEASE

CONFIG = RouterConfig(policy=RouterPolicy.RANDOM, seed=3, queue_timeout_s=7.0)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE}


def welcome(name: str) -> WorkerJoined:
    """Returns the event of a joining worker. Its name begins with its role."""
    role = ROLES[name[0]]
    info = Welcome(PROTOCOL_VERSION, name, "inc", role, "fp", LAYOUT, 100, 4)
    return WorkerJoined(info)


def arrival(name: str, prompt=(1, 2, 3, 4, 5), now_s=1.0) -> Arrived:
    """Returns a request whose sampling uses a field of each kind."""
    sampling = Sampling(logit_bias=((3, 0.5),), logprobs=1)
    return Arrived(Request(name, tuple(prompt), sampling, Limits(len(prompt) + 9), now_s))


SCRIPT = [
    *((1.0, welcome(name)) for name in ("p0", "p1", "d0", "d1")),
    (
        1.1,
        BlocksChanged(
            "d0", [AllBlocksCleared(), BlockStored([b"x" * 16], None, [], 4, *3 * [None])]
        ),
    ),
    *((1.1 + i / 7, arrival(f"r{i}")) for i in range(6)),
    (2.5, FromWorker("d1", LoadReport(9, 0, 0, 0, 0, 0, 0, 0, {"steps": 2.0}, decode_seqs=1))),
    *((3.0, FromWorker(p, PrefillStarted(f"r{i}.0", 0, LEASE))) for p in ("p0",) for i in range(6)),
    *(
        (3.0 + i / 3, FromWorker("p0", PrefillDone(f"r{i}.0", 9, None, Logprobs(-1 / 3, 1))))
        for i in range(6)
    ),
    (5.5, FromWorker("d0", KvReady("r1.0", 2, 0, "shm", 0.1, 0.05))),
    (5.6, BlockEventsMissed("d0", "why")),
    (5.7, FromWorker("d0", Tokens("r0.0", [7, 8]))),
    (6.0, FromWorker("d0", GivenBack("r2.0", "pull failed"))),
    (6.1, ClientGone("r3")),
    (6.2, WorkerLost("p1", "gone")),
    (6.3, FromWorker("d0", Tokens("r1.0", [7], FinishReason.STOP))),
    (100.0, Tick()),
]


def recorded(config: RouterConfig = CONFIG, script=SCRIPT) -> list[bytes]:
    """Returns the records of a script."""
    records: list[bytes] = []
    machine, recorder = RouterMachine(config), Recorder(config, records.append)
    for now_s, event in script:
        recorder.record(event, now_s, machine.handle(event, now_s))
    return records
