"""The chunks of a streamed answer, as OpenAI-compatible servers send them. Pure.

Fields that a server leaves out have defaults, since servers differ. Only what is not JSON, or has
fields of another type, fails.
"""

import msgspec

DONE = b"[DONE]"  # marks the end of a stream
NO_INDEX = -1


class ChunkDelta(msgspec.Struct):
    """What a chunk adds to an answer of the chat endpoint."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkLogprobs(msgspec.Struct):
    """Log-probabilities of the completions endpoint, one for each token of the chunk."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []


class ChunkChoice(msgspec.Struct):
    """What a chunk adds to one choice."""

    index: int = NO_INDEX
    text: str | None = None
    delta: ChunkDelta | None = None
    finish_reason: str | None = None
    logprobs: ChunkLogprobs | None = None

    @property
    def said(self) -> str:
        """The text, without reasoning."""
        return self.text or (self.delta.content if self.delta else None) or ""

    @property
    def has_content(self) -> bool:
        """True if there is text or reasoning."""
        delta = self.delta or ChunkDelta()
        return bool(self.said or delta.reasoning_content or delta.reasoning)


class ChunkPromptDetails(msgspec.Struct):
    """Prompt tokens by kind."""

    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    """Tokens as the server counted them; None if it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: ChunkPromptDetails | None = None


class AnswerChunk(msgspec.Struct):
    """One event of the stream. `baton_timeline` holds Baton's stages."""

    choices: list[ChunkChoice] | None = None
    usage: ChunkUsage | None = None
    error: object = None
    baton_timeline: dict[str, object] | None = None


decode_chunk = msgspec.json.Decoder(AnswerChunk).decode


def shown(data: bytes) -> str:
    """Returns the beginning of an event's data for an error message."""
    return data[:200].decode(errors="replace")
