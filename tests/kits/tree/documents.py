"""Reads the documents like a user: their code blocks, commands, links and paths."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]*)(?:#([\w-]+))?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
_PATH = re.compile(  # the path of a file or, with a final slash, of a folder
    r"`((?:router|prefill|decode|kvtransfer|deploy|bench|engine|tests|docs)/[\w./-]*(?:\.\w+|/))`"
)
SHELLS = ("sh", "bash")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command line of a shell block: the words of the command, without a trailing comment."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {shlex.join(self.words)}"


def documents() -> list[str]:
    """Returns the paths of the documents for users."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in pages)


def blocks(document: str) -> list[Block]:
    """Returns the fenced blocks of a document."""
    text = (ROOT / document).read_text("utf-8")
    return [Block(document, language, body) for language, body in _BLOCK.findall(text)]


def commands(document: str) -> Iterator[Command]:
    """Returns the command lines of a document's shell blocks."""
    for block in blocks(document):
        if block.language not in SHELLS:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if words := _words(line):
                yield Command(document, tuple(words))


def links(document: str) -> Iterator[Path]:
    """Returns files and folders that a document links to, or names in backticks by a whole path."""
    page = ROOT / document
    text = page.read_text("utf-8")
    for target, _ in _LINK.findall(text):
        if target and "://" not in target:
            yield page.parent / target
    for path in _PATH.findall(text):
        yield ROOT / path.rstrip(".")


def absent_anchors(document: str) -> list[str]:
    """Returns links of a document to headings that do not exist on the linked page."""
    page = ROOT / document
    absent = []
    for target, anchor in _LINK.findall(page.read_text("utf-8")):
        if not anchor or "://" in target:
            continue
        there = page.parent / target if target else page
        if anchor not in _anchors(there.read_text("utf-8")):
            absent.append(f"{target}#{anchor}")
    return absent


def _anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


def _words(line: str) -> list[str]:
    """Splits a line into words; returns none for a here-document or an unclosed quote."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    while words and (words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
        words = words[1:]
    return words
