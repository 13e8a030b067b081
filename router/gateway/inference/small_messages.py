"""Limits for the methods that need no key: server state, health, reflection.

Their messages have a few bytes, so long or malformed messages are refused. The number of their
streams, such as watches of health, is limited.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from engine.net.grpc_library import grpc

MAX_BYTES = 4096  # bytes per message
MAX_STREAMS = 256  # streams of all clients together
_CODES = grpc.StatusCode


class SmallMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Applies the limits to every method whose messages gRPC's library parses."""

    def __init__(self) -> None:
        self._num_streams = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Returns the handler of a method with the limits applied."""
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
        """Counts a stream, or ends its call if there are too many."""
        if self._num_streams >= MAX_STREAMS:
            await context.abort(_CODES.RESOURCE_EXHAUSTED, "too many such streams are open")
        self._num_streams += 1


def _reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a parser that returns None for a message that is too long or malformed."""

    def read(message: bytes) -> Any:
        if len(message) > MAX_BYTES:
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
    """Ends the call if its message was refused."""
    if request is None:
        text = f"the message is malformed, or longer than {MAX_BYTES} bytes"
        await context.abort(_CODES.INVALID_ARGUMENT, text)
