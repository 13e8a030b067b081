"""`bench.gpu --serve`: the comparison of answers, and a complete run on a CPU."""

import io
from random import Random

import pytest

from bench.common.report import from_json
from bench.gpu import __main__ as gpu
from bench.gpu.serve import (
    QUICK,
    TIE,
    Question,
    StreamedReply,
    TokenJudge,
    difference,
    questions_of,
)
from bench.gpu.session import GpuSession
from engine.clock import MonotonicClock

pytestmark = pytest.mark.torch

TOPS = ({"a": -0.1, "b": -3.0}, {"b": -0.7, "c": -0.8}, {"d": 0.0, "e": -9.0})
REFERENCE = StreamedReply(("a", "b", "d"), TOPS)


def answer(*tokens):
    return StreamedReply(tokens, TOPS[: len(tokens)])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("a", "b", "d"), None),
        # After the first different token, the other tokens belong to a different answer.
        (("a", "c", "x"), (1, pytest.approx(0.1))),
        (("b", "b", "d"), (0, pytest.approx(2.9))),
        (("a", "x", "d"), (1, float("inf"))),
        (("a", "b"), (2, float("inf"))),
        (("a", "b", "d", "e"), (3, float("inf"))),
    ],
)
def test_the_first_other_token_decides(tokens, expected):
    assert difference(REFERENCE, answer(*tokens)) == expected


@pytest.mark.parametrize(
    ("tie", "tokens", "seed", "counts", "fails"),
    [
        (0.0, ("a", "b", "d"), None, (1, 0, 0), False),
        (0.0, ("a", "c", "d"), None, (0, 0, 0), True),
        (TIE, ("a", "c", "d"), None, (0, 1, 0), False),
        (TIE, ("b", "b", "d"), None, (0, 0, 0), True),
        (TIE, ("b", "b", "d"), 7, (0, 0, 1), False),  # noise can make unlikely tokens nearly best
        (0.0, ("b", "b", "d"), 7, (0, 0, 0), True),
    ],
)
def test_only_near_tokens_may_be_exchanged_and_only_on_a_gpu(tie, tokens, seed, counts, fails):
    session = GpuSession(MonotonicClock(), 100.0, io.StringIO())
    judge = TokenJudge(session, tie)
    judge.judge("storm", Question((1, 2), seed), REFERENCE, answer(*tokens))
    assert (judge.num_equal, judge.num_tied, judge.num_resampled) == counts
    assert bool(session.failures) is fails


def test_prompts_share_prefixes_or_not():
    questions = questions_of(QUICK, 500, Random(0))
    assert len(questions) == QUICK.num_prompts
    assert questions == questions_of(QUICK, 500, Random(0))
    begins = [question.ids[:3] for question in questions]
    assert QUICK.num_prompts // 2 < len(set(begins)) < QUICK.num_prompts
    assert any(q.seed is None for q in questions)
    assert any(q.seed is not None for q in questions)


@pytest.mark.long
def test_the_whole_server_is_compared_on_a_cpu(tmp_path, capsys):
    path, folder = tmp_path / "serve.json", tmp_path / "checkpoint"
    words = ["--serve", str(folder), "--device", "cpu", "--shape", "tiny", "--quick"]
    assert gpu.main([*words, "--json", str(path)]) == 0
    report = from_json(path.read_bytes())
    assert (report.bench, report.config["failures"], report.config["skipped"]) == (
        "gpu_serve",
        "",
        "",
    )
    assert report.value("serve/4/tokens") > 0
    said = capsys.readouterr().out
    assert "one by one: 10 answers equal" in said
    assert "worker-1: device cpu" in said
