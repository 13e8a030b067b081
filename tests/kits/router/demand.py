"""A router machine with known costs, and requests for it."""

import random

import msgspec

from engine.config import RouterConfig
from engine.demand import DecodeCost
from engine.messages import (
    PROTOCOL_VERSION,
    Limits,
    RequestId,
    Sampling,
    Welcome,
)
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.machine.events import Arrived, WorkerJoined
from router.machine.machine import RouterMachine
from router.machine.requests import Request
from tests.kits.router.machine import LAYOUT

COSTS = WorkerCosts(PrefillCost(0.0, 0.01), DecodeCost(0.01, 0.001, 0.0), PullCost(0.0, 0.0, 1e12))


def machine_of(*roles, num_blocks=100, fluid=False, **config):
    """Returns a machine with workers of these roles and known costs."""
    machine = RouterMachine(
        RouterConfig(**config), estimates=Estimates(COSTS), rng=random.Random(0)
    )
    for number, role in enumerate(roles):
        name = f"{role}-{number}"
        info = Welcome(PROTOCOL_VERSION, name, "inc", role, "fp", LAYOUT, num_blocks, 4)
        info = msgspec.structs.replace(info, stretch=4.0 if fluid else None)
        machine.handle(WorkerJoined(info), 0.0)
    return machine


def ask(machine, name, now_s=1.0, num_tokens=40, max_tokens=10):
    """Submits a request to a machine; the prompt depends on the request's name."""
    limits = Limits(max_len=num_tokens + max_tokens, prompt_len=num_tokens)
    first = sum(map(ord, name))
    tokens = tuple(range(first, first + num_tokens))
    request = Request(RequestId(name), tokens, Sampling(0.0, seed=1), limits, received_s=now_s)
    return machine.handle(Arrived(request), now_s)
