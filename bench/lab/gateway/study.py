"""What the gateway adds to a first token, and its CPU time, beside other servers.

Servers answer the same requests with streams of the same pace:

    baton        the gateway, in front of a worker that computes nothing            ours
    uvloop       a bare server: a coroutine for each stream, which only writes      peer
    writes       the same with one timer for all streams: nothing but writes       limit
    fastapi      FastAPI, pydantic and uvicorn                                      peer, --peer
    vllm_router  vLLM's router in front of a bare server                            peer, --peer

Only Baton talks to a worker and handles text. Peers invent their tokens where they write them. One
client process loads all servers. While it loads one server, the others sleep. Each repetition gives
every load to each server:

    serial    one request after the other, of one token: what a server adds to a first token
    64        as many streams at once, a token every 10 ms
    512       as many streams at once, a token every 50 ms

| result                    | unit     |                                                        |
|---------------------------|----------|--------------------------------------------------------|
| gateway/tok_per_cpu_s     | tokens/s | of a second of the server's CPU, at 64 paced streams   |
| gateway/added_ttft_ms     | ms       | median TTFT of single requests, less the bare server's |
| gateway/added_ttft_p99_ms | ms       | their 99th percentile, less the bare server's median   |
| gateway/ttft_p99/<load>   | ms       | of streams that begin at once                          |
| gateway/itl_p99/<load>    | ms       | between two pieces of a stream; the pace is in it      |
| background/cpu            | %        | of all cores, used by other programs                   |

The limit of tokens per second of CPU is the bare server's, with one timer and a write a token.
A peer's `ratio` is ours over theirs; for times, less than one is better.
"""

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import typer

from bench.common.background import BusyWatch, busy_results, busy_warning
from bench.common.command import RepeatOption, peer_option
from bench.common.options import PeerProgram, peers_named
from bench.common.progress import Say
from bench.common.report import Result, notes_on, result_of
from bench.common.stats import percentile
from bench.lab.experiment import Experiment, Findings, order_of
from bench.lab.gateway.servers import BARE, MODEL, OURS, STEP_S, WRITES, Server, open_all
from bench.processes.driven import Driven, begun

PEERS = ("fastapi", "vllm_router")
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 150.0
CLIENT_BOUND = 0.7  # above this share of a core, the client may be the bottleneck
SATURATED = 0.95  # above this share of a core, times show a queue


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """Streams that begin together; each connection sends one request after the other."""

    name: str
    num_streams: int
    num_rounds: int
    num_tokens: int  # tokens of each answer
    steps: int = 1  # worker steps between two tokens

    @property
    def pace_s(self) -> float:
        """Seconds from token to token."""
        return self.steps * STEP_S

    @property
    def num_requests(self) -> int:
        """All of them."""
        return self.num_streams * self.num_rounds

    @property
    def total_tokens(self) -> int:
        """Tokens of all answers."""
        return self.num_requests * self.num_tokens


@dataclass(frozen=True, slots=True)
class GatewayRun:
    """The times of one load on one server, in seconds."""

    server: str
    load: StreamLoad
    repeat: int
    cpu_s: float
    client_cpu_s: float
    wall_s: float
    num_events: int
    ttft_s: tuple[float, ...]
    gaps_s: tuple[float, ...]

    def ttft_ms(self, percent: int) -> float:
        """A percentile of the times to first tokens."""
        return 1e3 * percentile(self.ttft_s, percent)

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens of a second of the server's CPU."""
        return self.load.total_tokens / self.cpu_s


@dataclass(frozen=True, slots=True)
class GatewayMeasured:
    """All runs, and versions of the peers."""

    runs: tuple[GatewayRun, ...]
    background: tuple[float, ...] = ()  # share of the CPU that others used, by repetition
    versions: Mapping[str, str] = field(default_factory=dict)

    def of(self, server: str, load: StreamLoad) -> list[GatewayRun]:
        """Returns a server's runs of one load, by repetition."""
        return [run for run in self.runs if (run.server, run.load) == (server, load)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStudy(Experiment):
    """Measure what the gateway adds to a first token, and its CPU, beside other servers."""

    NAME: ClassVar = "gateway"
    QUICK: ClassVar = "One short run: some seconds."

    prompt_words: Annotated[int, typer.Option(min=1, help="Words of every prompt.")] = 32
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at 64 streams.")] = 256
    repeat: RepeatOption = 5
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None

    def __post_init__(self) -> None:
        """Raises ConfigError for an unknown peer."""
        peers_named(self.peer or (), PEERS)

    @property
    def title(self) -> str:
        """Returns the line above the table."""
        return "gateway, in front of a worker that computes nothing"

    @property
    def peers(self) -> tuple[PeerProgram, ...]:
        """Returns the servers of `--peer`."""
        return peers_named(self.peer or (), PEERS)

    @property
    def servers(self) -> tuple[str, ...]:
        """Returns the names of the servers."""
        return (OURS, BARE, WRITES, *(peer.name for peer in self.peers))

    @property
    def serial(self) -> StreamLoad:
        """Returns the load of single requests."""
        return StreamLoad("serial", 1, num_rounds=30 if self.is_quick else 200, num_tokens=1)

    @property
    def loads(self) -> tuple[StreamLoad, ...]:
        """Returns the loads of streams."""
        if self.is_quick:
            return StreamLoad("64", 64, 1, 8), StreamLoad("512", 512, 1, 8, steps=5)
        few = max(2, self.tokens // 4)
        return StreamLoad("64", 64, 2, self.tokens), StreamLoad("512", 512, 1, few, steps=5)

    def quick(self) -> Self:
        """Returns one run of short answers."""
        return replace(self, repeat=1, is_quick=True)

    def measure(self, say: Say) -> Findings:
        """Raises DrivenFailed."""
        measured = self.run(say)
        notes = notes_on(measured.versions)
        return Findings(results(self, measured), warnings(self, measured), config=notes)

    def run(self, say: Say) -> GatewayMeasured:
        """Starts all servers, loads them in turn, and ends them."""
        with ExitStack() as stack:
            say("starting the servers")
            servers = open_all(self.peers, stack)
            client = begun(
                Driven("client", [sys.executable, "-m", "bench.lab.gateway.client"]), stack
            )
            client.ready(START_TIMEOUT_S)
            for server in servers.values():
                self._warm_up(server, client)
            runs: list[GatewayRun] = []
            sessions = [session for server in servers.values() for session in server.sessions]
            busy = BusyWatch(lambda: [*sessions, client.session or 0, os.getsid(0)])
            for repeat in range(self.repeat):
                say(f"repetition {repeat + 1} of {self.repeat}")
                with busy.repetition():
                    for name in order_of(self.servers, self.seed, repeat):
                        for load in (self.serial, *self.loads):
                            runs.append(self._run(servers[name], client, load=load, repeat=repeat))
            versions = {name: s.version for name, s in servers.items() if s.version}
            return GatewayMeasured(tuple(runs), tuple(busy.shares), versions)

    def _warm_up(self, server: Server, client: Driven) -> None:
        self._run(server, client, load=replace(self.serial, num_rounds=20), repeat=0)
        for load in self.loads:
            brief = replace(load, num_rounds=1, num_tokens=4)
            self._run(server, client, load=brief, repeat=0)

    def _run(self, server: Server, client: Driven, *, load: StreamLoad, repeat: int) -> GatewayRun:
        before_s = server.cpu_s()
        seen = client.ask(
            "stream",
            timeout_s=ANSWER_TIMEOUT_S,
            port=server.port,
            body=self.body_of(load),
            num_connections=load.num_streams,
            num_requests=load.num_requests,
            seed=(self.seed * self.repeat + repeat) * load.num_requests,
        )
        return GatewayRun(
            server=server.name,
            load=load,
            repeat=repeat,
            cpu_s=server.cpu_s() - before_s,
            client_cpu_s=seen["cpu_s"],
            wall_s=seen["wall_s"],
            num_events=seen["num_events"],
            ttft_s=tuple(seen["ttft_s"]),
            gaps_s=tuple(seen["gaps_s"]),
        )

    def body_of(self, load: StreamLoad) -> dict[str, Any]:
        """Returns a request's body. Peers read the pace from `user`, our worker from `top_k`."""
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": "word " * self.prompt_words}],
            "stream": True,
            "max_tokens": load.num_tokens,
            "ignore_eos": True,
            "top_k": load.steps,
            "user": str(load.pace_s),
        }


def results(study: GatewayStudy, measured: GatewayMeasured) -> tuple[Result, ...]:
    """All results, in the order of the table above."""
    first, serial = study.loads[0], study.serial
    bare_ms = {run.repeat: run.ttft_ms(50) for run in measured.of(BARE, serial)}

    def compared(
        name: str, unit: str, load: StreamLoad, of: Callable[[GatewayRun], float], *, but: str = ""
    ) -> Result:
        servers = [server for server in study.servers if server not in (WRITES, but)]
        values = {server: [of(run) for run in measured.of(server, load)] for server in servers}
        theirs = {name: statistics.median(found) for name, found in values.items() if name != OURS}
        known = {server: value for server, value in theirs.items() if value}
        return result_of(f"gateway/{name}", values[OURS], unit).beside(known)

    def added(percent: int, run: GatewayRun) -> float:
        return run.ttft_ms(percent) - bare_ms[run.repeat]

    speed = compared("tok_per_cpu_s", "tokens/s", first, lambda run: run.tokens_per_cpu_s)
    limit = statistics.median(run.tokens_per_cpu_s for run in measured.of(WRITES, first))
    found = [
        speed.limited(limit),
        compared("added_ttft_ms", "ms", serial, partial(added, 50), but=BARE),
        compared("added_ttft_p99_ms", "ms", serial, partial(added, 99), but=BARE),
    ]
    for load in study.loads:
        found.append(compared(f"ttft_p99/{load.name}", "ms", load, lambda run: run.ttft_ms(99)))
        found.append(
            compared(f"itl_p99/{load.name}", "ms", load, lambda r: 1e3 * percentile(r.gaps_s, 99))
        )
    return (*found, *busy_results(measured.background))


def warnings(study: GatewayStudy, measured: GatewayMeasured) -> list[str]:
    """A line for each reason not to trust the results."""
    lines = busy_warning(measured.background)
    for load in (study.serial, *study.loads):
        for server in study.servers:
            lines += _warnings_of(server, load, measured.of(server, load))
    return lines


def _warnings_of(server: str, load: StreamLoad, runs: Sequence[GatewayRun]) -> list[str]:
    lines: list[str] = []
    if not runs:
        return lines
    if any(run.num_events < load.total_tokens for run in runs):
        lines.append(f"{server} sent fewer events than tokens at {load.name}: it merges them")
    client = max(run.client_cpu_s / run.wall_s for run in runs)
    if client > CLIENT_BOUND:
        lines.append(f"the client used {client:.0%} of a core for {server} at {load.name}")
    used = max(run.cpu_s / run.wall_s for run in runs)
    if used > SATURATED and load.num_streams > 1:
        lines.append(f"{server} was saturated at {load.name}: its times show a queue")
    return lines
