"""Passes the tokens of all streams of one turn of the event loop to C++ in one call.

A step of a worker brings a token for each of its streams. Most streams need only the text of a
token. Their tokens are collected. At the end of the turn C++ makes chunks for all responses at once
and sends them (`router.text.native`). If a socket does not take all bytes, the transport gets the
rest. Tokens that Python handles must be sent after that rest: see `FastPath.close`.

Once a stream runs, its tokens do not need Python at all. Then C++ reads the tokens from the
worker's frame, and sends the chunks while it parses the frame. This stops before anything else is
sent to the client, and when the client's socket is full.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context

from engine.messages import SeqId
from router.edge.exchange import NO_SOCKET
from router.gateway.answers.choice import AnswerChoice
from router.gateway.answers.stream import StreamedAnswer
from router.gateway.answers.writing import AnswerWriter
from router.gateway.metrics.meters import GatewayMetrics
from router.port import Handle
from router.text.native.step import BatchedText, TextSteps

log = logging.getLogger(__name__)


class TextBatch:
    """The tokens of one turn of one event loop; implements `router.port.FrameTaker`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        """Raises BuildError if the C++ library is missing."""
        self._metrics = metrics
        self._steps = TextSteps()
        self._added: list[tuple[FastPath, Sequence[int], float]] = []
        self._paths: dict[int, FastPath] = {}  # paths whose tokens are read from frames, by number
        self._numbers: dict[SeqId, int] = {}  # the numbers of these paths
        self._num_opened = 0

    def path(
        self, choice: AnswerChoice, writer: AnswerWriter, *, is_alone: bool
    ) -> "FastPath | None":
        """Returns the fast path of a choice, which may be the only one of its answer.

        None if Python has to handle the choice's tokens.
        """
        if not isinstance(writer, StreamedAnswer) or writer.events.pipe is None:
            return None
        if not (choice.vocabulary is not None and writer.shows_text_alone):
            return None
        return FastPath(self, choice, writer, is_alone=is_alone)

    def add(self, path: "FastPath", token_ids: Sequence[int], now_s: float) -> None:
        """Adds tokens of a path; their text is sent at the end of the turn."""
        if not self._added:
            asyncio.get_running_loop().call_soon(self.flush, context=Context())
        self._added.append((path, token_ids, now_s))

    def open(self, seq_id: SeqId, path: "FastPath") -> None:
        """Starts to read the tokens of a sequence from frames, if that is possible now."""
        if seq_id in self._numbers:
            return
        socket = path.pipe.socket()
        number = self._num_opened = self._num_opened + 1
        if socket != NO_SOCKET and self._steps.open_stream(
            number, seq_id.encode(), path.text, socket
        ):
            self._paths[number] = path
            self._numbers[seq_id] = number
            path.seq_id = seq_id

    def close(self, seq_id: SeqId) -> None:
        """Stops reading the tokens of this sequence from frames."""
        number = self._numbers.pop(seq_id, None)
        if number is not None:
            self._steps.close_stream(seq_id.encode())
            del self._paths[number]

    def take_frame(self, frame: bytes, now_s: float) -> Sequence[int] | None:
        """Sends the tokens of fast paths in a worker's frame; returns the positions of other
        messages.

        None if the frame has nothing for fast paths.
        """
        if not self._paths:
            return None
        self.flush()  # tokens that arrived before this frame
        try:
            taken = self._steps.take_frame(frame, now_s, self._learn)
        except Exception:  # a bug; no token was read
            log.exception("a frame is left to Python")
            return None
        if taken is None:
            return None
        self._count(taken.num_tokens)
        for path, rest in [(self._paths[number], rest) for number, rest in taken.rests]:
            path.send_rest(rest)
        return taken.left

    def flush(self) -> None:
        """Sends all added tokens now."""
        if not self._added:
            return
        added, self._added = self._added, []
        paths, token_ids, times_s = zip(*added, strict=True)
        self._count(sum(map(len, token_ids)))
        paths[0].pipe.flush()  # parts of response bodies that were written before
        try:
            sockets = [path.pipe.socket() for path in paths]
            rests = self._steps.take([path.text for path in paths], token_ids, times_s, sockets)
        except Exception:  # a bug: without these tokens the answers would be wrong
            log.exception("tokens became no text: the connections of their streams are cut")
            for path in paths:
                path.pipe.cut()
            return
        for place, rest in rests:
            paths[place].send_rest(rest)

    def _learn(self, vocabulary: int, token_id: int) -> None:
        """Adds a token to the vocabulary with this handle."""
        for path in self._paths.values():
            if path.text.vocabulary.handle == vocabulary:
                path.text.vocabulary.learn(token_id)
                return
        raise LookupError("a token of no vocabulary")

    def _count(self, num_tokens: int) -> None:
        self._metrics.num_generation_tokens += num_tokens
        self._metrics.num_batched_tokens += num_tokens


class FastPath:
    """Carries the tokens of one choice to its client through a `TextBatch`."""

    text: BatchedText  # set once the stream is open

    def __init__(
        self, batch: TextBatch, choice: AnswerChoice, writer: StreamedAnswer, *, is_alone: bool
    ) -> None:
        assert writer.events.pipe is not None
        self.pipe = writer.events.pipe
        self.seq_id: SeqId | None = None  # the sequence whose tokens were last read from frames
        self._batch = batch
        self._choice = choice
        self._writer = writer
        self._is_alone = is_alone  # no other choice writes to the client
        self._is_begun = False

    def take(self, token_ids: Sequence[int], now_s: float, handle: Handle | None) -> bool:
        """Passes tokens of a running choice to C++, while its writer is not full.

        Returns False if Python has to handle them.
        """
        choice = self._choice
        if not choice.num_tokens:
            return False
        if not self._is_begun:
            self.text, self._is_begun = choice.batched(self._writer.frame_of(choice.index)), True
        self._batch.add(self, token_ids, now_s)
        if self._is_alone and handle is not None:
            seq_id = handle.offer_frames(self._batch)
            if seq_id != self.seq_id:
                self._close_frames()
            if seq_id is not None:
                self._batch.open(seq_id, self)
        return True

    def close(self) -> None:
        """Sends all added tokens. Call it before the choice is changed in any other way."""
        if self._is_begun:
            self._batch.flush()
            self._close_frames()

    def send_rest(self, rest: bytes) -> None:
        """Passes on the bytes that the socket did not take. Later chunks must not overtake them."""
        self.pipe.write_coded(rest)
        self._close_frames()

    def _close_frames(self) -> None:
        if self.seq_id is not None:
            self._batch.close(self.seq_id)
            self.seq_id = None
