"""Drives one engine for `baton bench engine`, in that engine's own environment.

    PYTHON bench/peers/driver.py NAME --checkpoint DIR --variant f32 --threads 2 …

Runs as a script, without Baton. `load(options)` of NAME_peer.py beside it loads the model and
returns its `Engine`. Then each line is one JSON object:

    out  {"ready": {"version": …}}       and other facts, if the engine has any
    in   {"do": "generate", "prompts": [[token id, …], …], "num_steps": n}
    out  {"prefill_s": …, "decode_s": …, "answers": [[token id, …], …]}

or, in place of either answer, {"error": "in one line"}. Other commands are methods of the engine:
they take the command's other keys and return the answer.

All engines are timed alike. All prompts are submitted at once. `prefill_s` ends when every sequence
has its first token, greedily chosen. `decode_s` goes on from there until each has `num_steps` more.
So prefill is never part of decoding, and choosing tokens is always part of both. An answer has
`num_steps + 1` tokens; ends of text are ignored.

What libraries print goes to stderr. Only answers go to stdout.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO

Prompts = list[list[int]]


class Engine(Protocol):
    """The driven engine; its other methods are its commands."""

    @property
    def facts(self) -> dict[str, object]:
        """Facts about the engine, `version` at least."""
        ...


class Stopwatch:
    """Seconds at which all sequences had their first token, and their last."""

    def __init__(self) -> None:
        self._begin_s = self._first_s = self._last_s = time.perf_counter()

    def stamp_first(self) -> None:
        """All sequences have one token."""
        self._first_s = self._last_s = time.perf_counter()

    def stamp_last(self) -> None:
        """All sequences have all tokens."""
        self._last_s = time.perf_counter()

    def answer(self, answers: list[list[int]]) -> dict[str, object]:
        """Returns the answer to `generate`."""
        return {
            "prefill_s": self._first_s - self._begin_s,
            "decode_s": self._last_s - self._first_s,
            "answers": answers,
        }


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line. The maxima are over all commands that will come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-sequences", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True, help="tokens of one sequence")
    parser.add_argument("--max-tokens", type=int, required=True, help="of all sequences together")
    return parser.parse_args(arguments)


def drive(load: Callable[[], Engine], commands: Iterable[str], out: TextIO) -> None:
    """Loads, then answers commands until they end. An error while loading is the last answer."""

    def say(answer: dict[str, object]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    try:
        engine = load()
    except Exception as error:
        say({"error": _in_one_line(error)})
        raise
    say({"ready": engine.facts})
    for line in commands:
        command: dict[str, Any] = json.loads(line)
        try:
            answer = getattr(engine, command.pop("do"))(**command)
        except Exception as error:  # whatever an engine raises: the next command may do better
            answer = {"error": _in_one_line(error)}
        say(answer)


def stdout_for_answers() -> TextIO:
    """Returns a stdout to which only the caller can write from now on.

    It has a buffer, and so writes long answers whole. With PYTHONUNBUFFERED, `sys.stdout` loses the
    rest of an answer if the pipe takes only a part.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> None:
    """Runs the engine that the command line names."""
    out = stdout_for_answers()
    options = options_of(sys.argv[1:])
    peer = importlib.import_module(f"{options.name}_peer")
    drive(lambda: peer.load(options), sys.stdin, out)


if __name__ == "__main__":
    main()
