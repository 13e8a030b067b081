"""Guides by llguidance: the tokens that a schema, an expression or a grammar allows next.

Every grammar is translated to llguidance's Lark dialect. A mask depends only on the bytes of the
answer so far, because no tokenization is forced (`no_forcing`). So all workers compute the same
mask, with or without drafts. The mask contains exactly the ids with which the answer can continue.

1. `LlGuides.prepare` compiles a grammar for a tokenizer, on any thread, and caches the result.
   For gateways, `engine.grammar.child` does this before a worker receives the grammar.
2. `LlGuides.open` makes a guide: a copy that shares the tables of the compiled grammar.

A client's costs are bounded: the length of the source, the work of compiling, the work for one
token, and the memory of one grammar and of all cached grammars. If a grammar exceeds a bound while
an answer is generated, its guide has a `fault`. Grammars are compiled on a thread with a large
stack, because their rules may be nested deeply.

Sources: github.com/guidance-ai/llguidance, docs/syntax.md, docs/json_schema.md and parser/src.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from tokenizers import Tokenizer

from engine.devices.heap import return_freed_memory
from engine.errors import GrammarError
from engine.grammar.ebnf import is_ebnf, lark_of
from engine.grammar.guide import Guide
from engine.grammar.json_schemas import followed
from engine.grammar.rewriting.patterns import regex_fault
from engine.grammar.thinking import ThinkingGuide
from engine.grammar.tokens import TokenGuide, rules_of
from engine.messages import Grammar, GrammarKind

MAX_SOURCE_LEN = 128 * 2**10  # characters of one source
MAX_MESSAGE_LEN = 300  # characters of an error message
MAX_LEXER_STATES = 16_000  # states of one lexer; each state takes about 2 kB
# expressions that one compilation may create; the largest schemas in use need this number
COMPILING_FUEL = 500_000
MASK_FUEL = 100_000  # most expressions that the computation of one mask may create
MASK_ITEMS = 5_000  # most parser items for one mask: 0.05 s for ambiguous rules
MAX_CACHED_BYTES = 2**30  # estimated memory of all cached grammars
COMPILED_BETWEEN_TRIMS = 16  # freed memory is returned to the system after this many grammars
STATES_BYTES = MAX_LEXER_STATES * 2048  # most memory that a guide adds to its grammar
COMPILED_BYTES_PER_S = 150 * 2**20  # most memory that one second of compilation adds, as measured
MAX_TOKEN_S = 0.1  # CPU seconds for one token; large schemas need 0.04
STACK_BYTES = 256 * 2**20  # address space of the stack; little of this memory is ever written
WORD_BITS = 32

# With this option llguidance forces no tokenization: the grammar alone determines the bytes.
_HEADER = '%llguidance {"no_forcing": true}\n'
_JSON = "%json"
# Each alternative matches up to its own end or the end of the line, so one pass reads a source.
LARK_TOKEN = re.compile(
    r"""//[^\n]*+|"(?:\\.|[^"\\\n])*+"?+|/(?:\\.|[^/\\\n])*+/?+|[\w-]++|\s++|.""", re.DOTALL
)
_REFUSED_OPTIONS = {"max_tokens", "stop", "stop_capture", "temperature"}
_BLANK = re.compile(r"\s*+")
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: |(?=invalid regex))")
_QUOTED_LINES = re.compile(r"\n +\d+ \| ")

T = TypeVar("T")
_Kept = tuple[bytes, Grammar]  # the salt of the tenants that share the grammar, and the grammar


class LlGuides:
    """Makes guides for one tokenizer; implements `engine.grammar.guide.Guides`. All threads may
    call it.

    `vocab_size` is the size of the model's vocabulary: ids without a token are never allowed. The
    tokenizer is loaded for the first grammar.
    """

    def __init__(
        self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[_Kept, Future[_Compiled]] = OrderedDict()
        self._num_compiled = 0

    def prepare(self, grammar: Grammar) -> None:
        """Compiles the grammar unless it is in the cache. Raises GrammarError."""
        self._prototype((b"", grammar))

    def open(self, grammar: Grammar, answer: Sequence[int], salt: bytes = b"") -> Guide:
        """Returns a guide that has consumed `answer`. Raises GrammarError, also if the grammar
        forbids a token of the answer.
        """
        if grammar.thinking is not None:
            guide = ThinkingGuide(
                self.open(Grammar(grammar.kind, grammar.source), (), salt),
                grammar.thinking,
                vocab_size=self._vocab_size,
            )
            for token_id in answer:
                guide.consume(token_id)
            if guide.fault is not None:
                raise GrammarError(guide.fault)
            return guide
        if grammar.kind is GrammarKind.TOKENS:
            by_tokens = TokenGuide(rules_of(grammar), self._vocab_size)
            by_tokens.replay(answer)
            return by_tokens
        kept = (salt, grammar)
        matcher = self._prototype(kept).deep_copy()
        by_text = LlGuide(matcher, self._loaded(), on_fault=lambda: self._remove(kept))
        by_text.replay(answer)
        if by_text.fault is not None:
            raise GrammarError(by_text.fault)
        return by_text

    def _prototype(self, kept: _Kept) -> LLMatcher:
        """Returns the compiled grammar. Concurrent callers wait for the result of the first
        caller.
        """
        with self._lock:
            future = self._compiled.get(kept)
            mine = future is None
            if future is None:
                future = self._compiled[kept] = Future()
            self._compiled.move_to_end(kept)
        if mine:
            try:
                future.set_result(_compile(self._loaded().tokenizer, kept[1]))
            except BaseException as error:
                future.set_exception(error)
            self._evict()
        try:
            return future.result().matcher
        finally:
            del future  # the error's traceback refers to this frame

    def _evict(self) -> None:
        """Evicts the least recently used grammars until the rest fits into MAX_CACHED_BYTES.

        Sometimes returns freed memory to the system, which the C library would otherwise keep.
        """
        with self._lock:
            self._num_compiled += 1
            is_due = self._num_compiled % COMPILED_BETWEEN_TRIMS == 0
            total_bytes = sum(map(_bytes_of, self._compiled.values()))
            while total_bytes > MAX_CACHED_BYTES and len(self._compiled) > 1:
                _, future = self._compiled.popitem(last=False)
                total_bytes -= _bytes_of(future)
        if is_due:
            return_freed_memory()

    @property
    def cached_bytes(self) -> int:
        """Returns the estimated memory of the cached grammars."""
        with self._lock:
            return sum(map(_bytes_of, self._compiled.values()))

    def load(self) -> None:
        """Loads the tokenizer now, before the first grammar. Raises GrammarError if no guide is
        possible.
        """
        self._loaded()

    def _loaded(self) -> "_Vocabulary":
        with self._lock:
            if self._vocabulary is None:
                facts = (self._tokenizer_file, self._vocab_size, self._eos_token_ids)
                self._vocabulary = _translated(lambda: _load(*facts))
            return self._vocabulary

    def _remove(self, kept: _Kept) -> None:
        """Removes a grammar from the cache after its guide had a fault: other guides share its
        tables.
        """
        with self._lock:
            self._compiled.pop(kept, None)


class LlGuide:
    """The grammar's state for one answer; implements `engine.grammar.guide.Guide`. After a token
    that ends the answer, only further end tokens can follow. llguidance does not count these end
    tokens.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: "_Vocabulary", *, on_fault: Callable[[], None]
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._on_fault = on_fault
        self.fault: str | None = None

    def consume(self, token_id: int) -> None:
        """Advances the guide by the next token. A token that the mask did not allow causes a
        fault.
        """
        begin_s = time.thread_time()
        if not self._is_over:
            self._matcher.consume_token(token_id)
        elif token_id not in self._vocabulary.eos_token_ids:
            self._fail(f"token {token_id} follows a complete answer")
        self._check(begin_s, 1)

    def replay(self, answer: Sequence[int]) -> None:
        """Advances the guide by all these tokens, in order."""
        begin_s = time.thread_time()
        eos = self._vocabulary.eos_token_ids
        ends = _length_until(answer, lambda token_id: token_id in eos)
        self._matcher.consume_tokens(list(answer[:ends]))
        self._check(begin_s, ends)
        for token_id in answer[ends:]:
            self.consume(token_id)

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """Returns the number of leading proposed tokens that the grammar allows one after the
        other.
        """
        begin_s = time.thread_time()
        vocabulary = self._vocabulary
        known = ahead[: _length_until(ahead, lambda token_id: token_id >= vocabulary.num_ids)]
        count, over = 0, self._is_over
        if not over and known:
            count = self._matcher.try_consume_tokens(list(known))
            over = self._matcher.is_stopped()
            self._matcher.rollback(count)
        if self._check(begin_s, len(ahead)) is not None:
            return 0
        if not over:
            return count
        return count + _length_until(known[count:], lambda t: t not in vocabulary.eos_token_ids)

    def masks(self, ahead: Sequence[int]) -> np.ndarray:
        """Returns masks uint32 [len(ahead) + 1, words], as `engine.grammar.guide.Guide` defines
        them; all zero after a fault.
        """
        begin_s = time.thread_time()
        vocabulary = self._vocabulary
        rows = np.zeros((len(ahead) + 1, vocabulary.words_computed), dtype=np.uint32)
        if self._is_over:
            rows[:] = vocabulary.eos_words
        elif ahead:
            self._matcher.unsafe_compute_mask_ptr_with_draft_token(  # type: ignore[attr-defined]
                rows.ctypes.data, rows.strides[0], list(ahead)
            )
            # Tokens after an end token are left out.
            rows[~rows.any(axis=1)] = vocabulary.eos_words
        else:
            self._matcher.unsafe_compute_mask_ptr(rows.ctypes.data, rows.strides[0])
        if self._check(begin_s, len(rows)) is not None:
            rows[:] = 0
        return vocabulary.trimmed(rows)

    @property
    def _is_over(self) -> bool:
        return self.fault is not None or self._matcher.is_stopped()

    def _check(self, begin_s: float, num_tokens: int) -> str | None:
        """Returns the guide's fault, or None, after it has processed `num_tokens` tokens."""
        if self.fault is None and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        elif self.fault is None and time.thread_time() - begin_s > MAX_TOKEN_S * (num_tokens + 1):
            self._fail("following the grammar takes too long")
        return self.fault

    def _fail(self, message: str) -> None:
        self.fault = _shortened(message)
        self._on_fault()


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled grammar: a matcher before its first token, and its estimated memory in bytes."""

    matcher: LLMatcher
    num_bytes: int


def _bytes_of(future: "Future[_Compiled]") -> int:
    """Returns the estimated memory of a grammar. STATES_BYTES is returned for a grammar that was
    refused or is still being compiled.
    """
    if future.done() and future.exception() is None:
        return future.result().num_bytes
    return STATES_BYTES


class _Vocabulary:
    """A tokenizer, with the number of words in its masks."""

    def __init__(
        self, tokenizer: LLTokenizer, num_tokens: int, vocab_size: int, eos: Sequence[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos)
        self.num_ids = min(num_tokens, vocab_size)  # ids that have both a token and a logit
        self.words_computed = -(-tokenizer.vocab_size // WORD_BITS)
        self._num_words = -(-vocab_size // WORD_BITS)
        self.eos_words = _words_of(self.eos_token_ids, self.words_computed)
        self._known_words = _words_of(range(self.num_ids), self._num_words)

    def trimmed(self, rows: np.ndarray) -> np.ndarray:
        """Returns the masks, cut to the number of the model's logits. Bits of ids without a token
        are cleared.
        """
        trimmed = rows[:, : self._num_words]
        trimmed &= self._known_words
        return trimmed


def _load(tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> _Vocabulary:
    """Loads a tokenizer. Raises GrammarError if its tokens have no bytes of their own."""
    text = tokenizer_file.read_text(encoding="utf-8")
    ids = Tokenizer.from_str(text).get_vocab(with_added_tokens=True).values()
    num_tokens = max(ids, default=-1) + 1
    eos = [token_id for token_id in eos_token_ids if token_id < min(num_tokens, vocab_size)]
    if not eos:
        raise GrammarError("the model has no token that ends an answer")
    width = max(vocab_size, num_tokens)
    tokenizer = LLTokenizer(text, n_vocab=width, eos_token=eos)
    return _Vocabulary(tokenizer, num_tokens, vocab_size, eos)


def to_lark(grammar: Grammar) -> str:
    """Translates a grammar of any kind to llguidance's Lark dialect. Raises GrammarError."""
    source = grammar.source
    if len(source) > MAX_SOURCE_LEN:
        raise GrammarError(f"the grammar has more than {MAX_SOURCE_LEN} characters")
    if "\0" in source:
        raise GrammarError("the grammar holds a null character")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _HEADER + "start: " + _json_directive(_decoded(source))
        case GrammarKind.REGEX:
            if (fault := regex_fault(source)) is not None:
                raise GrammarError(fault)
            return f"{_HEADER}start: /{regex_to_lark(source, use_ascii='')}/\n"
        case GrammarKind.LARK:
            return _from_lark(lark_of(source) if is_ebnf(source) else source)
        case GrammarKind.TOKENS:
            raise GrammarError("rules for tokens are no text")


def _from_lark(source: str) -> str:
    """Appends the options to the end of the source, so that errors have the client's line
    numbers.
    """
    if source.lstrip().startswith("{"):
        raise GrammarError("a grammar must be written in Lark or EBNF")
    for option in _rule_options(source):
        if option in _REFUSED_OPTIONS:
            raise GrammarError(f"the option {option} is not supported")
    parts, begin = list[str](), 0
    while (found := source.find(_JSON, begin)) >= 0:
        at = _BLANK.match(source, found + len(_JSON)).end()  # type: ignore[union-attr]
        try:
            schema, end = _decoder.raw_decode(source, at)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{_JSON}: {error}") from error
        parts += [source[begin:found], _json_directive(schema)]
        begin = end
    return "".join([*parts, source[begin:], "\n", _HEADER])


def _rule_options(source: str) -> Iterator[str]:
    """Returns the options of a rule: the words in brackets before the colon."""
    words, depth, ended = list[str](), 0, False
    for found in LARK_TOKEN.finditer(source):
        token = found[0]
        if token == "[":
            words, depth = [] if depth == 0 else words, depth + 1
        elif token == "]":
            depth = max(depth - 1, 0)
        elif token == ":" and ended:
            yield from words
        elif depth > 0:
            words.append(token)
        if not token.isspace() and not token.startswith("//"):
            ended = token == "]" and depth == 0


def _json_directive(schema: object) -> str:
    return f"{_JSON} " + json.dumps(followed(schema), ensure_ascii=False)


def _decoded(source: str) -> object:
    try:
        return json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    """Raises an error for NaN and Infinity: Python's JSON parser accepts them, JSON does not."""
    raise ValueError(f"{name} is no number")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


def _compile(tokenizer: LLTokenizer, grammar: Grammar) -> _Compiled:
    """Compiles a grammar. Raises GrammarError, also if the first mask of an answer fails.

    The mask after an object's opening brace is computed too: at that place the rules of all
    optional properties apply.
    """

    def compiled() -> _Compiled:
        begin_s = time.thread_time()
        matcher = LLMatcher(tokenizer, to_lark(grammar), log_level=0, limits=_limits())
        tried = matcher.deep_copy()
        tried.compute_bitmask()
        for token in tokenizer.tokenize_str(_OBJECT_BEGIN):
            if tried.is_error() or not tried.try_consume_tokens([token]):
                break
            tried.compute_bitmask()
        for candidate in (matcher, tried):
            if candidate.is_error():
                raise _refusal(candidate.get_error())
        # the compiler would ignore a part of the grammar
        if warnings := matcher.get_grammar_warnings():
            raise _refusal(warnings[0])
        spent_s = time.thread_time() - begin_s
        return _Compiled(matcher, STATES_BYTES + int(spent_s * COMPILED_BYTES_PER_S))

    return _deep(compiled)


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=MASK_ITEMS,
        initial_lexer_fuel=COMPILING_FUEL,
        step_lexer_fuel=MASK_FUEL,
        step_max_items=MASK_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


_OBJECT_BEGIN = "{\n"  # an object's beginning with indentation, which allows the most rules
_stack_size_lock = threading.Lock()


def _deep(work: Callable[[], T]) -> T:
    """Runs `work` on a thread with a large stack. Returns the result of `work`, or raises its
    error.
    """
    future: Future[T] = Future()

    def run(future: Future[T]) -> None:
        try:
            future.set_result(_translated(work))
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future  # the error's traceback refers to this frame

    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, args=(future,), name="grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    try:
        return future.result()
    finally:
        del future  # the error's traceback refers to this frame


def _translated(work: Callable[[], T]) -> T:
    """Raises a GrammarError for any error of the library, also for a panic, which is no Exception.

    All messages are shortened, because they may quote the client's text.
    """
    try:
        return work()
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise _refusal(str(error)) from error


def _refusal(message: str) -> GrammarError:
    return GrammarError(_shortened(message))


def _shortened(message: str) -> str:
    """Returns the message, shortened, without positions in text that the client did not write."""
    message = _PLACE.sub("", message.replace("<non-verbose/>", "").strip())
    message = _QUOTED_LINES.split(message, maxsplit=1)[0].strip()
    return message if len(message) <= MAX_MESSAGE_LEN else message[:MAX_MESSAGE_LEN] + "…"


def _length_until(token_ids: Sequence[int], ends: Callable[[int], bool]) -> int:
    return next((i for i, token_id in enumerate(token_ids) if ends(token_id)), len(token_ids))


def _words_of(token_ids: Sequence[int] | frozenset[int] | range, num_words: int) -> np.ndarray:
    """Returns uint32 [num_words] in which the bits of these ids are set."""
    bits = np.zeros(num_words * WORD_BITS, dtype=bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)
