"""From token ids to the text a client may see, one token at a time.

Decides when text is complete enough to show, which tokens never show, and where a stop string cuts
the answer. It does not know HTTP, and it cannot tell the router to stop: it says so in `stopped`.

Everything is done token by token, so an answer does not depend on how its tokens were batched on
the way here.

Of two ways to decode, `TextModel` takes the one that the tokenizer allows. Three reasons not to use
`tokenizers.decoders.DecodeStream`, measured with 0.23: it cannot be flushed, so an answer cut
inside a character loses bytes; a run of special tokens or of broken UTF-8 costs quadratic time
(4,000 tokens: 1.3 s); and on broken byte-fallback runs it raises.
"""

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from tokenizers import Tokenizer

from engine.messages import Limits

REPLACEMENT = "\ufffd"  # what an incomplete or broken UTF-8 sequence decodes to
MAX_PENDING_TOKENS = 16  # a character has at most four bytes: more pending tokens are no character
OVERLAP_TOKENS = 8  # at least as many bytes as one character has
CONTEXT_TOKENS = 6


class Detokenizer(Protocol):
    """Incremental decoding of one answer."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        ...

    def flush(self) -> str:
        """The text of a character that will never be complete."""
        ...


class ByteDetokenizer:
    """Where a text is its tokens' bytes one after the other, as with ByteLevel tokenizers.

    What is pushed in and flushed equals `Tokenizer.decode` of all tokens at once. Nothing is
    decoded twice: only the bytes of an incomplete character wait for the next token.
    """

    def __init__(
        self,
        bytes_by_id: Mapping[int, bytes],
        *,
        prompt_ids: Sequence[int] = (),
        hidden_ids: frozenset[int],
    ) -> None:
        self._bytes_by_id = bytes_by_id
        self._hidden_ids = hidden_ids
        self._rest = b""  # of a character whose end has not come
        for token_id in _visible_end(prompt_ids, hidden_ids):
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._hidden_ids:
            return ""
        data = self._bytes_by_id[token_id]
        if self._rest:
            data = self._rest + data
        text, num_decoded = utf_8_decode(data, "replace")
        self._rest = data[num_decoded:]
        return text

    def flush(self) -> str:
        """The text of a character that will never be complete."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class ContextDetokenizer:
    """For every tokenizer: decodes each token together with those before it.

    `_ids` is the context, tokens already shown that decide how the next ones decode (a space before
    a word, a character in several tokens), and then the tokens not yet shown. What is pushed in and
    flushed equals `Tokenizer.decode` of all tokens at once, with one exception that no streaming
    decoder can avoid: byte-fallback decoders, on meeting a broken byte, also break the good
    characters of the same run of bytes, and those may have been shown.
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
        """The text that this token completes."""
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
        """The text of a character that will never be complete."""
        text = self._decode()[self._shown_len :]
        self._ids, self._num_context, self._shown_len = [], 0, 0
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)  # none but shown ones

    def _show(self, text: str) -> str:
        shown = text[self._shown_len :]
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._shown_len = len(self._decode())
        return shown

    def _show_broken(self, text: str) -> str:
        """Shows all but the last character, which the next bytes may still complete.

        UTF-8 synchronises itself: however the kept tokens are cut out, their last character decodes
        as it does in the whole.
        """
        shown = text[self._shown_len : -1]
        del self._ids[:-OVERLAP_TOKENS]
        self._num_context = len(self._ids)
        self._shown_len = max(0, len(self._decode()) - 1)
        return shown


def _visible_end(prompt_ids: Sequence[int], hidden_ids: frozenset[int]) -> list[int]:
    """The last tokens of a prompt that show, in order."""
    visible = (token for token in reversed(prompt_ids) if token not in hidden_ids)
    return list(islice(visible, CONTEXT_TOKENS))[::-1]


class StopFinder:
    """Finds the stop string that is complete first, in a text that comes in pieces.

    Of two that end at the same character, the longer.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.found = False
        self._stop = tuple(stop)
        self._max_held = max(map(len, self._stop), default=1) - 1
        self._held = ""  # could be the beginning of a stop string

    def push(self, text: str) -> str:
        """The text that is certainly before any stop string. Call no more once `found`."""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.found, self._held = True, ""
            _, start = min(found)
            return text[:start]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    @property
    def held_len(self) -> int:
        """Characters that are held."""
        return len(self._held)

    def flush(self) -> str:
        """The held text: nothing follows that could make it a stop string."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, text: str) -> int:
        """Where the longest end of `text` begins that a stop string begins with."""
        first = max(0, len(text) - self._max_held)
        for at in range(first, len(text)):
            if any(string.startswith(text[at:]) for string in self._stop):
                return at
        return len(text)


class AnswerText:
    """One answer: hides the token that ends it, counts its tokens, cuts it at a stop string.

    Like `Limits`, a stop string counts only after `min_len` tokens.
    """

    def __init__(
        self, detokenizer: Detokenizer, *, prompt_len: int, limits: Limits, stop: Sequence[str]
    ) -> None:
        self.num_tokens = 0  # the one that ends the answer included
        self._detokenizer = detokenizer
        self._prompt_len = prompt_len
        self._limits = limits
        self._end_ids = frozenset(limits.stop_token_ids)
        self._stop = StopFinder(stop)
        self._has_stop = bool(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._has_stop and self._stop.found

    @property
    def held_len(self) -> int:
        """Characters that are complete and not shown: they could begin a stop string."""
        return self._stop.held_len

    def ends_with(self, token_id: int) -> bool:
        """Whether this token, if it is the next one, ends the answer and is not shown."""
        length = self._prompt_len + self.num_tokens + 1
        return token_id in self._end_ids and length > self._limits.min_len

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that may be shown now. Tokens after a stop string are neither shown nor counted."""
        if len(token_ids) == 1 and not self._has_stop:  # nearly always
            return self._push_one(token_ids[0])
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            pieces.append(self._push_one(token_id))
        return "".join(pieces)

    def finish(self) -> str:
        """The text still held back, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._stop.push(self._detokenizer.flush())
        return text + self._stop.flush()

    def _push_one(self, token_id: int) -> str:
        self.num_tokens += 1
        length = self._prompt_len + self.num_tokens
        if token_id in self._end_ids and length > self._limits.min_len:
            return ""
        text = self._detokenizer.push(token_id)
        return self._stop.push(text) if self._has_stop and length > self._limits.min_len else text
