"""The estimated work of steps."""

from engine.messages import Sampling
from engine.worker.batch import Row
from engine.worker.steps import ModelSizes, StepEffort

SIZES = ModelSizes(
    layer_weights=100, head_weights=10, attention_size=3, weights_bytes=1000, kv_token_bytes=7
)


def row(start: int, num_tokens: int, *, chooses: bool) -> Row:
    return Row("a", [1] * num_tokens, start, [], Sampling() if chooses else None)


def test_a_prompt_in_two_chunks_is_as_much_attention_as_in_one():
    whole, chunks = StepEffort(SIZES), StepEffort(SIZES)
    whole.record([row(0, 8, chooses=True)], 1.0)
    chunks.record([row(0, 5, chooses=False)], 0.5)
    chunks.record([row(5, 3, chooses=True)], 0.5)
    expected = 2 * (8 * 100 + 10) + 4 * 3 * (8 * 9 / 2)
    assert whole.counters()["flops"] == chunks.counters()["flops"] == expected
    assert whole.counters()["read_bytes"] == 1000 + 7 * 8
    # weights are read once per step
    assert chunks.counters()["read_bytes"] == 2 * 1000 + 7 * (5 + 8)
    assert chunks.counters()["busy_seconds"] == 1.0
    assert chunks.counters()["computed_prompt_tokens"] == 8


def test_decode_rows_read_the_weights_once_together():
    effort = StepEffort(SIZES)
    effort.record([row(9, 1, chooses=True), row(19, 1, chooses=True)], 0.1)
    assert effort.counters() == {
        "busy_seconds": 0.1,
        "computed_prompt_tokens": 0,
        "flops": 2 * 2 * 110 + 4 * 3 * (10 + 20),
        "read_bytes": 1000 + 7 * 30,
    }


def test_without_sizes_nothing_is_estimated():
    effort = StepEffort(None)
    effort.record([row(0, 4, chooses=True)], 0.1)
    assert effort.counters() == {"busy_seconds": 0.1, "computed_prompt_tokens": 4}
