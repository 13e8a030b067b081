"""Names what the operator may have meant by a key or a value that the configuration lacks. Pure."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

_UNKNOWN_KEY = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([\w.\[\]]*)`)?")
_ANY = "[...]"  # a key that the operator chooses, as msgspec writes it
_UNKNOWN_VALUE = re.compile(r"Invalid enum value '([^']*)' - at `\$\.?([\w.\[\]]*)`")


def hint_of(error: msgspec.ValidationError, root: type[msgspec.Struct]) -> str:
    """Returns "; did you mean …?" for an error of a tree of this type, or nothing."""
    if found := _UNKNOWN_KEY.search(str(error)):
        meant = list(_keys_near(found[1], _path_of(found[2] or ""), root))
    elif found := _UNKNOWN_VALUE.search(str(error)):
        meant = get_close_matches(found[1], _values_of(_type_at(_path_of(found[2]), root)))
    else:
        return ""
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _keys_near(name: str, section: str, root: type[msgspec.Struct]) -> Iterator[str]:
    """Yields similar keys of the same section, and equal ones of other sections."""
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
    """The values of an enumeration, which may be one of a union."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(each.value) for each in kind]
    return [value for part in get_args(kind) for value in _values_of(part)]
