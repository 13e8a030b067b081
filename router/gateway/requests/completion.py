"""POST /v1/completions: its body, the checks of its fields, and its answers."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.gateway.requests.body import (
    Body,
    Count,
    PromptScore,
    ShownAnswer,
    ShownChoice,
    TokenUsage,
    TopCount,
    check_in_vocabulary,
    unsupported,
)
from router.gateway.requests.field_table import COMPLETIONS
from router.inbox.api_errors import invalid_value
from router.machine.requests import Timeline
from router.text.tokenizer import TextModel

DEFAULT_COMPLETION_TOKENS = 16


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions."""

    endpoint = COMPLETIONS
    prompt_field = "prompt"

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    suffix: str | None = None
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: bool | TopCount | None = None

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
        """Returns the token ids of the prompt, which is text or token ids. Not for a batch."""
        (prompt,) = prompts_of(self.prompt)
        if not prompt:
            raise invalid_value("prompt must not be empty", "prompt")
        if isinstance(prompt, str):
            token_ids = text.encode_text(
                prompt,
                context_len,
                add_special_tokens=self.add_special_tokens is not False,
                may_exceed=may_exceed or self.truncate_prompt_tokens is not None,
            )
        else:
            check_in_vocabulary(prompt, text.vocab_size, "prompt")
            token_ids = prompt
        if self.suffix:
            token_ids = text.encode_between(token_ids, self.suffix, context_len)
        return (
            token_ids if self.truncate_prompt_tokens is None else self.cut(token_ids, context_len)
        )

    def echoed(self, token_ids: Sequence[int], text: TextModel) -> str | None:
        """Returns the prompt's text if each choice begins with the prompt."""
        if not self.echo:
            return None
        (prompt,) = prompts_of(self.prompt)
        if isinstance(prompt, str) and self.truncate_prompt_tokens is None:
            return prompt
        return text.decode_text(token_ids)

    @property
    def num_prompts(self) -> int:
        """Returns the number of prompts. Raises ApiError."""
        return len(prompts_of(self.prompt))

    def singles(self) -> "Sequence[Body]":
        """Returns one body for each prompt of a batch."""
        prompts = prompts_of(self.prompt)
        if len(prompts) == 1:
            return (self,)
        return [msgspec.structs.replace(self, prompt=prompt) for prompt in prompts]

    @property
    def wanted_tokens(self) -> int | None:
        """`max_tokens`, but at least one: workers always sample a token after a prompt."""
        return 1 if self.is_only_prompt else self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """OpenAI's default length of a completion."""
        return DEFAULT_COMPLETION_TOKENS

    @property
    def echoes_scores(self) -> bool:
        """True if `echo` and log-probabilities are both requested."""
        return bool(self.echo) and self.num_top_logprobs is not None

    @property
    def is_only_prompt(self) -> bool:
        """True if the client wants no answer: only the prompt and its log-probabilities."""
        return self.max_tokens == 0

    @property
    def scores_all_tokens(self) -> bool:
        """Always true, as with vLLM: evaluations rely on the last token that ended the answer."""
        return True

    @property
    def num_top_logprobs(self) -> int | None:
        """`logprobs`; some clients send `false` for none."""
        return None if self.logprobs is False else self.logprobs

    @property
    def num_scored_prompt(self) -> int | None:
        """The larger of `prompt_logprobs` and, with `echo`, `logprobs`."""
        wanted = (self.prompt_logprobs, self.num_top_logprobs if self.echoes_scores else None)
        return max((count for count in wanted if count is not None), default=None)

    @property
    def times_of_prompt(self) -> int:
        """The number of choices: each repeats them, as with vLLM."""
        return self.num_choices

    @property
    def num_candidates(self) -> int:
        """`best_of`, or `n` without `best_of`."""
        return self.best_of or self.num_choices


def prompts_of(
    prompt: str | list[str | int | list[int]] | None, field: str = "prompt"
) -> list[str | list[int]]:
    """Returns the prompts in a field, as texts or token ids. Raises ApiError if they are mixed."""
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    kinds = set(map(type, prompt))  # a fast check, as a prompt may have a million ids
    if len(kinds) > 1:
        message = f"{field} must hold only texts, only token ids, or only lists of token ids"
        raise invalid_value(message, field)
    if kinds <= {int}:
        return [cast("list[int]", prompt)]
    return cast("list[str | list[int]]", prompt)


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


class CompletionAnswer(ShownAnswer, kw_only=True):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage
    baton_timeline: Timeline | UnsetType | None = UNSET


class CompletionStreamChunk(ShownAnswer, kw_only=True):
    """An event in a stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    baton_timeline: Timeline | UnsetType | None = UNSET
