"""Chooses the forms of a model: named by the operator, or found by chat template and tokens."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from engine.errors import ConfigError
from router.text.forms.calling import CallForm, Calling, TokenOf
from router.text.forms.deltas import AnswerParser
from router.text.forms.harmony import Harmony, HarmonyParser
from router.text.forms.json_calls import (
    DeepSeek,
    DeepSeekFenced,
    Hermes,
    Llama,
    Mistral,
    MistralArgs,
)
from router.text.forms.pythonic import Pythonic
from router.text.forms.qwen_coder import QwenCoder
from router.text.forms.thinking import BEGIN, END, PlainParser, ThinkingForm, ThinkingParser

AUTO, NONE = "auto", "none"
FormT = TypeVar("FormT")
CALL_FORMS: dict[str, CallForm] = {
    form.name: form
    for form in (
        Hermes(),
        Llama(),
        Mistral(),
        MistralArgs(),
        QwenCoder(),
        DeepSeekFenced(),
        DeepSeek(),
        Pythonic(),
        Harmony(),
    )
}
HARMONY, HERMES = CALL_FORMS["openai"], CALL_FORMS["hermes"]
THINKING_FORMS = {
    form.name: form
    for form in (ThinkingForm("deepseek_r1", always_thinks=True), ThinkingForm("qwen3"))
}
OTHER_NAMES = {"deepseek_v3.1": "deepseek_v31", "llama3": "llama3_json", "qwen25": "hermes"}
OPENAI_GPT_OSS = "openai_gptoss"  # vLLM's name of gpt-oss's reasoning parser


@dataclass
class AnswerForms:
    """The forms of one model. gpt-oss uses one form of messages for both reasoning and calls."""

    calls: CallForm
    thinking: ThinkingForm | None = None

    def __post_init__(self) -> None:
        # True if all text is between marks, so that every answer must be parsed.
        self.is_harmony = self.calls is HARMONY


class AnswerParsing(NamedTuple):
    """The settings for parsing the answers to one request."""

    forms: AnswerForms
    calling: Calling | None  # None: no tool may be called
    is_thinking: bool | None = False
    splits_reasoning: bool = True  # False: reasoning is shown as a part of the text

    @property
    def marks(self) -> tuple[str, ...]:
        """The added tokens that the parser needs in the text."""
        marks: tuple[str, ...] = ()
        if self.calling is not None or self.forms.is_harmony:
            marks = tuple(self.forms.calls.marks)
        if self.forms.thinking is not None and self.splits_reasoning:
            marks = (*marks, BEGIN, END)
        return marks

    def parser(self, rng: random.Random) -> AnswerParser:
        """Returns a new parser, for one answer."""
        if self.forms.is_harmony:
            return HarmonyParser(rng)
        inner: AnswerParser = PlainParser()
        if self.calling is not None:
            inner = self.forms.calls.parser(self.calling, rng)
        if self.forms.thinking is None or not self.splits_reasoning:
            return inner
        return ThinkingParser(inner, is_thinking=self.is_thinking)


def forms_of(
    template: str | None, token_of: TokenOf, *, calls: str = AUTO, thinking: str = AUTO
) -> AnswerForms:
    """Returns the forms of a model with this chat template. Raises ConfigError for unknown names.

    If no form is recognised, Hermes is used; the grammar makes any model write Hermes.
    """
    source = template or ""
    form = HERMES
    if calls == AUTO:
        form = _found(source, token_of)
    elif calls != NONE:
        form = _named(OTHER_NAMES.get(calls, calls), CALL_FORMS, "gateway.tool_call_parser")
    thinks = None
    if thinking == AUTO:
        if form is not HARMONY and (BEGIN in source or END in source):
            thinks = THINKING_FORMS["qwen3"]
    elif thinking not in (NONE, OPENAI_GPT_OSS):
        name = thinking.replace("-", "_")
        thinks = _named(name, THINKING_FORMS, "gateway.reasoning_parser")
    return AnswerForms(form, thinks)


def _named(name: str, forms: Mapping[str, FormT], setting: str) -> FormT:
    if name not in forms:
        known = ", ".join([AUTO, NONE, *forms])
        raise ConfigError(f"{setting} is {name!r}; known are {known}")
    return forms[name]


def _found(source: str, token_of: TokenOf) -> CallForm:
    """Returns the call form that occurs in a chat template."""
    if "<|channel|>" in source and "<|message|>" in source:
        return HARMONY
    if "<function=" in source and "<parameter=" in source:
        return CALL_FORMS["qwen3_coder"]
    if "<tool_call>" in source:
        return CALL_FORMS["hermes"]
    if "<｜tool▁calls▁begin｜>" in source:
        return CALL_FORMS["deepseek_v3" if "```json" in source else "deepseek_v31"]
    if "[TOOL_CALLS]" in source or token_of("[TOOL_CALLS]") is not None:
        return CALL_FORMS["mistral_args" if token_of("[ARGS]") is not None else "mistral"]
    if '"parameters": ' in source and ("<|python_tag|>" in source or "ipython" in source):
        return CALL_FORMS["llama3_json"]
    if "[func_name1(" in source:
        return CALL_FORMS["pythonic"]
    return CALL_FORMS["hermes"]
