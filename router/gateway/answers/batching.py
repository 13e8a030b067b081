"""Takes the tokens of all streams of one turn of the loop in one call of C++.

A step of a worker brings a token of each stream. Most streams show text and nothing else of a
token. Their tokens are collected, and at the end of the turn they become chunks of the responses
all together, which C++ sends (`router.text.native`). A transport gets what its socket does not take
at once. What is taken in other ways must come behind them: see `flush`.
"""

import asyncio
import logging
from collections.abc import Sequence

from router.edge.extension import BodyPipe
from router.gateway.metrics.meters import GatewayMetrics
from router.text.native.step import BatchedText, TextSteps

log = logging.getLogger(__name__)


class TextBatch:
    """The tokens of one turn. Belongs to one event loop."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        """Raises BuildError where there is no C++."""
        self._metrics = metrics
        self._steps = TextSteps()
        self._added: list[tuple[BatchedText, Sequence[int], float]] = []
        self._pipes: list[BodyPipe] = []

    def add(
        self, text: BatchedText, pipe: BodyPipe, token_ids: Sequence[int], now_s: float
    ) -> None:
        """Takes tokens of an answer, and sends what they show through the pipe, soon."""
        if not self._pipes:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pipes.append(pipe)
        self._added.append((text, token_ids, now_s))

    def flush(self) -> None:
        """Sends everything now. Call it before a text is changed in any other way."""
        if not self._pipes:
            return
        pipes, added = self._pipes, self._added
        self._pipes, self._added = [], []
        num_tokens = sum([len(token_ids) for _, token_ids, _ in added])
        self._metrics.num_generation_tokens += num_tokens
        self._metrics.num_batched_tokens += num_tokens
        pipes[0].flush()  # parts of bodies that came before
        try:
            rests = self._steps.take(added, [pipe.socket() for pipe in pipes])
        except Exception:  # a bug: without these tokens the answers would be wrong
            log.exception("tokens became no text: the connections of their streams are cut")
            for pipe in pipes:
                pipe.cut()
            return
        for place, rest in rests:
            pipes[place].write_coded(rest)
