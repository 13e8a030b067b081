"""Hostile grammars reach only the child process, and get a verdict in time."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.clock import MonotonicClock
from engine.errors import GrammarError
from engine.grammar.child import MAX_WALL_S, GrammarVerdict, Vocabulary
from engine.messages import Grammar, GrammarKind
from router.gateway.requests import grammar_checker
from router.gateway.requests.grammar_checker import (
    Asker,
    GrammarBusy,
    GrammarChecker,
    check_structure,
)
from router.inbox.api_errors import ApiError
from router.text.structured import structure_of
from tests.fuzz import grammars
from tests.fuzz.grammars import fuzz, resident_bytes
from tests.kits.grammar_checks import EOS, TOKENIZER, VOCAB_SIZE

ASKER = Asker("", b"")
VOCABULARY = Vocabulary(str(TOKENIZER), VOCAB_SIZE, EOS)
# longest CPU time between two iterations of the event loop; about 0.01 without load
MAX_WORK_S = 0.5
TIMEOUT_S = 100.0
NUM_FUZZED = 200


def schema(value):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def lark(source):
    return Grammar(GrammarKind.LARK, source)


@asynccontextmanager
async def opened_checker():
    checker = GrammarChecker(MonotonicClock())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield checker
    finally:
        await checker.close()


async def verdict_of(checker, grammar, tenant=""):
    try:
        await checker.check(VOCABULARY, grammar, Asker(tenant, tenant.encode()))
    except (GrammarError, GrammarBusy) as error:
        return str(error)
    return None


def is_busy(refusal):
    """Returns True if the checker was too busy to judge the grammar."""
    said = ("no time", "was not compiled in")
    return refusal is not None and any(text in refusal for text in said)


async def judged_verdict_of(checker, grammar):
    """Asks again while the machine has no time to judge the grammar."""
    while is_busy(refusal := await verdict_of(checker, grammar)):
        pass
    return refusal


def pid_of(checker):
    return checker._child.pid


def is_running(pid):
    return Path(f"/proc/{pid}").exists()


async def longest_work_s(stop):
    """Returns the longest CPU time of this thread between two iterations of its event loop,
    seconds.

    Wall time would include the time that other processes use the CPU.
    """
    longest = 0.0
    while not stop.is_set():
        begin_s = time.thread_time()
        await asyncio.wait([asyncio.ensure_future(stop.wait())], timeout=0.005)
        longest = max(longest, time.thread_time() - begin_s)
    return longest


PRIMES = (997, 1009)
HOSTILE = {
    "newlines": lark("\n" * 32_768),
    "many newlines": lark('start: "a"\n' + "\n" * 120_000),
    "multiples": schema({"type": "integer", "allOf": [{"multipleOf": p} for p in PRIMES]}),
    "patterns": schema(
        {"type": "string", "allOf": [{"pattern": f"a{i}.*b{i}"} for i in range(40)]}
    ),
    "properties": schema({"type": "object", "properties": {f"p{i}": {} for i in range(3_000)}}),
    "nesting": Grammar(GrammarKind.JSON_SCHEMA, '{"const": ' + "[" * 985 + "]" * 985 + "}"),
    "met remainders": schema({"anyOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
    "special token first": lark(
        "start: <|endoftext|> a\na: %json "
        + json.dumps({"anyOf": [{"multipleOf": 9_900 + i, "type": "integer"} for i in range(20)]})
    ),
    "remainders": schema({"anyOf": [{"multipleOf": 9_900 + i} for i in range(20)]}),
}


HARMLESS = {"many newlines"}  # harmless, since they are read in one pass


async def test_hostile_grammars_are_refused_and_stall_nothing():
    async with opened_checker() as checker:
        assert await verdict_of(checker, schema(True)) is None
        stop = asyncio.Event()
        watching = asyncio.create_task(longest_work_s(stop))
        before = resident_bytes(os.getpid())
        for name, grammar in HOSTILE.items():
            begin_s = time.monotonic()
            refusal = await verdict_of(checker, grammar)
            assert time.monotonic() - begin_s < 2 * MAX_WALL_S, name
            if not is_busy(refusal):
                assert (refusal is None) == (name in HARMLESS), (name, refusal)
        # the child still answers after the hostile grammar
        await verdict_of(checker, schema({"type": "string"}))
        stop.set()
        assert await watching < MAX_WORK_S
        assert resident_bytes(os.getpid()) - before < 32 * 2**20
        assert resident_bytes(pid_of(checker)) < 256 * 2**20
        # On a busy machine the verdict of some grammars may be BUSY.
        assert checker.counters[GrammarVerdict.CRASHED] == 0


async def test_a_refusal_says_which_limit():
    async with opened_checker() as checker:
        limits = {"met remainders": "1 s", "properties": "properties", "multiples": "remainders"}
        for name, limit in limits.items():
            assert limit in await judged_verdict_of(checker, HOSTILE[name])


FORKS = """
import os, signal, sys
from engine.grammar import child

child.MAX_WALL_S = 90.0  # one second of CPU time can take long on a busy machine

class Guides:
    def __init__(self, act):
        self.prepare = act

def spin(_):
    while True:
        pass

acts = {
    "memory": lambda _: bytearray(2**30),
    "abort": lambda _: os.abort(),
    "spin": spin,
    "fault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda _: os._exit(0),
    "bug": lambda _: 1 // 0,
}
for name, act in acts.items():
    print(name, child.judged(Guides(act), None).verdict.value)
"""


def test_every_outcome_of_a_fork_has_a_verdict():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert dict(line.split() for line in done.stdout.splitlines()) == {
        "memory": "large",
        "abort": "large",
        "spin": "slow",
        "fault": "crashed",
        "exit": "crashed",
        "bug": "crashed",
    }


def test_random_hostile_grammars_end_in_verdicts():
    counts = fuzz(0, NUM_FUZZED)
    assert counts.total() == NUM_FUZZED
    assert counts[GrammarVerdict.FOLLOWED] > NUM_FUZZED / 5
    # The first limit that is reached depends on the machine: memory if it is fast, CPU time if it
    # is slow, and the wall time if it is busy.
    ended = (GrammarVerdict.LARGE, GrammarVerdict.SLOW, GrammarVerdict.BUSY)
    assert sum(counts[verdict] for verdict in ended) > 0


def test_a_planted_bug_is_a_finding(monkeypatch):
    monkeypatch.setattr(grammars, "SLACK_S", -MAX_WALL_S)
    with pytest.raises(grammars.Finding, match="took"):
        fuzz(0, 5)


async def test_errors_name_the_field_and_the_tool():
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "strict": True, "parameters": parameters},
        }
        for i, parameters in enumerate([{}, {"properties": {"a": {"type": "strin"}}}, {}])
    ]

    async with opened_checker() as checker:
        for fields, param in (
            ({"guided_regex": "["}, "guided_regex"),
            ({"tools": tools}, "tools[1].function.parameters"),
        ):
            with pytest.raises(ApiError) as caught:
                await check_structure(checker, structure_of(fields), VOCABULARY, ASKER)
            assert (caught.value.param, caught.value.status) == (param, 400)
        for tool in tools:
            del tool["function"]["strict"]
        found = await check_structure(checker, structure_of({"tools": tools}), VOCABULARY, ASKER)
        assert found.unheld == ("tools[1].function.parameters.properties.a.type",)


async def test_a_verdict_is_cached_and_shared_by_waiters_of_one_grammar():
    async with opened_checker() as checker:
        grammar = schema({"enum": ["a"]})
        await asyncio.gather(*(verdict_of(checker, grammar) for _ in range(20)))
        await verdict_of(checker, grammar)
        assert checker.counters[GrammarVerdict.FOLLOWED] == 1


def test_timing_does_not_reveal_other_tenants_grammars():
    async def run():
        async with opened_checker() as checker:
            for tenant in ("a", "b", "a"):
                assert await verdict_of(checker, schema({"const": "secret"}), tenant) is None
            return checker.counters[GrammarVerdict.FOLLOWED]

    assert asyncio.run(run()) == 2  # each grammar is compiled once


async def test_tenants_take_turns():
    async with opened_checker() as checker:
        order = []

        async def ask(tenant, index):
            await verdict_of(checker, schema({"const": f"{tenant}{index}"}), tenant)
            order.append(tenant)

        many = [asyncio.create_task(ask("many", i)) for i in range(30)]
        few = [asyncio.create_task(ask("few", i)) for i in range(2)]
        await asyncio.gather(*many, *few)
        assert max(i for i, tenant in enumerate(order) if tenant == "few") < 8


async def test_too_many_waiting_grammars_are_refused_as_busy(monkeypatch):
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 4)

    async with opened_checker() as checker:
        asked = [verdict_of(checker, schema({"const": i})) for i in range(10)]
        found = await asyncio.gather(*asked)
        assert found[:4] == [None] * 4
        assert all("too many" in message for message in found[4:])
        monkeypatch.setattr(grammar_checker, "MAX_WAITING", 0)
        structure = structure_of({"guided_regex": "abc"})
        with pytest.raises(ApiError) as caught:
            await check_structure(checker, structure, VOCABULARY, ASKER)
        assert caught.value.status == 503


async def test_a_cancelled_grammar_is_not_compiled():
    async with opened_checker() as checker:
        asked = [asyncio.create_task(verdict_of(checker, schema({"const": i}))) for i in range(20)]
        first = asyncio.create_task(verdict_of(checker, schema({"const": "x"})))
        await asyncio.wait(asked[:1])
        for task in asked[1:]:
            task.cancel()
        assert await first is None
        assert checker.counters[GrammarVerdict.FOLLOWED] < 5


async def test_a_child_that_dies_is_replaced():
    async with opened_checker() as checker:
        assert await verdict_of(checker, schema({"const": 1})) is None
        first = pid_of(checker)
        os.kill(first, signal.SIGKILL)
        assert "did not answer" in await verdict_of(checker, schema({"const": 2}))
        assert await verdict_of(checker, schema({"const": 2})) is None
        assert pid_of(checker) != first


async def test_the_child_ends_with_its_checker_even_while_it_compiles():
    async with opened_checker() as checker:
        await verdict_of(checker, schema({"const": 1}))
        pid = pid_of(checker)
        busy = asyncio.create_task(verdict_of(checker, HOSTILE["met remainders"]))
        await asyncio.wait([busy], timeout=0.1)
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 3.0
    assert not is_running(pid)
    busy.cancel()
    await asyncio.wait([busy])


async def test_a_model_whose_tokenizer_cannot_guide_refuses_grammars():
    async with opened_checker() as checker:
        for vocabulary in (None, Vocabulary("/nowhere", 8, (0,))):
            with pytest.raises(GrammarError):
                await checker.check(vocabulary, schema(True), ASKER)
