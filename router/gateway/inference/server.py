"""The gRPC server of a gateway: its port, TLS, health and reflection.

Several gateway processes may share the port: each process accepts connections from the same socket,
and relays the connections to gRPC's library (`router.edge.relay`). Clients need no key for health
and reflection, like for the corresponding HTTP pages. Messages to these two services have a few
bytes, so long or malformed messages are refused. The number of streams of these services, such as
watches of health, is limited.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from engine.config import GatewayConfig
from engine.errors import ConfigError
from engine.net.grpc_library import grpc
from router.edge.relay import Relay
from router.edge.tls import TlsFiles
from router.gateway.inference.service import SERVICE, InferenceService
from router.gateway.versions import Versions

MORE_MESSAGE_BYTES = 64 * 2**10  # maximum bytes of a message outside its tensors
MAX_CALLS_PER_CONNECTION = 256
KEEPALIVE_S = 30  # seconds without traffic after which a client is pinged
KEEPALIVE_TIMEOUT_S = 10
MAX_IDLE_S = 60  # seconds without a call until disconnection; clients reconnect by themselves
CLIENT_PINGS_S = 10  # minimum seconds between pings of a client
LOOK_EVERY_S = 0.5  # seconds between updates of gRPC's health
INNER = "inner-"  # prefix of the Unix socket's name on which gRPC's library listens
MAX_SMALL_BYTES = 4096  # maximum bytes of a message of a method that needs no key
MAX_STREAMS = 256  # maximum streams of methods that need no key, over all clients
_CODES = grpc.StatusCode
_NO_COMPRESSION = 1  # bit mask of allowed compression algorithms


class InferenceServer:
    """The gRPC server, from `open` to `close`. Belongs to one event loop."""

    def __init__(
        self,
        service: InferenceService,
        versions: Versions,
        config: GatewayConfig,
        tls: TlsFiles | None = None,
    ) -> None:
        """`tls` must be open already."""
        self._service = service
        self._versions = versions
        self._config = config
        self._tls = tls
        self._health = health_aio.HealthServicer()
        self._closing = asyncio.Event()
        self._stops_draining = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._relay: Relay | None = None
        self._directory: int | None = None

    async def open(self, host: str, port: int) -> int:
        """Starts to listen.

        Returns the port; for port 0 the system chooses one. Raises ConfigError.
        """
        if port:
            _check_free(host, port)
        return await self._open(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    async def open_on(self, sock: socket.socket, directory: Path, process: str) -> int:
        """Serves a listening socket that other processes share. Returns its port.

        gRPC listens on a separate Unix socket in `directory`, which only the directory's user may
        enter. Raises ConfigError.
        """
        # The path is short because the address of a Unix socket may have at most 107 bytes.
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        path = f"/proc/self/fd/{self._directory}/{INNER}{process}"
        await self._open(f"unix:{path}")
        self._relay = Relay(path, self._config.max_connections)
        await self._relay.open(sock)
        return int(sock.getsockname()[1])

    async def _open(self, address: str) -> int:
        self._server = grpc.aio.server(
            options=self._options(),
            interceptors=(SmallMessages(),),
            maximum_concurrent_rpcs=self._config.max_connections,
        )
        self._server.add_generic_rpc_handlers((self._service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        shown = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*shown, reflection.SERVICE_NAME), self._server)
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _credentials(self._tls))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address} for gRPC: {error}") from error
        await self._follow_once()
        await self._server.start()
        self._following = asyncio.create_task(self._follow())
        return int(port)

    def stop_draining(self) -> None:
        """Makes `close` cancel running calls now."""
        self._stops_draining.set()

    async def close(self, timeout_s: float) -> None:
        """Stops accepting calls, waits for running calls, and cancels running calls after the
        timeout.
        """
        if self._following is None:
            return
        self._closing.set()
        if self._relay is not None:
            self._relay.close()
        await self._following
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(timeout_s))
        cut = asyncio.create_task(self._stops_draining.wait())
        await asyncio.wait([stopping, cut], return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        if not stopping.done():
            await self._server.stop(0)
        await stopping
        if self._relay is not None:
            self._relay.cut()
        if self._directory is not None:
            os.close(self._directory)

    async def _follow(self) -> None:
        """Sets gRPC's health to the gateway's readiness repeatedly, until the server closes."""
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._closing.wait()
            await self._follow_once()

    async def _follow_once(self) -> None:
        states = health_pb2.HealthCheckResponse
        is_ready = self._versions.readiness() is None
        for name in ("", SERVICE):
            await self._health.set(name, states.SERVING if is_ready else states.NOT_SERVING)

    def _options(self) -> list[tuple[str, int]]:
        config = self._config
        return [
            ("grpc.max_receive_message_length", config.max_body_bytes + MORE_MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", config.max_head_bytes),
            ("grpc.absolute_max_metadata_size", config.max_head_bytes),
            ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
            ("grpc.max_allowed_incoming_connections", config.max_connections),
            ("grpc.server_handshake_timeout_ms", round(config.head_timeout_s * 1000)),
            ("grpc.compression_enabled_algorithms_bitset", _NO_COMPRESSION),
            ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
            ("grpc.max_connection_idle_ms", MAX_IDLE_S * 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PINGS_S * 1000),
            ("grpc.so_reuseport", 0),
        ]


def _check_free(host: str, port: int) -> None:
    """Raises ConfigError if a port is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} for gRPC: {error.strerror}") from error


def _credentials(tls: TlsFiles) -> Any:
    """Returns server credentials. gRPC reloads the credentials when the files change."""
    used = tls.pem

    def configuration() -> Any:
        certificate, key, client_ca = used
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    def changed() -> Any:
        nonlocal used
        if tls.pem is used:
            return None
        used = tls.pem
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(), changed, require_client_authentication=used[2] is not None
    )


class SmallMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Applies limits to the messages and streams of methods whose messages gRPC's library
    parses.
    """

    def __init__(self) -> None:
        self._num_streams = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Returns the handler of a method, wrapped so that the limits apply."""
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        bounded = handler._replace(request_deserializer=_reader(handler.request_deserializer))
        if handler.unary_unary is not None:
            return bounded._replace(unary_unary=_checked(handler.unary_unary))
        if handler.unary_stream is not None:
            watch = self._counted(_checked(handler.unary_stream))
            return bounded._replace(unary_stream=watch)
        return bounded._replace(stream_stream=self._checked_stream(handler.stream_stream))

    def _counted(self, method: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def run(request: Any, context: Any) -> None:
            await self._enter(context)
            try:
                await method(request, context)
            finally:
                self._num_streams -= 1

        return run

    def _checked_stream(self, method: Callable[[Any, Any], AsyncIterator[Any]]) -> Any:
        async def run(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            await self._enter(context)
            try:
                async for response in method(_each_checked(requests, context), context):
                    yield response
            finally:
                self._num_streams -= 1

        return run

    async def _enter(self, context: Any) -> None:
        """Counts a new stream. Aborts the stream's call if too many streams are open."""
        if self._num_streams >= MAX_STREAMS:
            await context.abort(_CODES.RESOURCE_EXHAUSTED, "too many such streams are open")
        self._num_streams += 1


def _reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a parser of messages. The parser returns None for a too long or malformed message."""

    def read(message: bytes) -> Any:
        if len(message) > MAX_SMALL_BYTES:
            return None
        try:
            return parse(message)
        except DecodeError:
            return None

    return read


def _checked(method: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    async def run(request: Any, context: Any) -> Any:
        await _check(request, context)
        return await method(request, context)

    return run


async def _each_checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        await _check(request, context)
        yield request


async def _check(request: Any, context: Any) -> None:
    """Aborts the call if the parser refused its message."""
    if request is None:
        text = f"the message is malformed, or longer than {MAX_SMALL_BYTES} bytes"
        await context.abort(_CODES.INVALID_ARGUMENT, text)
