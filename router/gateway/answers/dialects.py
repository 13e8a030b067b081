"""How the two endpoints write answers: whole choices, and the parts of a stream's chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from router.gateway.answers.choice import CallDelta
from router.gateway.requests.chat import (
    AnswerMessage,
    CalledFunction,
    CallPart,
    ChatChoice,
    DeltaFunction,
    ShownCall,
)
from router.gateway.requests.completion import CompletionChoice
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
    ) -> ChatChoice | CompletionChoice:
        """A choice of an answer that is not streamed."""
        scores, finish = cast("Any", logprobs), cast("Any", finish_reason)
        if not self.is_chat:
            return CompletionChoice(index=0, finish_reason=finish, text=text, logprobs=scores)
        message = AnswerMessage(content=text)
        if calls:
            message.content, message.tool_calls = text or None, _whole_calls(calls)
        if reasoning:
            message.reasoning_content = message.reasoning = reasoning
        return ChatChoice(index=0, finish_reason=finish, message=message, logprobs=scores)

    def logprobs_writer(
        self, bytes_of: BytesOf, num_top: int, *, ids_for_names: bool
    ) -> LogprobsWriter:
        """Returns the writer of one choice's log-probabilities."""
        writer = ChatLogprobs if self.is_chat else CompletionLogprobs
        return writer(bytes_of, num_top, ids_for_names=ids_for_names)


def _whole_calls(deltas: Sequence[CallDelta]) -> list[ShownCall]:
    calls = [delta for delta in deltas if isinstance(delta, CallBegun)]
    pieces: list[list[str]] = [[] for _ in calls]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            pieces[delta.index].append(delta.text)
    arguments = map("".join, pieces)
    return [
        ShownCall(id=call.id, function=CalledFunction(call.name, text))
        for call, text in zip(calls, arguments, strict=True)
    ]


def reasoning_fields(text: str) -> dict[str, str]:
    """Reasoning under both names that clients read: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def call_delta(delta: CallDelta) -> CallPart:
    """A tool call's part of a chunk. The name comes first, without arguments."""
    if isinstance(delta, CallArguments):
        return CallPart(delta.index, DeltaFunction(delta.text))
    return CallPart(delta.index, DeltaFunction("", delta.name), delta.id, "function")


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
