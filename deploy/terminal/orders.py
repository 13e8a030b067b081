"""Orders as an operator types them in `baton top`: the words of the command line. Pure.

pools prefill=1 decode=2     planner off|dry-run|on       finish VERSION
flip WORKER ROLE             weight VERSION=WEIGHT ...    abort VERSION
drain WORKER                 rollback [VERSION]           stop WORKER
"""

import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from engine.errors import ConfigError

USAGE = {
    "pools": "pools prefill=1 decode=2",
    "flip": "flip WORKER ROLE",
    "drain": "drain WORKER",
    "stop": "stop WORKER",
    "planner": "planner off|dry-run|on",
    "weight": "weight VERSION=WEIGHT ...",
    "finish": "finish VERSION",
    "abort": "abort VERSION",
    "rollback": "rollback [VERSION]",
}


class TypedOrder(msgspec.Struct, frozen=True):
    """A call of the admin API. `text` is what the operator typed."""

    text: str
    path: str
    body: Any = None


def typed_order(text: str) -> TypedOrder:
    """Reads an order. Raises ConfigError that says how it is written."""
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"type an order, as {USAGE['flip']}") from error
    if name not in USAGE:
        raise ConfigError(f"{name} is no order; there are: {', '.join(USAGE)}")
    call = _call(name, words)
    if call is None:
        raise ConfigError(f"write {USAGE[name]}")
    path, body = call
    return TypedOrder(" ".join([name, *words]), path, body)


def _call(name: str, words: Sequence[str]) -> tuple[str, Any] | None:
    match name, words:
        case "pools", [_, *_] if (counts := _numbers(words)) is not None:
            return "/v1/pools", counts
        case "weight", [_, *_] if (weights := _numbers(words)) is not None:
            return "/v1/weights", {"weights": weights}
        case "flip", [worker, role]:
            return f"/v1/workers/{quote(worker, safe='')}/flip", {"role": role}
        case "drain" | "stop", [worker]:
            return f"/v1/workers/{quote(worker, safe='')}/{name}", None
        case "planner", [mode]:
            return "/v1/planner", {"mode": mode}
        case "finish", [version]:
            return f"/v1/versions/{quote(version, safe='')}/finish", {}
        case "abort", [version]:
            return f"/v1/versions/{quote(version, safe='')}/abort", None
        case "rollback", []:
            return "/v1/rollback", {}
        case "rollback", [version]:
            return "/v1/rollback", {"name": version}
    return None


def _numbers(words: Sequence[str]) -> dict[str, int] | None:
    """Reads NAME=NUMBER; None if a word is something else."""
    pairs = [word.partition("=") for word in words]
    if not all(name and equals and number.isdecimal() for name, equals, number in pairs):
        return None
    return {name: int(number) for name, _, number in pairs}
