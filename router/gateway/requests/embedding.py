"""POST /v1/embeddings: like a completion, but the answer has one vector per prompt.

Sources: OpenAI API reference; vLLM, vllm/entrypoints/pooling/embed/protocol.py.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.embedding import Embedding
from router.gateway.requests.body import Count, ShownAnswer, TokenUsage
from router.gateway.requests.chat import MAX_VARIABLES, ChatBody, ChatMessage
from router.gateway.requests.completion import PromptBody
from router.gateway.requests.field_table import EMBEDDINGS
from router.inbox.api_errors import ApiError, invalid_value
from router.machine.requests import Timeline
from router.text.embeddings import EmbeddingForm
from router.text.tokenizer import TextModel

MAX_INPUTS = 2048  # maximum inputs per request, as in OpenAI's API
_DTYPES = {None: "f4", "float32": "f4", "float16": "f2"}


class EmbeddingBody(PromptBody, kw_only=True):
    """POST /v1/embeddings."""

    endpoint = EMBEDDINGS
    prompt_field = "input"

    input: str | list[str | int | list[int]] | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=MAX_VARIABLES)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    dimensions: Count | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        """Computes the attributes that checks and answers read."""
        super().__post_init__()
        self.wanted_tokens = 1  # workers always sample a token
        self.is_only_prompt = True
        self.max_inputs = MAX_INPUTS

    def encode(
        self,
        text: TextModel,
        context_len: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        may_exceed: bool = False,
    ) -> list[int]:
        """Returns the token ids of the messages, or of the only input (text or token ids)."""
        if self.messages is not None:
            return self._chat().encode(text, context_len, may_exceed=may_exceed)
        return super().encode(text, context_len, may_exceed=may_exceed)

    def embedding_form(self, text: TextModel) -> EmbeddingForm | None:
        """Returns the requested form of embeddings.

        Raises ApiError if the model does not support the form.
        """
        embedding = text.embedding
        if embedding is None:
            message = "this model gives no embeddings: it was trained to go on with text"
            raise ApiError(message, param="model", code="model_not_supported", status=404)
        size = embedding.size if self.dimensions is None else self.dimensions
        if not embedding.takes(size):
            raise invalid_value(_why_not(size, embedding), "dimensions")
        asked = (self.use_activation, self.normalize, embedding.is_normalized)
        return EmbeddingForm(
            size=size,
            is_normalized=next(each for each in asked if each is not None),
            is_base64=self.encoding_format == "base64",
            dtype=("<" if self.endianness != "big" else ">") + _DTYPES[self.embed_dtype],
        )

    def _chat(self) -> ChatBody:
        """Returns the body of a chat with these messages, whose prompt is embedded."""
        if self.input is not None:
            raise invalid_value("input and messages cannot be combined", "input")
        return ChatBody(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )


def _why_not(size: int, embedding: Embedding) -> str:
    """Returns the reason why a model has no embeddings of this size."""
    if not embedding.is_matryoshka:
        return (
            f"dimensions is {size}; this model's config.json does not say that a part of its "
            f"{embedding.size} numbers is an embedding (is_matryoshka)"
        )
    sizes = ", ".join(map(str, embedding.matryoshka_sizes)) or f"1 to {embedding.size}"
    return f"dimensions is {size}; this model allows {sizes}"


class ShownEmbedding(msgspec.Struct, kw_only=True):
    """The embedding of one input: numbers, or base64 of fp32 numbers."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(ShownAnswer, kw_only=True):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[ShownEmbedding]
    usage: TokenUsage
    baton_timeline: Timeline | UnsetType | None = UNSET
