"""Finds all errors of a configuration, and suggests the keys and values that were meant. Pure.

msgspec stops at the first error. So the key that this error names is removed from the tree, and the
rest of the tree is checked again. A later error about a removed key is only a consequence of the
removal, so it is not reported.
"""

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

_UNKNOWN_KEY = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([\w.\[\]]*)`)?")
MAX_FAULTS = 32
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"\b[a-z_]+(?:\.[A-Za-z0-9_]+)+\b")  # a key in errors of `engine.config`
_PART = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_ANY = "[...]"  # a key that the operator chooses, as msgspec writes it in its messages
_UNKNOWN_VALUE = re.compile(r"Invalid enum value '([^']*)' - at `\$\.?([\w.\[\]]*)`")


KeyPath = tuple[str, ...]


def faults_of(
    tree: dict[str, Any], check: Callable[[dict[str, Any]], object]
) -> list[msgspec.ValidationError]:
    """Returns all errors that `check` raises for the tree. Each wrong key is removed before the
    next check.
    """
    faults: list[msgspec.ValidationError] = []
    left_out: set[str] = set()
    for _ in range(MAX_FAULTS):
        try:
            check(tree)
            break
        except msgspec.ValidationError as error:
            if not left_out.intersection(_NAMED.findall(str(error))):
                faults.append(error)
            path = next(_culprits(tree, str(error)), ())
            if not path:
                break
            left_out.add(".".join(path))
            tree = _without(tree, path)
    return faults


def _culprits(tree: dict[str, Any], text: str) -> Iterator[KeyPath]:
    """Yields the keys of the tree that an error may concern. The most specific key comes first."""
    found = _PLACE.search(text)
    place = tuple(_PART.findall(found[1])) if found else ()
    if unknown := _UNKNOWN_KEY.search(text):
        yield from _present(tree, (*place, unknown[1]))
        return
    for named in _NAMED.findall(text[: found.start()] if found else text):
        yield from _present(tree, tuple(named.split(".")))
    while place and place[-1].startswith("[") and place[-1] != _ANY:  # an item of a list
        place = place[:-1]
    if place:
        yield from _present(tree, place)


def _present(tree: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yields the paths in the tree that match a path of msgspec; `_ANY` matches every key."""
    if not path:
        yield ()
        return
    if not isinstance(tree, dict):
        return
    first, rest = path[0], path[1:]
    for name in list(tree) if first == _ANY else [first]:
        if name in tree:
            for behind in _present(tree[name], rest):
                yield (name, *behind)


def _without(tree: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    name, rest = path[0], path[1:]
    if rest:
        return {**tree, name: _without(tree[name], rest)}
    return {key: value for key, value in tree.items() if key != name}


def hint_of(error: msgspec.ValidationError, root: type[msgspec.Struct]) -> str:
    """Returns "; did you mean …?" for an error in a tree of this type; an empty text without a
    suggestion.
    """
    if found := _UNKNOWN_KEY.search(str(error)):
        meant = list(_keys_near(found[1], _path_of(found[2] or ""), root))
    elif found := _UNKNOWN_VALUE.search(str(error)):
        meant = get_close_matches(found[1], _values_of(_type_at(_path_of(found[2]), root)))
    else:
        return ""
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _keys_near(name: str, section: str, root: type[msgspec.Struct]) -> Iterator[str]:
    """Yields similar keys of the same section, and equal keys of other sections."""
    prefix = f"{section}." if section else ""
    here = _type_at(section, root)
    for key in get_close_matches(name, get_type_hints(here)):
        yield f"{prefix}{key}"
    for other, kind in get_type_hints(root).items():
        is_section = isinstance(kind, type) and not get_args(kind)
        if other != section and is_section and name in get_type_hints(kind):
            yield f"{other}.{name}"


def _path_of(found: str) -> str:
    return found.replace(_ANY, ".NAME")


def _type_at(path: str, root: Any) -> Any:
    for name in filter(None, path.split(".")):
        root = get_args(root)[1] if get_origin(root) is dict else get_type_hints(root)[name]
    return root


def _values_of(kind: Any) -> list[str]:
    """Returns the values of an enumeration, also if the enumeration is a member of a union type."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(each.value) for each in kind]
    return [value for part in get_args(kind) for value in _values_of(part)]
