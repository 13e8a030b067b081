"""The cases that every `Attend` must pass on any device, and the checks that run them.

    check_attend(attend, **case)    against `reference_attention` and `KVCache.write`
    check_company(attend, **case)   each row gets the same result as alone
    CASES                           formats × head shapes, windows, softcaps, ragged lengths, blocks

Memory that a row may not touch is filled with NaN where its format has NaN, also in scales. This is
the memory of other sequences' blocks, of the record's other section and layer, and of a row's last
block beyond its context. Lengths are (earlier tokens, present tokens) of each row.
"""

from dataclasses import dataclass

import torch

from engine.layout import KVFormat, KVLayout, KVSection
from engine.model.attention.base import Scoring, build_batch, reference_attention
from engine.model.attention.kvcache import KVCache, allocate_buffer, dequantise
from engine.worker.batch import Row

OTHER_SECTION = KVSection(num_layers=1, num_kv_heads=1, head_dim=6)
LAYER = 1
NOT_A_NUMBER = 0xFF  # a float of any format is NaN if all its bytes have this value

# Bounds on a stored element's extra error over the nearest code, relative to max |x|: rounding of a
# reciprocal may pick the other code at a tie, and bf16 results may differ by one bit.
STORE_SLACK = {
    KVFormat.FP32: 0.0,
    KVFormat.BF16: 0.0,
    KVFormat.FP8_E4M3: 1e-5,
    KVFormat.INT8: 1e-5,
    KVFormat.INT4: 1e-2,
}


@dataclass(frozen=True)
class Problem:
    """A cache that holds only the rows' earlier tokens, and the rows' present tokens."""

    cache: KVCache
    rows: list[Row]
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor


def make_problem(
    *,
    device="cpu",
    kv_format,
    num_heads,
    num_kv_heads,
    head_dim,
    lengths,
    block_size=16,
    dtype=torch.float32,
    seed=0,
) -> Problem:
    rng = torch.Generator().manual_seed(seed)
    section = KVSection(num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim)
    layout = KVLayout(block_size, kv_format, (OTHER_SECTION, section))
    tables = _tables(layout, lengths, rng)
    buffer = allocate_buffer(layout, sum(map(len, tables)) + 3, device)
    buffer.fill_(NOT_A_NUMBER)
    cache = KVCache(layout, buffer, section=1)
    for (start, _), table in zip(lengths, tables, strict=True):
        if start:
            earlier = Row("earlier", [0] * start, 0, table, None)
            slots = build_batch([earlier], cache).slot_mapping
            cache.write(LAYER, slots, *_kv(section, start, device, dtype, rng))
    rows = [
        Row(f"s{i}", [0] * query_len, start, table, None)
        for i, ((start, query_len), table) in enumerate(zip(lengths, tables, strict=True))
    ]
    num_tokens = sum(query_len for _, query_len in lengths)
    query = torch.randn(num_tokens, num_heads, head_dim, generator=rng).to(device, dtype)
    return Problem(cache, rows, query, *_kv(section, num_tokens, device, dtype, rng))


def run(attend, problem, scoring):
    """Returns the result of `attend` [num_tokens, num_heads, head_dim], and writes the cache."""
    batch = build_batch(problem.rows, problem.cache)
    return attend(problem.query, problem.key, problem.value, problem.cache, LAYER, batch, scoring)


def check_attend(attend, *, scoring, tolerance=1e-5, **case):
    """Asserts that `attend` stores K and V in their slots and touches no other byte. The result
    must be within `tolerance` of the reference attention over the written record.
    """
    problem = make_problem(**case)
    before = problem.cache.buffer.clone()
    found = run(attend, problem, scoring)
    assert (found.shape, found.dtype) == (problem.query.shape, problem.query.dtype)
    _check_stored(problem, before)

    record = KVCache(problem.cache.layout, problem.cache.buffer.cpu(), section=1)
    batch = build_batch(problem.rows, record)
    expected = reference_attention(problem.query.cpu().float(), record, LAYER, batch, scoring)
    assert expected.isfinite().all()
    torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=tolerance)


def check_company(attend, *, scoring, tolerance=0.0, **case):
    """Asserts that a row alone gets the same result as beside other rows, bitwise by default."""
    problem = make_problem(**case)
    together = run(attend, problem, scoring)
    sizes = [len(row.token_ids) for row in problem.rows]
    parts = zip(*(x.split(sizes) for x in (problem.query, problem.key, problem.value)), strict=True)
    alone = [
        run(attend, Problem(problem.cache, [row], *part), scoring)
        for row, part in zip(problem.rows, parts, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=tolerance)


def _check_stored(problem, before):
    """Asserts that K and V are in their slots, within the format's error. All other bytes must
    equal `before`.
    """
    after = problem.cache
    slots = build_batch(problem.rows, after).slot_mapping
    block, offset = slots // after.layout.block_size, slots % after.layout.block_size
    twin = KVCache(after.layout, before.clone(), section=1)
    twin.write(LAYER, slots, problem.key, problem.value)
    for x, theirs, ours in (
        (problem.key, stored(after, LAYER)[0], stored(twin, LAYER)[0]),
        (problem.value, stored(after, LAYER)[1], stored(twin, LAYER)[1]),
    ):
        x = x.float()
        slack = STORE_SLACK[after.kv_format] * x.abs().amax(-1, keepdim=True)
        theirs, ours = theirs[block, :, offset], ours[block, :, offset]
        assert ((theirs - x).abs() <= (ours - x).abs() + slack).all()
    rest_before, rest_after = before.clone(), after.buffer.clone()
    for rest in (rest_before, rest_after):
        cleared = KVCache(after.layout, rest, section=1)
        cleared.write(LAYER, slots, torch.zeros_like(x), torch.zeros_like(x))
    assert torch.equal(rest_before, rest_after)


def stored(cache, layer):
    """Returns K and V of a layer, each fp32 [num_blocks, num_kv_heads, block_size, head_dim]."""
    scales = (None, None)
    if cache.kv_format.has_scales:
        scales = cache.key_scales[layer], cache.value_scales[layer]
    elements = cache.keys[layer], cache.values[layer]
    return [dequantise(e, s, cache.kv_format) for e, s in zip(elements, scales, strict=True)]


def _tables(layout, lengths, rng):
    """Returns scattered blocks for each row, with unowned blocks between them."""
    counts = [layout.num_blocks_for(start + query_len) for start, query_len in lengths]
    free = torch.randperm(sum(counts) + 3, generator=rng).tolist()
    return [[free.pop() for _ in range(count)] for count in counts]


def _kv(section, num_tokens, device, dtype, rng):
    """Returns random K and V [num_tokens, num_kv_heads, head_dim]; some values are hard to
    quantise."""
    shape = (num_tokens, section.num_kv_heads, section.head_dim)
    key, value = torch.randn(2, *shape, generator=rng)
    value[::3] *= 3
    key[1::7] = 0
    value[2::7] = value[2::7, :, :1]  # all elements equal
    return key.to(device, dtype), value.to(device, dtype)


MIXED = ((6, 1), (0, 5), (9, 3), (0, 1), (20, 1), (3, 4), (7, 1))
DECODE = ((6, 1), (0, 1), (20, 1), (31, 1), (32, 1), (33, 1))
PLAIN = Scoring(0.3)
HEAD_DIMS = (64, 80, 96, 128, 256)
HEADS = ((4, 4), (6, 2), (8, 1), (16, 1), (1, 1))
WINDOWS = (1, 3, 4, 8, 1000)
RAGGED = (  # one row, long contexts, lengths at the edges of blocks of 16 and tiles of 64
    ((0, 1),),
    ((40, 1),),
    ((0, 33),),
    ((700, 1), (5, 1), (1030, 1)),
    ((300, 4), (511, 4), (64, 4)),
    ((0, 64), (64, 64), (63, 65), (15, 1), (16, 1), (14, 2)),
    ((500, 70), (0, 130)),
)


def _case(kv_format, *, heads=(4, 2), head_dim=8, lengths=MIXED, scoring=PLAIN, block_size=16):
    return {
        "kv_format": kv_format,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": head_dim,
        "lengths": lengths,
        "scoring": scoring,
        "block_size": block_size,
    }


def _cases():
    for kv_format in KVFormat:
        for head_dim in HEAD_DIMS:
            yield _case(kv_format, head_dim=head_dim, scoring=Scoring(head_dim**-0.5))
        for heads in HEADS:
            yield _case(kv_format, heads=heads, head_dim=64, scoring=Scoring(64**-0.5))
        for window in WINDOWS:
            yield _case(kv_format, scoring=Scoring(0.3, window=window))
        yield _case(kv_format, scoring=Scoring(0.3, softcap=0.7))
        yield _case(kv_format, scoring=Scoring(0.3, window=5, softcap=0.7))
        yield _case(kv_format, lengths=DECODE, scoring=Scoring(0.3, window=5), block_size=4)
        for lengths in RAGGED:
            yield _case(kv_format, heads=(2, 1), head_dim=32, lengths=lengths)
        yield _case(kv_format, heads=(2, 1), lengths=RAGGED[-1], scoring=Scoring(0.3, window=100))
        for block_size in (1, 3, 32):
            yield _case(kv_format, block_size=block_size)


CASES = list(_cases())


def case_id(case):
    """Returns a name of the case for pytest."""
    scoring = case["scoring"]
    parts = [case["kv_format"].value, f"{case['num_heads']}on{case['num_kv_heads']}"]
    parts += [f"d{case['head_dim']}", f"b{case['block_size']}"]
    parts += [f"w{scoring.window}"] if scoring.window else []
    parts += ["softcap"] if scoring.softcap else []
    return "-".join([*parts, "_".join(f"{start}+{now}" for start, now in case["lengths"])])
