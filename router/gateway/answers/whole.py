"""Sends an answer as one JSON body when it is complete.

A long answer is encoded in parts. Between two parts, tenants take turns
(`router.inbox.fair_queue`).
"""

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from io import StringIO
from typing import Any

import msgspec
from starlette.types import Send

from router.edge.responses import send_data, send_parts
from router.gateway.answers.choice import AnswerPiece, CallDelta
from router.gateway.answers.writing import (
    TIMELINE_HEADER,
    AnswerWriter,
    Ending,
    Heading,
    send_failure,
    usage_of,
)
from router.gateway.requests.chat import ChatAnswer, ChatChoice
from router.gateway.requests.completion import CompletionAnswer, CompletionChoice
from router.gateway.requests.embedding import EmbeddingList, ShownEmbedding
from router.inbox.json_parts import LazyItems, encode_lazy, json_parts
from router.machine.requests import Failed, Finished
from router.text.embeddings import EmbeddingForm, are_numbers, shaped
from router.text.logprobs import (
    Entry,
    prompt_logprobs,
)

SHORT_ENTRIES = 16  # log-probabilities that take 1 ms to encode, with twenty alternatives each
SHORT_TOKENS = 8192  # maximum token ids and characters of a short answer, also 1 ms to encode
SHORT_NUMBERS = 8192  # maximum numbers of a short answer of embeddings, also 1 ms to encode


def whole_answer(heading: Heading, send: Send) -> AnswerWriter:
    """Returns a writer that sends the whole answer when it is complete."""
    form = heading.call.embedding
    if form is not None:
        return EmbeddingAnswer(heading, form, send)
    return WholeAnswer(heading, send)


class KeptChoice:
    """The text, tokens and scores of one choice so far."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.token_ids = array("I")
        self.calls: list[CallDelta] = []
        self.last: AnswerPiece | None = None
        self._text = StringIO()  # needs less memory than a list of pieces
        self._reasoning = StringIO()

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.getvalue()

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return self._reasoning.getvalue()

    def add(self, piece: AnswerPiece) -> None:
        """Adds the next piece of the choice."""
        self.last = piece
        self._text.write(piece.text)
        self._reasoning.write(piece.reasoning)
        self.entries += piece.entries
        self.token_ids.extend(piece.token_ids)
        self.calls += piece.calls


class CompleteWriter(AnswerWriter):
    """Sends an answer as one JSON body, in parts if it is long."""

    def __init__(self, heading: Heading, send: Send) -> None:
        self._heading = heading
        self._send = send

    async def end(self, ending: Ending) -> None:
        """Sends the whole answer, or the error if the answer failed."""
        heading = self._heading
        if not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
        elif self._is_short(ending):
            await send_data(self._send, 200, encode_lazy(self._body(ending)), heading.headers)
        else:
            await heading.turn()
            parts = json_parts(self._body(ending))
            await send_parts(self._send, parts, heading.headers, heading.turn)

    @abstractmethod
    def _is_short(self, ending: Ending) -> bool:
        """True if encoding the body takes at most a few milliseconds."""

    @abstractmethod
    def _body(self, ending: Ending) -> object:
        """Returns the body, not encoded yet."""


class WholeAnswer(CompleteWriter):
    """Sends an answer with choices when it is complete."""

    def __init__(self, heading: Heading, send: Send) -> None:
        super().__init__(heading, send)
        self._kept = [KeptChoice() for _ in heading.call.requests]

    def write(self, piece: AnswerPiece) -> None:
        """Keeps the piece for the whole answer."""
        self._kept[piece.choice].add(piece)

    def _is_short(self, ending: Ending) -> bool:
        num_entries = sum([len(kept.entries) for kept in self._kept])
        num_entries += sum(map(len, ending.prompt_entries))
        num_tokens = ending.completion_tokens
        if self._heading.call.body.return_token_ids:
            num_tokens += ending.prompt_tokens
        return num_entries <= SHORT_ENTRIES and num_tokens <= SHORT_TOKENS

    def _body(self, ending: Ending) -> ChatAnswer | CompletionAnswer:
        heading = self._heading
        choices = [self._choice(index, place) for place, index in enumerate(ending.shown)]
        kind: Any = ChatAnswer if heading.dialect.is_chat else CompletionAnswer
        fields = heading.fields(heading.dialect.object_name)
        body: ChatAnswer | CompletionAnswer = kind(**fields, choices=choices, usage=ending.usage())
        self._add_prompts([body] if heading.dialect.is_chat else choices, ending.prompt_entries)
        if heading.call.asked.debugs(TIMELINE_HEADER):
            body.baton_timeline = ending.timeline
        return body

    def _choice(self, index: int, place: int) -> ChatChoice | CompletionChoice:
        """Returns a choice of the body; `index` is its position among all shown choices."""
        kept, call, dialect = self._kept[index], self._heading.call, self._heading.dialect
        last = kept.last
        assert last is not None
        assert last.finish is not None
        logprobs = None
        if (num_top := call.body.num_top_logprobs) is not None:
            writer = dialect.logprobs_writer(call, num_top)
            logprobs = writer.shape(kept.entries)
        choice = dialect.whole_choice(kept.text, kept.calls, last.finish, logprobs, kept.reasoning)
        choice.index, choice.stop_reason = place, last.stop_reason
        choice.token_ids = kept.token_ids.tolist() if call.body.return_token_ids else None
        return choice

    def _add_prompts(self, places: Sequence[Any], prompts: Sequence[tuple[Entry, ...]]) -> None:
        """Adds token ids and scores of prompts in the same places as vLLM.

        A chat has these fields once, a completion in each choice. A field is null if the client did
        not ask for it.
        """
        call, num_each = self._heading.call, len(places) // len(prompts)
        for index, (leader, entries) in enumerate(zip(call.leaders, prompts, strict=True)):
            scores = None
            if (num_top := call.body.prompt_logprobs) is not None:
                scores = prompt_logprobs(entries, call.served.text.bytes_of, num_top)
            for place in places[index * num_each : (index + 1) * num_each]:
                place.prompt_token_ids = leader.token_ids if call.body.return_token_ids else None
                place.prompt_logprobs = scores


class EmbeddingAnswer(CompleteWriter):
    """Sends the embeddings of all inputs. Tokens that workers sampled are ignored."""

    def __init__(self, heading: Heading, form: EmbeddingForm, send: Send) -> None:
        super().__init__(heading, send)
        self._form = form
        self._found = [b""] * len(heading.call.requests)
        self._are_numbers = True  # False once an embedding has an infinite value or NaN

    def write(self, piece: AnswerPiece) -> None:
        """Keeps the embedding in a piece, if the piece has one."""
        if piece.embedding:
            self._found[piece.choice] = piece.embedding
            self._are_numbers = self._are_numbers and are_numbers(piece.embedding, self._form)

    async def end(self, ending: Ending) -> None:
        """Sends all embeddings, or the error if the answer failed."""
        if not self._are_numbers and isinstance(ending.outcome, Finished):
            outcome = Failed("the model gave values that are no numbers")
            ending = msgspec.structs.replace(ending, outcome=outcome)
        await super().end(ending)

    def _is_short(self, ending: Ending) -> bool:
        return len(self._found) * self._form.size <= SHORT_NUMBERS

    def _body(self, ending: Ending) -> EmbeddingList:
        """Returns the whole answer with all embeddings, not encoded yet."""
        heading = self._heading
        data: Any = LazyItems(range(len(self._found)), self._item)
        fields = heading.fields(heading.dialect.object_name)
        body = EmbeddingList(**fields, data=data, usage=usage_of(ending.prompt_tokens, 0))
        if heading.call.asked.debugs(TIMELINE_HEADER):
            body.baton_timeline = ending.timeline
        return body

    def _item(self, index: int) -> ShownEmbedding:
        return ShownEmbedding(index=index, embedding=shaped(self._found[index], self._form))
