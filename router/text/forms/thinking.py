"""Reasoning between two marks, before the answer: DeepSeek-R1, Qwen3 and many others.

The start mark may already be in the prompt, since some chat templates end with it. Other templates
write an empty reasoning into the prompt if no reasoning is wanted. So the end of the prompt decides
first, and then the beginning of the answer.

Sources: the chat templates of DeepSeek-R1 and Qwen3; vLLM, reasoning outputs.
"""

from dataclasses import dataclass

from router.text.forms.deltas import AnswerParser, Content, Delta, Reasoning, first_mark, merged

BEGIN, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """How a model marks its reasoning; a model that `always_thinks` may omit the start mark."""

    name: str
    always_thinks: bool = False

    def is_thinking(self, prompt_end: str) -> bool | None:
        """True if an answer begins with reasoning, False if not; None: its first mark decides."""
        begin, end = prompt_end.rfind(BEGIN), prompt_end.rfind(END)
        if begin > end:
            return True
        if end >= 0 and not prompt_end[end + len(END) :].strip():
            return False
        return True if self.always_thinks else None


class ThinkingParser:
    """Separates reasoning from an answer; `inner` parses the rest."""

    def __init__(self, inner: AnswerParser, *, is_thinking: bool | None) -> None:
        self._inner = inner
        self._pending = ""
        self._may_begin = is_thinking is not False  # a start mark may come
        self._is_thinking = is_thinking  # None: unknown so far
        self._is_blank = False  # only blanks have come since the end of the reasoning

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return self._inner.num_calls

    @property
    def is_reasoning(self) -> bool:
        """True inside the reasoning."""
        return self._is_thinking is True

    def feed(self, text: str) -> list[Delta]:
        """Adds text of the answer and returns the deltas that are now certain."""
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
        """Returns the held text; a mark that was cut is not shown."""
        rest, self._pending = self._pending, ""
        if self._is_thinking is True:
            return [] if is_cut else merged([Reasoning(rest)])
        deltas = [] if is_cut else self._inner.feed(rest)
        return merged([*deltas, *self._inner.finish(is_cut=is_cut)])

    def _find_begin(self) -> bool:
        """Decides whether the answer begins with the start mark; False if more text is needed."""
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
    """Shows all text; for answers that call no tools."""

    num_calls = 0
    is_reasoning = False

    def feed(self, text: str) -> list[Delta]:
        """Returns the text itself."""
        return [Content(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns nothing, as no text is held."""
        return []
