"""The anchored state of `anchored_state.py` inside Triton kernels: the state of one tile, and the merge of two.

x stands for logits before a row's last positive factor (the inverse temperature), z = c x; `rate` is c log2(e), so that
exp(z - z_t) = exp2(rate (x - x_t)) and x - x_t is exact between close logits. H is kept in units of log 2 until it is stored.

A tile has no column indices. Its anchor is, among the columns that share the largest logit, the one of largest u; which
columns those are is read from e = exp2(0) = 1. The other ties count with e = 1 and their own delta = u - u_t.
"""

import triton
import triton.language as tl

# exp2 of it is 0, and 0 times it is 0: what stands for z - z_t where a logit is -inf. NaN stays NaN.
MASKED = tl.constexpr(-1e5)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def empty_logit_sums(ROWS: tl.constexpr):
    """x_t, Q, R, H of no columns: the identity of the merges below."""
    zero = tl.zeros((ROWS,), tl.float32)
    return zero - float("inf"), zero, zero, zero


@triton.jit
def empty_reward_sums(ROWS: tl.constexpr):
    """u_t, S1, S2, S3 of no columns."""
    zero = tl.zeros((ROWS,), tl.float32)
    return zero, zero, zero, zero


@triton.jit
def tile_logit_sums(x, rate, MASKABLE: tl.constexpr):
    """x_t, Q, R, H [rows] of a tile x [rows, columns], and e [rows, columns], 1 at the anchor and its ties.

    MASKABLE: logits may be -inf.
    """
    x_t = tl.max(x, axis=1)
    if MASKABLE:
        offset = tl.where(x_t == -float("inf"), 0.0, x_t)
        gap = tl.maximum((x - offset[:, None]) * rate[:, None], MASKED, propagate_nan=tl.PropagateNan.ALL)
    else:
        gap = (x - x_t[:, None]) * rate[:, None]
    e = tl.exp2(gap)
    below = tl.where(e >= 1.0, 0.0, e)
    Q = tl.sum(below, axis=1)
    # The columns of e = 1, less the anchor: the difference of the sums, rounded.
    ties = tl.maximum(tl.floor(tl.sum(e, axis=1) - Q - 0.5), 0.0)
    Q += ties
    R = tl.sum(below * below, axis=1) + ties
    H = tl.sum(e * gap, axis=1)
    # A maximum passes over NaN; what follows must not take the row for one without columns.
    x_t = tl.where(Q == Q, x_t, Q)
    return x_t, Q, R, H, e


@triton.jit
def tile_reward_sums(u, e, MASKABLE: tl.constexpr):
    """u_t, S1, S2, S3 [rows] of a tile u [rows, columns] beside its e.

    MASKABLE: logits may be -inf, and what u holds there (NaN included) must not count. The comparison differs from the one that
    made Q on purpose: a shared predicate would be kept, a bit an element, over the product in between.
    """
    highest = tl.max(tl.where(e == 1.0, u, -float("inf")), axis=1)
    u_t = tl.where(highest == -float("inf"), 0.0, highest) if MASKABLE else highest
    delta = u - u_t[:, None]
    if MASKABLE:
        delta = tl.where(e == 0.0, 0.0, delta)
    weighted = e * delta
    return u_t, tl.sum(weighted, axis=1), tl.sum(e * weighted, axis=1), tl.sum(weighted * weighted, axis=1)


@triton.jit
def _b_is_higher(x_a, x_b):
    """Whether b's anchor is the union's: not at a tie. A NaN, whose sums are NaN, stays with either."""
    return (x_b > x_a) | (x_b != x_b)


@triton.jit
def _decay(x_hi, x_lo, rate):
    """rate (x_lo - x_hi), its exp2 and the square of that: 0 where the lower set is empty."""
    empty = x_lo == -float("inf")
    gap = tl.where(empty, MASKED, (tl.where(empty, 0.0, x_lo) - x_hi) * rate)
    gap = tl.maximum(gap, MASKED, propagate_nan=tl.PropagateNan.ALL)
    f = tl.exp2(gap)
    return gap, f, f * f


@triton.jit
def merge_logit_sums(x_a, Q_a, R_a, H_a, x_b, Q_b, R_b, H_b, rate):
    """The union of two sets of columns, a before b."""
    swap = _b_is_higher(x_a, x_b)
    x_hi, x_lo = tl.where(swap, x_b, x_a), tl.where(swap, x_a, x_b)
    Q_hi, Q_lo = tl.where(swap, Q_b, Q_a), tl.where(swap, Q_a, Q_b)
    R_hi, R_lo = tl.where(swap, R_b, R_a), tl.where(swap, R_a, R_b)
    H_hi, H_lo = tl.where(swap, H_b, H_a), tl.where(swap, H_a, H_b)
    gap, f, f2 = _decay(x_hi, x_lo, rate)
    return x_hi, Q_hi + f * (1 + Q_lo), R_hi + f2 * (1 + R_lo), H_hi + f * (H_lo + gap * (1 + Q_lo))


@triton.jit
def merge_reward_sums(
    x_a, Q_a, R_a, u_a, S1_a, S2_a, S3_a,
    x_b, Q_b, R_b, u_b, S1_b, S2_b, S3_b, rate,
):  # fmt: skip
    """The reward half of the same union, from the logit sums of a and b before they were merged."""
    swap = _b_is_higher(x_a, x_b)
    x_hi, x_lo = tl.where(swap, x_b, x_a), tl.where(swap, x_a, x_b)
    Q_lo, R_lo = tl.where(swap, Q_a, Q_b), tl.where(swap, R_a, R_b)
    u_hi, u_lo = tl.where(swap, u_b, u_a), tl.where(swap, u_a, u_b)
    S1_hi, S1_lo = tl.where(swap, S1_b, S1_a), tl.where(swap, S1_a, S1_b)
    S2_hi, S2_lo = tl.where(swap, S2_b, S2_a), tl.where(swap, S2_a, S2_b)
    S3_hi, S3_lo = tl.where(swap, S3_b, S3_a), tl.where(swap, S3_a, S3_b)
    _, f, f2 = _decay(x_hi, x_lo, rate)
    D = u_lo - u_hi
    S1 = S1_hi + f * (D * (1 + Q_lo) + S1_lo)
    S2 = S2_hi + f2 * (D * (1 + R_lo) + S2_lo)
    S3 = S3_hi + f2 * (D * D * (1 + R_lo) + 2 * D * S2_lo + S3_lo)
    return u_hi, S1, S2, S3
