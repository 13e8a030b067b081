"""Log-probabilities in the three forms that clients get, aligned with the text of their tokens.

There are two ways to choose the entries of an answer. In vLLM's way, every token has an entry. In
OpenAI's way, an entry is shown together with the first text of its token. Text may be held back
because it could begin a stop string, or because it ends inside a character. If a stop string cuts
off text, the entries of that text are dropped too. The token that ends an answer has no text and no
entry.

An entry with twenty alternatives is some 1.5 kB of JSON. So entries are converted to JSON one by
one, when their list is written (`router.inbox.json_parts`). The constant JSON of a token is encoded
once for each token of the vocabulary.

Sources: OpenAI API reference, chat completions and completions; `prompt_logprobs`, vLLM's
OpenAI-compatible server.
"""

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from engine.messages import Logprobs
from router.inbox.json_parts import LazyItems
from router.text.detokenizer import AnswerText

NUM_CACHED = 16_384  # number of tokens, some 300 bytes each
SMALLEST_LOGPROB = -9999.0  # replaces minus infinity, which JSON lacks

# A token id and its log-probabilities; None for the first token of a prompt.
Entry = tuple[int, Logprobs | None]
BytesOf = Callable[[int], bytes]

_encode = msgspec.json.Encoder().encode


class ScoredText:
    """An `AnswerText` with an entry of log-probabilities for each token."""

    def __init__(self, text: AnswerText) -> None:
        self._text = text
        self._shown_len = 0
        self._pending: deque[tuple[int, Entry]] = deque()  # position of the token's text, and entry

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]
    ) -> tuple[str, tuple[Entry, ...]]:
        """Returns the text to show now, and the entries of tokens that begin in it or before."""
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
        """Returns the remaining text and entries at the end of the answer."""
        text = self._text.finish()
        self._shown_len += len(text)
        released = self._release()
        if not self._text.stopped:  # entries of last tokens that have no text
            released += tuple(entry for _, entry in self._pending)
        self._pending.clear()
        return text, released

    def _release(self) -> tuple[Entry, ...]:
        released = []
        while self._pending and self._pending[0][0] < self._shown_len:
            released.append(self._pending.popleft()[1])
        return tuple(released)


class LogprobsWriter(Protocol):
    """The interface for encoding the entries of one choice, in order."""

    def shape(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Returns the `logprobs` of a choice with these tokens. Its lists may be read once."""
        ...


class ChatLogprobs:
    """The form of chat completions. With `ids_for_names`, a token is named `token_id:ID`."""

    def __init__(self, bytes_of: BytesOf, num_top: int, *, ids_for_names: bool = False) -> None:
        self._bytes_of = bytes_of
        self._num_top = num_top
        self._ids_for_names = ids_for_names

    def shape(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Returns the field, with one item of `content` for each token."""
        return {"content": LazyItems(entries, self._item), "refusal": None}

    def _item(self, entry: Entry) -> Raw:
        token_id, scores = entry
        assert scores is not None
        ids, logprobs = _ranked(scores, self._num_top)
        numbers = _numbers((scores.logprob, *logprobs))
        frames = [self._frame(token_id), *map(self._frame, ids)]
        own, *top = [b + number + e for (b, e), number in zip(frames, numbers, strict=True)]
        return Raw(own[:-1] + b',"top_logprobs":[' + b",".join(top) + b"]}")

    def _frame(self, token_id: int) -> tuple[bytes, bytes]:
        """Returns the JSON of a token, before and after its log-probability."""
        begin, end = _chat_frame(self._bytes_of(token_id))
        if self._ids_for_names:
            begin = b'{"token":"token_id:%d","logprob":' % token_id
        return begin, end


class CompletionLogprobs:
    """The form of completions: parallel lists. `text_offset` counts characters.

    With `ids_for_names`, a token is named `token_id:ID`.
    """

    def __init__(self, bytes_of: BytesOf, num_top: int, *, ids_for_names: bool = False) -> None:
        self._bytes_of = bytes_of
        self._num_top = num_top
        self._ids_for_names = ids_for_names
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def shape(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Returns the field, with one item of each list for each token."""
        return {
            "tokens": LazyItems(entries, lambda entry: Raw(self._name(entry[0]))),
            "token_logprobs": LazyItems(entries, _own_logprob),
            "top_logprobs": LazyItems(entries, self._alternatives),
            "text_offset": LazyItems(entries, self._advance),
        }

    def _alternatives(self, entry: Entry) -> Raw | None:
        """Returns the JSON of the likeliest tokens and of the chosen token."""
        token_id, scores = entry
        if scores is None:
            return None
        ids, logprobs = _ranked(scores, self._num_top)
        names = map(self._name, (*ids, token_id))
        pairs = dict(zip(names, _numbers((*logprobs, scores.logprob)), strict=True))
        return Raw(b"{" + b",".join([name + b":" + pairs[name] for name in pairs]) + b"}")

    def _name(self, token_id: int) -> bytes:
        """Returns the token's text as JSON."""
        if self._ids_for_names:
            return b'"token_id:%d"' % token_id
        return _spelled(self._bytes_of(token_id))

    def _advance(self, entry: Entry) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(self._bytes_of(entry[0])))
        return offset


def prompt_entries(token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> tuple[Entry, ...]:
    """Returns the entries of a prompt. `logprobs` start with the second token."""
    return tuple(zip(token_ids, (None, *logprobs), strict=True))


def prompt_logprobs(entries: Sequence[Entry], bytes_of: BytesOf, num_top: int) -> LazyItems[Entry]:
    """Returns a prompt's field in vLLM's form: for each token, the candidates by token id."""
    return LazyItems(entries, partial(candidates, bytes_of=bytes_of, num_top=num_top))


def candidates(entry: Entry, bytes_of: BytesOf, num_top: int) -> Raw | None:
    """Returns the JSON of a token and of the likeliest tokens at its position, by token id."""
    token_id, scores = entry
    if scores is None:
        return None
    found = {token_id: (scores.logprob, scores.rank)}
    for rank, (each, logprob) in enumerate(zip(*_ranked(scores, num_top), strict=True), start=1):
        found[each] = logprob, rank
    numbers = _numbers([logprob for logprob, _ in found.values()])
    items = [
        b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'
        % (each, number, rank, _decoded(bytes_of(each)))
        for (each, (_, rank)), number in zip(found.items(), numbers, strict=True)
    ]
    return Raw(b"{" + b",".join(items) + b"}")


def _own_logprob(entry: Entry) -> float | None:
    return None if entry[1] is None else _finite(entry[1].logprob)


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Returns the mean log-probability, by which the answers of a request are ranked."""
    return sum(logprobs) / len(logprobs) if logprobs else -float("inf")


def _ranked(scores: Logprobs, num_top: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns the ids of the likeliest tokens, and their log-probabilities."""
    return scores.top_ids[:num_top], scores.top_logprobs[:num_top]


def _numbers(logprobs: Sequence[float]) -> list[bytes]:
    """Returns the JSON of each log-probability. There must be at least one."""
    return _encode([_finite(logprob) for logprob in logprobs])[1:-1].split(b",")


def _finite(logprob: float) -> float:
    return max(logprob, SMALLEST_LOGPROB)


@lru_cache(NUM_CACHED)
def _chat_frame(data: bytes) -> tuple[bytes, bytes]:
    """Returns the JSON of a token in a chat, before and after its log-probability."""
    end = b',"bytes":' + _encode(list(data)) + b"}"
    return b'{"token":' + _decoded(data) + b',"logprob":', end


@lru_cache(NUM_CACHED)
def _decoded(data: bytes) -> bytes:
    """Returns the JSON of a token's text. Invalid bytes are replaced."""
    return _encode(data.decode(errors="replace"))


@lru_cache(NUM_CACHED)
def _spelled(data: bytes) -> bytes:
    """Returns the JSON of a token's text. Invalid bytes are escaped, so that names differ."""
    try:
        return _encode(data.decode())
    except UnicodeDecodeError:
        return _encode("bytes:" + "".join(f"\\x{byte:02x}" for byte in data))
