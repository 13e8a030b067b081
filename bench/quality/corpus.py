"""The training text of the bundled model: Python source that ships with CPython.

Documents are whole source files of the running interpreter's standard library, and short dialogues
about its functions: the user asks for a function by name and docstring, and the assistant answers
with the function's source. One file in fifty is held out, selected by a hash of its path. Neither a
held-out file nor the dialogues made from it are used for training.

Source: CPython's standard library, PSF License Version 2 (see NOTICE).
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
TURNS = ("<|system|>", "<|user|>", "<|assistant|>")
ANSWER_BEGINS = TURNS[2]
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, *TURNS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Character tables, and fixtures that are obfuscated on purpose, are no examples of usual Python.
SKIPPED_DIRS = ("site-packages", "encodings", "__pycache__", "lib2to3/tests/data")
HELD_OUT_ONE_IN = 50
MAX_DIALOGUE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Document:
    """One text for training or evaluation, including its end-of-text token."""

    text: str
    held_out: bool
    is_test_code: bool
    is_dialogue: bool


def standard_library() -> Path:
    """Returns the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def documents(root: Path) -> Iterator[Document]:
    """Yields every file below `root` as one document, each followed by the dialogues made from
    it.
    """
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if any(part in relative for part in SKIPPED_DIRS):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # skips fixtures in other encodings
        held_out = _bucket(relative) == 0
        in_tests = "test/" in relative or "tests/" in relative
        yield Document(
            text=f"# {relative}\n{source}{END_OF_TEXT}",
            held_out=held_out,
            is_test_code=in_tests,
            is_dialogue=False,
        )
        if not in_tests:
            for dialogue in _dialogues(source):
                yield Document(
                    text=dialogue, held_out=held_out, is_test_code=False, is_dialogue=True
                )


def _bucket(relative: str) -> int:
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4]) % HELD_OUT_ONE_IN


def _dialogues(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return  # skips fixtures with syntax errors
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        doc = ast.get_docstring(node)
        code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
        if not doc or len(code) > MAX_DIALOGUE_CHARS:
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        summary = " ".join(doc.split("\n\n")[0].split())
        yield (
            f"<|user|>Write a Python {kind} `{node.name}`: {summary}{END_OF_TURN}"
            f"<|assistant|>{code}{END_OF_TURN}{END_OF_TEXT}"
        )
