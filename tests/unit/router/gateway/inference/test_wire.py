"""Requests whose parsed form would be much larger are refused by their tags, before parsing."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.inference import inference_pb2 as pb
from router.gateway.inference.tensors import MAX_ITEMS
from router.gateway.inference.wire import MAX_FIELDS, check_wire
from router.inbox.api_errors import ApiError
from tests.kits.router.inference import request_of


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def in_tensor(data):
    return field(5, data)


def in_contents(data):
    return in_tensor(field(5, data))


MANY = 4_000_000
DEAR = {
    "inputs": b"\x2a\x00" * MANY,
    "parameters": b"\x22\x00" * MANY,
    "outputs": b"\x32\x00" * MANY,
    "raw contents": b"\x3a\x00" * MANY,
    "unknown fields": b"\x78\x00" * MANY,
    "a parameter's values": field(4, b"\x12\x00" * MANY),
    "a parameter's value's choices": field(4, field(2, b"\x08\x01" * MANY)),
    "a tensor's parameters": in_tensor(b"\x22\x00" * MANY),
    "a tensor's contents": in_tensor(b"\x2a\x00" * MANY),
    "a tensor's sizes": in_tensor(b"\x18\x01" * MANY),
    "packed sizes": in_tensor(field(3, b"\x01" * MANY)),
    "an output's parameters": field(6, b"\x12\x00" * MANY),
    "texts": in_contents(b"\x42\x00" * MANY),
    "numbers": in_contents(b"\x18\x00" * MANY),
    "packed numbers": in_contents(field(3, b"\x00" * MANY)),
    "packed truth values": in_contents(field(1, b"\x01" * MANY)),
}


@pytest.mark.parametrize("data", DEAR.values(), ids=DEAR)
def test_messages_whose_objects_outgrow_their_bytes_are_refused_and_leave_nothing(data):
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="has more than"):
            check_wire(data)
        assert tracemalloc.get_traced_memory()[1] < 2**20 + MANY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("raw", [False, True])
def test_long_texts_and_long_tensors_pass(raw):
    for request in (
        request_of("x" * MANY, raw=raw),
        request_of("", input_ids=[5] * (MAX_ITEMS // 2), raw=raw),
        request_of("", input_ids=[2**40] * (MAX_ITEMS // 8), raw=raw),
    ):
        check_wire(request.SerializeToString())


def test_a_batch_of_prompts_passes():
    request = pb.ModelInferRequest()
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[MAX_FIELDS // 2])
    tensor.contents.bytes_contents.extend([b"yo"] * (MAX_FIELDS // 2))
    check_wire(request.SerializeToString())


@pytest.mark.parametrize(
    "data",
    [b"\x2a", b"\x2a\x05ab", b"\xff" * 11, b"\x0b\x0c", b"\x09\x00", b"\x0d", b"\x2a\xff\xff"],
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(ApiError, match="not a ModelInferRequest"):
        check_wire(data)


@given(st.binary(max_size=60))
def test_any_bytes_pass_or_are_refused(data):
    try:
        check_wire(data)
    except ApiError:
        return


parameters = st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3)


@given(parameters, parameters, st.lists(st.integers(-5, 2**60), max_size=9), st.binary(max_size=9))
def test_messages_of_protobuf_pass(of_request, of_tensor, numbers, raw):
    request = pb.ModelInferRequest(id="i", model_name="m", raw_input_contents=[raw, raw])
    tensor = request.inputs.add(name="n", datatype="INT64", shape=[len(numbers)])
    tensor.contents.int64_contents.extend(numbers)
    tensor.contents.fp64_contents.extend(map(float, numbers))
    request.outputs.add(name="o")
    for name, value in of_request.items():
        request.parameters[name].int64_param = value
    for name, value in of_tensor.items():
        tensor.parameters[name].double_param = value
    check_wire(request.SerializeToString())
