"""Measures the delay that the gateway adds to a first token, and its CPU time, and compares
servers.

All servers answer the same requests, with streams of the same pace:

    baton        the gateway, in front of a worker that computes nothing            ours
    uvloop       a bare server: one coroutine for each stream, which writes tokens    peer
    writes       a bare server with one timer for all streams                      limit
    fastapi      FastAPI, pydantic and uvicorn                                      peer, --peer
    vllm_router  vLLM's router in front of a bare server                            peer, --peer

Only Baton communicates with a worker and detokenizes text. Peers write constant tokens. One client
process sends requests to all servers, one server at a time; the other servers sleep. In each
repetition, every server gets every load:

    serial    one request after the other, of one token: the delay of a first token
    64        64 concurrent streams, a token every 10 ms
    512       512 concurrent streams, a token every 50 ms

| result                    | unit     |                                                        |
|---------------------------|----------|--------------------------------------------------------|
| gateway/tok_per_cpu_s     | tokens/s | tokens per CPU second of the server, at 64 streams     |
| gateway/added_ttft_ms     | ms       | median TTFT of single requests minus the bare server's |
| gateway/added_ttft_p99_ms | ms       | p99 TTFT of them, minus the bare server's median       |
| gateway/ttft_p99/<load>   | ms       | p99 TTFT of streams that begin at once                 |
| gateway/itl_p99/<load>    | ms       | p99 between two pieces of a stream, pace included      |
| background/cpu            | %        | share of cores used by other programs                  |

The limit of tokens per CPU second is measured with `writes`: one timer, and one write per token. A
peer's `ratio` is ours over theirs; for times, less than one is better.
"""

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import msgspec
import typer

from bench.common import background
from bench.common.background import BusyWatch, busy_results, busy_warning
from bench.common.command import RepeatOption, Say, peer_option
from bench.common.options import PeerProgram, environment_of_peers, peers_named
from bench.common.report import Result, notes_on, result_of
from bench.common.stats import percentile
from bench.lab.experiment import Experiment, Findings, order_of
from bench.lab.gateway.worker import BLOCK_SIZE, NullWorkerOptions
from bench.processes.driven import Driven, launched, listening, started
from deploy.base.defaults import BUNDLED_MODEL
from engine.config import GatewayConfig, RouterConfig
from engine.control import Intent, Member, Members, Version
from engine.messages import WorkerId
from router.text.tokenizer import load_text_model

OURS, BARE, WRITES = "baton", "uvloop", "writes"
MODEL = "null"
STEP_S = 0.01  # seconds between two steps of the worker
START_TIMEOUT_S = 60.0
MANY = 2**30
TOKEN = "null"
CONTEXT_LEN = 4096
TEXT = "def add(a, b):\n    return the sum of a and b, and of all others that are given\n"
PEER_SCRIPTS = Path(__file__).parents[2] / "peers"
BARE_SERVER = (sys.executable, str(PEER_SCRIPTS / "uvloop_server.py"))


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. Its processes share a session. `behind` are servers that it needs, such as
    workers.
    """

    name: str
    port: int
    session: int
    version: str = ""
    behind: tuple[int, ...] = ()

    @property
    def sessions(self) -> tuple[int, ...]:
        """Returns the session ids of the server and of the servers behind it."""
        return (self.session, *self.behind)

    def cpu_s(self) -> float:
        """Returns the CPU seconds that the server's processes have used."""
        return background.session_seconds(self.session)


def open_all(peers: Sequence[PeerProgram], stack: ExitStack) -> dict[str, Server]:
    """Starts all servers; the stack ends them. Raises DrivenFailed."""
    servers = {
        OURS: _open_ours(stack),
        BARE: _open(BARE, [*BARE_SERVER, "tasks"], stack),
        WRITES: _open(WRITES, [*BARE_SERVER, "ticks"], stack),
    }
    behind: tuple[int, ...]
    for peer in peers:
        if peer.name == "fastapi":
            arguments, behind = [str(PEER_SCRIPTS / "fastapi_server.py")], ()
        else:
            backend = _open("backend", [*BARE_SERVER, "ticks"], stack)
            arguments, behind = (
                [str(PEER_SCRIPTS / "vllm_router.py"), str(backend.port)],
                (backend.session,),
            )
        command = [str(peer.python), *arguments]
        server = _open(peer.name, command, stack, environment_of_peers())
        servers[peer.name] = replace(server, behind=behind)
    return servers


def _open(
    name: str,
    command: Sequence[str],
    stack: ExitStack,
    environment: Mapping[str, str] | None = None,
) -> Server:
    process = started(Driven(name, command, environment), stack)
    facts = process.ready(START_TIMEOUT_S)
    session = process.session
    assert session is not None
    return Server(name, int(facts["port"]), session, str(facts.get("version", "")))


def _open_ours(stack: ExitStack) -> Server:
    token_ids = tuple(load_text_model(BUNDLED_MODEL).encode_text(TEXT, CONTEXT_LEN))
    options = msgspec.json.encode(NullWorkerOptions(TOKEN, STEP_S, token_ids)).decode()
    command = [sys.executable, "-m", "bench.lab.gateway.worker", options]
    worker = started(Driven("worker", command), stack)
    address = worker.ready(START_TIMEOUT_S)["address"]
    member = Member(WorkerId("null"), address, context_len=CONTEXT_LEN)
    served = Version(model=str(BUNDLED_MODEL), model_name=MODEL)
    spec = {  # a `deploy.base.spec.GatewaySpec` as JSON
        "members": Members(1, (member,), Intent((served,))),
        "gateway": GatewayConfig(port=0),
        "router": RouterConfig(
            max_queue=MANY, prefill_backlog_tokens=MANY * BLOCK_SIZE, prefill_backlog_s=MANY
        ),
        "token": TOKEN,
    }
    service = launched("gateway", stack)
    answer = listening(service, spec, timeout_s=START_TIMEOUT_S)
    port = int(answer["url"].rpartition(":")[2])
    assert service.session is not None
    assert worker.session is not None
    return Server(OURS, port, service.session, behind=(worker.session,))


PEERS = ("fastapi", "vllm_router")
ANSWER_TIMEOUT_S = 150.0
CLIENT_BOUND = 0.7  # if the client uses a larger share of a core, it may be the bottleneck
SATURATED = 0.95  # if a server uses a larger share of a core, its latencies include queueing


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """A load of concurrent streams. Each connection sends one request after the other."""

    name: str
    num_streams: int
    num_rounds: int
    num_tokens: int  # tokens of each answer
    steps: int = 1  # steps of the worker between two tokens

    @property
    def pace_s(self) -> float:
        """Returns the seconds between two tokens."""
        return self.steps * STEP_S

    @property
    def num_requests(self) -> int:
        """Returns the number of all requests."""
        return self.num_streams * self.num_rounds

    @property
    def total_tokens(self) -> int:
        """Returns the number of tokens of all answers."""
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
        """Returns a percentile of the times to first tokens, in milliseconds."""
        return 1e3 * percentile(self.ttft_s, percent)

    @property
    def tokens_per_cpu_s(self) -> float:
        """Returns the tokens per CPU second of the server."""
        return self.load.total_tokens / self.cpu_s


@dataclass(frozen=True, slots=True)
class GatewayMeasured:
    """All runs, and the versions of the peers."""

    runs: tuple[GatewayRun, ...]
    background: tuple[float, ...] = ()  # share of the CPU that other programs used, by repetition
    versions: Mapping[str, str] = field(default_factory=dict)

    def of(self, server: str, load: StreamLoad) -> list[GatewayRun]:
        """Returns the runs of one server with one load, in order of the repetitions."""
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
        """Raises ConfigError if a peer is unknown."""
        peers_named(self.peer or (), PEERS)

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return "gateway, in front of a worker that computes nothing"

    @property
    def peers(self) -> tuple[PeerProgram, ...]:
        """Returns the servers that `--peer` names."""
        return peers_named(self.peer or (), PEERS)

    @property
    def servers(self) -> tuple[str, ...]:
        """Returns the names of all servers."""
        return (OURS, BARE, WRITES, *(peer.name for peer in self.peers))

    @property
    def serial(self) -> StreamLoad:
        """Returns the load of single requests."""
        return StreamLoad("serial", 1, num_rounds=30 if self.is_quick else 200, num_tokens=1)

    @property
    def loads(self) -> tuple[StreamLoad, ...]:
        """Returns the loads of concurrent streams."""
        if self.is_quick:
            return StreamLoad("64", 64, 1, 8), StreamLoad("512", 512, 1, 8, steps=5)
        few = max(2, self.tokens // 4)
        return StreamLoad("64", 64, 2, self.tokens), StreamLoad("512", 512, 1, few, steps=5)

    def quick(self) -> Self:
        """Returns a study with one run of short answers."""
        return replace(self, repeat=1, is_quick=True)

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises DrivenFailed."""
        measured = self.run(say)
        notes = notes_on(measured.versions)
        return Findings(results(self, measured), warnings(self, measured), config=notes)

    def run(self, say: Say) -> GatewayMeasured:
        """Starts all servers, sends the loads to each in turn, and ends the servers."""
        with ExitStack() as stack:
            say("starting the servers")
            servers = open_all(self.peers, stack)
            client = started(
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
        """Returns the body of a request. Peers read the pace from `user`, our worker reads it from
        `top_k`.
        """
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
    """Returns all results, in the order of the table in this module's docstring."""
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
    """Returns a line for each reason not to trust the results."""
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
