"""The GPU's forward pass, run on a CPU: packed inputs, padding and results.

The class computes on a CPU in the same way as on a GPU, but without captures and pinned memory.
Padding needs an attention that accepts rows whose KV is not stored. `attend_but_pads` replaces the
Triton kernels. Its result for such rows is NaN, so that a leak into other rows is noticed.
"""

import logging
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.model import cuda, kernels, packing, staging
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import build_batch
from engine.model.attention.choice import PrefillTrial
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cuda import Captured, CudaForward, resolve_weights
from engine.model.kernels import DeviceKernels
from engine.model.packing import PAD_SLOT, PackingShape, StepSize, Tables
from engine.model.runner import TorchRunner
from engine.model.sampling import choosing
from engine.worker.batch import Row
from tests.kits.checkpoints import COMMON, tiny_checkpoint
from tests.kits.gpu.cuda_forward import (
    attend_but_pads,
    check_like_the_hook,
    fresh_cache,
    loaded_from,
    logits_of_the_hook,
    opened,
    random_model,
    steps_of,
)
from tests.kits.gpu.interpreter import check_under_interpreter, needs_triton

pytestmark = pytest.mark.torch

GPU = torch.device("cuda")


@pytest.fixture
def loaded(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory, "llama")
    return loaded_from(path)


# ------------------------------------------------------------ packing


sizes_of_steps = st.builds(
    PackingShape, st.integers(1, 9), st.integers(1, 99), st.integers(0, 9), st.integers(1, 40)
)


@given(shape=sizes_of_steps)
def test_inputs_are_consecutive_and_aligned(shape):
    found = packing.plan(shape)
    end = 0
    for place in found.places:
        assert place.offset_bytes % packing.ALIGNMENT_BYTES == 0
        assert end <= place.offset_bytes < end + packing.ALIGNMENT_BYTES
        end = place.end_bytes
    assert end == found.num_bytes


@given(shape=sizes_of_steps)
def test_host_and_device_see_the_same_bytes(shape):
    found = packing.plan(shape)
    memory = np.random.default_rng(0).integers(0, 256, found.num_bytes, np.uint8)
    seen = staging.tensors(torch.from_numpy(memory), found)
    for array, tensor in zip(packing.arrays(memory, found), seen, strict=True):
        assert np.array_equal(array, tensor.numpy())
        assert array.dtype.name == str(tensor.dtype).removeprefix("torch.")


def test_steps_are_captured_for_powers_of_two_and_midpoints():
    sizes = packing.padded_sizes(200)
    assert sizes == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
    assert packing.padded_sizes(3) == (1, 2)
    decode = packing.captured_sizes(sizes, (1,))
    assert packing.padded_size(33, 1, decode) == StepSize(1, 48)
    assert packing.padded_size(192, 1, decode) == StepSize(1, 192)
    assert packing.padded_size(193, 1, decode) is None
    assert packing.padded_size(33, 2, decode) is None
    assert packing.padded_size(1, 1, ()) is None


def test_verification_is_captured_for_few_sizes_of_bounded_tokens():
    sizes = packing.captured_sizes(packing.padded_sizes(256))
    assert sum(size.row_len == 1 for size in sizes) == 13
    verified = [size for size in sizes if size.row_len > 1]
    assert len(verified) == 9 + 8 + 7
    assert max(size.num_tokens for size in verified) == packing.MAX_VERIFIED_TOKENS
    assert packing.padded_size(3, 2, sizes) == StepSize(2, 4)
    assert packing.padded_size(3, 3, sizes) == StepSize(4, 4)
    assert packing.padded_size(100, 4, sizes) == StepSize(4, 128)
    assert packing.padded_size(100, 5, sizes) is None
    assert packing.padded_size(3, 9, sizes) is None


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 16]),
    filling=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 3)),
)
def test_packed_inputs_equal_the_batch_and_padding(lengths, block_size, filling):
    rng = random.Random(0)
    rows = [
        Row(f"s{i}", rng.choices(range(99), k=now), before, rng.sample(range(500), 60), None)
        for i, (before, now) in enumerate(lengths)
    ]
    num_tokens = sum(now for _, now in lengths)
    last = num_tokens - 1
    places, num_pads, row_len = list(range(num_tokens)), 0, None
    shape = PackingShape(len(rows), num_tokens, 3, 60)
    if filling is not None:
        num_pads, row_len = filling[0], max(now for _, now in lengths) + filling[1]
        size = StepSize(row_len, len(rows) + num_pads)
        shape = PackingShape(size.num_rows, size.num_tokens, 3, 60)
        places = [
            (r + 1) * row_len - now + i for r, (_, now) in enumerate(lengths) for i in range(now)
        ]
    found = packing.plan(shape)
    memory = np.full(found.num_bytes, 255, np.uint8)  # garbage of an earlier step
    inputs = packing.arrays(memory, found)
    packing.fill(inputs, rows, (0, last), tables=Tables(), block_size=block_size, row_len=row_len)

    assert inputs.token_ids[places].tolist() == [t for row in rows for t in row.token_ids]
    positions = [p for row in rows for p in range(row.start, row.end)]
    assert inputs.positions[places].tolist() == positions
    assert inputs.keep.tolist() == [places[0], places[last], 0]
    fills = np.setdiff1d(np.arange(shape.num_tokens), places)
    assert not inputs.token_ids[fills].any()
    assert (inputs.slot_mapping[fills] == PAD_SLOT).all()
    assert not inputs.context_lens[len(rows) :].any()
    assert not inputs.block_tables[len(rows) :].any()
    layout = KVLayout(block_size, KVFormat.FP32, (KVSection(1, 1, 4),))
    batch = build_batch(rows, KVCache(layout, allocate_buffer(layout, 1)))
    width = batch.block_tables.shape[1]
    lens = [now for _, now in lengths] if row_len is None else [row_len] * shape.num_rows
    assert np.diff(inputs.cu_seqlens_q, prepend=0).tolist() == [0, *lens]
    assert np.array_equal(inputs.context_lens[: len(rows)], batch.context_lens)
    assert np.array_equal(inputs.block_tables[: len(rows), :width], batch.block_tables)
    assert not inputs.block_tables[:, width:].any()
    assert np.array_equal(inputs.slot_mapping[places], batch.slot_mapping)


def test_tables_are_rebuilt_only_if_blocks_changed():
    tables = Tables()

    def arrays_of(*blocks, ends):
        steps = zip(blocks, ends, strict=True)
        rows = [Row(f"s{i}", [0], end - 1, table, None) for i, (table, end) in enumerate(steps)]
        return tables.of(rows, 4)

    first = arrays_of([5, 3, 9], [1, 2], ends=(8, 5))
    assert [array.tolist() for array in first] == [[5, 3], [1, 2]]
    same = arrays_of([5, 3, 9], [1, 2], ends=(8, 6))
    assert all(a is b for a, b in zip(first, same, strict=True))
    longer, replaced = arrays_of([5, 3, 9], [1, 7], ends=(9, 7))
    assert (longer.tolist(), replaced.tolist()) == ([5, 3, 9], [1, 7])
    assert [array.tolist() for array in arrays_of([8], ends=(1,))] == [[8]]


# ------------------------------------------------------------ the pass


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_ragged_steps_equal_the_hook(tmp_path_factory, kind):
    path = tiny_checkpoint(tmp_path_factory, kind)
    loaded = loaded_from(path)
    expected = logits_of_the_hook(loaded)
    check_like_the_hook(opened(loaded), loaded, expected)


def test_padding_rows_change_neither_other_rows_nor_the_cache(loaded):
    expected = logits_of_the_hook(loaded)
    forward = opened(loaded, attend=attend_but_pads)
    assert not loaded.context.cache.buffer.any()  # the warm-up has not written to the buffer
    assert forward.prepare(next(iter(steps_of(256))), ()).size is None
    check_like_the_hook(forward, loaded, expected)


@pytest.mark.parametrize("row_len", [1, 2])
def test_steps_are_padded_to_the_next_size_unless_too_large(loaded, row_len):
    forward = opened(loaded, attend=attend_but_pads, captured_rows=(1, 2, 4), captured_lens=(1, 2))
    rows = [Row(f"s{i}", [1] * row_len, 0, [i], None) for i in range(5)]
    sizes = [forward.prepare(rows[:n], range(n)).size for n in range(1, 6)]
    assert sizes == [*(StepSize(row_len, n) for n in (1, 2, 4, 4)), None]
    assert forward.logits(rows, range(5)).isfinite().all()


@pytest.mark.parametrize("row_lens", [(1, 1, 1), (2, 1, 4), (4, 4, 4)])
def test_a_padded_step_can_keep_any_logits(loaded, row_lens):
    rows = [Row(f"s{i}", [i + 1] * n, 0, [i], None) for i, n in enumerate(row_lens)]
    keeps = [(), (2,), (2, 0), (0, 1), (0, 1, 2)]
    plain = opened(loaded)
    expected = [plain.logits(rows, keep).clone() for keep in keeps]
    forward = opened(loaded, attend=attend_but_pads)
    for keep, logits in zip(keeps, expected, strict=True):
        assert forward.prepare(rows, keep).size == StepSize(max(row_lens), 4)
        torch.testing.assert_close(forward.logits(rows, keep), logits, rtol=0, atol=1e-5)


def test_a_step_can_be_prepared_before_the_last_one_is_launched(loaded):
    forward = opened(loaded, attend=attend_but_pads)
    rows = [[Row("a", [i], 0, [3], None)] for i in (5, 9)]
    expected = [forward.logits(row, [0]).clone() for row in rows]
    prepared = [forward.prepare(row, [0]) for row in rows]
    for step, logits in zip(prepared, expected, strict=True):
        torch.testing.assert_close(forward.launch(step), logits, rtol=0, atol=0)


@pytest.mark.long
@needs_triton
def test_steps_over_the_triton_kernels_equal_the_hook():
    check_under_interpreter("interpreted_cuda.py")


class Replayed:
    """Replaces a CUDA graph: computes the step again, in the memory of the first run."""

    @torch.inference_mode()
    def __init__(self, forward, size):
        self.forward = forward
        self.inputs = forward._padding(size, memory=forward._memory)
        self.logits = forward._compute(*self.inputs, None).clone()
        self.num_replays = 0

    def replay(self):
        self.logits.copy_(self.forward._compute(*self.inputs, None))
        self.num_replays += 1


def test_captured_steps_read_inputs_at_the_captured_addresses(loaded):
    expected = logits_of_the_hook(loaded)
    forward = opened(loaded, attend=attend_but_pads, captured_rows=(1, 2, 4))
    graphs = {size: Replayed(forward, size) for size in forward._sizes}
    for size, graph in graphs.items():
        forward._graphs[size] = Captured(graph, graph.inputs[0].keep, graph.logits)
    assert forward.is_fused
    check_like_the_hook(forward, loaded, expected)
    replays = {tuple(size): graph.num_replays for size, graph in graphs.items()}
    assert {size: number for size, number in replays.items() if number} == {
        (1, 1): 1,
        (1, 4): 2,
        (2, 2): 1,
        (8, 4): 1,
    }
    forward.close()
    assert not forward.is_fused


class Captures:
    """Replaces the captures of a forward pass on a GPU."""

    def __init__(self, forward, monkeypatch, *, bytes_each=0, fails=False):
        self.sizes = []
        self._forward, self._bytes_each, self._fails = forward, bytes_each, fails
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: bytes_each * len(self.sizes))
        monkeypatch.setattr(forward, "_capture", self._capture)

    def _capture(self, size, pool):
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.sizes.append(size)
        return Captured(Replayed(self._forward, size), None, None)


def test_a_failed_capture_is_counted_and_ends_padding(loaded, monkeypatch, caplog):
    forward = opened(loaded, attend=attend_but_pads)
    Captures(forward, monkeypatch, fails=True)
    forward._capture_all()
    assert forward.fallbacks == {"cuda_graph": 1}
    assert "not permitted" in caplog.text
    assert forward.prepare([Row("a", [1], 0, [0], None)], [0]).size is None


def test_the_steps_with_most_tokens_are_captured_first(loaded, monkeypatch):
    forward = opened(loaded, attend=attend_but_pads, captured_rows=(1, 2, 4))
    captures = Captures(forward, monkeypatch)
    forward._capture_all()
    tokens = [size.num_tokens for size in captures.sizes]
    assert tokens == sorted(tokens, reverse=True)
    assert set(captures.sizes) == set(forward._sizes) == set(forward._graphs)
    assert not forward.fallbacks


@pytest.mark.parametrize("limit", ["MAX_CAPTURE_S", "MAX_CAPTURE_BYTES"])
def test_captures_of_verification_end_with_their_time_or_memory(loaded, monkeypatch, caplog, limit):
    forward = opened(loaded, attend=attend_but_pads, captured_rows=(1, 2))
    captures = Captures(forward, monkeypatch, bytes_each=10)
    monkeypatch.setattr(cuda, limit, -1.0 if limit == "MAX_CAPTURE_S" else 15)
    forward._capture_all()
    verified = [size for size in captures.sizes if size.row_len > 1]
    assert len(verified) == (0 if limit == "MAX_CAPTURE_S" else 2)
    assert [tuple(size) for size in captures.sizes if size.row_len == 1] == [(1, 2), (1, 1)]
    assert forward.fallbacks == {"captured_verification": 1}
    assert "rows of " in caplog.text
    rows = [Row(f"s{i}", [1, 2], 0, [i], None) for i in range(2)]
    # Steps that run eagerly, and steps that are padded to one of the captured sizes.
    expected = None if limit == "MAX_CAPTURE_S" else StepSize(4, 2)
    assert forward.prepare(rows, [1, 3]).size == expected


def test_without_triton_a_gpu_logs_and_uses_torch_attention(loaded, monkeypatch, caplog):
    monkeypatch.setattr(kernels.triton_attention, "available", lambda: False)
    chosen = DeviceKernels(loaded, attend=None, sampler=None)
    chosen._is_cuda = True
    assert chosen.choose_attend() == (torch_attention.attend, False)
    assert chosen.fallbacks == {"triton": 1}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("is_installed", [True, False])
def test_without_its_kernel_a_gpu_logs_and_samples_by_torch(
    loaded, monkeypatch, caplog, is_installed
):
    monkeypatch.setattr(kernels.triton_attention, "available", lambda: is_installed)
    monkeypatch.setattr(kernels.triton_sampling, "sample", None)  # raises, as a compiler might
    chosen = DeviceKernels(loaded, attend=None, sampler=None)
    chosen._is_cuda = True
    assert chosen.choose_sampler() is choosing.sample
    assert chosen.fallbacks == {"triton_sampling": 1}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# ------------------------------------------------------------ compiled layers


class Counting:
    """A backend of torch.compile that counts graphs and runs them unchanged."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, example_inputs):
        self.num_graphs += 1
        return graph.forward


@pytest.mark.long
def test_layers_share_compiled_code_and_compute_the_same():
    num_graphs = {}
    for num_layers in (2, 5):
        torch._dynamo.reset()
        loaded = random_model(num_layers)
        expected = logits_of_the_hook(loaded)
        compiler = Counting()
        forward = opened(
            loaded, attend=attend_but_pads, captured_rows=(1, 2, 4, 8), compiler=compiler
        )
        num_graphs[num_layers] = compiler.num_graphs
        assert not forward.fallbacks
        check_like_the_hook(forward, loaded, expected)
        assert compiler.num_graphs == num_graphs[num_layers]  # nothing is compiled while serving
        forward.close()
        expected_again = logits_of_the_hook(loaded)
        torch.testing.assert_close(expected_again[0], expected[0], rtol=0, atol=0)
    assert num_graphs[2] == num_graphs[5] > 0


def test_a_failed_compilation_is_counted_and_layers_run_uncompiled(caplog):
    def fail(graph, example_inputs):
        raise RuntimeError("no compiler here")

    torch._dynamo.reset()
    loaded = random_model(2)
    expected = logits_of_the_hook(loaded)
    forward = opened(loaded, attend=attend_but_pads, captured_rows=(1, 2), compiler=fail)
    assert forward.fallbacks == {"torch_compile": 1}
    assert "no compiler here" in caplog.text
    check_like_the_hook(forward, loaded, expected)


# ------------------------------------------------------------ weights


def test_a_gpu_uses_bf16_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_weights(WeightFormat.AUTO, GPU) is WeightFormat.BF16
    for weights in (WeightFormat.BF16, WeightFormat.FP32):
        assert resolve_weights(weights, GPU) is weights
    with pytest.raises(ConfigError, match="a GPU has fp32, bf16 and fp8"):
        resolve_weights(WeightFormat.INT8, GPU)


def test_fp8_needs_a_capable_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"8\.9"):
        resolve_weights(WeightFormat.FP8, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_weights(WeightFormat.FP8, GPU) is WeightFormat.FP8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_building_takes_no_memory_of_the_device(loaded):
    there = replace(loaded, device=GPU)  # this machine has no GPU
    CudaForward(there, WeightFormat.FP32)


def test_a_missing_device_is_refused(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory, "llama")
    with pytest.raises(ConfigError, match="device cuda: torch finds no GPU"):
        TorchRunner(path, num_blocks=2, device="cuda").open()


def test_fp8_weights_are_quantised_when_opened_and_have_fewer_bytes(loaded):
    (whole, *_), _ = logits_of_the_hook(loaded)
    whole_bytes = opened(loaded).weights_bytes
    opened(loaded, weights=WeightFormat.FP8)
    expected = logits_of_the_hook(loaded)
    assert 0 < (expected[0][0] - whole).norm() < 0.5 * whole.norm()
    forward = opened(loaded, weights=WeightFormat.FP8)
    check_like_the_hook(forward, loaded, expected)
    assert forward.weights_bytes < 0.6 * whole_bytes


def test_weights_count_once_and_tied_embeddings_count():
    config = COMMON | {"model_type": "llama", "head_dim": 8, "tie_word_embeddings": True}
    tied = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    untied = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**(config | {"tie_word_embeddings": False}))
    )
    all_bytes = sum(x.nbytes for x in (*tied.parameters(), *tied.buffers()))
    assert cuda.weights_bytes(tied) == cuda.weights_bytes(untied) == all_bytes


# ------------------------------------------------------------ long rows


class Slow:
    """A way to attend long rows that is slow in a trial, or that fails."""

    takes_cached = True

    def __init__(self, name, seconds):
        self.name, self.seconds = name, seconds
        self.is_open = False

    def is_available(self, device):
        return True

    def open(self, device):
        self.is_open = True

    def close(self):
        self.is_open = False


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((5.0, 2.0), "triton, second"), ((5.0, 4.0), "triton")]
)
def test_the_fastest_way_to_attend_long_rows_is_opened_and_named(
    monkeypatch, caplog, seconds, chosen
):
    loaded = random_model(1, kv_format=KVFormat.BF16)
    loaded.model.to(torch.bfloat16)
    clock = SteppedClock()
    monkeypatch.setattr(kernels, "MonotonicClock", lambda: clock)
    monkeypatch.setattr(PrefillTrial, "is_possible", True)

    def attend(query, key, value, cache, layer, batch, scoring, way):
        clock.now += 3.0 if way is None else way.seconds
        if way is ways[2]:
            raise RuntimeError("no kernel image")
        return torch_attention.attend(query, key, value, cache, layer, batch, scoring)

    ways = [*map(Slow, ("first", "second"), seconds), Slow("third", 0.0)]
    device_kernels = DeviceKernels(loaded, attend=None, sampler=None)
    device_kernels.attention = "triton"
    caplog.set_level(logging.INFO)
    device_kernels._way = device_kernels.choose_way(fresh_cache(loaded.layout), ways, attend)
    assert device_kernels.attention == chosen
    assert f"prefill attention: {chosen.split()[-1]} (triton 3000.000 ms" in caplog.text
    assert device_kernels.fallbacks == {"prefill_third": 1}
    assert [way.is_open for way in ways] == [False, chosen.endswith("second"), False]
    device_kernels.close()
    assert not any(way.is_open for way in ways)


def test_other_records_than_bf16_are_read_by_the_triton_kernels(loaded):
    chosen = DeviceKernels(loaded, attend=None, sampler=None)
    assert chosen.choose_way(fresh_cache(loaded.layout), [Slow("first", 0.0)]) is None


class SteppedClock:
    now = 0.0

    def now_s(self):
        return self.now
