"""Writes answers as ModelInferResponse: one response for a whole answer, or one for each piece.

Every tensor has one item for each choice. In a stream a response has the new text of one choice;
the other choices have empty texts. The parameter `triton_final_response` marks the last response of
a stream, as in Triton.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.whole import KeptChoice
from router.gateway.answers.writing import AnswerWriter, Ending, Heading
from router.gateway.inference import inference_pb2 as pb
from router.gateway.inference.calls import OUTPUTS, SCORES_OUTPUT, TEXT_OUTPUT, AnswerForm
from router.gateway.inference.tensors import Tensor, parameter, write_tensors
from router.inbox.json_parts import LazyItems, encode_lazy, joined_in_turns, json_parts
from router.machine.requests import Finished, Outcome
from router.text.logprobs import Entry, prompt_logprobs

FINAL = "triton_final_response"
IGNORED = "baton_ignored"  # response parameter that lists the ignored fields of a request
_GOES_ON = b"None"  # finish reason of a running choice, as in Triton's vLLM backend

Send = Callable[[Any], Awaitable[None]]
Fail = Callable[[Outcome], Awaitable[None]]


class WholeInference(AnswerWriter):
    """Sends one response when the answer is complete."""

    def __init__(self, heading: Heading, form: AnswerForm, send: Send, fail: Fail) -> None:
        self._heading = heading
        self._form = form
        self._send = send
        self._fail = fail
        self._kept = [KeptChoice() for _ in heading.call.requests]

    def write(self, piece: AnswerPiece) -> None:
        """Keeps the piece for the response."""
        self._kept[piece.choice].add(piece)

    async def end(self, ending: Ending) -> None:
        """Sends the whole answer, or passes the outcome to `fail` if the answer failed."""
        if not isinstance(ending.outcome, Finished):
            await self._fail(ending.outcome)
            return
        heading = self._heading
        prompts = await self._prompts() if self._form.has_prompt else None
        num_each = len(ending.shown) // len(heading.call.echoes)
        choices, scores = [], []
        for place, index in enumerate(ending.shown):
            kept = self._kept[index]
            begin = "" if prompts is None else prompts[place // num_each]
            assert kept.last is not None
            choices.append(msgspec.structs.replace(kept.last, text=begin + kept.text))
            if self._form.has_scores:
                parts = json_parts(_scores_of(heading, kept.entries))
                scores.append(await joined_in_turns(parts, heading.turn))
        sums = [_sum_of(self._kept[index].entries) for index in ending.shown]
        await self._send(_response(heading, self._form, choices, sums, scores))

    async def _prompts(self) -> Sequence[str]:
        if self._form.prompts is not None:
            return self._form.prompts
        call = self._heading.call
        decode = call.served.text.decode_text
        return [await asyncio.to_thread(decode, leader.token_ids) for leader in call.leaders]


class StreamedInference(AnswerWriter):
    """Sends a response for each piece of the answer."""

    def __init__(self, heading: Heading, form: AnswerForm, send: Send, fail: Fail) -> None:
        self._heading = heading
        self._form = form
        self._send = send
        self._fail = fail
        self._unsent: list[AnswerPiece] = []
        self._unfinished = len(heading.call.requests)
        self._counted = [0] * len(heading.call.requests)  # by choice: tokens reported so far
        self._sums = [0.0] * len(
            heading.call.requests
        )  # sums of log-probabilities so far, by choice
        self._last: Any = None  # the last response, which `end` sends

    @property
    def is_full(self) -> bool:
        """Always True, because each message waits until gRPC accepts it."""
        return True

    def write(self, piece: AnswerPiece) -> None:
        """Keeps a piece for `flush`, unless the piece is empty."""
        if not piece.is_empty or piece.finish is not None:
            self._unsent.append(piece)

    async def flush(self) -> None:
        """Sends a response for each kept piece, except the answer's last response."""
        while self._unsent:
            piece = self._unsent.pop(0)
            response = self._response_to(piece)
            self._unfinished -= piece.finish is not None
            if self._unfinished:
                response.parameters[FINAL].CopyFrom(parameter(False))  # noqa: FBT003
                await self._send(response)
            else:
                self._last = response

    async def end(self, ending: Ending) -> None:
        """Sends the last response, or passes the outcome to `fail` if the answer failed."""
        await self.flush()
        if not isinstance(ending.outcome, Finished):
            await self._fail(ending.outcome)
            return
        self._last.parameters[FINAL].CopyFrom(parameter(True))  # noqa: FBT003
        await self._send(self._last)

    def _response_to(self, piece: AnswerPiece) -> Any:
        choices = [AnswerPiece(index, "", 0) for index in range(len(self._heading.call.requests))]
        news = piece.num_tokens - self._counted[piece.choice]
        self._counted[piece.choice] = piece.num_tokens
        self._sums[piece.choice] += _sum_of(piece.entries)
        choices[piece.choice] = msgspec.structs.replace(piece, num_tokens=news)
        scores = [self._scores(each) for each in choices]
        return _response(self._heading, self._form, choices, self._sums, scores)

    def _scores(self, piece: AnswerPiece) -> bytes:
        if not self._form.has_scores:
            return b""
        return encode_lazy(_scores_of(self._heading, piece.entries))


def _response(
    heading: Heading,
    form: AnswerForm,
    choices: Sequence[AnswerPiece],
    sums: Sequence[float],
    scores: Sequence[bytes],
) -> Any:
    """Returns a ModelInferResponse with the outputs that the client wants."""
    call = heading.call
    values: dict[str, Sequence[Any]] = {
        TEXT_OUTPUT: [choice.text.encode() for choice in choices],
        "finish_reason": [(choice.finish or "").encode() or _GOES_ON for choice in choices],
        "num_input_tokens": [call.prompt_len],
        "num_output_tokens": [choice.num_tokens for choice in choices],
        "cumulative_logprob": sums,
        SCORES_OUTPUT: scores,
    }
    tensors = {
        name: Tensor(OUTPUTS[name], (len(values[name]),), tuple(values[name]))
        for name in OUTPUTS
        if name in form.outputs
    }
    response = pb.ModelInferResponse(
        model_name=call.model, model_version=call.served.name, id=form.id
    )
    if call.ignored:
        response.parameters[IGNORED].CopyFrom(parameter(", ".join(call.ignored)))
    write_tensors(response, tensors, raw=form.is_raw)
    return response


def _sum_of(entries: Sequence[Entry]) -> float:
    """Returns the sum of the log-probabilities of these tokens."""
    return math.fsum(scores.logprob for _, scores in entries if scores is not None)


def _scores_of(heading: Heading, entries: Sequence[Entry]) -> LazyItems[Entry]:
    """Returns a JSON list with an object per token: the chosen and the likeliest tokens, by id."""
    call = heading.call
    return prompt_logprobs(entries, call.served.text.bytes_of, call.body.num_top_logprobs or 0)
