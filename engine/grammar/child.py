"""Compiles grammars in a process of their own: `python -m engine.grammar.child <descriptor>`.

A gateway starts this process for the first grammar that a client sends. It loads a model's
tokenizer once. For each grammar it forks, and the fork compiles the grammar exactly as workers do,
in bounded time and memory. A failure ends only the fork, and this process reports the reason. So a
grammar that would stop or slow a worker never reaches one.

The process has one thread when it forks. It ends when the gateway closes its end of the socket; a
fork ends by itself after `MAX_CPU_S` of computing.

A frame is a length of four bytes, big-endian, and one struct in msgpack.
"""

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
from collections import OrderedDict
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import msgspec

from engine.clock import MonotonicClock
from engine.errors import GrammarError
from engine.grammar.guides import STACK_BYTES, LlGuides
from engine.messages import Grammar

MAX_CPU_S = 1.0  # CPU seconds of one compilation; a schema of 64 kB in real use takes 0.1
MAX_BYTES = 128 * 2**20  # bytes of memory that one compilation may add
MAX_WALL_S = 10.0  # a slower fork counts as BUSY: the machine had no time for it
MAX_FRAME_BYTES = 2**21
MAX_TOKENIZERS = 2  # tokenizers in memory at once: one for each version of a rollout
MAX_REPLY_BYTES = 2**14  # a write of this size to a pipe does not block
NICENESS = 10  # gives this process a lower priority than the serving processes
MAX_DESCRIPTORS = 1024  # upper bound of the file descriptors of this process
HEAD_BYTES = 4


class Vocabulary(msgspec.Struct, frozen=True):
    """The arguments of `LlGuides`, which identify a tokenizer."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarToCompile(msgspec.Struct, frozen=True):
    """One grammar, and the vocabulary for which it is compiled."""

    vocabulary: Vocabulary
    grammar: Grammar


class GrammarVerdict(StrEnum):
    """The result of compiling a grammar."""

    FOLLOWED = "followed"
    REFUSED = "refused"  # the error of the compiler or of the schema rules
    SLOW = "slow"
    LARGE = "large"
    CRASHED = "crashed"
    BUSY = "busy"  # the machine had no time: the grammar was not judged


class GrammarResult(msgspec.Struct, frozen=True):
    """The verdict on a grammar. `message` is for the client; it is empty for a usable grammar."""

    verdict: GrammarVerdict
    message: str = ""


_MESSAGES = {
    GrammarVerdict.SLOW: f"compiling it takes more than {MAX_CPU_S:g} s",
    GrammarVerdict.LARGE: f"compiling it takes more than {MAX_BYTES // 2**20} MiB of memory",
    GrammarVerdict.CRASHED: "compiling it ends the compiler",
    GrammarVerdict.BUSY: "the server has no time to compile it now",
}
_SIGNALS = {
    signal.SIGPROF: GrammarVerdict.SLOW,
    signal.SIGKILL: GrammarVerdict.BUSY,  # sent by `_watched`, or by a kernel that is out of memory
    signal.SIGABRT: GrammarVerdict.LARGE,  # sent by Rust's runtime if it gets no memory
}


def judged(guides: LlGuides, grammar: Grammar) -> GrammarResult:
    """Compiles the grammar in a fork of this process and returns the result."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _compile_and_exit(guides, grammar, writer)
    os.close(writer)
    try:
        data = _watched(pid, reader)
    finally:
        os.close(reader)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and data:
        return msgspec.msgpack.decode(data, type=GrammarResult)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    verdict = GrammarVerdict.CRASHED if ended_by is None else _verdict_of(ended_by)
    return GrammarResult(verdict, _MESSAGES[verdict])


def _verdict_of(signal_number: int) -> GrammarVerdict:
    with contextlib.suppress(ValueError):
        return _SIGNALS.get(signal.Signals(signal_number), GrammarVerdict.CRASHED)
    return GrammarVerdict.CRASHED


def _watched(pid: int, reader: int) -> bytes:
    """Reads the fork's output until it ends; kills the fork if this takes too long."""
    data = b""
    clock = MonotonicClock()
    end_s = clock.now_s() + MAX_WALL_S
    while len(data) < MAX_REPLY_BYTES:
        left_s = max(end_s - clock.now_s(), 0.0)
        if not select.select([reader], [], [], left_s)[0]:
            os.kill(pid, signal.SIGKILL)
            return b""
        more = os.read(reader, MAX_REPLY_BYTES)
        if not more:
            break
        data += more
    return data


def _compile_and_exit(guides: LlGuides, grammar: Grammar, writer: int) -> NoReturn:
    """Runs in the fork: compiles the grammar, writes the result, exits."""
    status = 1
    try:
        os.closerange(3, writer)  # otherwise the fork would keep the gateway's socket open
        os.closerange(writer + 1, MAX_DESCRIPTORS)
        _limit()
        os.write(writer, msgspec.msgpack.encode(_compiled(guides, grammar)))
        status = 0
    finally:
        os._exit(status)


def _compiled(guides: LlGuides, grammar: Grammar) -> GrammarResult:
    try:
        guides.prepare(grammar)
    except GrammarError as error:
        return GrammarResult(GrammarVerdict.REFUSED, str(error))
    except MemoryError:
        return GrammarResult(GrammarVerdict.LARGE, _MESSAGES[GrammarVerdict.LARGE])
    return GrammarResult(GrammarVerdict.FOLLOWED)


def _limit() -> None:
    """Limits the time and memory of this process from now on, and discards its error output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _data_bytes() + STACK_BYTES + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)


def _data_bytes() -> int:
    """Returns the bytes of this process's memory that RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData")


# ---------------------------------------------------------------- the process


def send_frame(sock: socket.socket, message: GrammarToCompile | GrammarResult) -> None:
    """Sends one struct. Raises OSError."""
    data = msgspec.msgpack.encode(message)
    sock.sendall(len(data).to_bytes(HEAD_BYTES, "big") + data)


def receive_frame(sock: socket.socket) -> bytes:
    """Receives the next frame; returns empty bytes after the last frame. Raises OSError."""
    head = _received(sock, HEAD_BYTES)
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise OSError(f"a frame has {length} bytes")
    return _received(sock, length)


def _received(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = sock.recv(num_bytes - len(data))
        if not more:
            return b""
        data += more
    return data


class _Tokenizers:
    """The tokenizers in memory; the most recently used one is last."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[Vocabulary, LlGuides] = OrderedDict()

    def guides(self, vocabulary: Vocabulary) -> LlGuides:
        """Returns the guides of a vocabulary; loads its tokenizer if necessary. Raises GrammarError
        if no guide is possible for this tokenizer.
        """
        guides = self._loaded.get(vocabulary)
        if guides is None:
            guides = LlGuides(
                Path(vocabulary.tokenizer_file),
                vocab_size=vocabulary.vocab_size,
                eos_token_ids=vocabulary.eos_token_ids,
            )
            guides.load()
            self._loaded[vocabulary] = guides
            if len(self._loaded) > MAX_TOKENIZERS:
                self._loaded.popitem(last=False)
            gc.collect()
            gc.freeze()  # prevents a garbage collection in a fork from copying memory pages
        self._loaded.move_to_end(vocabulary)
        return guides


def _serve(sock: socket.socket) -> None:
    tokenizers = _Tokenizers()
    while data := receive_frame(sock):
        asked = msgspec.msgpack.decode(data, type=GrammarToCompile)
        try:
            answered = judged(tokenizers.guides(asked.vocabulary), asked.grammar)
        except GrammarError as error:
            answered = GrammarResult(GrammarVerdict.REFUSED, str(error))
        send_frame(sock, answered)


def main() -> None:
    """Serves the gateway at the other end of the socket until the gateway closes that end."""
    # ignore the terminal's Ctrl-C: the gateway drains first, then closes the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(ConnectionError):
        _serve(sock)


if __name__ == "__main__":
    main()
