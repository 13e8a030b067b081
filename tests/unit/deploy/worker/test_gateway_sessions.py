"""A session continues while a grammar compiles, and each sequence's messages keep their order."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from deploy.worker import gateway_sessions
from deploy.worker.gateway_sessions import RequestIds, SessionInbox
from engine.errors import GrammarError
from engine.messages import (
    Cancel,
    Decode,
    FirstToken,
    GatewayId,
    Grammar,
    GrammarKind,
    LeaseId,
    LeaseRef,
    Limits,
    Role,
    Sampling,
    SeqId,
    SessionEnd,
    SetRole,
    TransferAddress,
)

SLOW = Grammar(GrammarKind.REGEX, "slow")
BAD = Grammar(GrammarKind.REGEX, "bad")
LEASE = LeaseRef(LeaseId("l"), TransferAddress("w", "i", "tcp://h:1"), 1)
TIMEOUT_S = 10.0


def asked(seq, grammar=None, *, tokens=(1, 2), prompt_len=2):
    sampling, limits = Sampling(grammar=grammar), Limits(9, prompt_len=prompt_len)
    return Decode(SeqId(seq), list(tokens), sampling, limits, LEASE)


class HeldGuides:
    """Guides whose slow grammar opens only after the test sets `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.opened = []

    def open(self, grammar, answer, salt=b""):
        if grammar == SLOW:
            assert self.go.wait(TIMEOUT_S)
        self.opened.append((grammar.source, list(answer)))
        if grammar == BAD:
            raise GrammarError("bad")
        return f"guide of {grammar.source}"


class Session:
    def __init__(self, executor):
        self.guides = HeldGuides()
        self.events = []
        self.crashes = []
        self._changed = asyncio.Event()
        self.opening = SessionInbox(
            GatewayId("g"),
            self.guides,
            executor=executor,
            put=self._put,
            on_crash=self.crashes.append,
            request_ids=RequestIds(),
            possible_roles=list(Role),
        )

    def _put(self, event):
        self.events.append(event)
        self._changed.set()

    def seen(self):
        return [(type(e.message).__name__, getattr(e.message, "seq_id", "")) for e in self.events]

    async def until(self, count):
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.events) < count:
                self._changed.clear()
                await self._changed.wait()


def run(scene):
    async def main():
        with ThreadPoolExecutor(1) as executor:
            session = Session(executor)
            try:
                await scene(session)
            finally:
                session.guides.go.set()
            assert not session.crashes

    asyncio.run(main())


def test_other_sequences_pass_while_a_grammar_is_compiled():
    async def scene(session):
        for message in (
            asked("a", SLOW),
            FirstToken(SeqId("a"), 3),
            asked("b"),
            SetRole(Role.MIXED),
            SessionEnd("key", "session"),
            Cancel(SeqId("a")),
            Cancel(SeqId("b")),
        ):
            session.opening.receive(message)
        passed = [("Decode", "b"), ("SetRole", ""), ("SessionEnd", ""), ("Cancel", "b")]
        assert session.seen() == passed
        session.guides.go.set()
        await session.until(7)
        assert session.seen() == [*passed, ("Decode", "a"), ("FirstToken", "a"), ("Cancel", "a")]
        assert [e.guide for e in session.events] == [None] * 4 + ["guide of slow", None, None]

    run(scene)


def test_guide_replays_the_answer_and_a_refusal_is_passed_on():
    async def scene(session):
        session.opening.receive(asked("a", BAD, tokens=(1, 2, 7, 8), prompt_len=2))
        await session.until(1)
        assert session.guides.opened == [("bad", [7, 8])]
        assert isinstance(session.events[0].guide, GrammarError)

    run(scene)


def test_ended_session_emits_no_event():
    async def scene(session):
        session.opening.receive(asked("a", SLOW))
        session.opening.close()
        session.guides.go.set()
        session.opening.receive(asked("b"))
        await session.until(1)
        assert session.seen() == [("Decode", "b")]

    run(scene)


def test_number_of_waiting_grammars_is_bounded(monkeypatch):
    monkeypatch.setattr(gateway_sessions, "MAX_OPENING", 2)

    async def scene(session):
        for i in range(3):
            session.opening.receive(asked(f"s{i}", SLOW))
        assert session.seen() == [("Decode", "s2")]
        assert isinstance(session.events[0].guide, GrammarError)

    run(scene)


def test_bug_in_opening_a_guide_ends_the_worker():
    async def scene(session):
        session.guides.open = None
        session.opening.receive(asked("a", BAD))
        async with asyncio.timeout(TIMEOUT_S):
            while not session.crashes:
                await asyncio.wait([*session.opening._tasks] or [asyncio.create_task(_turn())])
        assert isinstance(session.crashes.pop(), TypeError)

    run(scene)


async def _turn():
    pass
