"""One streamed answer as the client received it: its pieces, and how the stream ended.

Pure: bytes and their times go in, a `ReceivedStream` comes out. `bench.client.answers` measures
latency; this module keeps the text, even text that should not have been sent. `bench.chaos.checker`
judges it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bench.client.stream import DONE, ChunkChoice, ChunkLogprobs, SseParser, decode_chunk, shown


@dataclass(frozen=True, slots=True)
class ReceivedPiece:
    """A part of one choice from one event; `logprobs` describe its tokens, if requested."""

    at_s: float
    choice: int
    text: str = ""
    finish: str | None = None
    logprobs: tuple[tuple[str, float | None], ...] = ()


@dataclass(frozen=True, slots=True)
class ReceivedUsage:
    """Tokens as the server counted them, without cached ones, which depend on earlier requests."""

    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class ReceivedStream:
    """An answer, or the part that arrived; `failure` says why the rest is missing."""

    sent_s: float
    ended_s: float
    pieces: tuple[ReceivedPiece, ...] = ()
    usages: tuple[ReceivedUsage, ...] = ()
    num_done: int = 0  # number of end marks
    num_after_done: int = 0  # number of events after the end mark
    num_attempts: int = 1  # number of placements by the router
    failure: str | None = None
    is_broken: bool = False  # the connection ended before the answer did


class StreamReader:
    """Reads one answer: call `feed` for each piece of the body, then one other method once."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._parser = SseParser()
        self._pieces: list[ReceivedPiece] = []
        self._usages: list[ReceivedUsage] = []
        self._num_done = 0
        self._num_after_done = 0
        self._num_attempts = 1
        self._failure: str | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Reads the bytes that arrived at `now_s`."""
        for event in self._parser.feed(data):
            self._take(event.data, now_s)

    def finish(self, now_s: float) -> ReceivedStream:
        """Returns the stream after the connection ended normally."""
        return self._stream(now_s, self._failure, is_broken=False)

    def refuse(self, why: str, now_s: float) -> ReceivedStream:
        """Returns the stream after the server refused or the request timed out."""
        return self._stream(now_s, self._failure or why, is_broken=False)

    def fail(self, why: str, now_s: float) -> ReceivedStream:
        """Returns the stream after the connection broke."""
        return self._stream(now_s, self._failure or why, is_broken=True)

    def _stream(self, now_s: float, failure: str | None, *, is_broken: bool) -> ReceivedStream:
        return ReceivedStream(
            sent_s=self._sent_s,
            ended_s=now_s,
            pieces=tuple(self._pieces),
            usages=tuple(self._usages),
            num_done=self._num_done,
            num_after_done=self._num_after_done,
            num_attempts=self._num_attempts,
            failure=failure,
            is_broken=is_broken,
        )

    def _take(self, data: bytes, now_s: float) -> None:
        if self._num_done and data != DONE:
            self._num_after_done += 1
        if data == DONE:
            self._num_done += 1
            return
        try:
            chunk = decode_chunk(data)
        except msgspec.MsgspecError as error:
            self._failure = self._failure or f"{error}: {shown(data)}"
            return
        if chunk.error is not None:
            self._failure = self._failure or shown(data)
        self._pieces += _pieces(chunk.choices or (), now_s)
        if chunk.usage is not None:
            usage = ReceivedUsage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            self._usages.append(usage)
        if chunk.baton_timeline is not None:
            attempts = chunk.baton_timeline.get("attempts")
            self._num_attempts = attempts if isinstance(attempts, int) else 1


def _pieces(choices: Sequence[ChunkChoice], now_s: float) -> list[ReceivedPiece]:
    """Returns an event's pieces, without chunks that have no content, such as a chat's first
    chunk with the role.
    """
    pieces = []
    for choice in choices:
        scored = choice.logprobs or ChunkLogprobs()
        logprobs = tuple(zip(scored.tokens, scored.token_logprobs, strict=True))
        if choice.said or logprobs or choice.finish_reason is not None:
            pieces.append(
                ReceivedPiece(now_s, choice.index, choice.said, choice.finish_reason, logprobs)
            )
    return pieces
