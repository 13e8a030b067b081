"""Sends the embeddings of all inputs of a call as one JSON body."""

import asyncio
from typing import Any

import msgspec
from starlette.types import Send

from router.edge.responses import send_data
from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.writing import Ending, Heading, send_failure, usage_of
from router.machine.requests import Failed, Finished
from router.text.embeddings import EmbeddingForm, shaped

LONG_NUMBERS = 65_536  # take about 10 ms to write

_encode = msgspec.json.Encoder().encode


class EmbeddingAnswer:
    """Keeps the embedding of each input; implements `router.gateway.answers.writing.AnswerWriter`.

    Tokens that came with them mean nothing.
    """

    def __init__(self, heading: Heading, form: EmbeddingForm, send: Send) -> None:
        self._heading = heading
        self._form = form
        self._send = send
        self._found = [b""] * heading.num_choices

    @property
    def is_ready(self) -> bool:
        """Always true: pieces are only kept."""
        return True

    @property
    def shows_text_alone(self) -> bool:
        """Always false: there is no text."""
        return False

    def write_at_once(self, piece: AnswerPiece) -> None:
        """Keeps the embedding that a piece brings."""
        self._found[piece.choice] = piece.embedding or self._found[piece.choice]

    def write_text(self, choice: int, text: str) -> None:
        """Drops the text."""

    async def write(self, piece: AnswerPiece) -> None:
        """Keeps the embedding that a piece brings."""
        self.write_at_once(piece)

    async def end(self, ending: Ending) -> None:
        """Sends everything, or the error."""
        if not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        is_long = len(self._found) * self._form.size > LONG_NUMBERS
        try:
            data = await asyncio.to_thread(self._body, ending) if is_long else self._body(ending)
        except ValueError as error:
            await send_failure(self._send, Failed(str(error)))
            return
        await send_data(self._send, 200, data, self._heading.headers)

    def _body(self, ending: Ending) -> bytes:
        """The whole answer, JSON. Raises ValueError."""
        heading = self._heading
        body: dict[str, Any] = heading.fields(heading.dialect.object_name)
        body["data"] = [
            {"object": "embedding", "index": index, "embedding": shaped(data, self._form)}
            for index, data in enumerate(self._found)
        ]
        body["usage"] = usage_of(ending.prompt_tokens, 0)
        if heading.call.timeline:
            body["baton_timeline"] = ending.timeline
        return _encode(body)
