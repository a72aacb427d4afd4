"""One program a response: statistics of its free positions, a bracket for the temperature, bisections, weights."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Each halves [1, tau_hi]; float32 has no more to give after 32.
BISECTIONS = tl.constexpr(32)


@triton.jit
def _free_credit(credit, frozen, at, stop, HAS_FROZEN: tl.constexpr):
    """Credit and whether it counts, at positions `at`; 0 where it does not, whatever lies there."""
    free = at < stop
    if HAS_FROZEN:
        free = free & (tl.load(frozen + at, mask=free, other=1) == 0)
    return tl.load(credit + at, mask=free, other=0.0).to(tl.float32), free


@triton.jit
def _exponential(credit, frozen, at, stop, lowest, scale, top, rate, HAS_FROZEN: tl.constexpr):
    """exp2(rate (v - v_top)) at free positions, 0 elsewhere."""
    d, free = _free_credit(credit, frozen, at, stop, HAS_FROZEN)
    return tl.exp2(tl.where(free, ((d - lowest) / scale - top) * rate, -float("inf"))), free


@triton.jit
def allocate_kernel(
    credit, frozen,  # [N]
    advantage, ends, lengths,  # [B]; ends: one past each response's last token
    weight, temperature,  # [N], [B]
    total, ceiling, log_ceiling,
    SIGN: tl.constexpr, HAS_FROZEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight and temperature of response program_id(0), as `allocate_weights` defines them.

    Credits count as v = (d - min d) / (max d - min d): their common offset and scale cost no digits. util = k (v - mean v), and
    util - max util = k (v - v_top) with v_top = 1 for k >= 0, else 0.
    """
    b = tl.program_id(0)
    stop = tl.minimum(tl.load(ends + b), total)
    start = tl.maximum(stop - tl.maximum(tl.load(lengths + b), 0), 0)
    A = tl.load(advantage + b).to(tl.float32)
    index = tl.arange(0, BLOCK).to(tl.int64)
    zero = tl.zeros((BLOCK,), tl.float32)

    count, nothing, low, high = zero, zero, zero + float("inf"), zero - float("inf")
    for at in range(start, stop, BLOCK):
        d, free = _free_credit(credit, frozen, at + index, stop, HAS_FROZEN)
        count += free.to(tl.float32)
        nothing += d * 0.0
        low = tl.minimum(low, tl.where(free, d, float("inf")))
        high = tl.maximum(high, tl.where(free, d, -float("inf")))
    n, lowest, highest = tl.sum(count, axis=0), tl.min(low, axis=0), tl.max(high, axis=0)
    finite = tl.sum(nothing, axis=0) + A * 0.0 == 0.0  # otherwise the weights are NaN
    uniform = (n < 2) | (A == 0) | (ceiling == 1.0) | (finite & (highest == lowest))
    scale = tl.where(highest > lowest, highest - lowest, 1.0)
    lowest = tl.where(n > 0, lowest, 0.0)
    n_or_1 = tl.maximum(n, 1.0)

    sums, sizes = zero, zero
    for at in range(start, stop, BLOCK):
        d, free = _free_credit(credit, frozen, at + index, stop, HAS_FROZEN)
        sums += tl.where(free, (d - lowest) / scale, 0.0)
        sizes += tl.abs(d) / scale
    mean = tl.sum(sums, axis=0) / n_or_1
    squares = zero
    for at in range(start, stop, BLOCK):
        d, free = _free_credit(credit, frozen, at + index, stop, HAS_FROZEN)
        centred = tl.where(free, (d - lowest) / scale - mean, 0.0)
        squares += centred * centred
    spread = tl.sqrt(tl.sum(squares, axis=0) / n_or_1) + 1e-3 * (tl.sum(sizes, axis=0) / n_or_1)
    direction = tl.where(A > 0, 1.0, -1.0) if SIGN else A
    k = direction / tl.where(spread > 0, spread, 1.0)
    top = tl.where(k >= 0, 1.0, 0.0)
    span = tl.abs(k)
    finite = finite & (scale < float("inf")) & (span < float("inf"))  # float32 ends at 3e38

    # The first look is at tau = 1, the answer where that is feasible; the last one at the smallest that was.
    tau_low, tau_high = 1.0, tl.maximum(span / log_ceiling, 1.0)
    tau, largest = 1.0, 1.0
    looks = tl.where(finite & (uniform == 0), BISECTIONS + 2, 0)
    for look in range(looks):
        tau = tl.where(look == 0, 1.0, tl.where(look == BISECTIONS + 1, tau_high, 0.5 * (tau_low + tau_high)))
        sums = zero
        for at in range(start, stop, BLOCK):
            e, _ = _exponential(credit, frozen, at + index, stop, lowest, scale, top, k / tau * LOG2_E, HAS_FROZEN)
            sums += e
        largest = n / tl.sum(sums, axis=0)
        feasible = (largest <= ceiling) & (largest * tl.exp2(-span / tau * LOG2_E) * ceiling >= 1.0)
        tau_high = tl.where(feasible, tau, tau_high)
        tau_low = tl.where(feasible, tau_low, tau)

    for at in range(start, stop, BLOCK):
        e, free = _exponential(credit, frozen, at + index, stop, lowest, scale, top, k / tau * LOG2_E, HAS_FROZEN)
        # At a bound itself the last bit of the rounding may stand beyond it.
        w = tl.minimum(tl.maximum(largest * e, 1.0 / ceiling), ceiling)
        w = tl.where(finite, w, float("nan"))
        tl.store(weight + at + index, tl.where(free & (uniform == 0), w, 1.0), mask=at + index < stop)
    tl.store(temperature + b, tl.where(finite | uniform, tau, float("nan")))
