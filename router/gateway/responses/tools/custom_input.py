"""Decodes the input of a custom tool from the JSON arguments that the model writes. Pure."""

import json
import re

from router.gateway.responses.tools.offer import INPUT

_HEAD = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
# The longest prefix of a JSON string without an incomplete escape or surrogate pair.
_HIGH, _UNIT = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[0-9a-fA-F]{4}"
_WHOLE = re.compile(rf'(?:[^"\\]|\\[^u]|{_HIGH}(?:{_UNIT}|(?=[^\\]|\\[^u]))|(?!{_HIGH}){_UNIT})+')


class CustomInput:
    """Decodes `{"input": "…"}`, which comes in pieces, to the text between the quotes."""

    def __init__(self) -> None:
        self._rest = ""  # text that is not decoded yet
        self._has_begun = False

    def feed(self, arguments: str) -> str:
        """Adds arguments. Returns the part of the input that is now certain."""
        self._rest += arguments
        if not self._has_begun:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._has_begun, self._rest = True, self._rest[head.end() :]
        whole = _WHOLE.match(self._rest)
        if whole is None:
            return ""
        self._rest = self._rest[whole.end() :]
        return _unquoted(whole[0])

    def finish(self) -> str:
        """Returns the rest of the input. Arguments of any other form are the input itself."""
        return "" if self._has_begun else self._rest


def _unquoted(text: str) -> str:
    """Decodes the inside of a JSON string. Half a surrogate pair becomes no character."""
    value: str = json.loads(f'"{text}"', strict=False)
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
