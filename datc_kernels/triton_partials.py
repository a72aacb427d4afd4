"""Partial states in memory: what kernels store, and the ordered merge of a row's slices.

`partials` are float32 [slots, fields, N]: a slot is a slice of the vocabulary, slots stand in column order, those of rewarded
columns first (8 fields: z_t, Q, R, H, u_t, S1, S2, S3), then the others (4 fields); H is in units of log 2.
"""

import triton
import triton.language as tl

from .triton_state import (
    LN_2,
    LOG2_E,
    empty_logit_sums,
    empty_reward_sums,
    merge_logit_sums,
    merge_reward_sums,
)
from .triton_tiles import BATCH_INVARIANT


@triton.jit
def store_logit_sums(at, row, rows, z_t, Q, R, H):
    """Four fields [rows] from `at` on."""
    inside = row < rows
    tl.store(at + row, z_t, mask=inside)
    tl.store(at + rows + row, Q, mask=inside)
    tl.store(at + 2 * rows + row, R, mask=inside)
    tl.store(at + 3 * rows + row, H, mask=inside)


@triton.jit
def store_reward_sums(at, row, rows, u_t, S1, S2, S3):
    store_logit_sums(at, row, rows, u_t, S1, S2, S3)


@triton.jit
def store_sampled(at, row, rows, here, value):
    """The sampled column's value, in rows whose column this program met."""
    tl.store(at + row, value, mask=here & (row < rows))


@triton.jit
def _load(at, row, rows, index):
    return tl.load(at + index * rows + row, mask=row < rows, other=0.0)


@triton.jit(**BATCH_INVARIANT)
def merge_partials_kernel(
    partials,
    merged,  # [4, N]: z_t, Q, R, H of all columns; with REWARD [12, N]: then the eight fields of the rewarded columns
    rows,
    rewarded_slots,
    other_slots,
    REWARD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Folds the slots of ROWS rows in order: rewarded columns first, then the others into the logit sums alone."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rate = tl.zeros((ROWS,), tl.float32) + LOG2_E
    z_t, Q, R, H = empty_logit_sums(ROWS)
    if REWARD:
        u_t, S1, S2, S3 = empty_reward_sums(ROWS)
        for _ in range(rewarded_slots):
            z_b, Q_b, R_b, H_b = _load4(partials, row, rows)
            u_b, S1_b, S2_b, S3_b = _load4(partials + 4 * rows, row, rows)
            u_t, S1, S2, S3 = merge_reward_sums(z_t, Q, R, u_t, S1, S2, S3, z_b, Q_b, R_b, u_b, S1_b, S2_b, S3_b, rate)
            z_t, Q, R, H = merge_logit_sums(z_t, Q, R, H, z_b, Q_b, R_b, H_b, rate)
            partials += 8 * rows
        store_logit_sums(merged + 4 * rows, row, rows, z_t, Q, R, H * LN_2)
        store_reward_sums(merged + 8 * rows, row, rows, u_t, S1, S2, S3)
    for _ in range(other_slots):
        z_b, Q_b, R_b, H_b = _load4(partials, row, rows)
        z_t, Q, R, H = merge_logit_sums(z_t, Q, R, H, z_b, Q_b, R_b, H_b, rate)
        partials += 4 * rows
    store_logit_sums(merged, row, rows, z_t, Q, R, H * LN_2)


@triton.jit
def _load4(at, row, rows):
    """Four fields [rows] from `at` on; zeros in rows that do not exist."""
    return _load(at, row, rows, 0), _load(at, row, rows, 1), _load(at, row, rows, 2), _load(at, row, rows, 3)
