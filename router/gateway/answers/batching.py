"""Takes the tokens of all streams of one turn of the loop in one call of C++.

A step of a worker brings a token of each stream. Most streams show text and nothing else of a
token. Their tokens are collected, and at the end of the turn they become chunks of the responses
all together, which C++ sends (`router.text.native`). A transport gets what its socket does not take
at once. What is taken in other ways must come behind them: see `flush`.

Once a stream runs, its tokens need nothing of Python. Then it has a *lane*: C++ takes its tokens
from the frames of its worker, and sends their chunks while it reads the frame. A lane is closed
before anything else is sent to its client, and when the client's socket is full.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context

from engine.messages import SeqId
from router.edge.exchange import NO_SOCKET, BodyPipe
from router.gateway.metrics.meters import GatewayMetrics
from router.text.native.step import BatchedText, TextSteps

log = logging.getLogger(__name__)


class TextBatch:
    """The tokens of one turn. Belongs to one event loop."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        """Raises BuildError where there is no C++."""
        self._metrics = metrics
        self._steps = TextSteps()
        self._added: list[tuple[tuple[BatchedText, BodyPipe], Sequence[int], float]] = []
        self._lanes: dict[int, tuple[SeqId, BatchedText, BodyPipe]] = {}  # open ones, by number
        self._numbers: dict[SeqId, int] = {}  # of open lanes
        self._num_opened = 0

    def add(
        self, answer: tuple[BatchedText, BodyPipe], token_ids: Sequence[int], now_s: float
    ) -> None:
        """Takes tokens of an answer, and sends what they show through its pipe, soon."""
        if not self._added:
            asyncio.get_running_loop().call_soon(self.flush, context=Context())
        self._added.append((answer, token_ids, now_s))

    def open_lane(self, seq_id: SeqId, answer: tuple[BatchedText, BodyPipe]) -> bool:
        """Opens a lane for an answer that has its pipe for itself; False if that has to wait."""
        socket = answer[1].socket()
        if socket == NO_SOCKET:
            return False
        self.close_lane(seq_id)
        number = self._num_opened = self._num_opened + 1
        if not self._steps.open_lane(number, seq_id.encode(), answer[0], socket):
            return False
        self._lanes[number] = (seq_id, *answer)
        self._numbers[seq_id] = number
        return True

    def close_lane(self, seq_id: SeqId) -> None:
        """Closes a lane, if it is open."""
        number = self._numbers.pop(seq_id, None)
        if number is not None:
            self._steps.close_lane(seq_id.encode())
            del self._lanes[number]

    def take_frame(self, frame: bytes, now_s: float) -> Sequence[int] | None:
        """Sends what a worker's frame has for open lanes; returns the places of other messages.

        None if there is nothing for lanes.
        """
        if not self._lanes:
            return None
        self.flush()  # tokens that came before
        try:
            taken = self._steps.take_frame(frame, now_s, self._learn)
        except Exception:  # a bug; nothing was taken
            log.exception("a frame is left to Python")
            return None
        if taken is None:
            return None
        self._count(taken.num_tokens)
        for pipe, rest in [(self._lanes[number][2], rest) for number, rest in taken.rests]:
            self._send_rest(pipe, rest)
        return taken.left

    def _learn(self, vocabulary: int, token_id: int) -> None:
        """Puts a token into the vocabulary with this handle."""
        for _, text, _ in self._lanes.values():
            if text.vocabulary.handle == vocabulary:
                text.vocabulary.learn(token_id)
                return
        raise LookupError("a token of no vocabulary")

    def _count(self, num_tokens: int) -> None:
        self._metrics.num_generation_tokens += num_tokens
        self._metrics.num_batched_tokens += num_tokens

    def _send_rest(self, pipe: BodyPipe, rest: bytes) -> None:
        """Gives the transport what the socket did not take. Lanes must not overtake it."""
        pipe.write_coded(rest)
        for seq_id in [lane[0] for lane in self._lanes.values() if lane[2] is pipe]:
            self.close_lane(seq_id)

    def flush(self) -> None:
        """Sends everything now. Call it before a text is changed in any other way."""
        if not self._added:
            return
        added, self._added = self._added, []
        answers, token_ids, times_s = zip(*added, strict=True)
        texts, pipes = zip(*answers, strict=True)
        self._count(sum(map(len, token_ids)))
        pipes[0].flush()  # parts of bodies that came before
        try:
            sockets = [pipe.socket() for pipe in pipes]
            rests = self._steps.take(texts, token_ids, times_s, sockets)
        except Exception:  # a bug: without these tokens the answers would be wrong
            log.exception("tokens became no text: the connections of their streams are cut")
            for pipe in pipes:
                pipe.cut()
            return
        for place, rest in rests:
            self._send_rest(pipes[place], rest)
