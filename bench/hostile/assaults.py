"""Assaults: requests of one attacker that try to block a gateway or to fill its memory.

The attacker is a process: `python -m bench.hostile.assaults NAME TIMES URL GRPC`. It prepares its
bytes before the measurement, reports to its parent that it is ready, and waits for a command. Its
answer to the command is the number of requests by status. To add an assault, add a function to
`ASSAULTS`.

| assault   |                                                                                   |
|-----------|-----------------------------------------------------------------------------------|
| `chunks`  | bodies in chunks of one byte, complete ones and endless ones; tiny trailers       |
| `grpc`    | gRPC messages of millions of empty fields, with a key and without one             |
| `refused` | long bodies that break off, with a key and without one                            |
| `answers` | whole answers of many choices with twenty log-probabilities a token, also by gRPC |
| `readers` | streams with log-probabilities whose clients read nothing for seconds             |
| `parsing` | a flood of texts to be tokenised: of 60 kB, of 2^18 characters, and longer       |

`Attacker` starts this process, and measures the gateways' memory after each assault.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from bench.common.background import PROC
from bench.common.waiting import holds_within, pause
from bench.hostile.corpus import ATTACKER_KEY, CHAT, COMPLETIONS
from bench.processes.deployment import ServedDeployment
from bench.processes.driven import Driven, answer_parent
from engine.clock import Clock
from engine.net.grpc_library import grpc as grpc_library
from router.gateway.inference import inference_pb2 as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
MIB = 2**20
BODY_BYTES = 8 * MIB - 1024  # slightly below the gateway's limit on bodies
NUM_EMPTY_FIELDS = 4_000_000
TENSOR, PARAMETER = b"\x2a\x00", b"\x22\x00"  # empty fields in protobuf's encoding


@dataclass(frozen=True, slots=True)
class GrpcMessage:
    """A message of a gRPC call, and its API key."""

    data: bytes
    key: str | None = ATTACKER_KEY
    path: str = INFER


@dataclass(frozen=True, slots=True)
class Assault:
    """The HTTP requests and gRPC messages of an assault. Each uses its own connection."""

    requests: tuple[bytes, ...] = ()
    messages: tuple[GrpcMessage, ...] = ()
    at_once: int = 4  # concurrent requests, and concurrent messages
    reads_after_s: float = 0.0  # seconds before the client reads an answer over HTTP


def http_request(path: str, body: bytes, *, key: str | None = ATTACKER_KEY) -> bytes:
    """Returns the bytes of an HTTP request with a JSON body, after which the connection closes."""
    return _head(path, key, f"Content-Length: {len(body)}") + body


def _head(path: str, key: str | None, framing: str) -> bytes:
    authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{authorization}"
        f"Content-Type: application/json\r\n{framing}\r\n\r\n"
    ).encode()


def chunks(times: int) -> Assault:
    """Returns bodies and trailers in the smallest chunks that HTTP allows, up to 9 MB on the
    wire.
    """
    head = _head(COMPLETIONS, ATTACKER_KEY, "Transfer-Encoding: chunked")
    chunk, end = b"1\r\n \r\n", b"0\r\n"
    half = head + chunk * (BODY_BYTES // 10)
    return Assault(
        (
            half + end + b"\r\n",
            head + chunk * (3 * MIB // 2),
            half,
            head + end + b"a:b\r\n" * 1_000_000,
            head + b"1;" + b"a" * 30_000 + b"\r\n \r\n",
        )
        * times
    )


def grpc(times: int) -> Assault:
    """Returns messages that need 180 times their length in memory when they are parsed."""
    many = (TENSOR * NUM_EMPTY_FIELDS, PARAMETER * NUM_EMPTY_FIELDS)
    messages = [GrpcMessage(data, key) for data in many for key in (ATTACKER_KEY, None, "wrong")]
    return Assault(messages=tuple(messages) * times)


def refused(times: int) -> Assault:
    """Returns bodies that the gateway reads and decodes, and then refuses."""
    broken = (b'{"prompt":"' + b"x" * BODY_BYTES, b'{"messages":[' + b" " * BODY_BYTES)
    requests = tuple(
        http_request(path, body, key=key)
        for path, body in zip((COMPLETIONS, CHAT), broken, strict=True)
        for key in (ATTACKER_KEY, None)
    )
    return Assault(requests * 5 * times, at_once=8)


def answers(times: int) -> Assault:
    """Returns requests for the most log-probabilities that are allowed, and some requests for
    more.
    """
    scored = {"n": 16, "max_tokens": 600, "ignore_eos": True, "logprobs": 20}
    chat = {**scored, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    request = pb.ModelInferRequest(model_name="")
    for name, text in (("text_input", "x"), ("sampling_parameters", json.dumps(scored))):
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(text.encode())
    request.outputs.add(name="logprobs")
    bodies = (
        (COMPLETIONS, {**scored, "prompt": "x"}),
        (COMPLETIONS, {**scored, "prompt": ["x"] * 8, "max_tokens": 300}),
        (COMPLETIONS, {"prompt": [7] * 700, "n": 16, "prompt_logprobs": 20, "max_tokens": 1}),
        (CHAT, {**chat, "top_logprobs": 20}),
    )
    requests = tuple(http_request(path, _json(fields)) for path, fields in bodies)
    return Assault(requests * times, (GrpcMessage(request.SerializeToString()),) * times)


def readers(times: int) -> Assault:
    """Returns streams whose clients read nothing for seconds, and then everything at once."""
    fields = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "logprobs": 20, "stream": True}
    request = http_request(COMPLETIONS, _json(fields))
    return Assault((request,) * 50 * times, at_once=150, reads_after_s=5.0)


def parsing(times: int) -> Assault:
    """Returns texts whose tokenization takes a thread of the gateway a tenth of a second up to
    seconds.
    """
    text, page = "the quick brown fox ", "/tokenize"
    short, long = (text * (size // len(text)) for size in (60_000, MIB // 4))
    cut = {"prompt": long, "truncate_prompt_tokens": 8, "max_tokens": 1}
    bodies: list[tuple[str, dict[str, Any]]] = [(page, {"prompt": short})] * 60
    bodies += [(page, {"prompt": long}), (COMPLETIONS, cut), (page, {"prompt": long * 28})] * 2
    return Assault(tuple(http_request(path, _json(f)) for path, f in bodies) * times, at_once=40)


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


LOADING = frozenset({"answers", "readers"})  # assaults whose requests workers compute
ASSAULTS: Mapping[str, Callable[[int], Assault]] = {
    "chunks": chunks,
    "grpc": grpc,
    "refused": refused,
    "answers": answers,
    "readers": readers,
    "parsing": parsing,
}

# ---------------------------------------------------------------- the attacker

LOW_PRIORITY = 10  # nice value: the server and the honest clients have priority
TIMEOUT_S = 60.0
OPTIONS = (("grpc.max_send_message_length", -1),)


async def _send(url: str, request: bytes, reads_after_s: float) -> str:
    """Sends one request on its own connection. Returns its HTTP status, or the reason why it has
    none.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            with closing(writer):
                writer.write(request)
                await pause(reads_after_s)  # meanwhile the answer fills the server's buffers
                line = (await reader.readline()).split()
                await reader.read()
        return line[1].decode() if len(line) > 1 else "closed"
    except TimeoutError:
        return "left"
    except OSError:
        return "closed"


async def _call(address: str, message: GrpcMessage) -> str:
    """Sends one gRPC message on its own connection. Returns the name of its status."""
    metadata = () if message.key is None else (("authorization", f"Bearer {message.key}"),)
    async with grpc_library.aio.insecure_channel(address, options=OPTIONS) as channel:
        call = channel.unary_unary(message.path)(message.data, metadata=metadata, timeout=TIMEOUT_S)
        return str((await call.code()).name)


async def _assault(assault: Assault, url: str, address: str) -> Counter[str]:
    """Sends everything: `at_once` HTTP requests and `at_once` gRPC messages at a time."""
    ends: Counter[str] = Counter()
    requests, messages = iter(assault.requests), iter(assault.messages)

    async def send(waiting: Iterable[bytes]) -> None:
        for request in waiting:
            ends[await _send(url, request, assault.reads_after_s)] += 1

    async def call(waiting: Iterable[GrpcMessage]) -> None:
        for message in waiting:
            ends[await _call(address, message)] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(assault.at_once):
            group.create_task(send(requests))
            group.create_task(call(messages))
    return ends


def main(name: str, times: str, url: str, address: str) -> None:
    """Waits for the command, carries out the assault, and prints the number of requests by
    status.
    """
    os.nice(LOW_PRIORITY)
    assault = ASSAULTS[name](int(times))
    answer_parent({"ready": {}})
    if sys.stdin.buffer.readline():
        answer_parent({"ends": dict(uvloop.run(_assault(assault, url, address)))})


ATTACKER = "bench.hostile.assaults"
READY_TIMEOUT_S = 60.0
RECOVERY_S = 30.0  # seconds after an assault within which memory must shrink
MAX_KEPT = 0.1  # allowed growth of memory after RECOVERY_S, as a share
ASSAULT_TIMEOUT_S = 600.0
KIB = 1024


@dataclass(frozen=True, slots=True)
class AssaultRun:
    """The outcome of one assault, and the gateways' private memory before it and some 30 s after
    it.
    """

    name: str
    ends: Mapping[str, int]  # number of requests by status
    before_bytes: int
    after_bytes: int

    @property
    def kept(self) -> float:
        """Returns the growth of memory as a share; negative if memory shrank."""
        return self.after_bytes / self.before_bytes - 1


class Attacker:
    """The process that carries out one assault. It is ready when `open` returns."""

    def __init__(self, name: str, times: int, served: ServedDeployment, grpc_port: int) -> None:
        self.name = name
        self._served = served
        address = f"127.0.0.1:{grpc_port}"
        command = [sys.executable, "-m", ATTACKER, name, str(times), served.url, address]
        self._process = Driven(name, command)

    async def open(self) -> None:
        """Starts the process and waits until it has prepared its bytes. Raises DrivenFailed."""
        self._process.start()
        await asyncio.to_thread(self._process.ready, READY_TIMEOUT_S)
        self._before_bytes = self._memory()

    async def attack(self) -> Mapping[str, int]:
        """Carries out the assault. Returns the number of requests by status. Raises
        DrivenFailed.
        """
        answer = await asyncio.to_thread(self._process.ask, "attack", timeout_s=ASSAULT_TIMEOUT_S)
        ends: Mapping[str, int] = answer["ends"]
        return ends

    async def recovered(self, ends: Mapping[str, int], clock: Clock) -> AssaultRun:
        """Ends the process. Waits, at most RECOVERY_S, until the gateways have freed the memory."""
        await asyncio.to_thread(self._process.close)

        async def is_back() -> bool:
            return self._memory() <= (1 + MAX_KEPT) * self._before_bytes

        await holds_within(is_back, RECOVERY_S, clock)
        return AssaultRun(self.name, ends, self._before_bytes, self._memory())

    def _memory(self) -> int:
        return private_bytes(self._served.services("gateway"))


def private_bytes(sessions: Iterable[int], proc: Path = PROC) -> int:
    """Returns the anonymous resident memory of all processes in these sessions, from Linux's /proc.

    Shared memory is left out: it contains KV blocks, whose pages count only after their first use.
    """
    wanted = frozenset(sessions)
    return sum(_rss_anon_bytes(path) for path in _processes(wanted, proc))


def _processes(sessions: frozenset[int], proc: Path) -> Iterator[Path]:
    for path in proc.glob("[0-9]*"):
        with suppress(OSError, IndexError):  # the process has ended
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                yield path


def _rss_anon_bytes(process: Path) -> int:
    with suppress(OSError):  # the process has ended
        for line in (process / "status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * KIB
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
