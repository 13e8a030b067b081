"""Workers of several ranks hand over, move and lose sequences; the tokens stay the same."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from engine.config import Speculate, Transport, WeightFormat, WorkerConfig
from engine.errors import ConfigError
from engine.messages import (
    PROTOCOL_VERSION,
    GatewayId,
    Hello,
    LoadReport,
    Role,
    RoleChanged,
    SetRole,
    WorkerId,
    decode_to_gateway,
    encode_frame,
)
from engine.net.sessions import SessionClient
from router.machine.requests import Finished
from tests.e2e.tokens.test_exactness import GREEDY, generate, serve
from tests.kits.checkpoints import COMMON, KINDS, save_checkpoint, tiny_checkpoint
from tests.kits.router.scripted_workers import updates_of
from tests.kits.services.cluster import SECRET, ask, prompts, request, router, until, workers
from tests.kits.services.processes import ended, processes

pytestmark = pytest.mark.torch

PAIR = (Role.PREFILL, Role.DECODE)
PROMPTS = prompts(8, vocab_size=64, seed=3, longest=60)
NUM_TOKENS = 12
RANK = b"deploy.ranks.main"  # a part of each rank's command line


def split(*, transport=Transport.AUTO, **ranks):
    """Returns the configuration of one role."""
    return WorkerConfig(
        weights=WeightFormat.FP32, kv_mib=16, chunk_tokens=16, kv_transport=transport, **ranks
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        ({"tp": 2}, {}, Transport.ZMQ),
        ({}, {"tp": 2}, Transport.SHM),
        ({"pp": 2}, {}, Transport.SHM),
        ({"tp": 2}, {"pp": 2}, Transport.ZMQ),
        ({"tp": 2, "pp": 2}, {"tp": 2}, Transport.SHM),
    ],
)
# `test_running_answers_move_between_workers_of_other_ranks` covers such pairs too
@pytest.mark.long
def test_pools_may_be_split_in_different_ways(tmp_path_factory, prefill, decode, transport):
    model = tiny_checkpoint(tmp_path_factory, "llama")
    config = {
        Role.PREFILL: split(transport=transport, **prefill),
        Role.DECODE: split(transport=transport, **decode),
    }
    with workers(PAIR, model=model, config=config) as pair:
        served = serve(pair, PROMPTS, [GREEDY] * len(PROMPTS), at_once=8, num_tokens=NUM_TOKENS)
    assert served == generate(model, PROMPTS, NUM_TOKENS)


def children_of(pid: int) -> list[int]:
    """Returns the rank processes that a worker has started."""
    return [i for i, (parent, name) in processes().items() if parent == pid and RANK in name]


def ranks_here() -> dict[int, int]:
    """Returns all rank processes of these tests, each with its worker's process."""
    there = processes()
    nurseries = {i for i, (parent, _) in there.items() if parent == os.getpid()}
    here = {i for i, (parent, _) in there.items() if parent in nurseries}
    return {i: parent for i, (parent, name) in there.items() if parent in here and RANK in name}


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ({"tp": 2, "ep": 2}, "config.json: model_type 'llama' has no plan for ep"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ({"pp": 4}, "3 layers cannot be split into 4 stages"),
                ({"tp": 3}, "4 attention heads cannot be shared by 3 ranks"),
            )
        ),
    ],
)
def test_ranks_that_cannot_share_a_model_say_so_in_one_line(tmp_path_factory, capfd, ranks, reason):
    model = tiny_checkpoint(tmp_path_factory, "llama")
    assert refusal(model, split(**ranks)) == f"mixed-0: {reason}"
    assert not ranks_here()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.long
def test_a_draft_that_ranks_cannot_share_is_refused_by_name(tmp_path_factory):
    model = tiny_checkpoint(tmp_path_factory, "llama")
    draft = tmp_path_factory.mktemp("models") / "draft"
    save_checkpoint(draft, COMMON | KINDS["llama"] | {"num_hidden_layers": 1})
    config = split(pp=2, speculate=Speculate.DRAFT, draft_model=str(draft))
    assert refusal(model, config) == "mixed-0: draft: 1 layers cannot be split into 2 stages"


def refusal(model: Path, config: WorkerConfig) -> str:
    """Returns the reason why a worker fails to start."""
    with pytest.raises(ConfigError) as refused, workers([Role.MIXED], model=model, config=config):
        pass
    return str(refused.value)


@pytest.mark.parametrize("delay_s", [0.0, pytest.param(3.5, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("is_rank_killed", "reason"),
    [(True, r"rank 1 has ended \(exit status -9\)"), (False, "ended while starting")],
)
def test_a_worker_starts_with_all_its_ranks_or_not_at_all(
    tmp_path_factory, capfd, is_rank_killed, reason, delay_s
):
    model = tiny_checkpoint(tmp_path_factory, "llama")
    is_over = threading.Event()
    killed: dict[int, int] = {}

    def kill() -> None:
        while not (found := ranks_here()):
            if is_over.wait(0.01):
                return
        is_over.wait(delay_s)
        killed.update(found)
        for rank, parent in found.items():
            os.kill(rank if is_rank_killed else parent, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    refused = pytest.raises(ConfigError, match=reason)
    try:
        with refused, workers([Role.MIXED], model=model, config=split(tp=2)):
            pass
    finally:
        is_over.set()
        killing.join()
    assert killed
    assert all(ended(rank) for rank in killed)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_a_rank_that_ends_or_hangs_ends_its_worker_and_streams_go_on(tmp_path_factory, number):
    model = tiny_checkpoint(tmp_path_factory, "llama")
    prompt = PROMPTS[6]
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    config = {Role.PREFILL: split(), Role.DECODE: split(tp=2, step_timeout_s=2.0)}
    hit: list[int] = []

    async def run(running):
        async with router(running) as r:
            killed: list[str] = []

            def on_tokens(num: int) -> None:
                if num < 5 or killed:
                    return
                loads = {i: worker.load for i, worker in r.workers().items()}
                busy = [i for i, load in loads.items() if load and load.running_seqs]
                worker = next((i for i in busy if i.startswith("decode")), None)
                if worker is None:
                    return
                [rank] = children_of(running.ready[worker].pid)
                os.kill(rank, number)
                hit.append(rank)
                killed.append(worker)

            answer = await ask(r, request("r", prompt, max_tokens=200, sampling=GREEDY), on_tokens)
            assert isinstance(answer.outcome, Finished), answer.outcome
            assert killed
            await until(lambda: killed[0] not in running.live, "the worker of the rank is dead")
            return answer.token_ids

    with workers(roles, model=model, config=config) as running:
        found = asyncio.run(run(running))
        assert ended(hit[0])
    assert found == generate(model, [prompt], 200)[0]


@pytest.mark.long
def test_a_rank_that_hangs_ends_its_worker_even_without_work(tmp_path_factory):
    model = tiny_checkpoint(tmp_path_factory, "llama")
    config = split(tp=2, step_timeout_s=1.0)
    with workers([Role.MIXED], model=model, config=config) as running:
        [(worker, ready)] = running.ready.items()
        [rank] = children_of(ready.pid)
        os.kill(rank, signal.SIGSTOP)
        assert ended(rank, deadline_s=10.0)  # the kernel kills a rank when its worker has exited
        assert ended(ready.pid)
        assert worker not in running.live


async def set_role(address: str, role: Role) -> None:
    """Sets a worker's role.

    Waits until the worker has the role and decodes only if the role may.
    """
    client = SessionClient(address, SECRET)
    await client.open()
    client.post(encode_frame([Hello(PROTOCOL_VERSION, GatewayId("operator"))]))
    client.post(encode_frame([SetRole(role)]))
    is_set = is_over = False
    while not is_over and (frame := await client.receive()) is not None:
        for message in decode_to_gateway(frame):
            is_set |= isinstance(message, RoleChanged) and message.role is role
            is_empty = isinstance(message, LoadReport) and not message.decode_seqs
            is_over |= is_set and (role.decodes or is_empty)
    assert is_over
    await client.close()


def test_running_answers_move_between_workers_of_other_ranks(tmp_path_factory):
    model = tiny_checkpoint(tmp_path_factory, "llama")
    split_up, whole = WorkerId("decode-1"), WorkerId("mixed-2")
    config = {Role.PREFILL: split(), Role.DECODE: split(tp=2), Role.MIXED: split(pp=2)}
    inputs = PROMPTS[4:]
    num_tokens = 440

    async def run(running):
        async with router(running) as r:
            streams = [[] for _ in inputs]

            async def stream(i: int) -> None:
                asked = request(f"r{i}", inputs[i], max_tokens=num_tokens, sampling=GREEDY)
                async for update in updates_of(r, asked):
                    streams[i] += update.token_ids

            tasks = [asyncio.create_task(stream(i)) for i in range(len(inputs))]
            await until(lambda: all(len(s) > 5 for s in streams), "all have begun")
            for left, other in ((split_up, whole), (whole, split_up)):
                await set_role(running.ready[other].address, Role.DECODE)
                await set_role(running.ready[left].address, Role.PREFILL)
                assert not r.machine.view.workers[left].decodes
            await asyncio.gather(*tasks)
            counters = r.machine.counters
            assert counters["moved", "role changed"] > 0
            assert not [reason for name, reason in counters if name == "retried"]
            return streams

    roles = (Role.PREFILL, Role.DECODE, Role.MIXED)
    with workers(roles, model=model, config=config) as running:
        assert asyncio.run(run(running)) == generate(model, inputs, num_tokens)
