"""Loads of the study: turns of sessions, from a recorded trace or drawn by a seed. Pure.

A trace says nothing of sessions. They follow from prefixes: a prompt that shares two blocks or
more with earlier prompts is the next turn of the last of these that has no next turn yet. The
first block alone is a system prompt.

The drawn load has chats, which pause as people do, and agents, which return after a tool call.
Both begin with one of a few system prompts. Its constants were not fitted to any trace.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from bench.simulator.traces import Trace
from engine.worker.blocks import BlockHash

SYSTEM_PROMPTS = 12
SYSTEM_BLOCKS = (1, 8)
AGENTS_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request: its prompt's blocks, its session, and when the session's next request comes."""

    arrived_s: float
    blocks: tuple[BlockHash, ...]
    session: int
    returns_after_s: float | None = None  # None: it was the session's last one


def turns_of(trace: Trace) -> list[ChatTurn]:
    """The requests of a trace as turns of sessions."""
    turns: list[ChatTurn] = []
    last_with: dict[int, int] = {}  # by block id: the last request with that block
    for request in trace.requests:
        at = len(turns)
        num_known = 0
        for block_id in request.block_ids:
            if block_id not in last_with:
                break
            num_known += 1
        session = at
        if num_known > 1:
            before = last_with[request.block_ids[num_known - 1]]
            if turns[before].returns_after_s is None:
                pause_s = request.arrived_s - turns[before].arrived_s
                turns[before] = replace(turns[before], returns_after_s=pause_s)
                session = turns[before].session
        blocks = tuple(_name(block_id) for block_id in request.block_ids)
        turns.append(ChatTurn(request.arrived_s, blocks, session))
        last_with.update(dict.fromkeys(request.block_ids, at))
    return turns


@dataclass(frozen=True, slots=True)
class SessionKind:
    """How sessions of one kind behave. Times are log-normal."""

    more_turns: float  # the chance that a turn is not the last one
    pause_s: float  # median
    pause_spread: float
    new_blocks: float  # median, in each turn


CHAT = SessionKind(more_turns=0.6, pause_s=60.0, pause_spread=1.0, new_blocks=4.0)
AGENT = SessionKind(more_turns=0.9, pause_s=8.0, pause_spread=0.7, new_blocks=2.0)


def drawn_turns(num_sessions: int, sessions_per_s: float, rng: Random) -> list[ChatTurn]:
    """Turns of sessions that begin at random, in order of arrival."""
    fresh = count(1)
    systems = [
        [_name(next(fresh)) for _ in range(rng.randint(*SYSTEM_BLOCKS))]
        for _ in range(SYSTEM_PROMPTS)
    ]
    turns: list[ChatTurn] = []
    begins_s = 0.0
    for session in range(num_sessions):
        begins_s += rng.expovariate(sessions_per_s)
        kind = AGENT if rng.random() < AGENTS_SHARE else CHAT
        prompt = list(systems[min(int(rng.expovariate(0.4)), SYSTEM_PROMPTS - 1)])
        at_s, is_last = begins_s, False
        while not is_last:
            grows = max(1, round(rng.lognormvariate(math.log(kind.new_blocks), 0.8)))
            prompt += [_name(next(fresh)) for _ in range(grows)]
            is_last = rng.random() >= kind.more_turns
            pause_s = rng.lognormvariate(math.log(kind.pause_s), kind.pause_spread)
            turns.append(ChatTurn(at_s, tuple(prompt), session, None if is_last else pause_s))
            at_s += pause_s
    return sorted(turns, key=lambda turn: turn.arrived_s)


def num_accesses(turns: Sequence[ChatTurn]) -> int:
    """Blocks of all prompts."""
    return sum(len(turn.blocks) for turn in turns)


def _name(block_id: int) -> BlockHash:
    return BlockHash(block_id.to_bytes(8))
