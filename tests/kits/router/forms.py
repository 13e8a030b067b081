"""A tokenizer of bytes with the marks of all forms, in a file that guides read."""

import tempfile
from pathlib import Path

from tokenizers import AddedToken

from router.text.forms.chosen import CALL_FORMS
from tests.kits.router.gateway import byte_tokenizer

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
    """The id of a mark."""
    return _IDS.token_to_id(mark) if mark in MARKS else None
