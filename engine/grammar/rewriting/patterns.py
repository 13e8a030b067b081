"""Translates patterns of schemas, which ECMA-262 defines, to the compiler's syntax. Pure.

The two differ, and the same text would silently mean something else:

    .             all but four line ends; the compiler's leaves out `\\n` only
    \\s \\d \\w      sets of their own; the compiler's follow Unicode, or ASCII only
    [a[b] [a--b]  plain characters; the compiler nests classes and has set operators
    [^] \\cX \\0    any character, control characters
    x*? (?<n>x)   the same texts as `x*` and `(x)`

Look-around, word boundaries and back-references are refused: `(?=x)`, `(?<!x)`, `\\b`, `\\1`.

Source: ECMA-262, §22.2 and Annex B.1.2, with the flag `u` where it matters.
"""

import re
from collections.abc import Iterator

from engine.errors import GrammarError

_LINE_ENDS = r"\n\r\u{2028}\u{2029}"
_BLANKS = r"\t\n\v\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}"
_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": _BLANKS + r"\u{3000}\u{feff}"}
_CODES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|c([A-Za-z])")
_LOW_HALF = re.compile(r"\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)
_PROPERTY = re.compile(r"[pP]\{[\w=]{1,64}\}")
_COUNT = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_GROUP = re.compile(r"\(\?(?:P?<\w+>|:)|\(\?[a-z]+[:)]|\(")
_ASSERTIONS = ("(?=", "(?!", "(?<=", "(?<!")


def translated(pattern: str) -> str:
    """Translates the pattern to the compiler's syntax. Raises GrammarError if it cannot."""
    return _Pattern(pattern).written()


def regex_fault(pattern: str) -> str | None:
    """Returns the reason why an expression has another meaning in Rust's syntax, or None.

    In a character class, Rust nests classes and knows the operators `&&`, `--` and `~~`.
    """
    inside = False
    for part in re.finditer(r"\\.|\[\^?\]?|\]|&&|--|~~|.", pattern, re.DOTALL):
        text = part[0]
        if inside and text[0] == "[":
            return "an unescaped '[' in a character class"
        if inside and text in ("&&", "--", "~~"):
            return f"{text!r} in a character class"
        if text[0] == "[":
            if text.endswith("]"):
                return "a character class that begins with ']'"
            inside = True
        elif text == "]":
            inside = False
    return None


class _Pattern:
    """A cursor that reads one pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def written(self) -> str:
        parts = list[str]()
        while self._at < len(self._text):
            parts.append(self._next())
        return "".join(parts)

    def _next(self) -> str:
        """Translates the next part of the pattern, outside a character class."""
        char = self._text[self._at]
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char == "(":
            return self._group()
        if (count := _COUNT.match(self._text, self._at)) is not None:
            self._at = count.end()
            return count[0] + self._no_laziness()
        self._at += 1
        if char in "*+?":
            return char + self._no_laziness()
        if char == ".":
            return f"[^{_LINE_ENDS}]"
        return char if char in ")|^$" else _coded(char)

    def _no_laziness(self) -> str:
        """Skips the `?` of a lazy quantifier. Laziness changes a match's length, not which texts
        match.
        """
        self._at += self._text.startswith("?", self._at)
        return ""

    def _group(self) -> str:
        if self._text.startswith(_ASSERTIONS, self._at):
            raise GrammarError("look-around is not supported")
        found = _GROUP.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0] if found[0][:2] == "(?" and "<" not in found[0] else "(?:"

    def _escape(self) -> str:
        name = self._text[self._at + 1 : self._at + 2]
        if name in "bB":
            raise GrammarError("a word boundary is not supported" if name else "it ends with '\\'")
        if name in "123456789k":
            raise GrammarError(f"the back-reference '\\{name}' is not supported")
        if name.lower() in _SETS:
            self._at += 2
            return f"[{'^' if name.isupper() else ''}{_SETS[name.lower()]}]"
        if (found := _PROPERTY.match(self._text, self._at + 1)) is not None:
            self._at = found.end()
            return f"\\{found[0]}"
        return _coded(self._character())

    def _character(self) -> str:
        """Returns the next character, with its escape decoded."""
        if self._text[self._at] != "\\":
            self._at += 1
            return self._text[self._at - 1]
        found = _HEX.match(self._text, self._at + 1)
        if found is not None:
            self._at = found.end()
            return self._of_code(found)
        name = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        if name in _CODES and name:
            return chr(_CODES[name])
        if not name or (name.isalnum() and name.isascii()):
            raise GrammarError(f"the escape '\\{name}' is unknown")
        return name

    def _of_code(self, found: re.Match[str]) -> str:
        if found[4] is not None:
            return chr(ord(found[4]) % 32)
        code = int(found[1] or found[2] or found[3], 16)
        low = _LOW_HALF.match(self._text, self._at)
        if 0xD800 <= code < 0xDC00 and low is not None:
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise GrammarError(f"'\\{found[0]}' is no character")
        return chr(code)

    def _class(self) -> str:
        negated = self._text.startswith("[^", self._at)
        self._at += 2 if negated else 1
        parts = list(self._members())
        self._at += 1
        if not parts:
            if negated:
                return "(?s:.)"
            raise GrammarError("an empty character class matches nothing")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _members(self) -> Iterator[str]:
        """Returns the members of a character class, and reads up to its closing bracket."""
        text = self._text
        while not text.startswith("]", self._at):
            if self._at >= len(text):
                raise GrammarError("a character class is not closed")
            first = self._member()
            if len(first) == 1 and text.startswith("-", self._at) and self._goes_on(self._at + 1):
                back = self._at
                self._at += 1
                last = self._member()
                if len(last) == 1 and first > last:
                    raise GrammarError(f"the range {first}-{last} is empty")
                if len(last) == 1:
                    yield f"{_coded(first)}-{_coded(last)}"
                    continue
                self._at = back
            yield _coded(first) if len(first) == 1 else first

    def _goes_on(self, at: int) -> bool:
        return at < len(self._text) and self._text[at] != "]"

    def _member(self) -> str:
        """Returns one translated member of a character class: a character, or a set like `\\d`."""
        name = self._text[self._at + 1 : self._at + 2] if self._text[self._at] == "\\" else ""
        if name and name.lower() in _SETS:
            self._at += 2
            inner = _SETS[name.lower()]
            return f"[^{inner}]" if name.isupper() else inner
        if name and (found := _PROPERTY.match(self._text, self._at + 1)) is not None:
            self._at = found.end()
            return f"\\{found[0]}"
        if name == "b":
            self._at += 2
            return "\b"
        return self._character()


def _coded(char: str) -> str:
    """Returns a character in Rust's syntax. Letters, digits and non-ASCII characters need no
    escape.
    """
    if char.isalnum() or ord(char) > 0xA0 or char in " _":
        return char
    return f"\\x{{{ord(char):x}}}"
