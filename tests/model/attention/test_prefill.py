"""Ways to attend long rows, called as their libraries document, and the choice between the ways.

The libraries need a GPU. Stand-ins replace them here and follow the documented meaning of the
arguments. So the tests check that the ways pass the right rows, pages and strides.
"""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from engine.layout import KVFormat, KVLayout, KVSection
from engine.model.attention import choice as choice_module
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import Scoring, build_batch, reference_attention
from engine.model.attention.choice import AttentionChoice, PrefillTrial, choose_fastest
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.attention.prefill import SDPA, FlashInferWay, VarlenWay, all_ways
from tests.kits.models.attention_cases import LAYER, make_problem

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
TOLERANCE = 0.06  # absolute error; values reach 12
LENGTHS = ((0, 5), (9, 20), (0, 18), (40, 3))
SCORINGS = (Scoring(0.3), Scoring(0.3, window=6))


# ------------------------------------------------------------ stand-ins of the libraries


def attention_of_a_row(query, key, value, *, scale, left, softcap=None):
    """Computes causal attention [queries, heads, dim]. The last query attends to the last key."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    seen = (distance >= 0) & ((distance <= left) | (left < 0))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa,
    seqused_k=None,
    block_table=None,
):
    """Replaces `torch.nn.attention.varlen.varlen_attn`; follows its documentation."""
    assert enable_gqa
    assert window_size[1] == 0
    assert max_q == max(b - a for a, b in pairwise(cu_seq_q.tolist()))
    assert cu_seq_q.dtype == torch.int32
    out = torch.empty_like(query)
    for row, (a, b) in enumerate(pairwise(cu_seq_q.tolist())):
        if block_table is None:
            keys, values = key[a:b], value[a:b]
            assert cu_seq_k.tolist() == cu_seq_q.tolist()
        else:
            assert cu_seq_k is None
            assert (block_table.dtype, seqused_k.dtype) == (torch.int32, torch.int32)
            length = int(seqused_k[row])
            assert length <= max_k
            pages = block_table[row, : -(-length // key.shape[1])]
            keys, values = (x[pages].flatten(0, 1)[:length] for x in (key, value))
        out[a:b] = attention_of_a_row(query[a:b], keys, values, scale=scale, left=window_size[0])
    return out


class Wrapper:
    """Replaces FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`; follows its documentation."""

    num_plans = 0

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        **options,
    ):
        assert options["causal"]
        assert options["q_data_type"] == options["kv_data_type"] == torch.bfloat16
        assert all(x.dtype == torch.int32 for x in (qo_indptr, paged_kv_indptr, paged_kv_indices))
        self.queries, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.lasts = paged_kv_indices, paged_kv_last_page_len.tolist()
        self.page_size, self.options = page_size, options
        self.num_heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        Wrapper.num_plans += 1

    def run(self, query, pages):
        assert self.num_heads == (query.shape[1], pages[0].shape[1], query.shape[2])
        out = torch.empty_like(query)
        for row, (a, b) in enumerate(pairwise(self.queries)):
            used = self.indices[self.pages[row] : self.pages[row + 1]]
            length = (len(used) - 1) * self.page_size + self.lasts[row]
            keys, values = (x[used].transpose(1, 2).flatten(0, 1)[:length] for x in pages)
            out[a:b] = attention_of_a_row(
                query[a:b],
                keys,
                values,
                scale=self.options["sm_scale"],
                left=self.options["window_left"],
                softcap=self.options["logits_soft_cap"],
            )
        return out


class Event:
    """A device's event that has always been reached."""

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def libraries(monkeypatch):
    """Replaces the libraries by the stand-ins."""
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    flashinfer, prefill = ModuleType("flashinfer"), ModuleType("flashinfer.prefill")
    prefill.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", prefill)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def check(way, scoring, rows, lengths=LENGTHS):
    """Asserts that the way writes the results of these rows, and writes nothing else."""
    problem = make_problem(
        kv_format=KVFormat.BF16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        lengths=lengths,
        dtype=torch.bfloat16,
    )
    batch = build_batch(problem.rows, problem.cache)
    problem.cache.write(LAYER, batch.slot_mapping, problem.key, problem.value)
    expected = reference_attention(problem.query.float(), problem.cache, LAYER, batch, scoring)
    for _ in range(2):  # the second layer of a step reuses plans
        out = torch.full_like(problem.query, torch.nan)
        heads = (problem.query, problem.key, problem.value)
        way.attend(*heads, out, problem.cache, LAYER, batch, rows, scoring)
        for row, extent in enumerate(batch.extents):
            tokens = slice(extent.query_start, extent.query_start + extent.query_len)
            if row in rows:
                found = out[tokens].float()
                torch.testing.assert_close(found, expected[tokens], rtol=0, atol=TOLERANCE)
            else:
                assert out[tokens].isnan().all()


# ------------------------------------------------------------ the ways


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 2), (0, 3), (1,)])
def test_varlen_reads_the_record_by_its_strides(scoring, rows):
    check(VarlenWay(has_fa3=True), scoring, rows)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("rows", [(0, 2), (2,)])
def test_without_fa3_varlen_attends_fresh_rows(scoring, rows):
    check(VarlenWay(has_fa3=False), scoring, rows)


@pytest.mark.parametrize("rows", [(0, 2), (0,)])
def test_sdpa_attends_fresh_rows(rows):
    check(SDPA, Scoring(0.3), rows)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("scoring", [*SCORINGS, Scoring(0.3, softcap=0.7)])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (0, 3)])
def test_flashinfer_plans_a_batch_once_and_reads_the_record_by_its_strides(scoring, rows):
    way = FlashInferWay()
    way.open(CPU)
    before = Wrapper.num_plans
    check(way, scoring, rows)
    assert Wrapper.num_plans == before + 1
    way.close()


def test_ways_refuse_rows_that_they_cannot_attend():
    softcap, window = Scoring(0.3, softcap=1.0), Scoring(0.3, window=9)
    taken = {
        way.name: [way.takes(128, scoring) for scoring in (Scoring(0.3), window, softcap)]
        for way in all_ways()
    }
    assert taken == {
        "torch-sdpa": [True, False, False],
        "torch-varlen": [True, True, False],
        "torch-varlen-fa3": [True, True, False],
        "flashinfer": [True, True, True],
    }
    assert [way.takes(100, Scoring(0.3)) for way in all_ways()] == [False] * 4


def test_what_is_not_installed_is_no_candidate():
    available = {way.name for way in all_ways() if way.is_available(CPU)}
    assert "torch-sdpa" in available
    assert "torch-varlen-fa3" not in available


# ------------------------------------------------------------ the choice


def test_the_fastest_working_candidate_is_chosen():
    def fail():
        raise RuntimeError("no kernel image")

    found = choose_fastest({"a": lambda: 2.0, "b": fail, "c": lambda: 1.0, "d": lambda: 1.0})
    expected = AttentionChoice("c", {"a": 2.0, "c": 1.0, "d": 1.0}, {"b": "no kernel image"})
    assert found == expected
    assert str(found) == (
        "c (a 2000.000 ms; c 1000.000 ms; d 1000.000 ms; b fails: no kernel image)"
    )


def test_if_nothing_works_the_first_error_is_raised():
    def fail():
        raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        choose_fastest({"a": fail, "b": lambda: 1 / 0})


class Candidate:
    """A way that takes `seconds` on the test's clock, and may fail or return wrong results."""

    takes_cached = True

    def __init__(self, name, seconds, clock, *, opens=True, error=0.0):
        self.name = name
        self._seconds, self._clock, self._opens, self._error = seconds, clock, opens, error
        self.is_open = False

    def is_available(self, device):
        return self._seconds is not None

    def open(self, device):
        if not self._opens:
            raise RuntimeError("cannot be opened")
        self.is_open = True

    def close(self):
        self.is_open = False

    def spend(self, out):
        assert self.is_open
        self._clock.seconds += self._seconds
        return out + self._error


class FakeClock:
    seconds = 0.0

    def now_s(self):
        return self.seconds


def attend_by(clock, kernels_s):
    """Returns an attention in torch, which replaces the Triton kernels and all ways."""

    def attend(query, key, value, cache, layer, batch, scoring, way):
        out = torch_attention.attend(query, key, value, cache, layer, batch, scoring)
        if way is None:
            clock.seconds += kernels_s
            return out
        return way.spend(out)

    return attend


def trial_of(clock, *, num_blocks=100, kernels_s=3.0):
    layout = KVLayout(16, KVFormat.BF16, (KVSection(2, 1, 8),))
    cache = KVCache(layout, allocate_buffer(layout, num_blocks))
    trial = PrefillTrial(
        cache, num_heads=2, context_len=9999, attend=attend_by(clock, kernels_s), clock=clock
    )
    return trial, cache


def test_a_trial_measures_ways_and_drops_those_that_fail_or_are_wrong(monkeypatch):
    monkeypatch.setattr(choice_module, "MEASURED_TOKENS", 256)
    clock = FakeClock()
    trial, cache = trial_of(clock)
    ways = [
        Candidate("quick", 2.0, clock),
        Candidate("wrong", 1.0, clock, error=0.5),
        Candidate("not-a-number", 1.0, clock, error=torch.nan),
        Candidate("shut", 1.0, clock, opens=False),
    ]
    found = trial.choose(ways)
    assert found.name == "quick"
    assert found.seconds == {"triton": 3.0, "quick": 2.0}
    assert found.failures.keys() == {"wrong", "not-a-number", "shut"}
    assert "differ by 0.5" in found.failures["wrong"]
    assert not any(way.is_open for way in ways)
    assert not cache.buffer.any()


def test_a_cache_without_room_for_long_rows_allows_no_trial():
    assert not trial_of(FakeClock(), num_blocks=40)[0].is_possible
    assert trial_of(FakeClock(), num_blocks=48)[0].is_possible
