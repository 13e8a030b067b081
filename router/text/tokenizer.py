"""The text side of a checkpoint: tokenizer, chat template, tokens that end an answer.

Reads `tokenizer.json`, which is required. Also reads, if present, `tokenizer_config.json`, the
files of chat templates, `generation_config.json` and `config.json`. It uses only `tokenizers`, so
the gateway needs neither torch nor transformers.

For a long text, `Tokenizer.encode` holds the interpreter lock for seconds, and every stream of the
gateway waits. `encode_batch_fast` releases the lock. By default it encodes in its own threads,
where a short text would wait behind long texts. With TOKENIZERS_PARALLELISM=false it uses the
caller's thread.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.embedding import Embedding, embedding_of
from engine.errors import CheckpointError, InvalidRequest
from router.inbox.api_errors import ApiError, context_exceeded, invalid_value, no_room
from router.text.checkpoint_files import (
    NO_DEFAULTS,
    Config,
    SamplingDefaults,
    load_config,
    sampling_defaults,
    template_sources,
)
from router.text.detokenizer import (
    ByteDetokenizer,
    ContextDetokenizer,
    Detokenizer,
    TextState,
)
from router.text.forms.chosen import AUTO, AnswerForms, forms_of
from router.text.logprobs import NUM_CACHED
from router.text.native import NativeVocabulary
from router.text.templates import DEFAULT, DEFAULT_OPTIONS, ChatTemplates, TemplateOptions
from router.text.token_bytes import TokenBytes, byte_table, chars_per_token

LONGEST_CUT = 2**18  # maximum characters and tokens of a text that is truncated or only counted
LONGEST_TOKEN = 64  # assumed maximum of characters, if a tokenizer has no bound

PREFIX, SUFFIX = "prefix", "suffix"  # positions in a fill-in-the-middle prompt
# The prompts of fill-in-the-middle models, by family: special tokens, and the two texts.
FILL_IN_FORMS = (
    # Qwen2.5-Coder, CodeGemma
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"),  # CodeLlama
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)

os.environ["TOKENIZERS_PARALLELISM"] = "false"


class TextModel:
    """Converts text to token ids, and token ids to text. Safe to use from several threads."""

    def __init__(  # noqa: PLR0913 - all but the first have defaults
        self,
        tokenizer: Tokenizer,
        *,
        templates: ChatTemplates | None = None,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int | None = None,  # size of the model's vocabulary; None: the tokenizer's
        file: Path | None = None,
        defaults: SamplingDefaults = NO_DEFAULTS,
        forms: AnswerForms | None = None,  # None: forms recognised by tokens alone
        embedding: Embedding | None = None,  # set for an embedding model
    ) -> None:
        """`file` is the file of the tokenizer, from which another process compiles grammars."""
        added = tokenizer.get_added_tokens_decoder().items()
        num_tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.vocab_size = num_tokens if vocab_size is None else min(num_tokens, vocab_size)
        self.eos_token_ids = tuple(i for i in eos_token_ids if i < self.vocab_size)
        self.file = file
        self.defaults = defaults
        self.embedding = embedding
        self._tokenizer = tokenizer
        self._templates = templates
        self._num_ids = num_tokens
        self._has_unknown_ids = self.vocab_size < num_tokens
        self._chars_per_token = chars_per_token(tokenizer)
        self._byte_table = byte_table(tokenizer)
        self._added_ids = {token.content: token_id for token_id, token in added}
        self.forms = forms or forms_of(None, self.added_token_id)
        self._hidden_ids = frozenset(token_id for token_id, token in added if token.special)

    def encode_text(
        self,
        text: str,
        context_len: int,
        param: str = "prompt",
        *,
        add_special_tokens: bool = True,
        may_exceed: bool = False,
    ) -> list[int]:
        """Encodes a text, with the special tokens that the tokenizer adds to every text.

        Raises ApiError if the text does not fit the context. This is checked before encoding, and
        again before the ids become Python objects. With `may_exceed`, the text may be longer, up to
        `LONGEST_CUT`.
        """
        if len(text) > context_len:  # otherwise it fits, as a token has at least one character
            self._check_length(text, context_len, param, may_exceed=may_exceed)
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        if may_exceed and len(encoding) > max(context_len, LONGEST_CUT):
            raise context_exceeded(f"the text has {len(encoding)} tokens: too many", param)
        if not may_exceed and len(encoding) > context_len:
            raise no_room(context_len, len(encoding), param)
        ids = encoding.ids
        if self._has_unknown_ids and max(ids, default=0) >= self.vocab_size:
            name = self._tokenizer.id_to_token(max(ids))
            message = f"the text holds {name!r}, which the model's vocabulary does not have"
            raise invalid_value(message, param)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        context_len: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        add_special_tokens: bool = False,
        may_exceed: bool = False,
    ) -> list[int]:
        """Encodes a conversation. The template writes the special tokens. Raises InvalidRequest."""
        templates = self._templates or self.templates
        text = templates.choose(with_tools=bool(tools)).render(messages, tools, options)
        return self.encode_text(
            text,
            context_len,
            "messages",
            add_special_tokens=add_special_tokens,
            may_exceed=may_exceed,
        )

    def spellings(self, word: str) -> list[list[int]]:
        """Returns the token ids of a word, and of a space and the word, as vLLM bans words."""
        texts = (word, " " + word.lstrip())
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found if encoding.ids]

    @property
    def has_template(self) -> bool:
        """True if the model has a chat template for messages without tools."""
        return self._templates is not None and self._templates.has_default

    @property
    def templates(self) -> ChatTemplates:
        """Returns the chat templates. Raises InvalidRequest if the model has none."""
        if self._templates is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        return self._templates

    def encode_between(self, prefix: Sequence[int], suffix: str, context_len: int) -> list[int]:
        """Returns the prompt for filling in a text between two others, in the form of the model.

        Raises InvalidRequest if the model was not trained for this.
        """
        form = self._fill_in_form
        if form is None:
            message = "suffix is not supported: this model has no tokens to fill in text with"
            raise ApiError(message, param="suffix", code="unsupported_parameter")
        behind = self.encode_text(suffix, context_len, "suffix", add_special_tokens=False)
        # Tokens that begin every text, such as <s>, come before this form, not inside.
        lead = self._leading_ids
        num_lead = len(lead) if list(prefix[: len(lead)]) == lead else 0
        texts = {PREFIX: prefix[num_lead:], SUFFIX: behind}
        token_ids = list(prefix[:num_lead])
        for part in form:
            token_ids += texts[part] if isinstance(part, str) else (part,)
        return token_ids

    @cached_property
    def _fill_in_form(self) -> tuple[int | str, ...] | None:
        """Returns the first form whose tokens the model has: token ids and positions of texts."""
        places = {PREFIX: PREFIX, SUFFIX: SUFFIX}
        for form in FILL_IN_FORMS:
            parts = [places.get(part, self._tokenizer.token_to_id(part)) for part in form]
            if all(isinstance(p, str) or (p is not None and p < self.vocab_size) for p in parts):
                return tuple(part for part in parts if part is not None)
        return None

    @cached_property
    def _leading_ids(self) -> list[int]:
        """Returns the special tokens that the tokenizer puts before every text."""
        encoding = self._tokenizer.encode("x", add_special_tokens=True)
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token_id for token_id, _ in takewhile(lambda pair: pair[1], marked)]

    def _check_length(self, text: str, context_len: int, param: str, *, may_exceed: bool) -> None:
        """Raises ApiError if a text has too many characters to be encoded."""
        is_bounded = self._chars_per_token is not None and not may_exceed
        longest = self._chars_per_token or LONGEST_TOKEN
        most = longest * context_len
        if not is_bounded:
            most = max(most, LONGEST_CUT)
        if len(text) <= most:
            return
        message = f"the text has {len(text)} characters; at most {most} are encoded"
        if is_bounded:
            message = (
                f"This model's maximum context length is {context_len} tokens, each of at most "
                f"{longest} characters. However, the prompt has {len(text)} characters"
            )
        raise context_exceeded(message, param)

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Decodes a whole text without its special tokens. Releases the interpreter lock."""
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: list[int]) -> str:
        """Decodes any number of tokens, including special tokens. Releases the interpreter lock."""
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return text

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the names of tokens in the vocabulary; an empty text for each unknown id."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """Returns the bytes of each token."""
        return lru_cache(NUM_CACHED)(TokenBytes(self._tokenizer))

    def added_token_id(self, content: str) -> int | None:
        """Returns the id of the added token with this text; None without such a token."""
        return self._added_ids.get(content)

    @cached_property
    def vocabulary(self) -> NativeVocabulary | None:
        """Returns the bytes of all tokens for C++; None if a token's text depends on other tokens.

        Raises BuildError if the C++ library is missing.
        """
        if self._byte_table is None:
            return None
        return NativeVocabulary(self._byte_table, self._num_ids, self._hidden_ids)

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        shown: Sequence[str] = (),
        *,
        shows_all: bool = False,
        state: TextState | None = None,
    ) -> Detokenizer:
        """Returns the decoder of an answer.

        Special tokens are hidden, except those in `shown`. With `shows_all`, none is hidden. A
        decoder that needs only the bytes of tokens keeps its state in `state`.
        """
        hidden_ids = frozenset() if shows_all else self._hidden_ids
        if shown:
            hidden_ids -= {self._added_ids.get(content) for content in shown}
        if self._byte_table is None:
            return ContextDetokenizer(self._tokenizer, prompt_ids=prompt_ids, hidden_ids=hidden_ids)
        return ByteDetokenizer(
            self._byte_table, prompt_ids=prompt_ids, hidden_ids=hidden_ids, state=state
        )


def load_text_model(
    directory: Path,
    *,
    chat_template: str | None = None,
    has_defaults: bool = True,
    parsers: tuple[str, str] = (AUTO, AUTO),
) -> TextModel:
    """Reads the text side of a checkpoint's directory. Raises CheckpointError with the file's name.

    `chat_template` replaces the checkpoint's template. With `has_defaults`, the checkpoint's
    sampling replaces the API's defaults. `parsers` are the names of the forms of calls and of
    reasoning. Raises ConfigError for an unknown name.
    """
    tokenizer = _load_tokenizer(directory / "tokenizer.json")
    config = _tokenizer_config(directory)
    sources = {DEFAULT: chat_template} if chat_template else template_sources(directory, config)
    specials = dict(_special_tokens(config))
    templates = ChatTemplates(sources, specials) if sources else None
    return TextModel(
        tokenizer,
        templates=templates,
        eos_token_ids=_eos_token_ids(directory, tokenizer, specials.get("eos_token")),
        vocab_size=_vocab_size(directory),
        file=directory / "tokenizer.json",
        defaults=sampling_defaults(directory) if has_defaults else NO_DEFAULTS,
        forms=forms_of(
            None if templates is None else templates.source,
            tokenizer.token_to_id,
            calls=parsers[0],
            thinking=parsers[1],
        ),
        embedding=embedding_of(directory),
    )


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises `Exception` itself
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_config(directory: Path) -> Config:
    """Returns tokenizer_config.json, or else special_tokens_map.json; {} if both are missing."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    found = (directory / name for name in names if (directory / name).is_file())
    path = next(found, None)
    return {} if path is None else load_config(path)


def _special_tokens(config: Config) -> Iterator[tuple[str, str]]:
    """Returns `bos_token` and similar tokens, written as strings or as objects with a `content`."""
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            yield name, content


def _eos_token_ids(directory: Path, tokenizer: Tokenizer, eos: str | None) -> tuple[int, ...]:
    """Returns all end-of-text ids in the checkpoint's files, without duplicates, in order."""
    ids: list[int | None] = []
    for name in ("generation_config.json", "config.json"):
        value = _ends(directory / name)
        ids += value if isinstance(value, list) else [value]
    ids.append(None if eos is None else tokenizer.token_to_id(eos))
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _ends(path: Path) -> int | list[int] | None:
    """Returns the end-of-text ids in a file; None without any. Raises CheckpointError."""
    if not path.is_file():
        return None
    value = load_config(path).get("eos_token_id")
    try:
        return msgspec.convert(value, int | list[int] | None)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: eos_token_id: {error}") from error


def _vocab_size(directory: Path) -> int | None:
    """Returns the vocabulary size in the configuration of the model, or of its text part."""
    path = directory / "config.json"
    config = load_config(path) if path.is_file() else {}
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None
