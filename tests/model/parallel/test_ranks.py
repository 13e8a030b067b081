"""Workers of several ranks choose the same tokens as one rank."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.layout import KVSection
from engine.messages import Sampling
from engine.model.parallel.group import RankGroup
from engine.model.runner import TorchRunner
from engine.worker.batch import BatchPlan, Row
from engine.worker.ranks import RankPlace
from tests.kits.checkpoints import COMMON, KINDS, make_embedding, save_checkpoint, tiny_checkpoint
from tests.kits.models.ranks import FP32, RankProcesses
from tests.kits.models.served import generate

pytestmark = pytest.mark.torch

GREEDY = Sampling(temperature=0.0)
PROMPTS = (list(range(1, 20)), [40, 41, 42], list(range(90, 60, -1)))
NUM_TOKENS = 12
NUM_BLOCKS = 96  # more than all answers need, because short answers wait for long ones


@pytest.fixture(scope="module")
def processes():
    processes = RankProcesses()
    yield processes
    processes.close()


def answers(runner, *, chunk=7):
    """Returns greedy answers to all prompts, in common batches. Prompts are computed in chunks."""
    width = NUM_BLOCKS // len(PROMPTS)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(len(PROMPTS))]
    texts, starts = [list(prompt) for prompt in PROMPTS], [0] * len(PROMPTS)
    while any(len(t) < len(p) + NUM_TOKENS for t, p in zip(texts, PROMPTS, strict=True)):
        rows = []
        for i, (text, start) in enumerate(zip(texts, starts, strict=True)):
            part = text[start : start + chunk]
            starts[i] += len(part)
            rows.append(Row(f"{i}", part, start, tables[i], _sampling(text, starts[i])))
        for text, token in zip(texts, runner.run(BatchPlan(rows)).tokens, strict=True):
            text += [] if token is None else [token]
    return [t[len(p) :][:NUM_TOKENS] for t, p in zip(texts, PROMPTS, strict=True)]


def _sampling(text, end):
    return GREEDY if end == len(text) else None


@cache
def answers_of_one(path):
    """Returns the answers of transformers itself."""
    return [generate(path, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("kind", "tp", "pp", "ep"),
    [
        ("llama", 2, 1, 1),
        ("llama", 1, 2, 1),
        ("qwen3", 2, 1, 1),
        ("qwen3_moe", 2, 1, 1),
        ("qwen3_moe", 2, 1, 2),
        ("gemma3", 2, 1, 1),
        ("gemma3", 1, 2, 1),
        ("gemma", 2, 1, 1),  # one KV head, which both ranks have
        ("phi3", 2, 1, 1),  # every rank computes the whole attention
    ],
)
def test_ranks_choose_the_greedy_tokens_of_one_rank(tmp_path_factory, processes, kind, tp, pp, ep):
    path = tiny_checkpoint(tmp_path_factory, kind)
    with processes.runner(path, tp=tp, pp=pp, ep=ep, num_blocks=NUM_BLOCKS, **FP32) as runner:
        assert answers(runner) == answers_of_one(path)


def test_ranks_hold_their_share_of_heads_and_layers(tmp_path_factory, processes):
    path = tiny_checkpoint(tmp_path_factory, "llama")
    with processes.runner(path, tp=2, pp=2, num_blocks=NUM_BLOCKS, **FP32) as runner:
        assert runner.layout.sections == (KVSection(1, 1, 8),)
        assert runner.whole_layout.sections == (KVSection(3, 2, 8),)
        assert runner.kernels.endswith("tp2 pp2 ep1")
        assert answers(runner) == answers_of_one(path)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_give_the_embeddings_of_one_rank(tmp_path_factory, processes, tp, pp):
    path = tmp_path_factory.mktemp("models") / "embedding"
    save_checkpoint(path, COMMON | KINDS["qwen3"])
    make_embedding(path)
    alone = TorchRunner(path, num_blocks=NUM_BLOCKS, **FP32)
    alone.open()
    expected = embedding(alone)
    alone.close()
    with processes.runner(path, tp=tp, pp=pp, num_blocks=NUM_BLOCKS, **FP32) as runner:
        assert runner.vocab_size == COMMON["vocab_size"]
        np.testing.assert_allclose(embedding(runner), expected, atol=1e-5)


def embedding(runner):
    row = Row("e", PROMPTS[0], 0, list(range(8)), GREEDY)
    return np.frombuffer(runner.run(BatchPlan([row])).rows[0].embedding, np.float32)


def test_no_port_of_the_ranks_is_open_to_other_machines(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    group = RankGroup(RankPlace(), tmp_path / "ranks")
    group.open()
    try:
        own = {os.readlink(link) for link in descriptors()}
        listening = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()]
        addresses = [line[1] for line in listening if f"socket:[{line[9]}]" in own]
        assert addresses
        assert all(address.startswith("0100007F:") for address in addresses), addresses
    finally:
        group.close()


def descriptors():
    """Returns the file descriptors of this process that are open."""
    return [link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]


def test_every_operation_of_a_stage_has_the_deadline_of_the_group(tmp_path):
    group = RankGroup(RankPlace(), tmp_path / "ranks", timeout_s=7.0)
    group.open()
    try:
        backends = [each._get_backend(torch.device("cpu")) for each in (group._stage, group._host)]
        assert [backend.options._timeout.total_seconds() for backend in backends] == [7.0, 7.0]
    finally:
        group.close()
