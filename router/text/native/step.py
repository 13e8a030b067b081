"""Takes the tokens of many answers at once, and returns the chunks that their streams send.

It does what `router.text.detokenizer` and `router.gateway.answers.stream` do one by one. It decodes
tokens, escapes for JSON, and puts the constant parts of a chunk around the text. In tests these two
are the slow twin. Only the bytes of a token are needed, so it is for ByteLevel tokenizers.
"""

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from router.text.native.library import NativeSeries, NativeText, opened


class GapSeries(Protocol):
    """A series of a histogram whose numbers are in arrays, which never move."""

    @property
    def bounds(self) -> "array[float]":
        """Upper bounds of all buckets but the last."""
        ...

    @property
    def counts(self) -> "array[int]":
        """Values by bucket."""
        ...

    @property
    def total(self) -> "array[float]":
        """The sum of all values."""
        ...


class NativeVocabulary:
    """The bytes of each token in C++, for one tokenizer; they are put there on demand."""

    def __init__(
        self, bytes_by_id: Mapping[int, bytes], size: int, special: frozenset[int]
    ) -> None:
        """For ids below `size`. Raises BuildError where there is no C++."""
        self._library = library = opened()
        self._bytes_by_id = bytes_by_id
        self._special = special
        self.handle: int = library.baton_vocabulary_open(size)

    def __del__(self) -> None:
        self._library.baton_vocabulary_close(self.handle)

    def learn(self, token_id: int) -> None:
        """Puts the bytes of a token there."""
        data = self._bytes_by_id[token_id]
        special = token_id in self._special
        self._library.baton_vocabulary_put(self.handle, token_id, data, len(data), special)


class BatchedText:
    """One answer whose tokens can be taken in steps. `state` is shared with the slow path."""

    def __init__(  # noqa: PLR0913 - all that a chunk is made of
        self,
        state: NativeText,
        vocabulary: NativeVocabulary,
        *,
        frame: tuple[bytes, bytes],
        end_ids: Sequence[int],
        min_tokens: int,
        gaps: GapSeries,
        shows_special: bool,
    ) -> None:
        """`frame` comes before and behind the text, which is a JSON string.

        Tokens of `end_ids` are not shown behind `min_tokens` tokens. The seconds between two steps
        count in `gaps`.
        """
        self.state = state
        self.vocabulary = vocabulary
        self._end_ids = array("q", end_ids)
        self._gaps = NativeSeries(
            gaps.bounds.buffer_info()[0],
            len(gaps.bounds),
            gaps.counts.buffer_info()[0],
            gaps.total.buffer_info()[0],
        )
        self._kept = (frame, gaps)  # C++ reads them
        state.vocabulary = vocabulary.handle
        state.before, state.after = frame
        state.before_len, state.after_len = map(len, frame)
        state.end_ids, state.num_end_ids = self._end_ids.buffer_info()
        state.min_tokens = min_tokens
        state.gaps = ctypes.addressof(self._gaps)
        state.shows_special = shows_special
        self.address = ctypes.addressof(state)


class TextSteps:
    """Tokens of answers, in the order in which they came, and the chunks that they become."""

    def __init__(self) -> None:
        """Raises BuildError where there is no C++."""
        self._library = library = opened()
        self._handle: int = library.baton_text_open()
        self._begin()

    def __del__(self) -> None:
        self._library.baton_text_close(self._handle)

    def _begin(self) -> None:
        self._texts: list[BatchedText] = []
        self._addresses, self._lengths = array("Q"), array("q")
        self._times_s, self._ids = array("d"), array("q")

    def add(self, text: BatchedText, token_ids: Sequence[int], now_s: float) -> None:
        """Adds tokens of one answer."""
        self._texts.append(text)
        self._addresses.append(text.address)
        self._lengths.append(len(token_ids))
        self._times_s.append(now_s)
        self._ids.extend(token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that were added, and not taken yet."""
        return len(self._ids)

    def take(self) -> list[bytes]:
        """Takes all tokens. Returns the chunk of each addition, in order; empty without text."""
        texts, ids = self._texts, self._ids
        ends, begin = array("q", bytes(8 * len(texts))), ctypes.c_void_p()
        arguments = (
            self._handle,
            self._addresses.buffer_info()[0],
            self._lengths.buffer_info()[0],
            self._times_s.buffer_info()[0],
            len(texts),
            ids.buffer_info()[0],
            ends.buffer_info()[0],
            ctypes.byref(begin),
        )
        while (unknown := self._library.baton_text_step(*arguments)) >= 0:
            for vocabulary in {text.vocabulary for text in texts}:
                vocabulary.learn(ids[unknown])
        self._begin()
        data = ctypes.string_at(begin, ends[-1]) if texts else b""
        return [data[start:end] for start, end in pairwise((0, *ends))]
