"""Converts tensors of the Open Inference Protocol to and from Python values. Pure.

The values of a tensor are typed (`contents`) or raw. Raw values are little-endian and flat, and
each item of BYTES follows its length in four bytes. In a request, either all tensors are raw or no
tensor is raw.

Source: the protocol's specification, "Tensor Data"; the protocol's extension for binary data has
the same form.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np

from router.gateway.inference import inference_pb2 as pb
from router.inbox.api_errors import ApiError, invalid_value

MAX_ITEMS = 2**20  # maximum items per tensor
MAX_TENSORS = 64  # maximum tensors per request
MAX_DIMENSIONS = 8

_LENGTH = struct.Struct("<I")
# By data type: the field of InferTensorContents, and the numpy dtype of raw values.
_FORMS = {
    "BOOL": ("bool_contents", "?"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"),
    "BYTES": ("bytes_contents", ""),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its shape, and its values in a flat tuple."""

    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]


def read_tensors(request: Any) -> dict[str, Tensor]:
    """Reads all inputs of a ModelInferRequest, by name. Raises ApiError."""
    inputs, raw = request.inputs, request.raw_input_contents
    if len(inputs) > MAX_TENSORS:
        raise _fault("inputs", f"at most {MAX_TENSORS} tensors are allowed")
    if raw and len(raw) != len(inputs):
        raise _fault("raw_input_contents", f"{len(raw)} contents for {len(inputs)} inputs")
    found: dict[str, Tensor] = {}
    for tensor, data in zip(inputs, raw or repeat(None), strict=bool(raw)):
        if tensor.name in found:
            raise _fault(tensor.name, "the tensor is given twice")
        found[tensor.name] = _read(tensor, data)
    return found


def _read(tensor: Any, raw: bytes | None) -> Tensor:
    name, datatype = tensor.name, tensor.datatype
    if len(tensor.shape) > MAX_DIMENSIONS:  # their product may have millions of digits
        raise _fault(name, f"at most {MAX_DIMENSIONS} dimensions are allowed")
    shape = tuple(tensor.shape)
    form = _FORMS.get(datatype)
    if form is None:
        known = ", ".join(_FORMS)
        raise _fault(name, f"the data type is {datatype[:40]!r}; expected one of {known}")
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_ITEMS:
        raise _fault(name, f"the shape is {list(shape)}; at most {MAX_ITEMS} items are allowed")
    num_items = math.prod(shape)
    values: Any
    if raw is None:
        values = getattr(tensor.contents, form[0])
    elif tensor.HasField("contents"):
        raise _fault(name, "contents and raw_input_contents do not go together")
    elif datatype == "BYTES":
        values = list(islice(_split(name, raw), num_items + 1))
    else:
        size = np.dtype(form[1]).itemsize
        if len(raw) % size:
            raise _fault(name, f"{len(raw)} bytes are no whole number of {datatype} values")
        values = np.frombuffer(raw, form[1])
    if len(values) != num_items:  # check before making Python objects
        raise _fault(name, f"{len(values)} values do not fill the shape {list(shape)}")
    if isinstance(values, np.ndarray):
        values = values.tolist()
    return Tensor(datatype, shape, tuple(values))


def _split(name: str, raw: bytes) -> Iterator[bytes]:
    """Yields the items of a raw tensor of BYTES. Raises ApiError."""
    start = 0
    while start < len(raw):
        if start + _LENGTH.size > len(raw):
            raise _fault(name, "the raw contents end within a length")
        (length,) = _LENGTH.unpack_from(raw, start)
        start += _LENGTH.size
        if start + length > len(raw):
            raise _fault(name, "the raw contents end within an item")
        yield raw[start : start + length]
        start += length


def write_tensors(response: Any, tensors: Mapping[str, Tensor], *, raw: bool) -> None:
    """Adds tensors to a ModelInferResponse as its outputs."""
    for name, tensor in tensors.items():
        output = response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        field, form = _FORMS[tensor.datatype]
        if not raw:
            getattr(output.contents, field).extend(tensor.values)
        elif form:
            response.raw_output_contents.append(np.array(tensor.values, form).tobytes())
        else:
            response.raw_output_contents.append(_joined(tensor.values))


def _joined(items: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(item)) + item for item in items)


def parameter(value: bool | int | str) -> Any:  # noqa: FBT001 - a value
    """Returns an InferParameter with this value."""
    if isinstance(value, bool):
        return pb.InferParameter(bool_param=value)
    if isinstance(value, int):
        return pb.InferParameter(int64_param=value)
    return pb.InferParameter(string_param=value)


def _fault(name: str, what: str) -> ApiError:
    return invalid_value(f"{name[:64]}: {what}", name[:64])
