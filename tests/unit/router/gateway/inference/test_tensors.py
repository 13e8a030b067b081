"""Typed and raw tensors. A tensor that does not fit its shape is refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.inference import inference_pb2 as pb
from router.gateway.inference.tensors import MAX_ITEMS, Tensor, read_tensors, write_tensors
from router.inbox.api_errors import ApiError


def request_of(name="x", datatype="BYTES", shape=(1,), raw=None, **contents):
    request = pb.ModelInferRequest()
    tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


VALUES = st.one_of(
    st.tuples(st.just("BYTES"), st.lists(st.binary(max_size=5))),
    st.tuples(st.just("BOOL"), st.lists(st.booleans())),
    st.tuples(st.just("INT32"), st.lists(st.integers(-(2**31), 2**31 - 1))),
    st.tuples(st.just("INT64"), st.lists(st.integers(-(2**63), 2**63 - 1))),
    st.tuples(st.just("UINT32"), st.lists(st.integers(0, 2**32 - 1))),
)


@given(VALUES, st.booleans())
def test_what_is_written_is_read(typed, raw):
    datatype, values = typed
    tensor = Tensor(datatype, (len(values),), tuple(values))
    response = pb.ModelInferResponse()
    write_tensors(response, {"x": tensor}, raw=raw)
    request = pb.ModelInferRequest()
    request.inputs.add().ParseFromString(response.outputs[0].SerializeToString())
    request.raw_input_contents.extend(response.raw_output_contents)
    assert read_tensors(request) == {"x": tensor}


def test_raw_numbers_are_those_of_numpy():
    data = np.array([[1, -2]], "<i8").tobytes()
    read = read_tensors(request_of(datatype="INT64", shape=(1, 2), raw=data))
    assert read["x"] == Tensor("INT64", (1, 2), (1, -2))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of(datatype="FP16"), "data type is 'FP16'"),
        (request_of(shape=(2,), bytes_contents=[b"a"]), "1 values do not fill the shape"),
        (request_of(shape=(-1,), bytes_contents=[b"a"]), "the shape is"),
        (request_of(shape=(MAX_ITEMS, 2)), "items are allowed"),
        (request_of(raw=b"\x05\0\0\0abc"), "within an item"),
        (request_of(raw=b"\x05\0"), "within a length"),
        (request_of(datatype="INT64", raw=b"abc"), "no whole number"),
        (request_of(raw=b"\0\0\0\0", bytes_contents=[b"a"]), "do not go together"),
        (pb.ModelInferRequest(raw_input_contents=[b""]), "1 contents for 0 inputs"),
    ],
)
def test_contents_that_do_not_fit_are_named(request_, message):
    with pytest.raises(ApiError, match=message):
        read_tensors(request_)


def test_a_tensor_given_twice_is_refused():
    request = request_of(bytes_contents=[b"a"])
    request.inputs.append(request.inputs[0])
    with pytest.raises(ApiError, match="x: the tensor is given twice"):
        read_tensors(request)


@given(st.binary(max_size=40))
def test_any_raw_bytes_are_read_or_refused(data):
    try:
        read = read_tensors(request_of(shape=(1,), raw=data))
    except ApiError:
        return
    assert len(read["x"].values) == 1
