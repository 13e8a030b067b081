"""Handles the tokens of many answers in one call, and sends the chunks of their streams.

It does the work of `router.text.detokenizer` and `router.gateway.answers.stream` for many answers
at once. It decodes tokens, escapes the text for JSON, and adds the constant parts of a chunk. In
tests these two modules are the slow twin. Only the bytes of each token are used, so it supports
only ByteLevel tokenizers.
"""

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from engine.native.library import library
from router.text.native.structs import NativeSeries, NativeText, TakenFrame

REST = 3  # numbers per rest in C++: index of its addition, start, end


class GapSeries(Protocol):
    """A series of a histogram; its numbers are in arrays that never move."""

    @property
    def bounds(self) -> "array[float]":
        """Upper bounds of all buckets but the last."""
        ...

    @property
    def counts(self) -> "array[int]":
        """The counts by bucket."""
        ...

    @property
    def total(self) -> "array[float]":
        """The sum of all observed values."""
        ...


class NativeVocabulary:
    """The bytes of each token of one tokenizer, in C++; tokens are added on demand."""

    def __init__(
        self, bytes_by_id: Mapping[int, bytes], size: int, special: frozenset[int]
    ) -> None:
        """Supports ids below `size`. Raises BuildError."""
        self._library = library()
        self._bytes_by_id = bytes_by_id
        self._special = special
        self.handle: int = self._library.baton_vocabulary_open(size)

    def __del__(self) -> None:
        self._library.baton_vocabulary_close(self.handle)

    def learn(self, token_id: int) -> None:
        """Adds the bytes of a token."""
        data = self._bytes_by_id[token_id]
        special = token_id in self._special
        self._library.baton_vocabulary_put(self.handle, token_id, data, len(data), special)


class BatchedText:
    """One answer whose tokens may be handled in steps. `state` is shared with the slow path."""

    __slots__ = ("_end_ids", "_gaps", "_kept", "address", "state", "vocabulary")

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
        """`frame` has the bytes before and after the text, which is a JSON string.

        Tokens of `end_ids` are not shown after `min_tokens` tokens. The seconds between two steps
        are counted in `gaps`.
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
        self._kept = (frame, gaps)  # C++ reads them, so they must stay alive
        state.vocabulary = vocabulary.handle
        state.before, state.after = frame
        state.before_len, state.after_len = map(len, frame)
        state.end_ids, state.num_end_ids = self._end_ids.buffer_info()
        state.min_tokens = min_tokens
        state.gaps = ctypes.addressof(self._gaps)
        state.shows_special = shows_special
        self.address = ctypes.addressof(state)


@dataclass(frozen=True, slots=True)
class FrameTaken:
    """The part of a worker's frame that was passed to streams."""

    num_tokens: int
    left: Sequence[int]  # positions of the other messages
    rests: Sequence[tuple[int, bytes]]  # numbers of streams, with their unsent bytes


class TextSteps:
    """Makes chunks of tokens and sends them.

    A *stream* carries one sequence's tokens from its worker's frames to a socket, without Python.
    Each stream has a number. The caller keeps its text.
    """

    def __init__(self) -> None:
        """Raises BuildError."""
        self._library = library()
        self._handle: int = self._library.baton_text_open()
        self._told = TakenFrame()

    def __del__(self) -> None:
        self._library.baton_text_close(self._handle)

    def take(
        self,
        texts: Sequence[BatchedText],
        token_ids: Sequence[Sequence[int]],
        came_s: Sequence[float],
        sockets: Sequence[int],
    ) -> list[tuple[int, bytes]]:
        """Handles the next tokens of answers, with the times at which they came.

        Sends the chunk of each answer to its socket, in order; nothing is sent to a negative
        socket. Without text there is no chunk. Returns the indices of answers with the bytes that
        could not be sent at once.
        """
        num_answers = len(texts)
        addresses = array("Q", [text.address for text in texts])
        lengths = array("q", list(map(len, token_ids)))
        times_s = array("d", came_s)
        ids = array("q", list(chain.from_iterable(token_ids)))
        descriptors = array("i", sockets)
        rests = array("q", bytes(8 * REST * num_answers))
        num_rests, begin = ctypes.c_int64(), ctypes.c_void_p()
        arguments = (
            self._handle,
            addresses.buffer_info()[0],
            lengths.buffer_info()[0],
            times_s.buffer_info()[0],
            num_answers,
            ids.buffer_info()[0],
            descriptors.buffer_info()[0],
            rests.buffer_info()[0],
            ctypes.byref(num_rests),
            ctypes.byref(begin),
        )
        while (unknown := self._library.baton_text_step(*arguments)) >= 0:
            for vocabulary in {text.vocabulary for text in texts}:
                vocabulary.learn(ids[unknown])
        if not num_rests.value:
            return []
        data = ctypes.string_at(begin, rests[REST * num_rests.value - 1])
        found = (rests[REST * i : REST * (i + 1)] for i in range(num_rests.value))
        return [(place, data[start:end]) for place, start, end in found]

    def open_stream(self, number: int, seq_id: bytes, text: BatchedText, socket: int) -> bool:
        """Opens a sequence's stream; False if the kernel cannot tell its socket from others."""
        length = len(seq_id)
        opened = self._library.baton_lane_open(
            self._handle, seq_id, length, text.address, socket, number
        )
        return bool(opened)

    def close_stream(self, seq_id: bytes) -> None:
        """Closes a stream, if it is open."""
        self._library.baton_lane_close(self._handle, seq_id, len(seq_id))

    def take_frame(
        self, frame: bytes, now_s: float, learn: Callable[[int, int], None]
    ) -> FrameTaken | None:
        """Handles the tokens of open streams in a worker's frame; None if it has none.

        `learn` adds a token, its second argument, to the vocabulary with this handle.

        No other data may be waiting for the sockets of streams: see
        `router.gateway.answers.batching`.
        """
        told, take = self._told, self._library.baton_text_frame
        while not take(self._handle, frame, len(frame), now_s, ctypes.byref(told)):
            if told.unknown_id < 0:
                return None
            learn(told.unknown_vocabulary, told.unknown_id)
        left: Sequence[int] = ()
        if told.num_taken < told.num_messages:
            left = [i for i in range(told.num_messages) if told.taken[i] is None]
        numbers = told.rests[: REST * told.num_rests]
        rests = [
            (
                numbers[i],
                ctypes.string_at(told.out + numbers[i + 1], numbers[i + 2] - numbers[i + 1]),
            )
            for i in range(0, len(numbers), REST)
        ]
        return FrameTaken(told.num_tokens, left, rests)
