"""Workers whose pools have different KV formats."""

import msgspec
import numpy as np
import pytest

from engine.config import Transport
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import SeqId
from engine.worker.events import PullFailed
from kvtransfer.formats import convert
from tests.kits.endpoints import NUM_BLOCKS, is_done, worker

FP32 = KVLayout(16, KVFormat.FP32, (KVSection(2, 4, 16), KVSection(1, 4, 8)))
HERE, THERE = [5, 0, 9, 3], [7, 8, 1, 100]
PAIRS = list(enumerate(HERE))


def in_format(kv_format: KVFormat, layout: KVLayout = FP32) -> KVLayout:
    return msgspec.structs.replace(layout, kv_format=kv_format)


def numbers(layout: KVLayout, seed: int) -> np.ndarray:
    """Returns random finite numbers as blocks in that format."""
    rng = np.random.default_rng(seed)
    floats = rng.standard_normal((NUM_BLOCKS, FP32.block_bytes // 4), dtype=np.float32)
    return convert(floats.view(np.uint8), FP32, layout.kv_format)


@pytest.mark.parametrize("transport", [Transport.SHM, Transport.ZMQ])
@pytest.mark.parametrize(
    ("stored", "wire", "wanted"),
    [
        ("fp32", "int8", "int8"),
        ("bf16", "int4", "int4"),
        ("fp32", "fp8_e4m3", "fp8_e4m3"),
        ("fp32", "bf16", "bf16"),
        ("bf16", None, "fp32"),
        ("fp32", "int8", "fp32"),
        ("int8", "int8", "bf16"),
        ("int8", "int8", "int8"),
    ],
)
def test_blocks_are_converted_as_configured(stored, wire, wanted, transport):
    source_layout, sink_layout = in_format(KVFormat(stored)), in_format(KVFormat(wanted))
    wire_format = KVFormat(wire) if wire else None
    source_blocks = numbers(source_layout, seed=1)
    with (
        worker("p", transport, layout=source_layout, kv_wire_dtype=wire_format) as source,
        worker("d", transport, layout=sink_layout, kv_wire_dtype=wire_format) as sink,
    ):
        source.pool.blocks[:] = source_blocks
        before = sink.pool.blocks.copy()
        assert is_done(sink.pull("s", source.lease("l", THERE), PAIRS), transport)
        travels_as = wire_format or KVFormat(stored)
        expected = source_blocks[THERE]
        if travels_as != stored:
            expected = convert(expected, source_layout, travels_as)
        if travels_as != wanted:
            expected = convert(expected, in_format(travels_as), KVFormat(wanted))
        assert np.array_equal(sink.pool.blocks[HERE], expected)
        others = sorted(set(range(NUM_BLOCKS)) - set(HERE))
        assert np.array_equal(sink.pool.blocks[others], before[others])


@pytest.mark.parametrize(
    ("stored", "wire", "wanted", "field"),
    [
        ("fp32", None, "int8", "layout.kv_format"),
        ("fp32", None, "bf16", "layout.kv_format"),
        ("int8", None, "fp32", "layout.kv_format"),
        ("int8", "int4", "int4", "kv_wire_dtype"),
        ("fp32", "int8", "int4", "layout.kv_format"),
    ],
)
def test_unrequested_or_double_rounding_is_refused(stored, wire, wanted, field):
    wire_format = KVFormat(wire) if wire else None
    with (
        worker("p", Transport.ZMQ, layout=in_format(KVFormat(stored)), kv_wire_dtype=wire_format)
        as source,
        worker("d", Transport.ZMQ, layout=in_format(KVFormat(wanted)), kv_wire_dtype=wire_format)
        as sink,
    ):  # fmt: skip
        end = sink.pull("s", source.lease("l", [1]), [(0, 1)])
        assert end == PullFailed(SeqId("s"), f"source refused: {field} differs")


def test_a_one_sided_read_converts_nothing():
    with (
        worker("p", Transport.NIXL, layout=FP32, kv_wire_dtype=KVFormat.INT8) as source,
        worker(
            "d", Transport.NIXL, layout=in_format(KVFormat.INT8), kv_wire_dtype=KVFormat.INT8
        ) as sink,
    ):
        end = sink.pull("s", source.lease("l", [1]), [(0, 1)])
        assert isinstance(end, PullFailed)
        assert "KV formats differ" in end.reason
