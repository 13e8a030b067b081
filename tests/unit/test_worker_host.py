"""What a worker is opened with, and what it says of itself: no thread or socket is needed."""

import pytest
from test_worker_core_kit import HERE, decode, generate, given_back, hold, prefill

from deploy.worker_host import ModelFacts, WorkerHost, WorkerIdentity
from engine.batch import BatchResult, RowResult
from engine.config import WorkerConfig
from engine.messages import Role, WorkerId
from engine.worker import WorkerCore
from tests.fakes import VOCAB_SIZE, FakeGuides, FakeRunner

EVENTS = {"prefill": prefill("a", 5), "generate": generate("a", 5), "decode": decode("a", 5)}
TAKEN = {"prefill": [], "generate": [], "decode": [hold("a", 2)]}


def host(role: Role, **config: object) -> WorkerHost:
    return WorkerHost(
        WorkerIdentity(WorkerId("w"), role, "model", "token"),
        config=WorkerConfig(**config),
        runner=FakeRunner(50),
        model=ModelFacts(VOCAB_SIZE, 1000, False, FakeGuides()),
        memory=None,
        clock=None,
        on_crash=None,
    )


def step(core: WorkerCore) -> list[tuple[str, int]]:
    """Carries out a step; the tokens that it has of each sequence."""
    plan, _ = core.plan(0.0)
    results = [RowResult((1,) if row.sampling is not None else ()) for row in plan.rows]
    core.finish(BatchResult(results), 0.0)
    return [(row.seq_id, len(row.token_ids)) for row in plan.rows]


@pytest.mark.parametrize(
    ("role", "prefills_locally", "takes"),
    [
        (Role.PREFILL, True, {"prefill"}),
        (Role.PREFILL, False, {"prefill"}),
        (Role.DECODE, True, {"generate", "decode"}),
        (Role.DECODE, False, {"decode"}),
        (Role.MIXED, True, {"prefill", "generate", "decode"}),
        (Role.MIXED, False, {"prefill", "generate", "decode"}),
    ],
)
def test_a_worker_takes_what_it_says_it_does(role, prefills_locally, takes):
    for name, event in EVENTS.items():
        worker = host(role, prefills_locally=prefills_locally)
        worker._events = None
        core = worker._open_core(HERE)
        effects = TAKEN[name] if name in takes else [given_back("a", "wrong role")]
        assert core.handle(event, 0.0) == effects
        assert worker._welcome().generates == ("generate" in takes)


def test_a_decode_worker_computes_prompts_in_chunks_behind_what_it_decodes():
    config = {"max_batch_tokens": 64, "chunk_tokens": 32, "max_running": 4}
    core = host(Role.DECODE, **config)._open_core(HERE)
    core.handle(generate("a", 3), 0.0)
    assert step(core) == [("a", 3)]
    core.handle(generate("b", [1] * 100), 0.0)
    core.handle(generate("c", [2] * 40), 0.0)
    assert step(core) == [("a", 1), ("b", 32), ("c", 31)]
    assert step(core) == [("a", 1), ("b", 32), ("c", 9)]
    assert step(core) == [("a", 1), ("c", 1), ("b", 32)]
    assert step(core) == [("a", 1), ("c", 1), ("b", 4)]
