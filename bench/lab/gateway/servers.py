"""The servers of `bench gateway`: start, address and CPU time."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bench.common import background
from bench.common.options import PeerProgram, environment_of_peers
from bench.lab.gateway.worker import BLOCK_SIZE, NullWorkerOptions
from bench.processes.driven import Driven, begun, launched, listening
from deploy.base.defaults import BUNDLED_MODEL
from engine.config import GatewayConfig, RouterConfig
from engine.control import Intent, Member, Members, Version
from engine.messages import WorkerId
from router.text.tokenizer import load_text_model

OURS, BARE, WRITES = "baton", "uvloop", "writes"
MODEL = "null"
STEP_S = 0.01  # the worker's
START_TIMEOUT_S = 60.0
MANY = 2**30
TOKEN = "null"
CONTEXT_LEN = 4096
TEXT = "def add(a, b):\n    return the sum of a and b, and of all others that are given\n"
PEERS = Path(__file__).parents[2] / "peers"
BARE_SERVER = (sys.executable, str(PEERS / "uvloop_server.py"))


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. Its processes share a session; `behind` are the servers it depends on."""

    name: str
    port: int
    session: int
    version: str = ""
    behind: tuple[int, ...] = ()

    @property
    def sessions(self) -> tuple[int, ...]:
        """Session ids of all processes that work for it."""
        return (self.session, *self.behind)

    def cpu_s(self) -> float:
        """Returns the CPU seconds that the server's processes have used."""
        return background.session_seconds(self.session)


def open_all(peers: Sequence[PeerProgram], stack: ExitStack) -> dict[str, Server]:
    """Starts all servers, which end with the stack. Raises DrivenFailed."""
    servers = {
        OURS: _open_ours(stack),
        BARE: _open(BARE, [*BARE_SERVER, "tasks"], stack),
        WRITES: _open(WRITES, [*BARE_SERVER, "ticks"], stack),
    }
    behind: tuple[int, ...]
    for peer in peers:
        if peer.name == "fastapi":
            arguments, behind = [str(PEERS / "fastapi_server.py")], ()
        else:
            backend = _open("backend", [*BARE_SERVER, "ticks"], stack)
            arguments, behind = (
                [str(PEERS / "vllm_router.py"), str(backend.port)],
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
    process = begun(Driven(name, command, environment), stack)
    facts = process.ready(START_TIMEOUT_S)
    session = process.session
    assert session is not None
    return Server(name, int(facts["port"]), session, str(facts.get("version", "")))


def _open_ours(stack: ExitStack) -> Server:
    token_ids = tuple(load_text_model(BUNDLED_MODEL).encode_text(TEXT, CONTEXT_LEN))
    options = msgspec.json.encode(NullWorkerOptions(TOKEN, STEP_S, token_ids)).decode()
    command = [sys.executable, "-m", "bench.lab.gateway.worker", options]
    worker = begun(Driven("worker", command), stack)
    address = worker.ready(START_TIMEOUT_S)["address"]
    member = Member(WorkerId("null"), address, context_len=CONTEXT_LEN)
    served = Version(model=str(BUNDLED_MODEL), model_name=MODEL)
    spec = {  # a `deploy.base.spec.GatewaySpec`
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
