"""The Triton kernel that chooses tokens, exactly as `choosing` defines them.

The import of this module needs triton. `cuda.py` launches the kernel. One program computes one row,
for a vocabulary of any size: it reads the row's logits a few times, from the GPU's cache.

1. The best logit and its first id. A greedy row is then complete.
2. Bounds (top_k, top_p, min_p). Each is a lower bound for the score (logit - best) / temperature,
   and determines the lowest logit that survives.
3. The race. With e = -log(u), the argmax of score + g is the argmin of e * exp(-score), the
   token's finishing time. It is computed for all tokens in fp32. Tokens that may have won are
   compared in fp64, as in the definition.

**The race** may err by less than 1e-4 of a finishing time, while LATEST and MARGIN allow for ten
times this error:

    the score in fp32   three roundings and the factor log2(e): 2**-22 of 27 at most         6.5e-6
    its exponential     2**-22 by the hardware                                               0.3e-6
    e                   a logarithm with an error of 2**-21, which is at least 0.064 below
                        u = 15/16; above, a series in 1 - u to its fifth power               7.5e-6

u is in [2**-33, 1 - 2**-33], so e is in [2**-33, 22.88]. The best token has score 0, and so
finishes by 22.88. A token with a score below -27 finishes after 60 and cannot win. Temperatures
above 2**60 or below 2**-60 do not fit fp32, so for them all tokens are compared in fp64.

**Bounds** by top_k and top_p are found by bisection between the lowest and the best logit. Each
pass over the row also finds the nearest logits on both sides of the middle. So the search ends at a
logit of the row, after as many passes as are needed to separate it from its neighbours.

For top_k a pass counts logits. For top_p a pass adds masses exp(score) in fp32. This is exact
enough unless the mass is within DOUBT of the wanted mass. In this case a sum in fp64 decides, as
for all sums that a result depends on. So the bound equals the definition's: the highest logit from
which on masses sum to at least top_p of all. A result may differ from the definition only if a
bound equals a cumulated mass to 13 digits, because sums have another order.
`src/kernels/sampling.h` has the same rule.
"""
# ruff: noqa: FBT003, PLR0913 - constants go by position

import triton
import triton.language as tl

NUM_PARAMETERS: tl.constexpr = tl.constexpr(6)  # number of parameter words of a row
HOPELESS: tl.constexpr = tl.constexpr(-27.0)  # a token with a lower score cannot win
LATEST: tl.constexpr = tl.constexpr(23.0)  # a time at which the best token has finished
MARGIN: tl.constexpr = tl.constexpr(1.001)
DOUBT: tl.constexpr = tl.constexpr(1e-4)  # relative to a mass: ten times its error in fp32
GREATEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOT_A_NUMBER: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # NaN orders above all numbers, as in argmax
LOW_WORD: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def sample_kernel(
    tokens,  # [num_rows] int64
    logits,  # [num_rows, vocab] fp32, bf16 or fp16; logits of a row are neighbours
    parameters,  # [num_rows, NUM_PARAMETERS] int64, or fp64 as its bits:
    #              temperature, top_p, log(min_p), seed, position, top_k (0: all)
    vocab,
    row_stride,
    TILE: tl.constexpr,
):
    """Chooses the token of one row. Grid: (num_rows,)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    parameters += row * NUM_PARAMETERS
    temperature = tl.load(parameters).to(tl.float64, bitcast=True)
    top_p = tl.load(parameters + 1).to(tl.float64, bitcast=True)
    bound = tl.load(parameters + 2).to(tl.float64, bitcast=True)
    seed = tl.load(parameters + 3)
    position = tl.load(parameters + 4)
    top_k = tl.load(parameters + 5)

    token, order = _argmax(logits, vocab, TILE)
    if temperature > 0:
        best = _float_at(order)
        if order == NOT_A_NUMBER:
            token = tl.zeros_like(token)
        elif tl.abs(best) <= GREATEST:
            if (top_k > 0) | (top_p < 1):
                least = _bound_by_mass(logits, vocab, best, temperature, top_k, top_p, TILE)
                bound = tl.maximum(bound, _score(least, best, temperature))
            least = best
            if bound < HOPELESS:
                least = tl.full([], float("-inf"), tl.float32)
            else:
                least = _least_logit(bound, best, temperature)
            token = _race(logits, vocab, best, least, bound, temperature, seed, position, TILE)
    tl.store(tokens + row, token)


@triton.jit
def _load(logits, start, vocab, TILE: tl.constexpr):
    """Loads the ids and logits of a tile. Logits beyond the vocabulary are -inf."""
    ids = start + tl.arange(0, TILE)
    return ids, tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _order_of(x):
    """Maps fp32 numbers `x` [n] to integers in the same order. NaN is above all numbers."""
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    return tl.where(x == x, order, NOT_A_NUMBER)


@triton.jit
def _float_at(order):
    """Maps an integer of `_order_of` back to the fp32 number."""
    bits = tl.where(order >= 0, order, -order | 0x80000000)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _score(x, best, temperature):
    """Computes scores in fp64, as the definition of `sample` does."""
    return (x.to(tl.float64) - best.to(tl.float64)) / temperature


@triton.jit
def _is_extreme(temperature):
    return (temperature < 2.0**-60) | (temperature > 2.0**60)


@triton.jit
def _per_score(temperature):
    """Returns the factor by which a difference of logits becomes an exponent of two. It is
    arbitrary for extreme temperatures.
    """
    return tl.where(_is_extreme(temperature), 2.0**-126, 1.0 / temperature * LOG2_E).to(tl.float32)


@triton.jit
def _argmax(logits, vocab, TILE: tl.constexpr):
    """Returns the first id of the best logit, and this logit as an integer of `_order_of`."""
    # Order and id are in one integer, so the lowest id wins a tie.
    best = tl.full([TILE], -(2**63), tl.int64)
    for start in range(0, vocab, TILE):
        ids, x = _load(logits, start, vocab, TILE)
        best = tl.maximum(best, (_order_of(x).to(tl.int64) << 32) | (ids.to(tl.int64) ^ LOW_WORD))
    found = tl.max(best, 0)
    return (found & LOW_WORD) ^ LOW_WORD, found >> 32


@triton.jit
def _survey(logits, vocab, middle, best, per_score, TILE: tl.constexpr):
    """Splits the logits at `middle`. Returns four values: the number, the mass in fp32 and the
    lowest of the logits from `middle` up; and the highest of the logits below.
    """
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    above = tl.full([TILE], float("inf"), tl.float32)
    below = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocab, TILE):
        _, x = _load(logits, start, vocab, TILE)
        counts = x >= middle
        count += counts.to(tl.int32)
        mass += tl.where(counts, tl.exp2((x - best) * per_score), 0.0)
        above = tl.minimum(above, tl.where(counts, x, float("inf")))
        below = tl.maximum(below, tl.where(counts, float("-inf"), x))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _mass_above(logits, vocab, bound, best, temperature, TILE: tl.constexpr):
    """Returns the number of logits above `bound`, and the mass of these logits in fp64."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float64)
    for start in range(0, vocab, TILE):
        _, x = _load(logits, start, vocab, TILE)
        counts = x > bound
        count += counts.to(tl.int32)
        mass += tl.where(counts, tl.exp(_score(x, best, temperature)), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _bound_by_mass(logits, vocab, best, temperature, top_k, top_p, TILE: tl.constexpr):
    """Returns the lowest logit that top_k and top_p allow."""
    num_finite, _, least, _ = _survey(logits, vocab, -GREATEST, best, 1.0, TILE)
    num_left = num_finite.to(tl.int64)
    if (top_k > 0) & (top_k < num_left):
        num_left = top_k
        least = _search(logits, vocab, least, best, best, temperature, top_k, 0.0, True, TILE)
    if top_p < 1:
        num_above, mass = _mass_above(logits, vocab, least, best, temperature, TILE)
        mass += (num_left - num_above) * tl.exp(_score(least, best, temperature))
        wanted = mass * top_p
        least = _search(logits, vocab, least, best, best, temperature, 0, wanted, False, TILE)
    return least


@triton.jit
def _search(
    logits,
    vocab,
    low,  # a logit; the logits from it up are enough
    high,  # a logit; the logits above it are not enough
    best,
    temperature,
    wanted_count,
    wanted_mass,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the highest bound such that the logits from it up have the wanted number, or mass."""
    per_score = _per_score(temperature)
    is_extreme = _is_extreme(temperature)
    while low < high:
        middle = 0.5 * low + 0.5 * high
        middle = tl.where((middle > low) & (middle <= high), middle, high)
        count, mass, above, below = _survey(logits, vocab, middle, best, per_score, TILE)
        if COUNTS:
            is_enough = count >= wanted_count
        else:
            exact = mass.to(tl.float64)
            if is_extreme | (tl.abs(exact - wanted_mass) <= wanted_mass * DOUBT):
                _, exact = _mass_above(logits, vocab, below, best, temperature, TILE)
            is_enough = exact >= wanted_mass
        if is_enough:
            low = above
        else:
            high = below
    return low


@triton.jit
def _least_logit(bound, best, temperature):
    """Returns the lowest logit whose score is at least `bound`; +inf if even the best score is
    lower.

    Scores never fall as logits grow, but different logits may have the same score.
    """
    below = tl.full([], -0x7F800000, tl.int64)  # the order of -inf
    enough = _order_of(best).to(tl.int64)
    if bound > 0:
        enough = tl.full([], 0x7F800000, tl.int64)
        below = enough - 1
    while enough - below > 1:
        middle = below + (enough - below) // 2
        if _score(_float_at(middle), best, temperature) >= bound:
            enough = middle
        else:
            below = middle
    return _float_at(enough)


@triton.jit
def _race(
    logits, vocab, best, least, bound, temperature, seed, position, TILE: tl.constexpr
):  # fmt: skip
    """Returns the token that wins the race; the first id if no token survives."""
    is_extreme = _is_extreme(temperature)
    per_score = _per_score(temperature)
    margin = tl.where(is_extreme, float("inf"), MARGIN)
    limit = tl.where(is_extreme, float("inf"), LATEST)
    winner = tl.zeros([], tl.int64)
    highest = tl.full([], float("-inf"), tl.float64)
    for start in range(0, vocab, TILE):
        ids, x = _load(logits, start, vocab, TILE)
        words = _words(start // 4, position, seed, TILE)
        time = _exponential(words) * tl.exp2((best - x) * per_score)
        time = tl.where(x >= least, time, float("inf"))
        first = tl.min(time, 0)
        if first <= limit:
            limit = tl.minimum(limit, first * margin)
            noise = -tl.log(-tl.log((words.to(tl.float64) + 0.5) * 2.0**-32))
            noisy = _score(x, best, temperature) + noise
            noisy = tl.where((x >= least) & (time <= limit), noisy, float("-inf"))
            top = tl.max(noisy, 0)
            if top > highest:
                highest = top
                winner = tl.min(tl.where(noisy == top, ids, vocab), 0).to(tl.int64)
    return winner


@triton.jit
def _words(first_counter, position, seed, TILE: tl.constexpr):
    """Returns the words of Philox4x32-10, [TILE] uint32, for the tokens from `4 * first_counter`
    on.
    """
    counter = first_counter + tl.arange(0, TILE // 4)
    zero = tl.zeros_like(counter)
    a, b, c, d = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _exponential(words):
    """Returns e = -log(u) in fp32. Near u = 1 it uses a series in v = 1 - u, for precision relative
    to e.
    """
    u = (words.to(tl.float32) + 0.5) * 2.0**-32
    v = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * (0.25 + v * 0.2))))
    return tl.where(v < 0.0625, series, -tl.log(u))
