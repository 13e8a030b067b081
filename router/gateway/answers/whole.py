"""Sends an answer as one JSON body when it is complete."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Send

from router.edge.responses import send_data
from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.embedded import EmbeddingAnswer
from router.gateway.answers.writing import (
    AnswerWriter,
    Ending,
    Heading,
    send_failure,
)
from router.machine.requests import (
    Finished,
)
from router.text.logprobs import (
    Entry,
    prompt_logprobs,
)

LONG_PROMPT_TOKENS = 256  # with twenty alternatives each, more take milliseconds to encode

_encode = msgspec.json.Encoder().encode


def whole_answer(heading: Heading, send: Send) -> AnswerWriter:
    """Returns the writer of an answer that is not streamed."""
    form = heading.call.embeddings
    if form is not None:
        return EmbeddingAnswer(heading, form, send)
    return WholeAnswer(heading, send)


class WholeAnswer:
    """Sends an answer when it is complete."""

    def __init__(self, heading: Heading, send: Send) -> None:
        self._heading = heading
        self._send = send
        self._pieces: list[list[AnswerPiece]] = [[] for _ in range(heading.num_choices)]

    @property
    def is_ready(self) -> bool:
        """Always true: pieces are only kept."""
        return True

    @property
    def shows_text_alone(self) -> bool:
        """Always true: text alone can be kept as a piece."""
        return True

    def write_at_once(self, piece: AnswerPiece) -> None:
        """Keeps the piece."""
        self._pieces[piece.choice].append(piece)

    def write_text(self, choice: int, text: str) -> None:
        """Keeps the text."""
        self._pieces[choice].append(AnswerPiece(choice, text, 0))

    async def write(self, piece: AnswerPiece) -> None:
        """Keeps the piece."""
        self._pieces[piece.choice].append(piece)

    async def end(self, ending: Ending) -> None:
        """Sends everything, or the error."""
        if not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        long = sum(map(len, ending.prompt_entries)) > LONG_PROMPT_TOKENS
        data = await asyncio.to_thread(self._body, ending) if long else self._body(ending)
        await send_data(self._send, 200, data, self._heading.headers)

    def _body(self, ending: Ending) -> bytes:
        heading = self._heading
        body = heading.fields(heading.dialect.object_name)
        choices = [self._choice(index) for index in ending.shown]
        body["choices"] = [{"index": i, **choice} for i, choice in enumerate(choices)]
        body["usage"] = ending.usage()
        self._add_prompts(body, ending.prompt_entries)
        if heading.call.timeline:
            body["baton_timeline"] = ending.timeline
        return _encode(body)

    def _choice(self, index: int) -> dict[str, Any]:
        pieces, call, dialect = self._pieces[index], self._heading.call, self._heading.dialect
        finish = pieces[-1].finish
        assert finish is not None
        logprobs = None
        if call.num_top is not None:
            entries = [entry for piece in pieces for entry in piece.entries]
            bytes_of = call.served.text.bytes_of
            writer = dialect.logprobs_writer(
                bytes_of, call.num_top, ids_for_names=call.ids_for_names
            )
            logprobs = writer.shape(entries)
        text = "".join(piece.text for piece in pieces)
        deltas = [delta for piece in pieces for delta in piece.calls]
        reasoning = "".join(piece.reasoning for piece in pieces)
        choice = dialect.whole_choice(text, deltas, finish, logprobs, reasoning)
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        choice["stop_reason"] = pieces[-1].stop_reason
        choice["token_ids"] = token_ids if call.return_token_ids else None
        return choice

    def _add_prompts(self, body: dict[str, Any], prompts: Sequence[tuple[Entry, ...]]) -> None:
        """Adds ids and scores of prompts as vLLM: to a chat, or to each choice of a completion.

        They are null if the client did not ask for them.
        """
        call = self._heading.call
        for index, (leader, entries) in enumerate(zip(call.leaders, prompts, strict=True)):
            scores = None
            if call.num_prompt_top is not None:
                scores = prompt_logprobs(entries, call.served.text.bytes_of, call.num_prompt_top)
            prompt = {
                "prompt_token_ids": leader.token_ids if call.return_token_ids else None,
                "prompt_logprobs": scores,
            }
            first = index * call.num_shown
            is_chat = self._heading.dialect.is_chat
            for place in [body] if is_chat else body["choices"][first : first + call.num_shown]:
                place |= prompt
