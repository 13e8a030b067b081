"""How the two endpoints write answers: whole choices, and the parts of a stream's chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.gateway.answers.choice import CallDelta
from router.text.forms.deltas import CallArguments, CallBegun
from router.text.logprobs import (
    BytesOf,
    ChatLogprobs,
    CompletionLogprobs,
    LogprobsWriter,
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of one endpoint's answers, with the constant parts of a chunk.

    The choice of a chunk is `[{"index":` index `text_start` text `text_end` logprobs and so on.
    """

    id_prefix: str
    object_name: str
    chunk_name: str
    is_chat: bool
    text_start: bytes
    text_end: bytes
    no_text: bytes  # in place of all three, in a chunk that only ends the choice

    def whole_choice(
        self,
        text: str,
        calls: Sequence[CallDelta],
        finish_reason: str,
        logprobs: Mapping[str, Any] | None,
        reasoning: str = "",
    ) -> dict[str, Any]:
        """A choice of an answer that is not streamed, without its index."""
        choice: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason}
        if not self.is_chat:
            return choice | {"text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": _whole_calls(calls)}
        if reasoning:
            message |= reasoning_fields(reasoning)
        return choice | {"message": message}

    def logprobs_writer(
        self, bytes_of: BytesOf, num_top: int, *, ids_for_names: bool
    ) -> LogprobsWriter:
        """Returns the writer of one choice's log-probabilities."""
        writer = ChatLogprobs if self.is_chat else CompletionLogprobs
        return writer(bytes_of, num_top, ids_for_names=ids_for_names)


def _whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    calls = [delta for delta in deltas if isinstance(delta, CallBegun)]
    pieces: list[list[str]] = [[] for _ in calls]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            pieces[delta.index].append(delta.text)
    arguments = map("".join, pieces)
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
        for call, text in zip(calls, arguments, strict=True)
    ]


def reasoning_fields(text: str) -> dict[str, str]:
    """Reasoning under both names that clients read: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def call_delta(delta: CallDelta) -> dict[str, Any]:
    """A tool call's part of a chunk. The name comes first, without arguments."""
    if isinstance(delta, CallArguments):
        return {"index": delta.index, "function": {"arguments": delta.text}}
    function = {"name": delta.name, "arguments": ""}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


EMBEDDING = Dialect(
    id_prefix="embd-",
    object_name="list",
    chunk_name="",  # it has no streams
    is_chat=False,
    text_start=b"",
    text_end=b"",
    no_text=b"",
)
CHAT = Dialect(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    chunk_name="chat.completion.chunk",
    is_chat=True,
    text_start=b',"delta":{"content":',
    text_end=b"}",
    no_text=b',"delta":{}',
)
COMPLETION = Dialect(
    id_prefix="cmpl-",
    object_name="text_completion",
    chunk_name="text_completion",
    is_chat=False,
    text_start=b',"text":',
    text_end=b"",
    no_text=b',"text":""',
)
