"""Answers of a server that were never sent."""

from collections.abc import Iterable, Mapping

from bench.client.answers import Answer


def answer_at(
    times_s: Iterable[float],
    *,
    sent_s: float = 0.0,
    num_tokens: int | None = None,
    num_prompt: int | None = 8,
    num_cached: int | None = 0,
    timeline_s: Mapping[str, float] | None = None,
) -> Answer:
    """An answer with a content chunk at each time, and by default a token in each chunk."""
    chunk_times_s = tuple(times_s)
    num_output = len(chunk_times_s) if num_tokens is None else num_tokens
    return Answer(sent_s, chunk_times_s, num_output, num_prompt, num_cached, timeline_s or {})
