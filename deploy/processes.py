"""Wiring: builds a worker or a gateway from its spec. The one place that names every real part.

A *service* is opened and closed on an event loop of its own, in a thread of its own, so that the
same code runs in a plain process, in a Ray actor and in a test.
"""

import asyncio
import gc
import logging
import os
import random
import resource
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec
import uvloop

from deploy.model_source import Parts, default_cache, is_remote, local_model
from deploy.worker import memory
from deploy.worker.host import ModelFacts, WorkerHost, WorkerIdentity
from engine.clock import Clock, MonotonicClock
from engine.config import GatewayConfig, RouterConfig, WorkerConfig
from engine.control import FIRST_VERSION, Members
from engine.errors import ConfigError
from engine.grammar.guides import LlGuides
from engine.messages import Role, WorkerId
from engine.net.trust import Secret
from kvtransfer.memory import PrivatePool, SharedPool, host_pool
from kvtransfer.native.library import is_native
from router.access.file import KeyFile
from router.access.limits import KeyLimits
from router.edge.limits import Book, EdgeLimits
from router.edge.listener import BACKLOG, Listener
from router.edge.tls import TlsFiles
from router.gateway.app import create_app
from router.gateway.grammar_checker import GrammarChecker
from router.gateway.jobs import GatewaySettings
from router.gateway.siblings import Siblings
from router.membership import ControlServer
from router.native.library import is_native as is_router_native
from router.service import Router
from router.text.tokenizer import load_text_model
from router.version_routers import VersionRouters

if TYPE_CHECKING:
    from engine.model.runner import KVNeeds, SizeKV

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 300.0  # a fetch of the model not counted
CLOSE_TIMEOUT_S = 30.0
OTHER_DESCRIPTORS = 1024  # of a gateway, beside its clients' connections
LINK_TIMEOUT_S = 10.0  # a gateway that has no worker by then answers 503 until it has


class WorkerSpec(msgspec.Struct, frozen=True):
    """All that a worker is started with."""

    worker_id: WorkerId
    role: Role
    model: str  # as `model_source` reads it
    config: WorkerConfig
    token: str
    threads: int
    memory_bytes: int | None = None  # for all workers together; None: what is available
    num_workers: int = 1  # that share it
    host: str = "127.0.0.1"
    log_level: str = "warning"
    version: str = FIRST_VERSION


class WorkerReady(msgspec.Struct, frozen=True):
    """What a started worker says of itself."""

    address: str
    pid: int
    context_len: int
    num_blocks: int
    block_bytes: int
    start_s: float  # from when it knew what to be until it listened
    version: str = FIRST_VERSION
    max_len: int = 0  # tokens of one request, as its context and its KV memory allow
    # Whether a sequence has the same bits in any company: measured, for this model and format.
    is_batch_invariant: bool = True


class GatewaySpec(msgspec.Struct, frozen=True):
    """All that a gateway is started with."""

    members: Members  # as they are just then
    gateway: GatewayConfig
    router: RouterConfig
    token: str
    log_level: str = "warning"
    name: str = "gateway"
    process: int = 0  # which of those that share the port
    joins: bool = False  # the others may be there already; who does not sees that the port is free
    siblings: str | None = None  # a directory, where several share it
    control_host: str = "127.0.0.1"  # where the controller reaches it


class GatewayReady(msgspec.Struct, frozen=True):
    """What a started gateway says of itself."""

    url: str
    model_name: str
    pid: int
    control: str = ""  # address for the controller
    drain_timeout_s: float = 0.0  # its end may take so long


T = TypeVar("T", covariant=True)
U = TypeVar("U")


class Fetching(msgspec.Struct, frozen=True, tag=True):
    """The model must come to this machine first. Who has nothing to fetch says nothing of it."""


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The model is on this machine: from now on the service starts."""


class LateStart(ConfigError):
    """A service takes too long to open; it may only have had much to do."""


class LoopService(Protocol[T]):
    """Something that runs on an event loop between open and close."""

    async def open(self) -> T:
        """Starts; returns what others need to know."""
        ...

    @property
    def drain_timeout_s(self) -> float:
        """How long `close` may wait for what is under way."""
        ...

    def hurry(self) -> None:
        """Has `close` wait for nothing any more."""
        ...

    async def close(self) -> None:
        """Stops."""
        ...


class WorkerService:
    """A worker with the torch runner."""

    drain_timeout_s = 0.0  # gateways end before their workers

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec

    async def open(self) -> WorkerReady:
        """Loads the model and starts to listen. Raises CheckpointError, ConfigError."""
        clock = MonotonicClock()
        begin_s = clock.now_s()
        import torch  # seconds to import, and a gateway does without

        from engine.model.runner import TorchRunner

        spec = self._spec
        torch.set_num_threads(spec.threads)
        directory = await asyncio.to_thread(_directory_of, spec.model, Parts.ALL)
        runner = TorchRunner(
            directory,
            draft=spec.config.draft_path,
            block_size=spec.config.block_size,
            kv_format=spec.config.kv_dtype,
            weights=spec.config.weights,
            kv_bytes=self._kv_bytes(),
            max_len=spec.config.max_model_len,
        )
        pools: list[PrivatePool | SharedPool] = []

        def allocate(num_bytes: int) -> memoryview:
            block_bytes = num_bytes // runner.num_blocks
            pool = host_pool(runner.num_blocks, block_bytes, spec.config.kv_transport)
            pool.open()
            pools.append(pool)
            return pool.blocks.reshape(-1).data

        await asyncio.to_thread(runner.open, allocate)
        await asyncio.to_thread(runner.warm_up)
        await asyncio.to_thread(is_native)  # so that no pull waits for a compiler
        identity = WorkerIdentity(
            spec.worker_id, spec.role, runner.fingerprint, Secret(spec.token), spec.host
        )
        self._runner = runner
        self._host = WorkerHost(
            identity,
            config=spec.config,
            runner=runner,
            model=ModelFacts(
                vocab_size=runner.vocab_size,
                context_len=runner.context_len,
                has_draft_model=runner.draft_forward is not None,
                guides=LlGuides(
                    directory / "tokenizer.json",
                    vocab_size=runner.vocab_size,
                    eos_token_ids=runner.eos_token_ids,
                ),
            ),
            memory=pools[0],
            clock=clock,
            on_crash=die,
        )
        address = await self._host.open()
        return WorkerReady(
            address=address,
            pid=os.getpid(),
            context_len=runner.context_len,
            num_blocks=runner.num_blocks,
            block_bytes=runner.layout.block_bytes,
            start_s=clock.now_s() - begin_s,
            version=spec.version,
            max_len=min(runner.context_len, runner.num_blocks * runner.block_size),
            is_batch_invariant=runner.is_batch_invariant,
        )

    def _kv_bytes(self) -> "int | SizeKV":
        """As configured, or as memory allows that is available before the model is loaded."""
        spec = self._spec
        if spec.config.kv_mib is not None:
            return spec.config.kv_mib * 2**20
        here_bytes = memory.available_bytes()
        shared_bytes = here_bytes if spec.memory_bytes is None else spec.memory_bytes

        def size(needs: "KVNeeds") -> int:
            # Where less is available than this worker's share, other programs have it.
            return memory.kv_bytes(
                min(shared_bytes, here_bytes * spec.num_workers),
                num_workers=spec.num_workers,
                **needs._asdict(),
            )

        return size

    def hurry(self) -> None:
        """It waits for nothing as it is."""

    async def close(self) -> None:
        """Ends sessions and threads; asserts that the pool's books are in order."""
        await self._host.close()


class GatewayService:
    """A gateway on uvicorn."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._spec = spec
        self.drain_timeout_s = spec.gateway.drain_timeout_s
        self._siblings: Siblings | None = None
        self._listener: Listener | None = None

    async def open(self) -> GatewayReady:
        """Binds the port and connects to the workers. Raises ConfigError."""
        sock = _bind(self._spec.gateway, is_first=not self._spec.joins)
        try:
            return await self._open(sock)
        except BaseException:
            sock.close()
            raise

    async def _open(self, sock: socket.socket) -> GatewayReady:
        spec = self._spec
        config = spec.gateway
        clock, secret = MonotonicClock(), Secret(spec.token)
        await asyncio.to_thread(is_router_native)  # so that no request waits for a compiler
        self._routers = VersionRouters(
            new_router=lambda: Router(
                [],
                config=spec.router,
                secret=secret,
                clock=clock,
                record_dir=None if config.record_dir is None else Path(config.record_dir),
            ),
            load_text=lambda version: load_text_model(_directory_of(version.model, Parts.TEXT)),
        )
        keys = None if config.keys_file is None else _open_keys(config.keys_file, clock)
        settings = GatewaySettings(
            secret=Secret(spec.token),
            max_body_bytes=config.max_body_bytes,
            key_limits=KeyLimits(config.requests_per_s, config.tokens_per_min, config.max_streams),
            max_choices=config.max_choices,
            min_priority=config.min_priority,
        )
        rng = random.Random(os.urandom(16))
        if spec.siblings is not None:
            self._siblings = Siblings(Path(spec.siblings), str(spec.process))
        tls = _open_tls(config)
        book = Book(_limits_of(config))
        self._grammars = GrammarChecker(clock)
        app = create_app(
            self._routers.versions,
            settings=settings,
            clock=clock,
            rng=rng,
            grammars=self._grammars,
            keys=keys,
            siblings=self._siblings,
            edge=book,
        )
        if self._siblings is not None:
            await self._siblings.open()
        first = await self._routers.open(spec.members)
        missing = await self._routers.routers()[first.name].wait_until_ready(LINK_TIMEOUT_S)
        if missing is not None:
            log.warning("serving all the same: %s", missing)
        self._listener = Listener(app, book, tls)
        self._control = ControlServer(
            self._routers,
            secret=secret,
            clock=clock,
            members=spec.members,
            host=spec.control_host,
        )
        control = await self._control.open()
        _listen(sock)
        self._listener.open(sock)
        host, port = sock.getsockname()[:2]
        return GatewayReady(
            url=f"{'http' if tls is None else 'https'}://{host}:{port}",
            model_name=first.model_name,
            pid=os.getpid(),
            control=control,
            drain_timeout_s=self.drain_timeout_s,
        )

    def hurry(self) -> None:
        """Answers that have begun are ended now."""
        if self._listener is not None:
            self._listener.hurry()

    async def close(self) -> None:
        """Takes no request any more, waits for answers that have begun, and ends all sessions."""
        assert self._listener is not None
        self._routers.versions.stop()
        await self._listener.close(self.drain_timeout_s, self._cut)
        await self._control.close()
        await self._grammars.close()
        if self._siblings is not None:
            await self._siblings.close()
        await self._routers.close()

    def _cut(self) -> None:
        """Ends answers that were waited for long enough, each with an error."""
        log.warning("%d requests are ended before they are complete", self._routers.cut())


def _open_tls(config: GatewayConfig) -> TlsFiles | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    client_ca = config.tls_client_ca
    tls = TlsFiles(
        Path(config.tls_cert).expanduser(),
        Path(config.tls_key).expanduser(),
        None if client_ca is None else Path(client_ca).expanduser(),
    )
    tls.open()
    return tls


def _open_keys(path: str, clock: Clock) -> KeyFile:
    keys = KeyFile(Path(path).expanduser(), clock)
    keys.open()
    return keys


def has_to_fetch(kind: str, spec: bytes) -> bool:
    """Whether `fetch` may take long. A gateway fetches its small part when it starts."""
    return kind == "worker" and is_remote(msgspec.json.decode(spec, type=WorkerSpec).model)


def fetch(kind: str, spec: bytes) -> None:
    """Has the model of a worker on this machine, which takes as long as a download may.

    Raises ConfigError.
    """
    if kind == "worker":
        _directory_of(msgspec.json.decode(spec, type=WorkerSpec).model, Parts.ALL)


def _directory_of(model: str, parts: Parts) -> Path:
    return local_model(model, cache=default_cache(os.environ), parts=parts, report=log.warning)


def service_of(
    kind: str, spec: bytes, *, host: str | None = None
) -> tuple[LoopService[object], str]:
    """The service that an encoded spec describes, and its log level.

    `host` is the address of this node among those of its cluster, if it is part of one.
    """
    if kind == "worker":
        worker = msgspec.json.decode(spec, type=WorkerSpec)
        if host is not None:
            worker = msgspec.structs.replace(worker, host=host)
        return WorkerService(worker), worker.log_level
    gateway = msgspec.json.decode(spec, type=GatewaySpec)
    if host is not None:
        gateway = msgspec.structs.replace(gateway, control_host=host)
    return GatewayService(gateway), gateway.log_level


def _limits_of(config: GatewayConfig) -> EdgeLimits:
    """What clients may take, as far as this process may have that many descriptors."""
    wanted = config.max_connections + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            log.warning("gateway.max_connections is bounded by the %d open files allowed", soft)
    room = wanted if soft == resource.RLIM_INFINITY else soft
    return EdgeLimits(
        max_head_bytes=config.max_head_bytes,
        max_connections=max(
            1, min(config.max_connections, room - min(room // 2, OTHER_DESCRIPTORS))
        ),
        max_connections_per_address=config.max_connections_per_address,
        head_timeout_s=config.head_timeout_s,
    )


def _bind(config: GatewayConfig, *, is_first: bool) -> socket.socket:
    """Takes the port, with others of the same user where several processes share it.

    The kernel hands connections out among all that listen, without a word to anybody who was there
    before: so the first one looks whether anybody is, and listens, to be seen by whoever looks
    next. Any other listens when it can answer: until then connections are for those who can.
    """
    host, port, shares = config.host, config.port, config.processes > 1
    try:
        if shares and is_first:
            with socket.create_server((host, port)) as alone:
                port = alone.getsockname()[1]
        if is_first:
            return socket.create_server((host, port), backlog=BACKLOG, reuse_port=shares)
        return _bound(host, port, shares=shares)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _bound(host: str, port: int, *, shares: bool) -> socket.socket:
    """As `socket.create_server` does it, but it does not listen yet. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _listen(sock: socket.socket) -> None:
    """Connections wait from here on. Raises ConfigError."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def die(error: BaseException) -> None:
    """Ends the process at once: a worker without one of its threads must not look alive."""
    log.critical("worker thread died: %r", error, exc_info=error)
    os._exit(70)


class ServiceThread(Generic[T]):
    """Runs a service on an event loop in a thread of its own."""

    def __init__(
        self, service: LoopService[T], name: str, *, open_timeout_s: float = READY_TIMEOUT_S
    ) -> None:
        self._service = service
        self._open_timeout_s = open_timeout_s
        self._opening: Future[T] | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def open(self) -> T:
        """Opens the service; raises what it raises, and LateStart."""
        self._thread.start()
        self._opening = opening = asyncio.run_coroutine_threadsafe(_open(self._service), self._loop)
        try:
            return opening.result(self._open_timeout_s)
        except TimeoutError as error:
            if not opening.cancel():  # it is over, and that is what it raised
                raise
            raise LateStart(f"it did not start in {self._open_timeout_s:g} s") from error

    def ask(self, work: Coroutine[Any, Any, U], timeout_s: float) -> U:
        """The result of some work on the service's loop. Raises what that raises, TimeoutError."""
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(timeout_s)
        except TimeoutError:
            asked.cancel()
            raise

    def hurry(self) -> None:
        """Has a close under way wait for nothing. May be called by a handler of signals."""
        self._loop.call_soon_threadsafe(self._service.hurry)

    def close(self) -> None:
        """Closes the service, also while it opens, and ends the thread."""
        if self._opening is not None:
            self._opening.cancel()
        closing = asyncio.run_coroutine_threadsafe(self._service.close(), self._loop)
        closing.result(CLOSE_TIMEOUT_S + self._service.drain_timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)


async def _open(service: LoopService[T]) -> T:
    return await service.open()


def freeze_heap() -> None:
    """Takes what a service consists of out of the garbage collector's sight.

    To be called once, when a process of its own has started its service. A full collection looks at
    each object there is, for tens of milliseconds, and what modules, tokenizer and model consist of
    is never garbage. vLLM and SGLang do the same when they have warmed up.
    """
    gc.collect()
    gc.freeze()
