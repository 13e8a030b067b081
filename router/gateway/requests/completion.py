"""POST /v1/completions: its body, the checks of its fields, and its answers."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.gateway.requests.body import (
    Body,
    CompleteAnswer,
    Count,
    PromptScore,
    ShownChoice,
    StreamChunk,
    TopCount,
    check_in_vocabulary,
    unsupported,
)
from router.gateway.requests.field_table import COMPLETIONS
from router.inbox.api_errors import invalid_value
from router.text.tokenizer import TextModel

DEFAULT_COMPLETION_TOKENS = 16


class PromptBody(Body, kw_only=True):
    """A body whose field `prompt_field` has texts or token ids."""

    def check(self) -> None:
        """Checks fields that depend on each other, and counts the prompts. Raises ApiError."""
        super().check()
        self.num_prompts = len(self._prompts())

    def encode(
        self,
        text: TextModel,
        context_len: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        may_exceed: bool = False,
    ) -> list[int]:
        """Returns the token ids of the only prompt, which is a text or token ids."""
        field = self.prompt_field
        (prompt,) = self._prompts()
        if not prompt:
            raise invalid_value(f"{field} must not be empty", field)
        if isinstance(prompt, str):
            prompt = text.encode_text(
                prompt,
                context_len,
                field,
                add_special_tokens=self.add_special_tokens is not False,
                may_exceed=may_exceed or self.truncate_prompt_tokens is not None,
            )
        else:
            check_in_vocabulary(prompt, text.vocab_size, field)
        return self.cut(prompt, context_len)

    def singles(self) -> "Sequence[Body]":
        """Returns one body for each prompt."""
        prompts = self._prompts() if self.num_prompts > 1 else ()
        changed: Any = [{self.prompt_field: prompt} for prompt in prompts]
        return [msgspec.structs.replace(self, **each) for each in changed] or (self,)

    def _prompts(self) -> list[str | list[int]]:
        """Returns the prompts, as texts or token ids. Raises ApiError if kinds are mixed."""
        field = self.prompt_field
        prompt = getattr(self, field)
        if prompt is None or isinstance(prompt, str):
            return [prompt or ""]
        kinds = set(map(type, prompt))  # fast: a prompt may have a million ids
        if len(kinds) > 1:
            message = f"{field} must hold only texts, only token ids, or only lists of token ids"
            raise invalid_value(message, field)
        return [prompt] if kinds <= {int} else prompt


class CompletionBody(PromptBody, kw_only=True):
    """POST /v1/completions."""

    endpoint = COMPLETIONS
    prompt_field = "prompt"

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    suffix: str | None = None
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: bool | TopCount | None = None

    def __post_init__(self) -> None:
        """Computes the attributes that checks and answers read."""
        super().__post_init__()
        self.num_candidates = self.best_of or self.num_choices
        self.is_only_prompt = self.max_tokens == 0
        # The minimum is one token, because workers always sample a token after a prompt.
        self.wanted_tokens = 1 if self.is_only_prompt else self.max_tokens
        self.default_tokens = DEFAULT_COMPLETION_TOKENS
        self.num_top_logprobs = None if self.logprobs is False else self.logprobs
        self.scores_all_tokens = True  # as in vLLM: evaluations use the last token
        self.times_of_prompt = self.num_choices  # as in vLLM
        self.echoes_prompt = bool(self.echo)
        if self.echoes_prompt and self.num_top_logprobs is not None:
            self.echoes_scores = True
            self.num_scored_prompt = max(self.prompt_logprobs or 0, self.num_top_logprobs)

    def check(self) -> None:
        """Checks fields that depend on each other. Raises ApiError."""
        super().check()
        if self.suffix and self.truncate_prompt_tokens is not None:
            raise unsupported("truncate_prompt_tokens", "with suffix")
        if self.suffix and self.echo:
            raise unsupported("echo", "with suffix")
        if self.logprobs is True:
            raise invalid_value("logprobs: expected an integer", "logprobs")
        if self.is_only_prompt and not self.echo:
            raise invalid_value("max_tokens: 0 is allowed only with echo", "max_tokens")
        if self.num_candidates < self.num_choices:
            raise invalid_value(f"best_of is {self.best_of}, less than n", "best_of")
        if self.stream and self.num_candidates > self.num_choices:
            raise unsupported("best_of", "in a stream")

    def encode(
        self,
        text: TextModel,
        context_len: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        may_exceed: bool = False,
    ) -> list[int]:
        """Returns the token ids of the prompt.

        If there is a `suffix`, the prompt has the model's form for filling in the middle.
        """
        token_ids = super().encode(text, context_len, may_exceed=may_exceed)
        if self.suffix:
            return text.encode_between(token_ids, self.suffix, context_len)
        return token_ids

    def echoed(self, token_ids: Sequence[int], text: TextModel) -> str | None:
        """Returns the text of the prompt, with which the answer begins."""
        (prompt,) = self._prompts()
        if isinstance(prompt, str) and self.truncate_prompt_tokens is None:
            return prompt
        return text.decode_text(token_ids)


class CompletionScores(msgspec.Struct):
    """Log-probabilities of a completion, in parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ShownChoice, kw_only=True):
    """One of the answers to a prompt, whole or a part of it."""

    text: str
    logprobs: CompletionScores | None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptScore | UnsetType | None = UNSET


class CompletionAnswer(CompleteAnswer, kw_only=True):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionStreamChunk(StreamChunk, kw_only=True):
    """An event in a stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
