"""One request to an OpenAI-compatible server: encodes its body, reads its streamed answer.

Pure: the shell passes in bytes with their arrival times, and the result is an `Answer` or a
`Failure`.

Times are seconds of one monotonic clock at the client. Each is measured from the moment when the
HTTP client gets the request, so it includes the time to open a connection:

| TTFT | first content chunk - sent                                              |
| ITL  | each gap between consecutive content chunks                             |
| TPOT | (last - first content chunk) / (n_out - 1); not defined for n_out = 1   |
| E2E  | last content chunk - sent = TTFT + (n_out - 1) · TPOT                   |

n_out is `completion_tokens` of the server's usage; without usage, the number of content chunks. A
content chunk carries text or reasoning; role, finish and usage chunks carry none. A chunk can hold
several tokens (speculation, batched frames) or none (half a character). Gaps are therefore times
between chunks, not between tokens. `tokens/per_chunk` in the report is the mean number of tokens
per chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import msgspec

from bench.client.stream import (
    DONE,
    AnswerChunk,
    ChunkPromptDetails,
    ChunkUsage,
    SseEvent,
    SseParser,
    decode_chunk,
    shown,
)
from bench.common.prompts import Messages, Prompt


class Endpoint(StrEnum):
    """One of the two OpenAI endpoints: chat or text completions."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Returns the path of the endpoint, to append to the server's URL."""
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer: its times, token counts and text."""

    sent_s: float
    chunk_times_s: tuple[float, ...]  # arrival of each content chunk; never empty
    num_output_tokens: int
    num_prompt_tokens: int | None  # None: the server sent no usage
    num_cached_tokens: int | None
    # seconds of Baton's stages and of KV transfers; empty from other servers
    timeline_s: Mapping[str, float]
    said: str = ""  # the text without reasoning, if the reader keeps texts

    @property
    def ttft_s(self) -> float:
        """Returns the seconds from sending to the first content chunk."""
        return self.chunk_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Returns the seconds from sending to the last content chunk."""
        return self.chunk_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Returns the mean seconds per token after the first; None if the answer has one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Returns the seconds between consecutive content chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]


@dataclass(frozen=True, slots=True)
class Failure:
    """A request without a complete answer.

    Kinds: `http_<status>`, `timeout`, `connection`, `truncated` (the stream ended early),
    `stream_error` (the stream contains an error or an invalid chunk), `empty` (complete, without
    content).
    """

    kind: str
    detail: str


def request_body(
    endpoint: Endpoint,
    prompt: Prompt | Messages,
    *,
    model: str,
    output_len: int,
    temperature: float,
) -> bytes:
    """Returns the JSON body of a streamed request that asks for exactly `output_len` tokens.

    For the chat endpoint, `prompt` is the text of one message, or a list of messages.
    """
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    asked = {"messages": messages} if endpoint is Endpoint.CHAT else {"prompt": prompt}
    return msgspec.json.encode(
        {
            "model": model,
            **asked,
            "max_tokens": output_len,
            "ignore_eos": True,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


class AnswerReader:
    """Reads one streamed answer. Call `feed` for every piece of the body, then `finish` once."""

    def __init__(self, sent_s: float, *, keeps_text: bool = False) -> None:
        self._sent_s = sent_s
        self._said: list[str] | None = [] if keeps_text else None
        self._parser = SseParser()
        self._chunk_times_s: list[float] = []
        self._usage = ChunkUsage()
        self._timeline_s: dict[str, float] = {}
        self._complete = False
        self._failure: Failure | None = None

    def feed(self, piece: bytes, now_s: float) -> None:
        """Parses bytes that arrived at `now_s`."""
        for event in self._parser.feed(piece):
            self._add(event, now_s)

    def finish(self) -> Answer | Failure:
        """Returns the answer or the failure, after the stream has ended."""
        # An event that the end of the stream cut short may be incomplete, unless it is the end
        # mark.
        if any(event.data == DONE for event in self._parser.finish()):
            self._complete = True
        if self._failure is not None:
            return self._failure
        if not self._complete:
            return Failure("truncated", f"ended after {len(self._chunk_times_s)} content chunks")
        if not self._chunk_times_s:
            return Failure("empty", "the answer has no content")
        return self._answer()

    def _add(self, event: SseEvent, now_s: float) -> None:
        if event.data == DONE:
            self._complete = True
            return
        try:
            chunk = decode_chunk(event.data)
        except msgspec.MsgspecError as error:
            self._fail(f"{error}: {shown(event.data)}")
            return
        if chunk.error is not None or event.kind == b"error":
            self._fail(shown(event.data))
            return
        self._add_chunk(chunk, now_s)

    def _add_chunk(self, chunk: AnswerChunk, now_s: float) -> None:
        choices = chunk.choices or ()
        if any(choice.has_content for choice in choices):
            self._chunk_times_s.append(now_s)
            if self._said is not None:
                self._said += [choice.said for choice in choices]
        if any(choice.finish_reason for choice in choices):
            # a finish reason completes the answer, because some servers never send [DONE]
            self._complete = True
        self._usage = chunk.usage or self._usage
        self._timeline_s.update(_stages(chunk.baton_timeline or {}))

    def _fail(self, detail: str) -> None:
        self._failure = self._failure or Failure("stream_error", detail)

    def _answer(self) -> Answer:
        details = self._usage.prompt_tokens_details or ChunkPromptDetails()
        return Answer(
            sent_s=self._sent_s,
            chunk_times_s=tuple(self._chunk_times_s),
            num_output_tokens=self._usage.completion_tokens or len(self._chunk_times_s),
            num_prompt_tokens=self._usage.prompt_tokens,
            num_cached_tokens=details.cached_tokens,
            timeline_s=self._timeline_s,
            said="".join(self._said or ()),
        )


def _stages(timeline: Mapping[str, object]) -> dict[str, float]:
    """Returns the seconds of Baton's stages and of KV transfers. Stages that are null are left
    out.
    """
    return {
        name.removesuffix("_s"): value
        for name, value in timeline.items()
        if isinstance(value, float)
    }
