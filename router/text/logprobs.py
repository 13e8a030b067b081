"""Log-probabilities in the three shapes that clients get, kept with the text of their tokens.

There are two ways to choose the entries of an answer. With vLLM's, every token has its entry. With
OpenAI's, entries are shown with the text that they begin. Text may be held back because it could
begin a stop string or ends inside a character. Text that a stop string cuts off takes its entries
along. The token that ends an answer has no text and no entry.

Sources: OpenAI API reference, chat completions and completions; `prompt_logprobs`, vLLM's
OpenAI-compatible server.
"""

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.messages import Logprobs
from router.text.detokenizer import AnswerText

SMALLEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have

# A token id and its log-probabilities; the first token of a prompt has none.
Entry = tuple[int, Logprobs | None]
BytesOf = Callable[[int], bytes]


class ScoredText:
    """An `AnswerText` whose tokens come with log-probabilities."""

    def __init__(self, text: AnswerText) -> None:
        self._text = text
        self._shown_len = 0
        self._pending: deque[tuple[int, Entry]] = deque()  # where its text begins, and the entry

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]
    ) -> tuple[str, tuple[Entry, ...]]:
        """Returns text to show now, and the entries of tokens that begin in it or before."""
        pieces = []
        for token_id, scores in zip(token_ids, logprobs, strict=True):
            if self._text.stopped:
                break
            start = self._shown_len + self._text.held_len
            if not self._text.hides(token_id):
                self._pending.append((start, (token_id, scores)))
            piece = self._text.push((token_id,))
            self._shown_len += len(piece)
            pieces.append(piece)
        return "".join(pieces), self._release()

    def finish(self) -> tuple[str, tuple[Entry, ...]]:
        """Returns the text and entries still held back, at the end of the answer."""
        text = self._text.finish()
        self._shown_len += len(text)
        released = self._release()
        if not self._text.stopped:  # tokens without text, at the end
            released += tuple(entry for _, entry in self._pending)
        self._pending.clear()
        return text, released

    def _release(self) -> tuple[Entry, ...]:
        released = []
        while self._pending and self._pending[0][0] < self._shown_len:
            released.append(self._pending.popleft()[1])
        return tuple(released)


class LogprobsWriter(Protocol):
    """Shapes the entries of one choice, in order."""

    def shape(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The `logprobs` of a choice that shows these tokens."""
        ...


class ChatLogprobs:
    """The shape of chat completions. With `ids_for_names`, a token is named `token_id:` its id."""

    def __init__(self, bytes_of: BytesOf, num_top: int, *, ids_for_names: bool = False) -> None:
        self._bytes_of = bytes_of
        self._num_top = num_top
        self._ids_for_names = ids_for_names

    def shape(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """`content` has one item for each token."""
        return {"content": [self._item(*entry) for entry in entries], "refusal": None}

    def _item(self, token_id: int, scores: Logprobs | None) -> dict[str, Any]:
        assert scores is not None
        top = [self._token(*pair) for pair in _top(scores, self._num_top)]
        return self._token(token_id, scores.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes_of(token_id)
        name = _id_name(token_id) if self._ids_for_names else data.decode(errors="replace")
        return {"token": name, "logprob": _finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """The shape of completions: parallel lists. `text_offset` counts characters.

    With `ids_for_names`, a token is named `token_id:` its id.
    """

    def __init__(self, bytes_of: BytesOf, num_top: int, *, ids_for_names: bool = False) -> None:
        self._bytes_of = bytes_of
        self._num_top = num_top
        self._ids_for_names = ids_for_names
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def shape(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """One item for each token in each of the lists."""
        return {
            "tokens": [self._name(token_id) for token_id, _ in entries],
            "token_logprobs": [None if s is None else _finite(s.logprob) for _, s in entries],
            "top_logprobs": [self._alternatives(*entry) for entry in entries],
            "text_offset": [self._advance(token_id) for token_id, _ in entries],
        }

    def _alternatives(self, token_id: int, scores: Logprobs | None) -> dict[str, float] | None:
        """The likeliest tokens, and the chosen one."""
        if scores is None:
            return None
        pairs = [*_top(scores, self._num_top), (token_id, scores.logprob)]
        return {self._name(i): _finite(logprob) for i, logprob in pairs}

    def _name(self, token_id: int) -> str:
        """The token's text. Bytes that are not valid text are spelled, so that names differ."""
        if self._ids_for_names:
            return _id_name(token_id)
        data = self._bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(self._bytes_of(token_id)))
        return offset


def prompt_entries(token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> tuple[Entry, ...]:
    """The entries of a prompt; `logprobs` begin with its second token."""
    return tuple(zip(token_ids, (None, *logprobs), strict=True))


def prompt_logprobs(
    entries: Sequence[Entry], bytes_of: BytesOf, num_top: int
) -> list[Mapping[str, Any] | None]:
    """vLLM's shape: for each token of a prompt, the candidates by token id."""
    return [_candidates(*entry, bytes_of, num_top) for entry in entries]


def _candidates(
    token_id: int, scores: Logprobs | None, bytes_of: BytesOf, num_top: int
) -> dict[str, Any] | None:
    if scores is None:
        return None
    ranked = [(token_id, scores.logprob, scores.rank)]
    ranked += [(i, p, rank) for rank, (i, p) in enumerate(_top(scores, num_top), start=1)]
    return {
        str(i): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": bytes_of(i).decode(errors="replace"),
        }
        for i, logprob, rank in ranked
    }


def mean_logprob(scores: Sequence[Logprobs]) -> float:
    """The mean log-probability, which ranks several answers."""
    return sum(s.logprob for s in scores) / len(scores) if scores else -float("inf")


def _top(scores: Logprobs, num_top: int) -> list[tuple[int, float]]:
    return list(zip(scores.top_ids, scores.top_logprobs, strict=True))[:num_top]


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, SMALLEST_LOGPROB)
