"""The C++ kernels give torch's results, and the same bits in any batch."""

from functools import partial

import pytest
import torch

from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.messages import Sampling
from engine.model import cpu
from engine.model.attention.base import Scoring
from engine.model.native.decoder import NativeAttention
from engine.model.native.linear import PackedLinear
from engine.model.native.matrix import Team, exact_in_bf16
from engine.model.native.structs import BF16, BF16_PAIRS, FP32
from engine.model.runner import TorchRunner
from engine.native.library import library
from engine.worker.batch import Row
from tests.kits.checkpoints import KINDS, tiny_checkpoint
from tests.kits.models.attention_cases import CASES, case_id, check_attend, check_company
from tests.kits.models.sequences import logits_in_chunks
from tests.kits.models.teams import avx2_kernels

pytestmark = pytest.mark.torch

ROWS = (1, 2, 3, 13, 14, 15, 29, 100)
SHAPES = ((8, 8), (33, 20), (100, 77), (64, 130), (256, 48))  # outputs, inputs
FUSED_KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3")
ROUNDED = 6e-4  # largest error over int8 KV: queries and weights of tokens have 16 bits
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(params=["best", "avx2"])
def kernels(request):
    """The library for this processor, and a library for processors without AVX-512."""
    return library() if request.param == "best" else avx2_kernels()


@pytest.fixture(params=[1, 2])
def team(request, kernels):
    team = Team(kernels, request.param)
    yield team
    team.close()


@pytest.fixture
def two_threads():
    team = Team(library(), 2)
    yield team
    team.close()
    team.library.baton_use_amx(1)  # a test may have switched AMX off


def tolerance_of(kv_format):
    return ROUNDED if kv_format is KVFormat.INT8 else 1e-5


def linear_of(outputs, inputs, *, bias=True, bf16=False):
    torch.manual_seed(outputs)
    linear = torch.nn.Linear(inputs, outputs, bias=bias)
    if bf16:
        linear.weight.data = linear.weight.data.bfloat16().float()
    return linear.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_packed_linear_layer_equals_the_layer(team, shape, bf16):
    linear = linear_of(*shape, bf16=bf16)
    packed = PackedLinear(linear, team, WeightFormat.FP32)
    narrow = BF16_PAIRS if team.library.baton_uses_amx() else BF16
    assert packed.matrix.struct.kind == (narrow if bf16 else FP32)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_int8_layer_computes_exactly_with_rounded_weights_and_activations(team, shape):
    linear = linear_of(*shape)
    packed = PackedLinear(linear, team, WeightFormat.INT8)
    weight, weight_scale = rounded(linear.weight)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        whole, scale = rounded(x)
        expected = (whole @ weight.T) * weight_scale.T * scale + linear.bias
        torch.testing.assert_close(packed(x), expected.float(), rtol=1e-6, atol=1e-6)


def rounded(x):
    """Rounds each row to whole numbers up to 127 times the row's scale, in fp64."""
    scale = x.abs().amax(1, keepdim=True) / 127
    whole = torch.round(x * (127 / x.abs().amax(1, keepdim=True)))
    return whole.double(), scale.double()


@pytest.mark.parametrize("form", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8])
def test_a_row_of_a_linear_layer_has_the_same_bits_in_any_batch(team, form):
    packed = PackedLinear(linear_of(70, 150), team, form)
    x = torch.randn(40, 150)
    whole = packed(x)
    for start in range(0, 40, 7):
        for count in (1, 2, 5):
            part = slice(start, start + count)
            assert torch.equal(packed(x[part]), whole[part])


@pytest.mark.parametrize("form", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8])
def test_avx2_and_avx512_give_the_same_bits(form, two_threads):
    two_threads.library.baton_use_amx(0)  # AMX rounds sums of bf16 products differently
    other = Team(avx2_kernels(), 1)
    linear = linear_of(70, 150)
    x = torch.randn(20, 150)
    assert torch.equal(
        PackedLinear(linear, two_threads, form)(x), PackedLinear(linear, other, form)(x)
    )
    other.close()


@pytest.mark.parametrize("inputs", [8, 64, 150])
def test_amx_changes_no_bit_of_a_product(inputs, two_threads):
    packed = PackedLinear(linear_of(70, inputs), two_threads, WeightFormat.INT8)
    batches = [torch.randn(rows, inputs) for rows in (1, 3, 4, 5, 16, 17, 32, 33, 100)]
    found = [packed(x) for x in batches]
    two_threads.library.baton_use_amx(0)
    for x, y in zip(batches, found, strict=True):
        assert torch.equal(packed(x), y)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_window_may_begin_after_a_partition_of_the_context(tokens, team):
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "scoring": Scoring(0.1, window=40)}
    case = {"kv_format": KVFormat.INT8, "lengths": ((1100, tokens),), **shape}
    check_attend(NativeAttention(team), **case, tolerance=ROUNDED)


@pytest.mark.parametrize("scoring", [Scoring(0.1), Scoring(0.1, window=40, softcap=2.0)], ids=str)
@pytest.mark.parametrize("head_dim", [6, 64, 80, 128])
def test_amx_changes_no_bit_of_attention(head_dim, scoring, two_threads):
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "scoring": scoring}
    case = {"kv_format": KVFormat.INT8, "lengths": ((40, 1), (0, 50), (1100, 3)), **shape}
    results = []

    def record(*arguments):
        results.append(NativeAttention(two_threads)(*arguments))
        return results[-1]

    check_attend(record, **case, tolerance=ROUNDED)
    two_threads.library.baton_use_amx(0)
    check_attend(record, **case, tolerance=ROUNDED)
    assert torch.equal(*results)


def test_zero_rows_and_empty_batches_are_computed(team):
    packed = PackedLinear(linear_of(9, 5, bias=False), team, WeightFormat.INT8)
    assert torch.equal(packed(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 9))
    assert packed(torch.zeros(0, 5)).shape == (0, 9)


def test_values_exact_in_bf16_are_recognised():
    assert exact_in_bf16(torch.tensor([0.0, -1.5, 3e38, 1e-38]).bfloat16().float())
    assert not exact_in_bf16(torch.tensor([1.0, 1.0001]))
    assert exact_in_bf16(torch.tensor([1.0, 1.5]).half())
    assert not exact_in_bf16(torch.tensor([1.0, 1.001]).half())


def test_one_inexact_value_among_many_is_noticed():
    many = torch.zeros(600, 1000)
    assert exact_in_bf16(many)
    many[-1, -1] = 1.0001
    assert not exact_in_bf16(many)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8])
def test_16_bit_weights_are_packed_like_fp32(two_threads, dtype, form):
    half = linear_of(70, 150).to(dtype)
    x = torch.randn(3, 150)
    found, expected = (PackedLinear(linear, two_threads, form) for linear in (half, half.float()))
    assert found.matrix.struct.kind == expected.matrix.struct.kind
    assert torch.equal(found(x), expected(x))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_attention_equals_the_reference(case, two_threads):
    check_attend(NativeAttention(two_threads), **case, tolerance=tolerance_of(case["kv_format"]))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_attention_of_a_row_has_the_same_bits_in_any_batch(case, two_threads):
    check_company(NativeAttention(two_threads), **case)


@pytest.mark.parametrize("kv_format", KVFormat)
def test_attention_without_avx512_gives_the_same_bits(kv_format, two_threads):
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80, "scoring": Scoring(0.1)}
    case = {"kv_format": kv_format, "lengths": ((40, 1), (0, 50), (1100, 3)), **shape}
    other = Team(avx2_kernels(), 1)
    attends = [NativeAttention(two_threads), NativeAttention(other)]
    results = []

    def record(*arguments):
        result = attends[len(results)](*arguments)
        results.append(result)
        return result

    for _ in attends:
        check_attend(record, **case, tolerance=tolerance_of(kv_format))
    assert torch.equal(*results)
    other.close()


def opened(tmp_path_factory, kind, *, weights, kv_format=KVFormat.FP32, num_blocks=200):
    path = tiny_checkpoint(tmp_path_factory, kind)
    runner = TorchRunner(
        path, block_size=4, num_blocks=num_blocks, weights=weights, kv_format=kv_format
    )
    runner.open()
    return runner


@pytest.mark.parametrize("kind", FUSED_KINDS)
@pytest.mark.parametrize("weights", [WeightFormat.FP32, WeightFormat.INT8])
def test_models_of_llamas_shape_are_computed_as_a_whole(tmp_path_factory, kind, weights):
    runner = opened(tmp_path_factory, kind, weights=weights)
    assert runner.is_fused
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weights", "kv_format"),
    [*((WeightFormat.INT8, kv_format) for kv_format in KVFormat), (WeightFormat.FP32, "fp32")],
)
def test_logits_have_the_same_bits_in_any_batch(tmp_path_factory, kind, weights, kv_format):
    """Logits are computed alone and in a batch, in any chunking (prefill), and by one or several
    tokens after a prefix (decode, verification of a draft).
    """
    runner = opened(tmp_path_factory, kind, weights=weights, kv_format=KVFormat(kv_format))
    logits = partial(logits_in_chunks, runner)
    token_ids = [(7 * i * i + 3) % 256 for i in range(50)]
    table = list(range(13))
    whole = logits(token_ids, [50], table)
    company = [
        Row("b", [5] * 9, 0, [20, 21, 22], None),
        Row("c", [9], 6, [30, 31], None),
        Row("d", [1, 2, 3], 0, [40], None),
    ]
    for chunks, others in (
        ([50], company),
        ([1] * 50, ()),
        ([20, 1, 1, 4, 4, 20], ()),
        ([33, 4, 1, 4, 1, 4, 3], company),
    ):
        assert torch.equal(logits(token_ids, chunks, table, others), whole), chunks
    runner.close()


def test_threads_change_no_bit(tmp_path_factory):
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        runner = opened(tmp_path_factory, "llama", weights=WeightFormat.INT8)
        found.append(logits_in_chunks(runner, range(40), [17, 1, 22], range(10)))
        runner.close()
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_fp8_weights_are_refused_on_a_cpu():
    with pytest.raises(ConfigError, match="GPU"):
        cpu.resolve_weights(WeightFormat.FP8)


def test_auto_is_int8_on_a_cpu():
    assert cpu.resolve_weights(WeightFormat.AUTO) is WeightFormat.INT8
