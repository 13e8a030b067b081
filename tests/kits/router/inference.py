"""A gateway's gRPC service in this process, with a scripted router and a client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from engine.net.grpc_library import grpc
from router.edge.tls import TlsFiles
from router.gateway.inference import inference_pb2 as pb
from router.gateway.inference.server import InferenceServer
from router.gateway.inference.service import SERVICE, InferenceService
from tests.kits.router.gateway import FakeRouter, create_parts, settings_of, versions_of


class InferenceClient:
    """The methods of the service, like a generated client."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
        for method in methods:
            streams = method.client_streaming
            kind = channel.stream_stream if streams else channel.unary_unary
            call = kind(
                f"/{SERVICE}/{method.name}",
                request_serializer=getattr(pb, method.input_type.name).SerializeToString,
                response_deserializer=getattr(pb, method.output_type.name).FromString,
            )
            setattr(self, method.name, call)


def server_of(
    router: FakeRouter,
    *,
    keys: Any = None,
    tls: TlsFiles | None = None,
    **settings: Any,
) -> InferenceServer:
    """Returns a server that is not open yet."""
    versions = versions_of(router)
    settings = {"max_body_bytes": 2**20, "max_head_bytes": 2**14, **settings}
    parts = create_parts(versions, clock=router.clock, settings=settings_of(**settings))
    service = InferenceService(parts, keys, "1")
    return InferenceServer(service, versions, parts.settings.gateway, tls)


@asynccontextmanager
async def inference(router: FakeRouter, **settings: Any) -> AsyncIterator[InferenceClient]:
    """Opens a server on a free loopback port, and yields a client of it."""
    server = server_of(router, **settings)
    port = await server.open("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield InferenceClient(channel)
    finally:
        await server.close(0.0)


def request_of(text: str = "yo", *, raw: bool = False, id: str = "", **inputs: Any) -> Any:
    """Returns a request with a text and further inputs: booleans, texts or sampling fields."""
    request = pb.ModelInferRequest(model_name="tiny", id=id)
    for name, value in {"text_input": text, **inputs}.items():
        add_input(request, name, value, raw=raw)
    return request


def add_input(request: Any, name: str, value: Any, *, raw: bool = False) -> None:
    if isinstance(value, dict):
        value = msgspec.json.encode(value).decode()
    if isinstance(value, bool):
        tensor = request.inputs.add(name=name, datatype="BOOL", shape=[1])
        data = bytes([value])
        tensor.contents.bool_contents.append(value)
    elif isinstance(value, list):
        tensor = request.inputs.add(name=name, datatype="INT64", shape=[1, len(value)])
        data = b"".join(each.to_bytes(8, "little") for each in value)
        tensor.contents.int64_contents.extend(value)
    else:
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        data = len(value.encode()).to_bytes(4, "little") + value.encode()
        tensor.contents.bytes_contents.append(value.encode())
    if raw:
        tensor.ClearField("contents")
        request.raw_input_contents.append(data)


def outputs_of(response: Any) -> dict[str, list[Any]]:
    """Returns the typed values of all outputs, by name."""
    found = {}
    for output in response.outputs:
        fields = output.contents.ListFields()
        found[output.name] = list(fields[0][1]) if fields else []
    return found
