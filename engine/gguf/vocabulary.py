"""Makes tokenizer.json and tokenizer_config.json from the vocabulary of a GGUF file.

Only byte-level BPE is supported: `tokenizer.ggml.model` is "gpt2". `tokenizer.ggml.pre` names the
rule that splits text into words before merges apply. The file contains only the name of the rule;
its expressions are in llama.cpp's code, and in this module. An unknown name is refused, because
wrong splits would silently produce other tokens.

Sources: llama.cpp's `llama-vocab.cpp`, the files of `tokenizers`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import CheckpointError
from engine.gguf.container import GgufHeader, Value

CONTROL, UNKNOWN, USER = 3, 2, 4  # types of tokens in tokenizer.ggml.token_type
SPECIAL = frozenset({CONTROL, UNKNOWN})

_CASED = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CASED}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"(?i:{_CASED})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_WORDS = {  # expressions that split text into words, applied one after the other
    "default": (_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
    "smollm": (r"\p{N}", _GPT2),
}
# rules that put the first token before a prompt, unless the file forbids it
_BEGINS = frozenset({"llama-bpe"})
# rules in which a word of the vocabulary is one token, even if merges give other tokens
_IGNORES_MERGES = frozenset({"llama-bpe"})
_NORMALISED = {"qwen2": {"type": "NFC"}}
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATE = "tokenizer.chat_template"


def special_ids(header: GgufHeader) -> dict[str, Any]:
    """Returns `bos_token_id` and similar entries; `eos_token_id` lists all tokens that end an
    answer.
    """
    return _Vocabulary(header).ids()


def tokenizer_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the contents of tokenizer.json. Raises CheckpointError."""
    return _Vocabulary(header).tokenizer()


def tokenizer_config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json. Raises CheckpointError."""
    return _Vocabulary(header).config()


class _Vocabulary:
    """The tokens of a GGUF file, with their types, merges and special roles."""

    def __init__(self, header: GgufHeader) -> None:
        self._path, self._values = header.path, header.values
        model = self._value("model", "")
        if model != "gpt2":
            raise self._refused(f"tokenizer.ggml.model is {model!r:.80}; read is gpt2")
        self._pre = str(self._value("pre", "default"))
        if self._pre not in _WORDS:
            known = ", ".join(_WORDS)
            raise self._refused(f"tokenizer.ggml.pre is {self._pre!r:.80}; read are {known}")
        if self._value("add_eos_token", False):  # noqa: FBT003
            raise self._refused("tokenizer.ggml.add_eos_token is not supported")
        self._tokens = self._strings("tokens")
        types = self._value("token_type", [1] * len(self._tokens))
        if not isinstance(types, list) or len(types) != len(self._tokens):
            raise self._refused("tokenizer.ggml.token_type is not of the length of the tokens")
        self._types = types

    def ids(self) -> dict[str, Any]:
        ends = [self._id(name) for name in ("eos", "eot", "eom")]
        return {
            "bos_token_id": self._id("bos"),
            "eos_token_id": list(dict.fromkeys(each for each in ends if each is not None)),
            "pad_token_id": self._id("padding"),
        }

    def tokenizer(self) -> dict[str, Any]:
        ids = {token: i for i, token in enumerate(self._tokens)}
        if len(ids) != len(self._tokens):
            raise self._refused("tokenizer.ggml.tokens has a token twice")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "normalizer": _NORMALISED.get(self._pre),
            "pre_tokenizer": _pre_tokenizer(_WORDS[self._pre]),
            "post_processor": self._post_processor(),
            "decoder": _byte_level(),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": self._pre in _IGNORES_MERGES,
                "vocab": ids,
                "merges": self._merges(ids),
            },
        }

    def config(self) -> dict[str, Any]:
        found = {key: self._id(name) for key, name in _NAMED.items()}
        tokens = {key: self._tokens[i] for key, i in found.items() if i is not None}
        own = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._begins(),
        }
        template = self._template()
        return own | tokens | ({} if template is None else {"chat_template": template})

    def _template(self) -> str | list[dict[str, str]] | None:
        """Returns the chat template, or the list of named templates if there are several."""
        named = {
            key.removeprefix(_TEMPLATE).removeprefix(".") or "default": template
            for key, template in self._values.items()
            if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
        }
        if wrong := [name for name, text in named.items() if not isinstance(text, str)]:
            raise self._refused(f"the chat template {wrong[0]:.80} is no text")
        if named.keys() <= {"default"}:
            return str(named["default"]) if named else None
        return [{"name": name, "template": str(text)} for name, text in named.items()]

    def _added(self) -> list[dict[str, Any]]:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": token, **plain, "special": kind in SPECIAL}
            for i, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind in SPECIAL or kind == USER
        ]

    def _merges(self, ids: Mapping[str, int]) -> list[tuple[str, str]]:
        merges = []
        for merge in self._strings("merges"):
            left, _, right = merge.partition(" ")
            if left not in ids or right not in ids or left + right not in ids:
                raise self._refused(
                    f"tokenizer.ggml.merges has {merge!r:.80}, which makes no token"
                )
            merges.append((left, right))
        return merges

    def _begins(self) -> bool:
        return bool(self._value("add_bos_token", self._pre in _BEGINS))

    def _post_processor(self) -> dict[str, Any]:
        """Returns the post-processor that inserts the first token before a prompt."""
        bos = self._id("bos")
        if bos is None or not self._begins():
            return _byte_level() | {"trim_offsets": False}
        token = self._tokens[bos]
        first = {"SpecialToken": {"id": token, "type_id": 0}}
        text, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
        return {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, second],
            "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
        }

    def _id(self, name: str) -> int | None:
        value = self._value(f"{name}_token_id", None)
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self._tokens)):
            raise self._refused(f"tokenizer.ggml.{name}_token_id is {value!r:.80}")
        return value

    def _strings(self, name: str) -> list[str]:
        found = self._value(name, None)
        listed = found if isinstance(found, list) else []
        strings = [each for each in listed if isinstance(each, str)]
        if not strings or len(strings) != len(listed):
            raise self._refused(f"tokenizer.ggml.{name} is not a list of strings")
        return strings

    def _value(self, name: str, default: Value | None) -> Value | None:
        return self._values.get(f"tokenizer.ggml.{name}", default)

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {why}")


def _pre_tokenizer(expressions: Sequence[str]) -> dict[str, Any]:
    cuts = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in expressions
    ]
    return {"type": "Sequence", "pretokenizers": [*cuts, _byte_level() | {"use_regex": False}]}


def _byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
