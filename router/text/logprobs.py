"""Log-probabilities in the three shapes that clients get, kept with the text of their tokens.

There are two ways to choose the entries of an answer. With vLLM's, every token has its entry. With
OpenAI's, entries are shown with the text that they begin. Text may be held back because it could
begin a stop string or ends inside a character. Text that a stop string cuts off takes its entries
along. The token that ends an answer has no text and no entry.

An entry with twenty alternatives is some 1.5 kB of JSON. So entries become JSON one by one, when
the list that holds them is written (`router.inbox.json_parts`), from parts that are encoded once
for each token of the vocabulary.

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

NUM_CACHED = 16_384  # tokens, some 300 bytes each
SMALLEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have

# A token id and its log-probabilities; the first token of a prompt has none.
Entry = tuple[int, Logprobs | None]
BytesOf = Callable[[int], bytes]

_encode = msgspec.json.Encoder().encode


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
        """The `logprobs` of a choice that shows these tokens. Its lists are read once."""
        ...


class ChatLogprobs:
    """The shape of chat completions. With `ids_for_names`, a token is named `token_id:` its id."""

    def __init__(self, bytes_of: BytesOf, num_top: int, *, ids_for_names: bool = False) -> None:
        self._bytes_of = bytes_of
        self._num_top = num_top
        self._ids_for_names = ids_for_names

    def shape(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """`content` has one item for each token."""
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
        """The JSON of a token before and behind its number."""
        begin, end = _chat_frame(self._bytes_of(token_id))
        if self._ids_for_names:
            begin = b'{"token":"token_id:%d","logprob":' % token_id
        return begin, end


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
            "tokens": LazyItems(entries, lambda entry: Raw(self._name(entry[0]))),
            "token_logprobs": LazyItems(entries, _own_logprob),
            "top_logprobs": LazyItems(entries, self._alternatives),
            "text_offset": LazyItems(entries, self._advance),
        }

    def _alternatives(self, entry: Entry) -> Raw | None:
        """The likeliest tokens, and the chosen one."""
        token_id, scores = entry
        if scores is None:
            return None
        ids, logprobs = _ranked(scores, self._num_top)
        names = map(self._name, (*ids, token_id))
        pairs = dict(zip(names, _numbers((*logprobs, scores.logprob)), strict=True))
        return Raw(b"{" + b",".join([name + b":" + pairs[name] for name in pairs]) + b"}")

    def _name(self, token_id: int) -> bytes:
        """The token's text as JSON."""
        if self._ids_for_names:
            return b'"token_id:%d"' % token_id
        return _spelled(self._bytes_of(token_id))

    def _advance(self, entry: Entry) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(self._bytes_of(entry[0])))
        return offset


def prompt_entries(token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> tuple[Entry, ...]:
    """The entries of a prompt; `logprobs` begin with its second token."""
    return tuple(zip(token_ids, (None, *logprobs), strict=True))


def prompt_logprobs(entries: Sequence[Entry], bytes_of: BytesOf, num_top: int) -> LazyItems[Entry]:
    """vLLM's shape: for each token of a prompt, the candidates by token id."""
    return LazyItems(entries, partial(candidates, bytes_of=bytes_of, num_top=num_top))


def candidates(entry: Entry, bytes_of: BytesOf, num_top: int) -> Raw | None:
    """A token and the likeliest ones in its place, by token id."""
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
    """The mean log-probability, which ranks several answers."""
    return sum(logprobs) / len(logprobs) if logprobs else -float("inf")


def _ranked(scores: Logprobs, num_top: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The likeliest tokens, and their log-probabilities."""
    return scores.top_ids[:num_top], scores.top_logprobs[:num_top]


def _numbers(logprobs: Sequence[float]) -> list[bytes]:
    """The JSON of each number; there is at least one."""
    return _encode([_finite(logprob) for logprob in logprobs])[1:-1].split(b",")


def _finite(logprob: float) -> float:
    return max(logprob, SMALLEST_LOGPROB)


@lru_cache(NUM_CACHED)
def _chat_frame(data: bytes) -> tuple[bytes, bytes]:
    """The JSON of a token in a chat, before and behind its number."""
    end = b',"bytes":' + _encode(list(data)) + b"}"
    return b'{"token":' + _decoded(data) + b',"logprob":', end


@lru_cache(NUM_CACHED)
def _decoded(data: bytes) -> bytes:
    """The JSON of a token's text."""
    return _encode(data.decode(errors="replace"))


@lru_cache(NUM_CACHED)
def _spelled(data: bytes) -> bytes:
    """The same. Bytes that are not valid text are spelled, so that names differ."""
    try:
        return _encode(data.decode())
    except UnicodeDecodeError:
        return _encode("bytes:" + "".join(f"\\x{byte:02x}" for byte in data))
