"""Checks the results of GPU kernels, before `bench.gpu` times the kernels.

    check_attention   the kernels against torch's attention in fp32 over the record that they left,
                      and that record against `KVCache.write`
    check_matmul      products of fp8 matrices against plain numbers
    check_groups      products of groups of fp8 rows, as experts need them, likewise

Each function returns a list of complaints, one line each. Memory that a row must not read or write
is filled with NaN. A CPU has no kernels, so on a CPU torch's attention is checked.

    python -m bench.gpu.kernels KV_FORMAT HEAD_DIM DTYPE DEVICE

prints the complaints about one case. It imports only the modules that this case needs.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.engine.jobs import scattered_tables
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import SeqId
from engine.model.attention import cuda as triton_attention
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import (
    Attend,
    AttentionBatch,
    Extent,
    Scoring,
    build_batch,
)
from engine.model.attention.kvcache import KVCache, allocate_buffer, dequantise
from engine.model.fp8 import (
    grouped_matmul,
    one_by_one,
    quantise_rows,
    reference_matmul,
    scaled_matmul,
)
from engine.model.packing import PAD_SLOT
from engine.worker.batch import Row

BLOCK_SIZE = 16
LAYER = 1
NOT_A_NUMBER = 0xFF  # byte value: a float of any format is NaN if all its bytes have this value
NUM_PADS = 3

# (cached tokens, new tokens) of each row: decode, verification, prefill, and a mixture
LENGTHS = (
    ((700, 1), (5, 1), (1030, 1), (0, 1), (15, 1), (16, 1)),
    ((300, 4), (511, 4), (64, 3)),
    ((0, 300), (500, 70), (40, 1), (64, 16)),
    ((9000, 1), (0, 2048)),
)
# this head size is also checked with windows and softcaps, whose kernels are compiled separately
USUAL_HEAD_DIM = 128
HEAD_DIMS = (USUAL_HEAD_DIM, 256, 96, 80, 64)

# Tolerated error, relative to the largest element of a query's result. bf16 has 8 bits of
# precision. If one of 1000 context tokens were missing, the error would be larger.
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}
STORE_SLACK = {KVFormat.FP8_E4M3: 1e-5, KVFormat.INT8: 1e-5, KVFormat.INT4: 1e-2}
MATMUL_TOLERANCE = 2**-7


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One case of the attention check: a KV format, a head size and a dtype."""

    kv_format: KVFormat
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 32
    num_kv_heads: int = 8

    @property
    def name(self) -> str:
        """Returns the name of the case, for messages."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"attention, KV {self.kv_format}, head size {self.head_dim}, queries {dtype}"

    @property
    def scorings(self) -> tuple[Scoring, ...]:
        """Returns the variants of attention scores to check, such as windows and softcaps."""
        scaling = self.head_dim**-0.5
        if self.head_dim != USUAL_HEAD_DIM:
            return (Scoring(scaling),)
        windowed = Scoring(scaling, window=100)
        return Scoring(scaling), windowed, Scoring(scaling, window=33, softcap=0.7)


def attention_cases(*, is_quick: bool) -> list[AttentionCase]:
    """Returns the cases, the slowest first. All formats and head sizes; if `is_quick`, only all
    formats.
    """
    head_dims = (USUAL_HEAD_DIM,) if is_quick else HEAD_DIMS
    cases = [AttentionCase(kv_format, d) for d in head_dims for kv_format in KVFormat]
    return [AttentionCase(KVFormat.INT8, USUAL_HEAD_DIM, torch.float32), *cases]


def arguments_of(case: AttentionCase, device: str) -> list[str]:
    """Returns the command-line arguments of this module that describe the case."""
    dtype = str(case.dtype).removeprefix("torch.")
    return [case.kv_format.value, str(case.head_dim), dtype, device]


def main(arguments: Sequence[str]) -> None:
    """Checks the case that the arguments describe (see `arguments_of`)."""
    kv_format, head_dim, dtype, device = arguments
    case = AttentionCase(KVFormat(kv_format), int(head_dim), getattr(torch, dtype))
    for line in check_attention(case, device):
        sys.stdout.write(line + "\n")


def check_attention(case: AttentionCase, device: str) -> list[str]:
    """Returns complaints about attention over batches of all kinds, with windows, softcaps and
    padding rows.
    """
    found = []
    with torch.inference_mode():
        for lengths in LENGTHS if device != "cpu" else LENGTHS[:-1]:
            for scoring in case.scorings:
                about = f"{case.name}, {scoring}, lengths {lengths}"
                problem = _Problem(case, lengths, device)
                found += [f"{about}: {line}" for line in problem.complaints(scoring)]
        if device != "cpu":
            found += [f"{case.name}: {line}" for line in _complaints_of_padding(case, device)]
    return found


def check_matmul(device: str) -> list[str]:
    """Returns complaints about matrix products with the row counts of decode, verification and
    prefill.

    Needs a GPU with fp8.
    """
    rng = torch.Generator(device).manual_seed(0)
    weight, weight_scales = quantise_rows(torch.randn(1024, 512, generator=rng, device=device))
    found = []
    for num_rows in (1, 3, 16, 17, 64, 300, 2048):
        x = torch.randn(num_rows, 512, generator=rng, device=device)
        x *= torch.logspace(-3, 3, num_rows, device=device)[:, None]
        operands = (*quantise_rows(x), weight, weight_scales[:, 0])
        expected = reference_matmul(*operands)
        error = (scaled_matmul(*operands).float() - expected).abs().amax(-1)
        worst = float((error / expected.abs().amax(-1)).max())
        if not worst <= MATMUL_TOLERANCE:
            found.append(f"fp8 product of {num_rows} rows: error {worst:.2g}")
    return found


def check_groups(device: str) -> list[str]:
    """Returns complaints about matrix products of rows that are sorted by expert. Some experts have
    no rows.

    Needs a GPU that multiplies groups.
    """
    rng = torch.Generator(device).manual_seed(0)
    matrices = torch.randn(8, 1024, 512, generator=rng, device=device)
    weights, scales = (x.unflatten(0, (8, 1024)) for x in quantise_rows(matrices.flatten(0, 1)))
    found = []
    for num_rows in (1, 3, 64, 300, 2048):
        x = quantise_rows(torch.randn(num_rows, 512, generator=rng, device=device))
        experts = torch.randint(0, 8, (num_rows,), generator=rng, device=device)
        experts = torch.where(experts == 3, 4, experts).sort().values
        numbers = torch.arange(8, device=device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        operands = (*x, weights, scales[..., 0].contiguous(), ends)
        expected = one_by_one(reference_matmul, *operands)
        error = (grouped_matmul(*operands).float() - expected).abs().amax(-1)
        worst = float((error / expected.abs().amax(-1)).max())
        if not worst <= MATMUL_TOLERANCE:
            found.append(f"fp8 product of groups, {num_rows} rows: error {worst:.2g}")
    return found


class _Problem:
    """Rows of a batch, and a KV record with their earlier tokens. All other bytes of the record are
    NaN.
    """

    def __init__(
        self, case: AttentionCase, lengths: Sequence[tuple[int, int]], device: str
    ) -> None:
        self.case = case
        self.device = device
        section = KVSection(2, case.num_kv_heads, case.head_dim)
        layout = KVLayout(BLOCK_SIZE, case.kv_format, (section,))
        tables = scattered_tables([sum(pair) for pair in lengths], BLOCK_SIZE, seed=len(lengths))
        buffer = allocate_buffer(layout, sum(map(len, tables)) + 2, device)
        buffer.fill_(NOT_A_NUMBER)
        self.cache = KVCache(layout, buffer)
        self._rng = torch.Generator(device).manual_seed(len(lengths))
        for (before, _), table in zip(lengths, tables, strict=True):
            if before:
                earlier = Row(SeqId("earlier"), [0] * before, 0, table, None)
                slots = build_batch([earlier], self.cache).slot_mapping
                self.cache.write(LAYER, slots, *self._kv(before))
        self.rows = [
            Row(SeqId(f"s{i}"), [0] * now, before, table, None)
            for i, ((before, now), table) in enumerate(zip(lengths, tables, strict=True))
        ]
        num_tokens = sum(now for _, now in lengths)
        self.query = self._random(num_tokens, case.num_heads)
        self.key, self.value = self._kv(num_tokens)

    def complaints(self, scoring: Scoring) -> Iterator[str]:
        """Returns complaints about the result of the kernel, and about the record after it."""
        before = self.cache.buffer.clone()
        batch = build_batch(self.rows, self.cache)
        found = _attend_of(self.device)(
            self.query, self.key, self.value, self.cache, LAYER, batch, scoring
        )
        yield from self._complaints_of_record(before, batch.slot_mapping)
        # Uses a batch of its own: torch's attention builds masks in it, in the dtype of the
        # queries.
        batch = build_batch(self.rows, self.cache)
        truth = torch_attention.paged_attention(
            self.query.float(), self.cache, LAYER, batch, scoring
        )
        yield from _complaints_of_result(found, truth, TOLERANCE[self.case.dtype])

    def _complaints_of_record(self, before: torch.Tensor, slots: torch.Tensor) -> Iterator[str]:
        """Checks that K and V are in their slots, rounded to the format, and that all other bytes
        are unchanged.
        """
        after = self.cache
        twin = KVCache(after.layout, before.clone())
        twin.write(LAYER, slots, self.key, self.value)
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        slack = STORE_SLACK.get(after.kv_format, 0.0)
        for what, x, theirs, ours in zip(
            ("K", "V"), (self.key, self.value), _stored(after), _stored(twin), strict=True
        ):
            x = x.float()
            bound = (ours[block, :, offset] - x).abs() + slack * x.abs().amax(-1, keepdim=True)
            if not ((theirs[block, :, offset] - x).abs() <= bound).all():
                yield f"{what} is not stored as well as it could be"
        zero = torch.zeros_like(self.key)
        rest_before, rest_after = before.clone(), after.buffer.clone()
        for rest in (rest_before, rest_after):
            KVCache(after.layout, rest).write(LAYER, slots, zero, zero)
        if not torch.equal(rest_before, rest_after):
            yield "bytes of other tokens were overwritten"

    def _kv(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads = self.case.num_kv_heads
        return self._random(num_tokens, heads), self._random(num_tokens, heads)

    def _random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        size = (num_tokens, num_heads, self.case.head_dim)
        x = torch.randn(size, generator=self._rng, device=self.device)
        return x.to(self.case.dtype)


def _complaints_of_padding(case: AttentionCase, device: str) -> Iterator[str]:
    """Checks that padding rows write nothing to the record, get zeros as result, and leave other
    rows unchanged.
    """
    problem = _Problem(case, LENGTHS[0], device)
    scoring = Scoring(case.head_dim**-0.5)
    arguments = (problem.query, problem.key, problem.value)
    batch = build_batch(problem.rows, problem.cache)
    truth = triton_attention.attend(*arguments, problem.cache, LAYER, batch, scoring)
    left = problem.cache.buffer.clone()
    num_rows = len(problem.rows) + NUM_PADS
    filled_up = AttentionBatch(
        extents=tuple(Extent(i, 1, 0) for i in range(num_rows)),
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.nn.functional.pad(batch.context_lens, (0, NUM_PADS)),
        block_tables=torch.nn.functional.pad(batch.block_tables, (0, 7, 0, NUM_PADS)),
        slot_mapping=torch.nn.functional.pad(batch.slot_mapping, (0, NUM_PADS), value=PAD_SLOT),
    )
    fill = [torch.cat((x, x[:NUM_PADS])) for x in arguments]
    found = triton_attention.attend(*fill, problem.cache, LAYER, filled_up, scoring)
    if found[-NUM_PADS:].any():
        yield "rows that fill up do not get zeros"
    if not torch.equal(problem.cache.buffer, left):
        yield "rows that fill up are stored"
    yield from _complaints_of_result(found[:-NUM_PADS], truth.float(), TOLERANCE[case.dtype])


def _complaints_of_result(
    found: torch.Tensor, truth: torch.Tensor, tolerance: float
) -> Iterator[str]:
    """Compares `found` with `truth`, both [num_tokens, num_heads, head_dim], for each query and
    head.
    """
    error = (found.float() - truth).abs().amax(-1) / truth.abs().amax(-1)
    if not truth.isfinite().all():
        yield "the reference itself is not finite"
    elif not (error <= tolerance).all():
        worst = int(error.nan_to_num(nan=torch.inf).argmax())
        token, head = divmod(worst, error.shape[1])
        yield f"error {float(error[token, head]):.2g} at token {token}, head {head}"


def _stored(cache: KVCache) -> list[torch.Tensor]:
    """Returns K and V of the layer as fp32 [num_blocks, num_kv_heads, block_size, head_dim]."""
    scales: tuple[torch.Tensor | None, ...] = (None, None)
    if cache.kv_format.has_scales:
        scales = cache.key_scales[LAYER], cache.value_scales[LAYER]
    elements = cache.keys[LAYER], cache.values[LAYER]
    return [dequantise(e, s, cache.kv_format) for e, s in zip(elements, scales, strict=True)]


def _attend_of(device: str) -> Attend:
    return torch_attention.attend if device == "cpu" else triton_attention.attend


if __name__ == "__main__":
    main(sys.argv[1:])
