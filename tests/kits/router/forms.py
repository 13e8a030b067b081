"""A tokenizer of bytes with the special tokens of all forms, and a check of its guides."""

import json
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import AddedToken

from engine.errors import GrammarError
from engine.grammar.guides import LlGuides
from engine.messages import Grammar, GrammarKind
from router.text.forms.chosen import CALL_FORMS
from tests.kits.router.gateway import byte_tokenizer

EOS = 256
MARKS = tuple(dict.fromkeys(mark for form in CALL_FORMS.values() for mark in form.marks))


def _made() -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    tokenizer.save(str(path))
    return path


TOKENIZER = _made()
_IDS = byte_tokenizer()
_IDS.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])


def token_of(mark: str) -> int | None:
    """Returns the token id of a special token."""
    return _IDS.token_to_id(mark) if mark in MARKS else None


@cache
def byte_guides():
    return LlGuides(TOKENIZER, vocab_size=len(MARKS) + 257, eos_token_ids=[EOS])


def tokens_of(text):
    """Returns the byte tokens of a text; each special token is one token."""
    ids = []
    while text:
        mark = next((m for m in MARKS if text.startswith(m)), None)
        if mark is not None:
            ids.append(token_of(mark))
            text = text[len(mark) :]
        else:
            ids += text[0].encode()
            text = text[1:]
    return ids


def allows(grammar, text):
    """Returns True if the guide accepts exactly `text`. Raises GrammarError for a bad grammar."""
    byte_guides().prepare(grammar)
    try:
        guide = byte_guides().open(grammar, tokens_of(text))
    except GrammarError:
        return False
    return guide.num_allowed([EOS]) == 1


def schema(value):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))
