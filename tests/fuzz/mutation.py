"""Mutates valid messages. Decoders accept more of the mutated messages than of random bytes.

A message is a tuple of frames. A script is the list of messages that one peer sends, in order. A
mutation of the script loses, repeats or moves a message. A mutation of a message loses, repeats or
cuts a frame, or flips bits of a frame. Most mutations change one field: frames are msgpack maps, so
the frame remains well-formed.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from bench.hostile.corpus import INTEGERS, with_damage

Message = tuple[bytes, ...]
Script = list[Message]

# half of the sockets' limit; a longer frame would only close the connection
MAX_FRAME_BYTES = 2**15
MAX_CHANGES = 4
TEXTS = ("", "g", "l", "m", "released", "fp32", "int4", "VRAM", "Attach", "Data", "x" * 5000)
OTHERS = (None, True, 0.5, float("inf"), b"\xff\x00", [], {}, [[]], {"": {}})
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def spoiled(script: Sequence[Message], rng: random.Random) -> Script:
    """Returns the script with a few random mutations, sometimes with none."""
    result = list(script)
    for _ in range(rng.randint(0, MAX_CHANGES)):
        result = changed_once(result, rng)
    return result


def changed_once(script: Script, rng: random.Random) -> Script:
    """Returns the script with one mutated message."""
    if not script:
        return []
    result = list(script)
    index = rng.randrange(len(result))
    message = result.pop(index)
    if rng.random() < 0.1:
        result.insert(rng.randint(0, len(result)), message)
    else:
        result[index:index] = _changed(message, rng)
    return result


def _changed(message: Message, rng: random.Random) -> list[Message]:
    change = rng.choice(["field", "field", "field", "frame", "bytes", "lost", "doubled"])
    match change:
        case "field":
            return [(with_another_field(message[0], rng), *message[1:])]
        case "frame":
            return [_with_other_frames(message, rng)]
        case "bytes":
            index = rng.randrange(len(message))
            damaged = with_damage(message[index], rng)
            return [(*message[:index], damaged, *message[index + 1 :])]
        case "lost":
            return []
    return [message, (with_another_field(message[0], rng), *message[1:])]


def _with_other_frames(message: Message, rng: random.Random) -> Message:
    """Adds a frame to the message, or removes a frame but never the last one."""
    frames = list(message)
    index = rng.randrange(len(frames))
    if len(frames) > 1 and rng.random() < 0.5:
        del frames[index]
    else:
        frames.insert(index, rng.choice((frames[index], b"", frames[index][:10])))
    return tuple(frames)


# ---------------------------------------------------------------- fields


def with_another_field(frame: bytes, rng: random.Random) -> bytes:
    """Changes or removes one field of a map in the message."""
    try:
        tree = msgspec.msgpack.decode(frame)
        places = list(_places(tree))
    except DECODE_ERRORS:
        return with_damage(frame, rng)
    if not places:
        return with_damage(frame, rng)
    parent, key = rng.choice(places)
    if rng.random() < 0.05:
        del parent[key]
    else:
        parent[key] = _another(parent[key], rng)
    try:
        changed = msgspec.msgpack.encode(tree)
    except OverflowError:  # the changed number has more than 64 bits
        return with_damage(frame, rng)
    return changed if len(changed) <= MAX_FRAME_BYTES else frame


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Returns every (container, key) in a tree of lists and dictionaries."""
    if isinstance(tree, dict | list):
        for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
            yield tree, key
            yield from _places(value)


def _another(value: Any, rng: random.Random) -> Any:
    """Returns another random value, usually of the same type, since decoders accept that more
    often.
    """
    if rng.random() < 0.1:
        return rng.choice((*OTHERS, *INTEGERS, *TEXTS))
    another = ANOTHER.get(type(value))
    return rng.choice(OTHERS) if another is None else another(value, rng)


def _another_integer(value: int, rng: random.Random) -> int:
    return rng.choice((value - 1, value + 1, value * 2, -value, rng.choice(INTEGERS)))


def _another_list(value: list[Any], rng: random.Random) -> list[Any]:
    times = rng.choice((0, 2, 2, 5000))
    shuffled = rng.sample(value, len(value))
    return rng.choice((value * times, shuffled, value[:-1], [*value, *rng.sample(INTEGERS, 3)]))


ANOTHER: dict[type, Callable[[Any, random.Random], Any]] = {
    int: _another_integer,
    bool: lambda value, _: not value,
    str: lambda _, rng: rng.choice(TEXTS),
    bytes: with_damage,
    list: _another_list,
    dict: lambda value, rng: dict(rng.sample(list(value.items()), len(value) // 2)),
}
