"""A router machine driven event by event, and what its tests share."""

import random

import msgspec

from engine.config import RouterConfig
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PROTOCOL_VERSION,
    DecodeStarted,
    KvReady,
    LeaseRef,
    Limits,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Role,
    Sampling,
    TransferAddress,
    Welcome,
)
from router.machine.events import Arrived, FromWorker, SendTo, WorkerJoined
from router.machine.machine import RouterMachine
from router.machine.requests import Request, Update

LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED, "s": Role.STORE}
LEASE = LeaseRef("lease", TransferAddress("p0", "inc", "tcp://x"), 2)


class First(random.Random):
    """Chooses the first worker by name among equals."""

    def choice(self, seq):
        return seq[0]


class Driver:
    """A router machine with its own clock, and short methods that send its events."""

    def __init__(self, *workers: str, num_blocks: int = 100, **config) -> None:
        self.machine = RouterMachine(RouterConfig(**config), rng=First())
        self.now_s = 10.0
        for name in workers:
            self.join(name, num_blocks)

    def handle(self, event):
        effects = self.machine.handle(event, self.now_s)
        self.machine.validate()
        return effects

    def join(self, name: str, num_blocks: int = 100, *, stretch: float | None = None):
        role = ROLES[name[0]]
        info = Welcome(PROTOCOL_VERSION, name, "inc", role, "fp", LAYOUT, num_blocks, 4)
        info = msgspec.structs.replace(info, stretch=stretch)
        return self.handle(WorkerJoined(info))

    def ask(self, name="r", prompt=(1, 2, 3, 4, 5), max_tokens=4, **fields):
        limits = Limits(max_len=len(prompt) + max_tokens)
        received_s = self.now_s - 0.5
        request = Request(RequestId(name), tuple(prompt), Sampling(), limits, received_s, **fields)
        return self.handle(Arrived(request))

    def say(self, worker: str, message, after_s: float = 0.0):
        self.now_s += after_s
        return self.handle(FromWorker(worker, message))

    def hand_over(self, seq="r.0", prefill="p0", decode="d0", token=9):
        """Sends all messages up to a running decode."""
        self.say(prefill, PrefillStarted(seq, 0, LEASE))
        self.say(prefill, PrefillDone(seq, token, None))
        self.say(decode, KvReady(seq, 2, 0, "shm"))
        self.say(decode, DecodeStarted(seq))


def sent(effects, kind):
    """Returns the messages of one kind in the effects, each with its worker."""
    return [
        (e.worker_id, e.message)
        for e in effects
        if isinstance(e, SendTo) and isinstance(e.message, kind)
    ]


def updates(effects):
    """Returns the updates that effects deliver to clients."""
    return [e for e in effects if isinstance(e, Update)]


def ends(effects):
    """Returns the outcomes of the requests that effects end."""
    return [e.outcome for e in updates(effects) if e.outcome is not None]
