"""Reasoning between two marks, before the answer: DeepSeek-R1, Qwen3 and many others.

The start mark may already be in the prompt, since some chat templates end with it. Other templates
write an empty reasoning into the prompt if the client wants no reasoning. So the end of the prompt
is checked first, and then the beginning of the answer.

Sources: the chat templates of DeepSeek-R1 and Qwen3; vLLM, reasoning outputs.
"""

from dataclasses import dataclass

from router.text.forms.deltas import AnswerParser, Content, Delta, Reasoning, first_mark, merged

BEGIN, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """The marks of a model's reasoning. A model that `always_thinks` may omit the start mark."""

    name: str
    always_thinks: bool = False

    def is_thinking(self, prompt_end: str) -> bool | None:
        """True if an answer to this prompt begins with reasoning, False if it does not.

        Returns None if this depends on the first mark of the answer.
        """
        begin, end = prompt_end.rfind(BEGIN), prompt_end.rfind(END)
        if begin > end:
            return True
        if end >= 0 and not prompt_end[end + len(END) :].strip():
            return False
        return True if self.always_thinks else None


class ThinkingParser:
    """Separates reasoning from the answer. `inner` parses the answer."""

    def __init__(self, inner: AnswerParser, *, is_thinking: bool | None) -> None:
        self._inner = inner
        self._pending = ""
        self._may_begin = is_thinking is not False  # True if a start mark may still come
        self._is_thinking = is_thinking  # True in the reasoning; None: unknown so far
        self._is_blank = False  # True while only blanks follow the reasoning

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._inner.num_calls

    @property
    def is_reasoning(self) -> bool:
        """True while the next text is reasoning."""
        return self._is_thinking is True

    def feed(self, text: str) -> list[Delta]:
        """Adds text of the answer. Returns the deltas that are now certain."""
        if self._is_thinking is False:
            return self._answer(text)
        self._pending += text
        if self._may_begin and not self._find_begin():
            return []
        if not self.is_reasoning:
            rest, self._pending = self._pending, ""
            return self._answer(rest)
        shown, found, rest = first_mark(self._pending, (END,))
        self._pending = rest
        deltas: list[Delta] = [Reasoning(shown)]
        if found is not None:
            self._is_thinking, self._is_blank, self._pending = False, True, ""
            deltas += self._answer(rest)
        return merged(deltas)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns the remaining text. An incomplete mark is not shown."""
        rest, self._pending = self._pending, ""
        if self._is_thinking is True:
            return [] if is_cut else merged([Reasoning(rest)])
        deltas = [] if is_cut else self._inner.feed(rest)
        return merged([*deltas, *self._inner.finish(is_cut=is_cut)])

    def _find_begin(self) -> bool:
        """Checks if the answer begins with the start mark. Returns False if more text is needed."""
        begin = self._pending.lstrip()
        if BEGIN.startswith(begin) and begin != BEGIN:
            return False
        self._may_begin = False
        if begin.startswith(BEGIN):
            self._is_thinking = True
            self._pending = begin[len(BEGIN) :]
        elif self._is_thinking is None:
            self._is_thinking = False
        return True

    def _answer(self, text: str) -> list[Delta]:
        if self._is_blank:
            text = text.lstrip("\n")
            self._is_blank = not text
        return self._inner.feed(text) if text else []


class PlainParser:
    """Returns all text as it is, for answers that call no tools."""

    num_calls = 0
    is_reasoning = False

    def feed(self, text: str) -> list[Delta]:
        """Returns the text as one delta."""
        return [Content(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns nothing, as all text was returned before."""
        return []
