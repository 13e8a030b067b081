"""Drives one engine for `baton bench engine`, in that engine's own environment.

    PYTHON bench/peers/driver.py NAME --checkpoint DIR --variant f32 --threads 2 …

This file runs as a script, without Baton. `load(options)` of NAME_peer.py in the same folder loads
the model and returns its `Engine`. Then each line of input and output is one JSON object:

    out  {"ready": {"version": …}}       and other facts, if the engine has any
    in   {"do": "generate", "prompts": [[token id, …], …], "num_steps": n}
    out  {"prefill_s": …, "decode_s": …, "answers": [[token id, …], …]}

In place of an answer, the output may be {"error": "in one line"}. Each other command is a method of
the engine: the command's other keys are its arguments, and it returns the answer.

All engines are timed alike. All prompts are submitted at once. `prefill_s` ends when every sequence
has its first token, chosen greedily. `decode_s` begins there and ends when each sequence has
`num_steps` more tokens. So the time of decoding never includes prefill, and both times include the
choice of tokens. An answer has `num_steps + 1` tokens; end-of-text tokens do not end it.

The output of libraries goes to stderr. Only answers go to stdout.
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
    """The driven engine. Each of its other methods is a command."""

    @property
    def facts(self) -> dict[str, object]:
        """Returns facts about the engine, including `version`."""
        ...


class Stopwatch:
    """Records when all sequences had their first token, and when they had their last."""

    def __init__(self) -> None:
        self._begin_s = self._first_s = self._last_s = time.perf_counter()

    def stamp_first(self) -> None:
        """Records the time at which all sequences have one token."""
        self._first_s = self._last_s = time.perf_counter()

    def stamp_last(self) -> None:
        """Records the time at which all sequences have all tokens."""
        self._last_s = time.perf_counter()

    def answer(self, answers: list[list[int]]) -> dict[str, object]:
        """Returns the answer to `generate`."""
        return {
            "prefill_s": self._first_s - self._begin_s,
            "decode_s": self._last_s - self._first_s,
            "answers": answers,
        }


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line. The options for maximum sizes cover all commands that will
    follow.
    """
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
    """Loads the engine, then answers commands until there are none. If loading fails, the error is
    the only answer.
    """

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
        # any error of an engine is answered, because the next command may succeed
        except Exception as error:
            answer = {"error": _in_one_line(error)}
        say(answer)


def stdout_for_answers() -> TextIO:
    """Returns a new stdout for answers. All other output is sent to stderr from now on.

    The new stdout is buffered, so it writes long answers completely. With PYTHONUNBUFFERED,
    `sys.stdout` loses the rest of an answer if the pipe accepts only a part.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> None:
    """Runs the engine that the command-line arguments name."""
    out = stdout_for_answers()
    options = options_of(sys.argv[1:])
    peer = importlib.import_module(f"{options.name}_peer")
    drive(lambda: peer.load(options), sys.stdin, out)


if __name__ == "__main__":
    main()
