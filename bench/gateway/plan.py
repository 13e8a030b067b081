"""The plan of one `bench gateway`. Pure.

Servers answer the same requests with streams of the same pace:

    baton        the gateway, in front of a worker that computes nothing            ours
    uvloop       a bare server: a coroutine for each stream, which only writes      peer
    writes       the same with one timer for all streams: nothing but writes       limit
    fastapi      FastAPI, pydantic and uvicorn                                      peer, --peer
    vllm_router  vLLM's router in front of a bare server                            peer, --peer

Only Baton talks to a worker and handles text. Peers invent their tokens where they write them.

Each repetition gives every load to each server, in an order of its own:

    serial    one request after the other, of one token: what a server adds to a first token
    64        as many streams at once, a token every 10 ms
    512       as many streams at once, a token every 50 ms
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from bench.common.options import PeerProgram, peers_named
from bench.common.report import Scalar

STEP_S = 0.01  # of the worker
PEERS = ("fastapi", "vllm_router")
OURS, BARE, WRITES = "baton", "uvloop", "writes"
MODEL = "null"


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """Streams that begin together; each connection sends one request after the other."""

    name: str
    num_streams: int
    num_rounds: int
    num_tokens: int  # of each
    steps: int = 1  # from token to token

    @property
    def pace_s(self) -> float:
        """Seconds from token to token."""
        return self.steps * STEP_S

    @property
    def num_requests(self) -> int:
        """All of them."""
        return self.num_streams * self.num_rounds

    @property
    def total_tokens(self) -> int:
        """Tokens of all answers."""
        return self.num_requests * self.num_tokens


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """All that is measured. Every prompt has `prompt_words` words."""

    serial: StreamLoad
    loads: tuple[StreamLoad, ...]
    prompt_words: int = 32
    num_repeats: int = 5
    peers: tuple[PeerProgram, ...] = ()
    seed: int = 0

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers."""
        return (OURS, BARE, WRITES, *(peer.name for peer in self.peers))


def plan_of(
    *, prompt_words: int, num_tokens: int, num_repeats: int, peers: Sequence[str], seed: int
) -> GatewayPlan:
    """The plan from the options. Raises ConfigError."""
    return GatewayPlan(
        serial=StreamLoad("serial", 1, num_rounds=200, num_tokens=1),
        loads=(
            StreamLoad("64", 64, num_rounds=2, num_tokens=num_tokens),
            StreamLoad("512", 512, num_rounds=1, num_tokens=max(2, num_tokens // 4), steps=5),
        ),
        prompt_words=prompt_words,
        num_repeats=num_repeats,
        peers=peers_named(peers, PEERS),
        seed=seed,
    )


def quick(plan: GatewayPlan) -> GatewayPlan:
    """A smaller plan, which takes some seconds."""
    serial = replace(plan.serial, num_rounds=30)
    loads = tuple(replace(load, num_rounds=1, num_tokens=8) for load in plan.loads)
    return replace(plan, serial=serial, loads=loads, num_repeats=1)


def body_of(plan: GatewayPlan, load: StreamLoad) -> dict[str, Any]:
    """The body of a load's requests. Peers read the pace from `user`, our worker from `top_k`."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "word " * plan.prompt_words}],
        "stream": True,
        "max_tokens": load.num_tokens,
        "ignore_eos": True,
        "top_k": load.steps,
        "user": str(load.pace_s),
    }


def order_of(plan: GatewayPlan, repeat: int) -> list[str]:
    """The servers, in the order of one repetition."""
    names = list(plan.servers)
    Random(f"{plan.seed}/{repeat}").shuffle(names)
    return names


def config_of(plan: GatewayPlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    told: dict[str, Scalar] = {
        "prompt_words": plan.prompt_words,
        "num_repeats": plan.num_repeats,
        "num_serial": plan.serial.num_rounds,
    }
    for load in plan.loads:
        told[f"tokens_{load.name}"] = load.num_tokens
        told[f"pace_ms_{load.name}"] = 1e3 * load.pace_s
    return told
