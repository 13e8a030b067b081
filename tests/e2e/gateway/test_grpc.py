"""The gRPC service: stock calls, streams, status codes, keys, health, reflection, and shutdown."""

import asyncio
import functools
import resource
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deploy.services.shared_port import listen_on
from engine.errors import ConfigError
from engine.net.grpc_library import grpc
from router.access.keys import FixedKeys, hash_of
from router.edge.tls import TlsFiles
from router.gateway.inference import inference_pb2 as pb
from router.gateway.inference import service
from router.gateway.inference.answers import FINAL, IGNORED
from router.gateway.inference.service import SERVICE
from router.machine.requests import Failed, Rejected, Update
from tests.kits.certificates import make_certificate, needs_openssl
from tests.kits.router.access import access_lines
from tests.kits.router.gateway import FakeRouter, Never, answer, tokens
from tests.kits.router.inference import (
    InferenceClient,
    inference,
    outputs_of,
    request_of,
    server_of,
)

DEADLINE_S = 20.0
KEYS = FixedKeys([hash_of(b"right")])
CODES = grpc.StatusCode


def in_time(test):
    """Runs a test in an event loop, with a deadline."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), DEADLINE_S))

    return run


def a_stream(**inputs):
    return request_of("yo", stream=True, **inputs)


async def responses_to(client, *requests, metadata=None):
    call = client.ModelStreamInfer(metadata=metadata)
    for request in requests:
        await call.write(request)
    await call.done_writing()
    return [response async for response in call]


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@in_time
async def test_states_and_models_are_reported():
    router = FakeRouter()
    async with inference(router) as client:
        assert (await client.ServerLive(pb.ServerLiveRequest())).live
        assert (await client.ServerReady(pb.ServerReadyRequest())).ready
        assert (await client.ServerMetadata(pb.ServerMetadataRequest())).name == "baton"
        assert (await client.ModelReady(pb.ModelReadyRequest(name="tiny"))).ready
        metadata = await client.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
        assert metadata.versions == ["v1"]
        assert {"text_input", "stream"} < {each.name for each in metadata.inputs}
        code, _ = await status_of(client.ModelReady(pb.ModelReadyRequest(name="other")))
        assert code is CODES.NOT_FOUND
        router.not_ready = "no worker"
        assert not (await client.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await client.ModelReady(pb.ModelReadyRequest(name="tiny"))).ready


@in_time
async def test_a_whole_answer_has_the_prompt_and_the_wanted_outputs():
    async with inference(FakeRouter(answer("hi"))) as client:
        response = await client.ModelInfer(request_of("yo", id="mine"))
        assert outputs_of(response) == {"text_output": [b"yohi"]}
        assert (response.id, response.model_name, response.model_version) == ("mine", "tiny", "v1")
        request = request_of(
            "yo",
            exclude_input_in_output=True,
            return_finish_reason=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        )
        assert outputs_of(await client.ModelInfer(request)) == {
            "text_output": [b"hi"],
            "finish_reason": [b"stop"],
            "num_input_tokens": [2],
            "num_output_tokens": [3],
        }


@in_time
async def test_a_raw_request_gets_a_raw_answer():
    async with inference(FakeRouter(answer("hi"))) as client:
        response = await client.ModelInfer(request_of("yo", raw=True))
        assert list(response.raw_output_contents) == [b"\x04\0\0\0yohi"]


@in_time
async def test_a_stream_sends_pieces_and_marks_the_last_one():
    async with inference(FakeRouter(answer("hi"))) as client:
        request = a_stream(return_finish_reason=True, return_num_output_tokens=True)
        responses = [each.infer_response for each in await responses_to(client, request)]
        # Tokens that arrive while a message is being sent share the next message.
        assert len(responses) >= 2
        assert b"".join(outputs_of(each)["text_output"][0] for each in responses) == b"hi"
        *earlier, last = [outputs_of(each)["finish_reason"] for each in responses]
        assert set(map(tuple, earlier)) == {(b"None",)}
        assert last == [b"stop"]
        assert sum(outputs_of(each)["num_output_tokens"][0] for each in responses) == 3
        *earlier, last = [each.parameters[FINAL].bool_param for each in responses]
        assert last
        assert not any(earlier)


@in_time
async def test_choices_have_places_in_the_tensors():
    async with inference(FakeRouter(answer("a"), answer("b"), answer("a"), answer("b"))) as client:
        sampling = {"n": 2}
        request = request_of("yo", exclude_input_in_output=True, sampling_parameters=sampling)
        response = await client.ModelInfer(request)
        assert outputs_of(response) == {"text_output": [b"a", b"b"]}
        streamed = await responses_to(client, a_stream(sampling_parameters=sampling))
        texts = [outputs_of(each.infer_response)["text_output"] for each in streamed]
        assert b"".join(each[1] for each in texts) == b"b"


@in_time
async def test_requests_of_one_stream_are_answered_each_under_its_id():
    async with inference(FakeRouter(answer("hi"))) as client:
        bad = a_stream(id="bad", sampling_parameters={"temperature": -1})
        responses = await responses_to(client, a_stream(id="a"), bad, a_stream(id="b"))
        texts = {"a": b"", "b": b""}
        for response in responses:
            name = response.infer_response.id
            if name == "bad":
                assert "temperature" in response.error_message
            else:
                texts[name] += outputs_of(response.infer_response)["text_output"][0]
        assert texts == {"a": b"hi", "b": b"hi"}


@in_time
async def test_an_error_ends_the_stream_of_a_client_that_wants_that():
    async with inference(FakeRouter()) as client:
        bad = a_stream(sampling_parameters={"temperature": -1})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await responses_to(client, bad, metadata=[("triton_grpc_error", "true")])
        assert caught.value.code() is CODES.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Rejected("too many wait", 3.0), CODES.RESOURCE_EXHAUSTED),
        (Failed("no worker could"), CODES.UNAVAILABLE),
    ],
)
@in_time
async def test_outcomes_have_their_status(outcome, code):
    async with inference(FakeRouter([Update(token_ids=(), outcome=outcome)])) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ModelInfer(request_of())
        assert (caught.value.code(), caught.value.details()) == (code, outcome.message)
        assert "retry-after" in dict(caught.value.trailing_metadata())


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (request_of("y" * 99), CODES.INVALID_ARGUMENT, "maximum context length"),
        (request_of(stream=True), CODES.INVALID_ARGUMENT, "use ModelStreamInfer"),
        (request_of(sampling_parameters={"suffix": 3}), CODES.INVALID_ARGUMENT, "suffix"),
        (pb.ModelInferRequest(model_name="x"), CODES.INVALID_ARGUMENT, "text_input"),
    ],
)
@in_time
async def test_refused_requests_say_why(request_, code, words):
    async with inference(FakeRouter()) as client:
        found, details = await status_of(client.ModelInfer(request_))
        assert found is code
        assert words in details


@in_time
async def test_ignored_fields_are_reported():
    async with inference(FakeRouter()) as client:
        response = await client.ModelInfer(request_of(sampling_parameters={"colour": "red"}))
        assert response.parameters[IGNORED].string_param == "colour"


@in_time
async def test_a_bug_is_an_internal_error_without_details():
    async with inference(FakeRouter([ZeroDivisionError("secret")])) as client:
        assert await status_of(client.ModelInfer(request_of())) == (
            CODES.INTERNAL,
            "internal error",
        )


@in_time
async def test_a_long_message_is_refused():
    async with inference(FakeRouter(), max_body_bytes=1000) as client:
        code, words = await status_of(client.ModelInfer(request_of("y" * 2000)))
        assert (code, words) == (CODES.INVALID_ARGUMENT, "the body is longer than 1000 bytes")
        code, _ = await status_of(client.ModelInfer(request_of("y" * 100_000)))
        assert code is CODES.RESOURCE_EXHAUSTED


MANY_INPUTS = b"\x2a\x00" * 4_000_000
# Bytes that gRPC's buffers may keep; each parsed message would take 360 MB.
KEPT_BYTES = 100 * 2**20


def resident_bytes():
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize()


@pytest.mark.parametrize("key", ["right", "wrong"])
@in_time
async def test_messages_whose_objects_outgrow_their_bytes_take_no_memory(key):
    async with inference(FakeRouter(), keys=KEYS, max_body_bytes=8 * 2**20) as client:
        metadata = [("authorization", f"Bearer {key}")]
        call = client.channel.unary_unary(f"/{SERVICE}/ModelInfer")
        before = resident_bytes()
        for _ in range(6):
            code, _ = await status_of(call(MANY_INPUTS, metadata=metadata))
            assert code is (CODES.INVALID_ARGUMENT if key == "right" else CODES.UNAUTHENTICATED)
        assert resident_bytes() - before < KEPT_BYTES


@in_time
async def test_malformed_messages_are_refused_without_a_traceback(caplog):
    async with inference(FakeRouter(answer("hi"))) as client:
        for path in (
            *(f"/{SERVICE}/{name}" for name in ("ModelInfer", "ServerLive", "ModelReady")),
            *(f"/{health_pb2.DESCRIPTOR.package}.Health/{name}" for name in ("Check", "Watch")),
            f"/{reflection_pb2.DESCRIPTOR.package}.ServerReflection/ServerReflectionInfo",
        ):
            for message in (b"\xff\xff", b"\x0a", b"\x0a" + b"\x00" * 10_000):
                code, _ = await status_of(client.channel.unary_unary(path)(message))
                assert code is CODES.INVALID_ARGUMENT
        assert await client.ModelInfer(request_of())
    assert "Traceback" not in caplog.text


@in_time
async def test_a_message_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(service, "BODY_TIMEOUT_S", 0.1)
    async with inference(FakeRouter()) as client:
        call = client.channel.stream_unary(f"/{SERVICE}/ModelInfer")()
        assert await call.code() is CODES.DEADLINE_EXCEEDED


@in_time
async def test_streams_that_need_no_key_are_bounded(monkeypatch):
    monkeypatch.setattr("router.gateway.inference.server.MAX_STREAMS", 1)
    async with inference(FakeRouter()) as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        other = health.Watch(health_pb2.HealthCheckRequest())
        assert await other.code() is CODES.RESOURCE_EXHAUSTED
        assert await health.Check(health_pb2.HealthCheckRequest())
        watch.cancel()


@in_time
async def test_models_need_a_key_and_probes_do_not():
    async with inference(FakeRouter(answer("hi")), keys=KEYS) as client:
        assert (await client.ServerReady(pb.ServerReadyRequest())).ready
        right = [("authorization", "Bearer right")]
        for metadata in (None, [("authorization", "Bearer wrong")]):
            code, _ = await status_of(client.ModelInfer(request_of(), metadata=metadata))
            assert code is CODES.UNAUTHENTICATED
            name = pb.ModelMetadataRequest(name="tiny")
            code, _ = await status_of(client.ModelMetadata(name, metadata=metadata))
            assert code is CODES.UNAUTHENTICATED
            # The client writes nothing: grpc reports INTERNAL for a write to an already refused
            # call.
            assert await client.ModelStreamInfer(metadata=metadata).code() is CODES.UNAUTHENTICATED
        assert await client.ModelInfer(request_of(), metadata=right)
        assert len(await responses_to(client, a_stream(), metadata=right)) >= 2


@pytest.fixture
def lines():
    with access_lines() as found:
        yield found


@in_time
async def test_each_request_is_a_line_of_the_access_log(lines):
    async with inference(FakeRouter(answer("hi"), answer("hi")), keys=KEYS) as client:
        right = (("authorization", "Bearer right"), ("x-request-id", "mine"))
        await client.ModelInfer(request_of(), metadata=right)
        await responses_to(
            client, a_stream(), a_stream(sampling_parameters={"temperature": -1}), metadata=right
        )
        await status_of(client.ModelInfer(request_of()))
        await client.ServerLive(pb.ServerLiveRequest())
        await status_of(client.ModelReady(pb.ModelReadyRequest(name="other"), metadata=right))
    whole, refused, streamed, keyless, live, unknown = sorted_as_told(lines)
    assert {line["method"] for line in lines} == {"GRPC"}
    assert {line["client"] for line in lines} == {"127.0.0.1"}
    assert whole["path"] == f"/{SERVICE}/ModelInfer"
    assert (whole["status"], whole["request_id"], whole["outcome"]) == (200, "mine", "finished")
    assert (whole["prompt_tokens"], whole["completion_tokens"] > 0) == (2, True)
    assert whole["request"].startswith("cmpl-")
    assert (streamed["path"], streamed["status"]) == (f"/{SERVICE}/ModelStreamInfer", 200)
    assert (refused["path"], refused["status"]) == (f"/{SERVICE}/ModelStreamInfer", 400)
    assert (keyless["status"], keyless["outcome"]) == (401, "invalid")
    assert (live["path"], live["status"]) == (f"/{SERVICE}/ServerLive", 200)
    assert unknown["status"] == 404


def sorted_as_told(lines):
    """Sorts the two access log lines of a stream, whose order varies: the refused request first."""
    first, *two, third, fourth, fifth = lines
    return first, *sorted(two, key=lambda line: -line["status"]), third, fourth, fifth


@in_time
async def test_a_client_that_leaves_is_a_line_of_the_access_log(lines):
    router = FakeRouter([tokens("a"), Never()])
    async with inference(router) as client:
        call = client.ModelInfer(request_of())
        await router.waiting.wait()
        call.cancel()
        while not any(line["path"].endswith("ModelInfer") for line in lines):
            await client.ServerLive(pb.ServerLiveRequest())
    [line] = [line for line in lines if line["path"].endswith("ModelInfer")]
    assert (line["status"], line["outcome"]) == (0, "cancelled")


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
@pytest.mark.parametrize("streams", [False, True])
@in_time
async def test_a_client_that_leaves_or_is_late_cancels_on_the_workers(streams, ends):
    router = FakeRouter([tokens("a"), Never()])
    async with inference(router) as client:
        timeout = 0.5 if ends == "deadline" else None
        if streams:
            call = client.ModelStreamInfer(timeout=timeout)
            await call.write(a_stream())
        else:
            call = client.ModelInfer(request_of(), timeout=timeout)
        await router.waiting.wait()
        assert router.live == 1
        if ends == "cancel":
            call.cancel()
        else:
            assert await call.code() is CODES.DEADLINE_EXCEEDED
        while router.live:
            await asyncio.wait(
                [asyncio.create_task(client.ServerLive(pb.ServerLiveRequest()).code())]
            )
        assert router.cancelled == [router.requests[0].request_id]


@in_time
async def test_a_key_at_its_limit_gets_a_status_and_a_time():
    async with inference(FakeRouter(answer("hi")), requests_per_s=0.001) as client:
        assert await client.ModelInfer(request_of())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.ModelInfer(request_of())
        assert caught.value.code() is CODES.RESOURCE_EXHAUSTED
        assert int(dict(caught.value.trailing_metadata())["retry-after"]) > 1


@needs_openssl
@in_time
async def test_tls_uses_the_certificate_and_follows_its_change(tmp_path):
    files = make_certificate(tmp_path, "first")
    tls = TlsFiles(*files)
    tls.open()
    server = server_of(FakeRouter(answer("hi")), tls=tls)
    port = await server.open("127.0.0.1", 0)

    async def ask():
        roots = grpc.ssl_channel_credentials(files[0].read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", roots) as channel:
            return await InferenceClient(channel).ModelInfer(request_of(), timeout=5)

    try:
        assert await ask()
        make_certificate(tmp_path, "second")
        tls.check()
        assert await ask()
        with pytest.raises(grpc.aio.AioRpcError):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await InferenceClient(channel).ModelInfer(request_of(), timeout=5)
    finally:
        await server.close(0.0)


@in_time
async def test_a_taken_port_is_reported():
    first, stranger = server_of(FakeRouter()), server_of(FakeRouter())
    try:
        port = await first.open("127.0.0.1", 0)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} for gRPC"):
            await stranger.open("127.0.0.1", port)
    finally:
        await first.close(0.0)


@needs_openssl
@pytest.mark.parametrize("is_secure", [False, True])
@in_time
async def test_processes_that_share_a_socket_answer_alike_and_large(tmp_path, is_secure):
    files = make_certificate(tmp_path, "shared") if is_secure else None
    tls = None if files is None else TlsFiles(*files)
    if tls is not None:
        tls.open()
    text = "yo" * 200_000  # more than all buffers of a connection
    servers = [server_of(FakeRouter(answer("hi")), tls=tls) for _ in range(2)]
    with listen_on("127.0.0.1", 0) as sock:
        for number, server in enumerate(servers):
            shared = sock.dup()
            assert await server.open_on(shared, tmp_path, str(number)) == sock.getsockname()[1]
        address = "{}:{}".format(*sock.getsockname())
    for left in (2, 1):  # servers that are open; before the second round, one server has closed
        for _ in range(4):
            if files is None:
                channel = grpc.aio.insecure_channel(address)
            else:
                roots = grpc.ssl_channel_credentials(files[0].read_bytes())
                channel = grpc.aio.secure_channel(address, roots)
            async with channel:
                client = InferenceClient(channel)
                assert await client.ModelInfer(request_of("yo"), timeout=5)
                assert await status_of(client.ModelInfer(request_of(text), timeout=5))
        await servers[left - 1].close(0.0)


@pytest.mark.parametrize("hurries", [False, True])
@in_time
async def test_a_server_that_closes_waits_for_answers_unless_it_is_hurried(hurries):
    router = FakeRouter([tokens("a"), Never()])
    server = server_of(router)
    port = await server.open("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = InferenceClient(channel).ModelInfer(request_of())
        await router.waiting.wait()
        closing = asyncio.create_task(server.close(DEADLINE_S if hurries else 0.2))
        if hurries:
            server.stop_draining()
        assert await call.code() in (CODES.UNAVAILABLE, CODES.CANCELLED)
        await closing
    assert router.live == 0


@in_time
async def test_health_follows_readiness():
    router = FakeRouter()
    async with inference(router) as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            found = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert found.status == states.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == states.SERVING
        router.not_ready = "no worker"
        assert (await watch.read()).status == states.NOT_SERVING
        watch.cancel()


@in_time
async def test_reflection_describes_the_services():
    async with inference(FakeRouter()) as client:
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = [each async for each in stub.ServerReflectionInfo(iter(asked))]
        names = {each.name for each in listed.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} < names
        files = described.file_descriptor_response.file_descriptor_proto
        assert "GRPCInferenceService" in {
            service.name
            for data in files
            for service in FileDescriptorProto.FromString(data).service
        }


@pytest.mark.torch
@in_time
async def test_a_served_model_answers_as_over_http(served, client):
    prompt = "def add(a, b):\n"
    wanted = client.completions.create(
        model=client.models.list().data[0].id, prompt=prompt, max_tokens=8, temperature=0
    )
    sampling = {"max_tokens": "8", "temperature": "0"}
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        own = InferenceClient(channel)
        request = request_of(prompt, stream=True, sampling_parameters=sampling)
        request.model_name = wanted.model
        responses = await responses_to(own, request)
        texts = [outputs_of(each.infer_response)["text_output"][0] for each in responses]
        assert b"".join(texts).decode() == wanted.choices[0].text
        endless = request_of(prompt, sampling_parameters={"max_tokens": 3000, "ignore_eos": True})
        endless.model_name = wanted.model
        call = own.ModelInfer(endless, timeout=0.3)
        # so the workers hold no blocks afterwards
        assert await call.code() is CODES.DEADLINE_EXCEEDED
