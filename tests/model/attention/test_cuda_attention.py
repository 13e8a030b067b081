"""The Triton kernels, checked without a GPU.

`interpreted_attention.py` tests their results under triton's interpreter. Here they are compiled
for a Hopper GPU, and must fit it. Their assembly, which the interpreter skips, is executed here in
Python. `python -m bench.gpu` checks the kernels on a GPU before it measures them.
"""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import KVFormat, KVLayout, KVSection
from engine.model.attention import cuda as triton_attention
from engine.model.attention.base import Extent, Scoring, build_batch
from engine.model.attention.cuda import NO_LEN, RowLimits, plan_launches, tiling
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cuda import WARM_UP_LENS, WARM_UP_ROWS
from engine.worker.batch import Row
from tests.kits.gpu.hopper import HOPPER_SHARED_BYTES, bytes_on_stack, compile_for_hopper
from tests.kits.gpu.interpreter import check_under_interpreter, needs_triton

pytestmark = pytest.mark.torch

HOPPER_SMS = 132


@pytest.mark.long
@needs_triton
def test_the_kernels_equal_the_reference_under_the_interpreter():
    check_under_interpreter("interpreted_attention.py")


# ------------------------------------------------------------ launches


NO_LIMITS = RowLimits(NO_LEN, NO_LEN)


def plan(extents, *, group=4, num_kv_heads=8, limits=NO_LIMITS):
    return plan_launches(
        extents,
        group=group,
        num_kv_heads=num_kv_heads,
        num_sms=HOPPER_SMS,
        limits=limits,
        all_rows_m=triton_attention.ROWS_OF_LAUNCHES,
    )


def extents_of(lengths):
    return [Extent(0, query_len, before + query_len) for before, query_len in lengths]


def test_decode_verification_and_prefill_are_separate_launches():
    launches = plan(extents_of([(99, 1), (9, 4), (9, 5), (0, 16), (0, 500), (70, 17)])).launches
    assert [(x.min_len, x.max_len, x.rows_m) for x in launches] == [
        (1, 4, 16),
        (5, 16, 64),
        (17, NO_LEN - 1, 128),
    ]
    assert [x.num_units for x in launches] == [2, 2, 16 + 1]
    assert [x.longest for x in launches] == [4, 16, 500]


def test_prefill_is_split_only_if_units_do_not_fill_the_gpu():
    assert plan(extents_of([(30000, 40)])).launches[0].num_spare > 0
    assert plan(extents_of([(0, 8192)])).launches[0].num_spare == 0


def test_a_launch_for_decode_does_not_depend_on_contexts():
    assert plan(extents_of([(1, 1), (2, 1)])) == plan(extents_of([(9999, 1), (0, 1)]))


def test_long_rows_with_an_empty_context_go_elsewhere():
    extents = extents_of([(0, 300), (1, 300), (0, 255)])
    found = plan(extents, limits=RowLimits(256, NO_LEN))
    assert found.elsewhere == (0,)
    assert found.launches[0].num_units == 10 + 8


def test_all_long_rows_go_elsewhere_if_they_are_taken():
    found = plan(extents_of([(0, 300), (1, 300), (0, 255), (9, 256)]), limits=RowLimits(256, 256))
    assert found.elsewhere == (0, 1, 3)
    assert [(x.max_len, x.num_units) for x in found.launches] == [(255, 8)]


def test_more_query_heads_than_a_tile_has_rows_make_larger_tiles():
    launch = plan(extents_of([(5, 1), (5, 3)]), group=200, num_kv_heads=1).launches[0]
    assert (launch.rows_m, launch.unit_len, launch.num_units) == (256, 1, 4)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 600)), min_size=1, max_size=70),
    group=st.sampled_from([1, 3, 4, 8, 40]),
    num_kv_heads=st.sampled_from([1, 2, 8]),
    window=st.none() | st.integers(1, 500),
)
def test_the_grid_has_a_program_for_every_item(lengths, group, num_kv_heads, window):
    """Counts the items of a launch with the formula of the kernels: see `_share` in their
    module.
    """
    extents = extents_of(lengths)
    for launch in plan(extents, group=group, num_kv_heads=num_kv_heads).launches:
        tile = tiling(KVFormat.BF16, 128, launch.rows_m).tile
        mine = [e for e in extents if launch.min_len <= e.query_len <= launch.max_len]
        units = [-(-e.query_len // launch.unit_len) for e in mine]
        assert launch.num_units == sum(units)
        if launch.num_spare == 0:
            continue
        tiles = []
        for extent in mine:
            first = extent.context_len - extent.query_len
            first_seen = max(first - window + 1, 0) if window else 0
            tiles.append(-(-extent.context_len // tile) - first_seen // tile)
        work = sum(u * t for u, t in zip(units, tiles, strict=True))
        share = max(-(-work // launch.num_spare), 1)
        items = sum(u * -(-t // share) for u, t in zip(units, tiles, strict=True))
        assert items <= launch.num_units + launch.num_spare


# ------------------------------------------------------------ for a Hopper GPU


class Recorded:
    """A kernel that does nothing but record its launches."""

    def __init__(self, kernel, launches):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launches.append(
            (self.kernel, arguments, constants)
        )


class RecordedKernels:
    """The module of the kernels. Its kernels record their launches in a list."""

    def __init__(self):
        from engine.model.attention import kernels as triton_kernels

        self.launches = []
        self.triton, self.tl = triton_kernels.triton, triton_kernels.tl
        for name in ("store_kernel", "attention_kernel", "merge_kernel"):
            setattr(self, name, Recorded(getattr(triton_kernels, name), self.launches))


def launches_of(monkeypatch, kv_format, before, query_len, head_dim=128, num_rows=8):
    """Returns the launches of `attend` for such rows of an 8 B Llama: kernel, arguments,
    constants.
    """
    kernels = RecordedKernels()
    monkeypatch.setattr(triton_attention, "_kernels", lambda: kernels)
    monkeypatch.setattr(triton_attention, "_is_interpreted", lambda: False)
    monkeypatch.setattr(triton_attention, "_num_sms", lambda device: HOPPER_SMS)
    section = KVSection(num_layers=1, num_kv_heads=8, head_dim=head_dim)
    layout = KVLayout(block_size=16, kv_format=kv_format, sections=(section,))
    length = layout.num_blocks_for(before + query_len)
    cache = KVCache(layout, allocate_buffer(layout, 1))
    rows = [Row(f"s{i}", [0] * query_len, before, [0] * length, None) for i in range(num_rows)]
    query = torch.zeros(num_rows * query_len, 32, head_dim, dtype=torch.bfloat16)
    key = torch.zeros(num_rows * query_len, 8, head_dim, dtype=torch.bfloat16)
    triton_attention.attend(
        query, key, key, cache, 0, build_batch(rows, cache), Scoring(head_dim**-0.5)
    )
    return kernels.launches


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.FP8_E4M3, KVFormat.INT8])
def test_kernels_of_a_decode_step_fit_twice_on_a_hopper_multiprocessor(
    monkeypatch, tmp_path, kv_format
):
    launches = launches_of(monkeypatch, kv_format, before=1000, query_len=1)
    assert len(launches) == 3
    for launch in launches:
        compiled = compile_for_hopper(*launch)
        assert compiled.metadata.shared <= HOPPER_SHARED_BYTES // 2
        assert bytes_on_stack(compiled, tmp_path) == 0


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize(
    ("kv_format", "query_len", "head_dim"),
    [(KVFormat.BF16, 512, 128), (KVFormat.INT4, 8, 128), (KVFormat.BF16, 512, 256)],
)
def test_kernels_of_other_steps_fit_a_hopper_multiprocessor(
    monkeypatch, kv_format, query_len, head_dim
):
    for launch in launches_of(monkeypatch, kv_format, 600, query_len, head_dim):
        assert compile_for_hopper(*launch).metadata.shared <= HOPPER_SHARED_BYTES


@needs_triton
@pytest.mark.parametrize("query_len", [1, 4])
def test_one_compilation_serves_all_numbers_of_rows(monkeypatch, query_len):
    constants = [
        [launch[2] for launch in launches_of(monkeypatch, KVFormat.BF16, 50, query_len, num_rows=n)]
        for n in (1, 3, 60, 300)
    ]
    few_tokens = [kernels[1:] for kernels in constants]  # the first kernel stores K and V
    assert all(each == few_tokens[0] for each in few_tokens)
    assert len(few_tokens[0]) == 2


@needs_triton
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 16, 64])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_the_warm_up_meets_every_kind_of_launch(group, num_kv_heads):
    def kinds(batches):
        plans = (
            plan(extents_of([(0, n)] * rows), group=group, num_kv_heads=num_kv_heads)
            for n, rows in batches
        )
        return {(x.min_len, x.num_spare > 0) for each in plans for x in each.launches}

    decode = (1, 1)  # captures have warmed up this launch
    warm = [decode, *((n, 1) for n in WARM_UP_LENS), (WARM_UP_LENS[-1], WARM_UP_ROWS)]
    met = [(n, 1) for n in (1, *range(2, 200, 3), 500, 1000, 2048, 8192)] + [(64, 128), (700, 10)]
    assert kinds(warm) >= kinds(met)


# ------------------------------------------------------------ assembly


def carry_out(assembly, words):
    """Returns the registers $0, $1, … after the PTX of `assembly` has run. Covers the subset of PTX
    that the kernels use.
    """
    registers = dict(words)

    def value(name):
        return int(name, 16) if name.startswith("0x") else registers.get(name, name)

    for line in re.findall(r"^\s*(\S.*);$", assembly, re.MULTILINE):
        operation, _, rest = line.partition(" ")
        target, *sources = [x.strip() for x in re.split(r",(?![^{]*\})", rest)]
        match operation.split(".")[0], [value(x) for x in sources]:
            case "", _:  # a declaration
                pass
            case "mov", [number] if target.startswith("{"):
                below, above = target.strip("{}").split(", ")
                registers |= {below: number & 0xFFFF, above: number >> 16}
            case "mov", [number]:
                registers[target] = number
            case "prmt", [low, high, selector]:
                pool = (low | high << 32).to_bytes(8, "little")
                chosen = bytes(pool[selector >> 4 * i & 7] for i in range(4))
                registers[target] = int.from_bytes(chosen, "little")
            case "shr", [number, distance]:
                registers[target] = number >> int(distance)
            case "lop3", [a, b, c, table]:
                bits = [table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1
                        for i in range(32)]  # fmt: skip
                registers[target] = sum(bit << i for i, bit in enumerate(bits))
            case "sub", numbers:
                first, second = (halves_of(number) for number in numbers)
                registers[target] = first - second
            case "cvt", [number]:
                assert operation == "cvt.rn.f16x2.e4m3x2"
                pair = torch.tensor([number & 0xFF, number >> 8], dtype=torch.uint8)
                registers[target] = pair.view(torch.float8_e4m3fn).half()
            case unknown:
                raise AssertionError(unknown)
    return registers


def halves_of(number):
    """Returns the two fp16 numbers in 32 bits, lower half first."""
    return torch.tensor([number & 0xFFFF, number >> 16]).short().view(torch.float16)


@needs_triton
@given(first=st.integers(0, 2**32 - 1), second=st.integers(0, 2**32 - 1))
def test_the_assembly_unpacks_words_as_the_formats_define(first, second):
    from engine.model.attention import kernels as triton_kernels

    bytes_of = torch.tensor([first, second]).view(torch.uint8).view(2, 8)[:, :4]  # [2, 4]
    fp8 = carry_out(triton_kernels.FP8_BYTES.value, {"$4": first, "$5": second})
    int8 = carry_out(triton_kernels.INT8_BYTES.value, {"$4": first, "$5": second})
    int4 = carry_out(triton_kernels.INT4_NIBBLES.value, {"$8": first, "$9": second})
    for i in range(4):
        stored = bytes_of[:, i].contiguous()
        expected = stored.view(torch.float8_e4m3fn).half()
        torch.testing.assert_close(fp8[f"${i}"], expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(int8[f"${i}"], stored.view(torch.int8).half())
        assert torch.equal(int4[f"${i}"], (stored & 15).half())
        assert torch.equal(int4[f"${i + 4}"], (stored >> 4).half())
