"""Sends the embeddings of all inputs of a call as one JSON body."""

from typing import Any

from starlette.types import Send

from router.edge.responses import send_data, send_parts
from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.writing import (
    TIMELINE_HEADER,
    Ending,
    Heading,
    send_failure,
    usage_of,
)
from router.gateway.requests.embedding import EmbeddingList, ShownEmbedding
from router.inbox.json_parts import LazyItems, encode_lazy, json_parts
from router.machine.requests import Failed, Finished
from router.text.embeddings import EmbeddingForm, are_numbers, shaped

SHORT_NUMBERS = 8192  # take about a millisecond to write


class EmbeddingAnswer:
    """Keeps the embedding of each input; implements `router.gateway.answers.writing.AnswerWriter`.

    Tokens that came with them mean nothing.
    """

    def __init__(self, heading: Heading, form: EmbeddingForm, send: Send) -> None:
        self._heading = heading
        self._form = form
        self._send = send
        self._found = [b""] * heading.num_choices
        self._are_numbers = True  # no value so far is infinite or NaN

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
        if piece.embedding:
            self._found[piece.choice] = piece.embedding
            self._are_numbers = self._are_numbers and are_numbers(piece.embedding, self._form)

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
        heading, form = self._heading, self._form
        if not self._are_numbers:
            await send_failure(self._send, Failed("the model gave values that are no numbers"))
            return
        if len(self._found) * form.size <= SHORT_NUMBERS:
            await send_data(self._send, 200, encode_lazy(self._body(ending)), heading.headers)
            return
        await send_parts(self._send, json_parts(self._body(ending)), heading.headers, heading.turn)

    def _body(self, ending: Ending) -> EmbeddingList:
        """The whole answer."""
        heading = self._heading
        data: Any = LazyItems(range(len(self._found)), self._item)
        fields = heading.fields(heading.dialect.object_name)
        body = EmbeddingList(**fields, data=data, usage=usage_of(ending.prompt_tokens, 0))
        if heading.call.asked.debugs(TIMELINE_HEADER):
            body.baton_timeline = ending.timeline
        return body

    def _item(self, index: int) -> ShownEmbedding:
        return ShownEmbedding(index=index, embedding=shaped(self._found[index], self._form))
