"""The converter for devices produces the same records as the host's converter, bit for bit."""

import ctypes

import numpy as np
import pytest
import torch

from engine.layout import KVFormat, KVLayout
from engine.model.converting import TorchConverter
from kvtransfer.formats import convert, is_defined
from tests.kits.models.kv_records import NUM_BLOCKS, SECTIONS, fill

pytestmark = pytest.mark.torch

PAIRS = [(source, to) for source in KVFormat for to in KVFormat if is_defined(source, to)]


def bytes_at(address, shape):
    memory = (ctypes.c_ubyte * int(np.prod(shape))).from_address(address)
    return np.frombuffer(memory, np.uint8).reshape(shape).copy()


@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_converted_records_equal_the_host_s(source, to):
    layout = KVLayout(16, source, SECTIONS)
    records = fill(layout, 0).numpy()
    expected = convert(records, layout, to)
    converter = TorchConverter("cpu")
    address = converter.convert(records.ctypes.data, NUM_BLOCKS, layout, to, stream=0)
    assert np.array_equal(bytes_at(address, expected.shape), expected)


def test_two_conversions_in_a_row_keep_the_first_result():
    layout = KVLayout(16, KVFormat.FP32, SECTIONS)
    wire = KVLayout(16, KVFormat.INT8, SECTIONS)
    records = fill(layout, 0).numpy()
    converter = TorchConverter("cpu")
    first = converter.convert(records.ctypes.data, NUM_BLOCKS, layout, KVFormat.INT8, stream=0)
    second = converter.convert(first, NUM_BLOCKS, wire, KVFormat.FP32, stream=0)
    expected = convert(convert(records, layout, KVFormat.INT8), wire, KVFormat.FP32)
    assert np.array_equal(bytes_at(second, expected.shape), expected)


def test_room_grows_and_stays():
    converter = TorchConverter("cpu")
    small = converter.room(100, stream=0)
    assert converter.room(50, stream=0) == small
    assert converter.room(2**20, stream=0) != 0


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_a_gpu_converts_as_the_host(source, to):
    layout = KVLayout(16, source, SECTIONS)
    records = fill(layout, 0)
    expected = convert(records.numpy(), layout, to)
    converter, stream = TorchConverter("cuda:0"), torch.cuda.Stream()
    there = records.cuda()
    torch.cuda.synchronize()
    address = converter.convert(there.data_ptr(), NUM_BLOCKS, layout, to, stream.cuda_stream)
    stream.synchronize()
    [*_, result] = converter._results
    assert result.data_ptr() == address
    assert np.array_equal(result.cpu().numpy(), expected)
