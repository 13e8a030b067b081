"""Builds the client's record of an answer without a server."""

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
    """Returns an answer with one content chunk at each time. By default a chunk has one token."""
    chunk_times_s = tuple(times_s)
    num_output = len(chunk_times_s) if num_tokens is None else num_tokens
    return Answer(sent_s, chunk_times_s, num_output, num_prompt, num_cached, timeline_s or {})
