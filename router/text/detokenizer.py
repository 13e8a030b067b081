"""Decodes token ids to the text that a client may see, one token at a time.

Decides when text is complete enough to show, which tokens are hidden, and where a stop string cuts
the answer. After a stop string, `stopped` is set; the caller cancels the request.

All work is done token by token, so an answer does not depend on how its tokens were batched.

There are two decoders; `TextModel` chooses the one that the tokenizer allows.
`tokenizers.decoders.DecodeStream` is not used, for three reasons, measured with 0.23. It cannot be
flushed, so an answer cut inside a character loses bytes. A run of special tokens or of broken UTF-8
costs quadratic time (4,000 tokens: 1.3 s). On broken byte-fallback runs it raises an error.
"""

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from tokenizers import Tokenizer

from engine.messages import Limits

REPLACEMENT = "\ufffd"  # the decoder's output for incomplete or broken UTF-8
MAX_PENDING_TOKENS = 16  # a character has at most four bytes, so a longer run is broken UTF-8
OVERLAP_TOKENS = 8  # at least the maximum number of tokens in one character
CONTEXT_TOKENS = 6


class TextState(Protocol):
    """The state of one answer's text. `router.text.native` has the same state for C++."""

    num_tokens: int  # number of tokens so far, with the token that ends the answer
    num_batched: int  # number of tokens handled by C++
    last_s: float  # time of the last tokens in seconds
    rest: bytes  # the first bytes of an incomplete character


@dataclass(slots=True)
class PlainTextState:
    """A `TextState` in Python."""

    num_tokens: int = 0
    num_batched: int = 0
    last_s: float = 0.0
    rest: bytes = b""


class Detokenizer(Protocol):
    """The interface for decoding one answer's tokens one by one."""

    def push(self, token_id: int) -> str:
        """Returns the text that is complete with this token."""
        ...

    def flush(self) -> str:
        """Returns the text of a character that was never completed."""
        ...


class ByteDetokenizer:
    """Decoder for tokenizers whose text is the concatenated bytes of the tokens, as with ByteLevel.

    The result equals `Tokenizer.decode` of all tokens at once. No byte is decoded twice: only the
    bytes of an incomplete character wait for the next token.
    """

    def __init__(
        self,
        bytes_by_id: Mapping[int, bytes],
        *,
        prompt_ids: Sequence[int] = (),
        hidden_ids: frozenset[int],
        state: TextState | None = None,
    ) -> None:
        """`state` keeps the first bytes of an incomplete character."""
        self._bytes_by_id = bytes_by_id
        self._hidden_ids = hidden_ids
        self._state = state or PlainTextState()
        # Usually the prompt ends with an ASCII character, so no character is incomplete.
        last_id = prompt_ids[-1] if prompt_ids else -1
        last = bytes_by_id.get(last_id, b"")
        if prompt_ids and (not last or not last[-1:].isascii() or last_id in hidden_ids):
            visible = _visible_end(prompt_ids, hidden_ids)
            end = b"".join([bytes_by_id.get(token_id, b"") for token_id in visible])
            _, num_decoded = utf_8_decode(end, "replace")
            if num_decoded < len(end):
                self._state.rest = end[num_decoded:]

    def push(self, token_id: int) -> str:
        """Returns the text that is complete with this token."""
        if token_id in self._hidden_ids:
            return ""
        data = self._bytes_by_id.get(token_id, b"")
        state = self._state
        if rest := state.rest:
            data = rest + data
        text, num_decoded = utf_8_decode(data, "replace")
        if rest or num_decoded < len(data):
            state.rest = data[num_decoded:]
        return text

    def flush(self) -> str:
        """Returns the text of a character that was never completed."""
        rest, self._state.rest = self._state.rest, b""
        return rest.decode(errors="replace")


class ContextDetokenizer:
    """Decoder for every tokenizer: decodes each token together with the tokens before it.

    `_ids` has the context, followed by the tokens not shown yet. The context is a few shown tokens
    on which the decoding of the next tokens depends: a space before a word, a character in several
    tokens. The result equals `Tokenizer.decode` of all tokens at once, with one exception that no
    streaming decoder can avoid. On a broken byte, byte-fallback decoders also replace the valid
    characters of the same run of bytes, although these may have been shown already.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = (), hidden_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._ids = _visible_end(prompt_ids, hidden_ids)
        self._num_context = len(self._ids)
        self._shown_len = len(self._decode().rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Returns the text that is complete with this token."""
        if token_id in self._hidden_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode()
        if not text.endswith(REPLACEMENT):
            return self._show(text)
        if len(self._ids) - self._num_context < MAX_PENDING_TOKENS:
            return ""
        return self._show_broken(text)

    def flush(self) -> str:
        """Returns the text of a character that was never completed."""
        text = self._decode()[self._shown_len :]
        self._ids, self._num_context, self._shown_len = [], 0, 0
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._ids, skip_special_tokens=False
        )  # `_ids` has no hidden tokens

    def _show(self, text: str) -> str:
        shown = text[self._shown_len :]
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._shown_len = len(self._decode())
        return shown

    def _show_broken(self, text: str) -> str:
        """Returns all text except the last character, which the next bytes may still complete.

        UTF-8 is self-synchronising: the last character of the kept tokens decodes as in the whole
        text.
        """
        shown = text[self._shown_len : -1]
        del self._ids[:-OVERLAP_TOKENS]
        self._num_context = len(self._ids)
        self._shown_len = max(0, len(self._decode()) - 1)
        return shown


def _visible_end(prompt_ids: Sequence[int], hidden_ids: frozenset[int]) -> list[int]:
    """Returns the last visible tokens of a prompt, in the order of the prompt."""
    visible = (token for token in reversed(prompt_ids) if token not in hidden_ids)
    return list(islice(visible, CONTEXT_TOKENS))[::-1]


class StopFinder:
    """Finds the stop string that ends first, in a text that arrives in pieces.

    If two stop strings end at the same character, the longer one is found. The text is cut before
    the stop string, or after it if the finder `keeps` it.
    """

    def __init__(self, stop: Sequence[str], *, keeps: bool = False) -> None:
        self.found: str | None = None
        self._keeps = keeps
        self._stop = tuple(stop)
        self._max_held = max(map(len, self._stop), default=1) - 1
        self._held = ""  # text at the end that may be the first part of a stop string

    def push(self, text: str) -> str:
        """Returns the text that is certainly before any stop string. Not allowed after `found`."""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            end, start, self.found = min(found)
            self._held = ""
            return text[: end if self._keeps else start]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    @property
    def held_len(self) -> int:
        """The number of characters that are not returned yet."""
        return len(self._held)

    def flush(self) -> str:
        """Returns the text that is not returned yet, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, text: str) -> int:
        """Returns the start of the longest suffix of `text` that may begin a stop string."""
        first = max(0, len(text) - self._max_held)
        for at in range(first, len(text)):
            if any(string.startswith(text[at:]) for string in self._stop):
                return at
        return len(text)


class AnswerText:
    """The text of one answer: omits its end token, counts its tokens, cuts it at a stop string.

    Like an end token in `Limits`, a stop string is ignored before `min_len` tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        prompt_len: int,
        limits: Limits,
        stop: Sequence[str],
        shows_stop: bool = False,
        state: TextState | None = None,
    ) -> None:
        """With `shows_stop`, the answer includes the stop string or token that ended it.

        The detokenizer must have the same `state`.
        """
        self._state = state or PlainTextState()
        self._detokenizer = detokenizer
        # Tokens that end the answer and are hidden, and the number of tokens before which they do
        # not end it.
        self.hidden_end_ids = frozenset(() if shows_stop else limits.stop_token_ids)
        self.min_tokens = limits.min_len - prompt_len
        self._stop = StopFinder(stop, keeps=shows_stop) if stop else None
        self.stop_string: str | None = None  # the stop string that ended the answer
        self.stopped = False  # True once a stop string has ended the answer

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, with the token that ends the answer."""
        return self._state.num_tokens

    @property
    def held_len(self) -> int:
        """The number of characters that may begin a stop string, and so are not shown yet."""
        return 0 if self._stop is None else self._stop.held_len

    def hides(self, token_id: int) -> bool:
        """True if this token, as the next token, would end the answer without being shown."""
        return token_id in self.hidden_end_ids and self.num_tokens >= self.min_tokens

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text to show now. Tokens after a stop string are ignored and not counted."""
        state, stop, pieces = self._state, self._stop, list[str]()
        num_tokens = state.num_tokens
        for token_id in token_ids:
            if self.stopped:
                break
            num_tokens += 1
            if token_id in self.hidden_end_ids and num_tokens > self.min_tokens:
                continue
            text = self._detokenizer.push(token_id)
            if stop is not None and num_tokens > self.min_tokens:
                text = self._before_stop(stop, text)
            pieces.append(text)
        state.num_tokens = num_tokens
        return "".join(pieces)

    def finish(self) -> str:
        """Returns the text that was not shown yet, at the end of the answer."""
        if self.stopped:
            return ""
        text = self._detokenizer.flush()
        return (
            text if self._stop is None else self._before_stop(self._stop, text) + self._stop.flush()
        )

    def _before_stop(self, stop: StopFinder, text: str) -> str:
        text = stop.push(text)
        self.stop_string = stop.found
        self.stopped = stop.found is not None
        return text
