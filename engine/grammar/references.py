"""Finds the subschemas that references of one document lead to. Pure.

A reference names a place by a JSON pointer (`#/$defs/a`), by an anchor (`#a`), or by either behind
the document's own `$id`. Nothing outside the document is fetched.

Sources: RFC 6901; JSON Schema 2020-12, core §8.2.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Json = Any


class References:
    """The references of one document."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._anchors: dict[str, str] | None = None
        self._own = _own_ids(root)

    def pointer(self, reference: Json) -> str | None:
        """Returns the reference as `#` and an unquoted JSON pointer; None for a reference to
        another document.
        """
        if not isinstance(reference, str):
            return None
        base, _, fragment = reference.partition("#")
        if base and base not in self._own:
            return None
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            return "#" + normal(fragment)
        if self._anchors is None:
            self._anchors = dict(_anchors(self._root))
        return self._anchors.get(fragment)

    def target(self, reference: Json) -> Json:
        """Returns the value at a reference; None if the document has no such place."""
        pointer = self.pointer(reference)
        if pointer is None:
            return None
        value = self._root
        for part in pointer.split("/")[1:]:
            name = unescaped(part)
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return value


def normal(pointer: str) -> str:
    """Returns a JSON pointer in its normal form."""
    return "".join("/" + escaped(unescaped(part)) for part in pointer.split("/")[1:])


def escaped(name: str) -> str:
    """Escapes a name for use as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unescaped(part: str) -> str:
    """Inverts `escaped`."""
    return part.replace("~1", "/").replace("~0", "~")


def _own_ids(root: Json) -> set[str]:
    if not isinstance(root, dict):
        return set()
    ids = (root.get("$id"), root.get("id"))
    return {name.removesuffix("#") for name in ids if isinstance(name, str)} - {""}


def _anchors(root: Json) -> Iterator[tuple[str, str]]:
    """Yields each anchor and its pointer. An anchor that occurs at two places is left out."""
    seen: dict[str, str] = {}
    for at, value in _walk(root):
        if isinstance(value, dict):
            for name in _names(value):
                seen[name] = "" if name in seen else at
    yield from ((name, at) for name, at in seen.items() if at)


def _names(schema: dict[str, Json]) -> Iterator[str]:
    if isinstance(name := schema.get("$anchor"), str):
        yield name
    for keyword in ("$id", "id"):  # `id` is the keyword of draft 4, `$id` of later drafts
        if isinstance(name := schema.get(keyword), str) and name.startswith("#"):
            yield name[1:]


def _walk(root: Json) -> Iterator[tuple[str, Json]]:
    """Yields every value of the document with its pointer."""
    pending = [("#", root)]
    while pending:
        at, value = pending.pop()
        yield at, value
        if isinstance(value, dict):
            pending += [(f"{at}/{escaped(name)}", item) for name, item in value.items()]
        elif isinstance(value, list):
            pending += [(f"{at}/{index}", item) for index, item in enumerate(value)]
