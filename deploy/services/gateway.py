"""A gateway that listens on its socket, built from its spec."""

import asyncio
import logging
import os
import random
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.base.spec import GatewayReady, GatewaySpec
from deploy.base.thread import LoopService
from deploy.fetching.cache import Parts
from deploy.services.model import directory_of
from deploy.services.shared_port import GRPC, HTTP, PortHolder, listen_on, take_or_listen
from deploy.services.text import text_model
from engine.clock import Clock, MonotonicClock
from engine.config import GatewayConfig
from engine.errors import ConfigError
from engine.native.library import library
from engine.net.trust import Secret
from router.access.file import KeyFile
from router.access.guard import KeyFinder
from router.access.keys import FixedKeys
from router.access.shared_accounts import SharedAccounts
from router.edge.limits import Book
from router.edge.listener import Listener
from router.edge.tls import TlsFiles
from router.gateway.answering import GatewayParts
from router.gateway.app import app_of, parts_of, version_of_baton
from router.gateway.background import BackgroundWork
from router.gateway.inference.server import InferenceServer
from router.gateway.inference.service import InferenceService
from router.gateway.metrics.pools import PoolBoard
from router.gateway.metrics.process import ProcessMeter
from router.gateway.metrics.siblings import Siblings
from router.gateway.requests.calls import GatewaySettings
from router.gateway.requests.grammar_checker import GrammarChecker
from router.gateway.storage import Storage
from router.gateway.stream_probe import StreamProbe
from router.membership import ControlServer
from router.service import Router
from router.version_routers import VersionRouters

if TYPE_CHECKING:
    from router.gateway.tracing.otel import OtelTracing

log = logging.getLogger(__name__)

OTHER_DESCRIPTORS = 1024  # open files of a gateway in addition to its clients' connections
ACCOUNTS = "accounts"  # name of the file of keys' accounts, beside the directory of siblings
LINK_TIMEOUT_S = 10.0  # a gateway that has no worker after this time starts anyway, and answers 503


class GatewayService(LoopService[GatewayReady]):
    """Runs a gateway from `open` to `close`."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._spec = spec
        self.drain_timeout_s = spec.gateway.drain_timeout_s
        self._siblings: Siblings | None = None
        self._accounts: SharedAccounts | None = None
        self._listener: Listener | None = None
        self._inference: InferenceServer | None = None
        self._folder: int | None = None
        self._holders: list[PortHolder] = []

    async def open(self) -> GatewayReady:
        """Starts to listen, and connects to the workers. Raises ConfigError."""
        sock = await asyncio.to_thread(self._listening, HTTP, self._spec.gateway.port)
        try:
            return await self._open(sock)
        except BaseException:
            sock.close()
            self._close_ports()
            raise

    async def _open(self, sock: socket.socket) -> GatewayReady:
        spec = self._spec
        config = spec.gateway
        clock, secret = MonotonicClock(), Secret(spec.token)
        await asyncio.to_thread(library)  # compiles it now, so that no request waits
        self._routers = VersionRouters(
            clock=clock,
            new_router=lambda: Router(
                [],
                config=spec.router,
                secret=secret,
                clock=clock,
                record_dir=None if config.record_dir is None else Path(config.record_dir),
            ),
            load_text=lambda version: text_model(directory_of(version.model, Parts.TEXT), config),
        )
        keys = _open_keys(config, clock)
        settings = GatewaySettings(Secret(spec.salts or spec.token), config, spec.router)
        rng = random.Random(os.urandom(16))
        if spec.siblings is not None:
            self._siblings = Siblings(Path(spec.siblings), str(spec.process))
            file = Path(spec.siblings).with_name(ACCOUNTS)
            self._accounts = SharedAccounts(file, spec.process, config.processes or 1)
            await asyncio.to_thread(self._accounts.open)
        tls = _open_tls(config)
        book = _book_of(config)
        self._grammars = GrammarChecker(clock)
        self._storage = _storage_of(config)
        await self._storage.open()
        self._background = BackgroundWork()
        self._tracing = _open_tracing(spec, clock)
        parts = parts_of(
            self._routers.versions,
            settings=settings,
            clock=clock,
            rng=rng,
            grammars=self._grammars,
            siblings=self._siblings,
            shared=self._accounts,
            storage=self._storage,
            tracing=self._tracing,
        )
        self._routers.more_probes = StreamProbe(parts).fault_of
        board = PoolBoard(self._routers.versions, clock)
        self._process = ProcessMeter(clock)
        self._process.open()
        app = app_of(
            parts,
            keys=keys,
            siblings=self._siblings,
            edge=book,
            background=self._background,
            board=board,
            process=self._process,
            logs_requests=spec.logs.access is not None,
        )
        if self._siblings is not None:
            await self._siblings.open()
        first = await self._routers.open(spec.members)
        # Without workers, do not wait: the controller sends the members once this gateway listens.
        link_s = LINK_TIMEOUT_S if spec.members.of(first.name) else 0.0
        missing = await self._routers.routers()[first.name].wait_until_ready(link_s)
        if missing is not None:
            log.warning("the gateway starts although it cannot serve yet: %s", missing)
        self._listener = Listener(app, book, tls)
        self._control = ControlServer(
            self._routers,
            secret=secret,
            clock=clock,
            members=spec.members,
            board=board,
            host=spec.host,
        )
        control = await self._control.open()
        grpc_port = await self._open_grpc(parts, keys, tls)
        self._listener.open(sock)
        await self._background.open()
        host, port = sock.getsockname()[:2]
        return GatewayReady(
            url=f"{'http' if tls is None else 'https'}://{host}:{port}",
            model_name=first.model_name,
            pid=os.getpid(),
            control=control,
            drain_timeout_s=self.drain_timeout_s,
            grpc_port=grpc_port,
        )

    async def _open_grpc(
        self, parts: GatewayParts, keys: KeyFinder | None, tls: TlsFiles | None
    ) -> int | None:
        """Listens for gRPC if a port is configured.

        Returns the port, or None. Raises ConfigError.
        """
        config = self._spec.gateway
        if config.grpc_port is None:
            return None
        self._inference = InferenceServer(
            InferenceService(parts, keys, version_of_baton()),
            parts.versions,
            config,
            tls,
        )
        if self._spec.ports is None or not config.shares_port:
            return await self._inference.open(config.host, config.grpc_port)
        sock = await asyncio.to_thread(self._listening, GRPC, config.grpc_port)
        return await self._inference.open_on(sock, Path(self._spec.ports), self._spec.name)

    def _listening(self, port_name: str, port: int) -> socket.socket:
        """Returns the listening socket of a port, from another process or newly made. May block.

        Raises ConfigError.
        """
        address = (self._spec.gateway.host, port)
        if self._spec.ports is None:
            return listen_on(*address)
        folder = Path(self._spec.ports)
        if self._folder is None:
            # By this open file the next deployment finds this process and ends it. If this process
            # is paused when its deployment dies, it cannot end by itself, and would keep the port.
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        sock, holder = take_or_listen(folder, port_name, self._spec.name, address)
        self._holders.append(holder)
        return sock

    def _close_ports(self) -> None:
        for holder in self._holders:
            holder.close()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def stop_draining(self) -> None:
        """Ends all running answers now."""
        if self._listener is not None:
            self._listener.stop_draining()
            self._background.stop_draining()
        if self._inference is not None:
            self._inference.stop_draining()

    async def close(self) -> None:
        """Refuses new requests, waits for running answers, then ends all sessions."""
        assert self._listener is not None
        self._routers.versions.stop()
        await asyncio.to_thread(self._close_ports)
        await asyncio.gather(
            self._background.close(self.drain_timeout_s),
            self._listener.close(self.drain_timeout_s, self._cut),
            self._close_grpc(),
        )
        await self._control.close()
        await self._grammars.close()
        if self._siblings is not None:
            await self._siblings.close()
        if self._accounts is not None:
            self._accounts.close()
        await self._routers.close()
        await self._storage.close()
        await self._process.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _close_grpc(self) -> None:
        if self._inference is not None:
            await self._inference.close(self.drain_timeout_s)

    def _cut(self) -> None:
        """Ends each answer that still runs with an error."""
        log.warning("%d requests are ended before they are complete", self._routers.cut())


def _storage_of(config: GatewayConfig) -> Storage:
    return Storage(None if config.store is None else Path(config.store).expanduser())


def _open_tracing(spec: GatewaySpec, clock: Clock) -> "OtelTracing | None":
    """Returns the sender of traces; None if no endpoint is configured. Raises ConfigError."""
    endpoint = spec.gateway.trace_endpoint
    if endpoint is None:
        return None
    try:
        from router.gateway.tracing.otel import OtelTracing, exporting
    except ImportError as error:
        raise ConfigError(
            f"gateway.trace_endpoint needs the extra baton-serve[otel]: {error}"
        ) from error
    return OtelTracing(
        exporting(endpoint),
        clock=clock,
        share=spec.gateway.trace_share,
        process=spec.name,
        version=version_of_baton(),
    )


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


def _open_keys(config: GatewayConfig, clock: Clock) -> KeyFinder | None:
    """Returns the finder of clients' keys; None if the gateway needs no keys. Raises KeysError."""
    if config.keys_file is None:
        return FixedKeys(config.key_hashes) if config.api_key else None
    keys = KeyFile(Path(config.keys_file).expanduser(), clock)
    keys.open()
    return keys


def _book_of(config: GatewayConfig) -> Book:
    """Returns a connection book with the configured limits, reduced to the number of files that
    this process may open.
    """
    wanted = config.max_connections + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            log.warning("gateway.max_connections is bounded by the %d open files allowed", soft)
    room = wanted if soft == resource.RLIM_INFINITY else soft
    return Book(
        max_head_bytes=config.max_head_bytes,
        max_connections=max(
            1, min(config.max_connections, room - min(room // 2, OTHER_DESCRIPTORS))
        ),
        max_connections_per_address=config.max_connections_per_address,
        head_timeout_s=config.head_timeout_s,
    )
