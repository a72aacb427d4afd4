"""The fused kernel of `linear_credit`: one block of rows and one slice of the vocabulary a program; logits never leave it."""

import triton
import triton.language as tl

from ..triton_partials import store_logit_sums, store_reward_sums, store_sampled
from ..triton_state import (
    LOG2_E,
    empty_logit_sums,
    empty_reward_sums,
    merge_logit_sums,
    merge_reward_sums,
    tile_logit_sums,
    tile_reward_sums,
)
from ..triton_tiles import BATCH_INVARIANT, local_ids, pick_column, product_tile, row_factor, soft_capped


@triton.jit(**BATCH_INVARIANT)
def linear_credit_kernel(
    hidden, weight,  # [N, D], [V, D]
    grad, table,  # [N, K], [rows, K]; hidden and weight again where not REWARD
    bias, row_temperature, token_ids,  # [V], [N], [N]
    partials,  # from this launch's first slot on: [slots, 8, N], [slots, 4, N] without REWARD
    z_y, u_y,  # [N], written by the one program that meets the sampled column
    hidden_row, hidden_col, weight_row, weight_col, grad_row, grad_col, table_row, table_col, bias_stride,  # strides
    rows, first, stop, vocab_size, table_last, D, K,
    scale, softcap, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, EVEN_D: tl.constexpr, EVEN_K: tl.constexpr,
    UPCAST_D: tl.constexpr, UPCAST_K: tl.constexpr,
    REWARD: tl.constexpr, RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_ROW_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """Partial states of columns [first, stop), a slot a slice of SLICE columns.

    GROUP blocks of rows take the same slices next to each other in time, so that their hidden states stay in L2. RAGGED: the
    last tile reaches beyond `stop` and is masked; otherwise stop - first is a multiple of COLUMNS.
    """
    n_blocks = tl.cdiv(rows, ROWS)
    n_slices = tl.cdiv(stop - first, SLICE)
    group = tl.program_id(0) // (GROUP * n_slices)
    within = tl.program_id(0) - group * (GROUP * n_slices)
    group_blocks = tl.minimum(n_blocks - group * GROUP, GROUP)
    block = group * GROUP + within % group_blocks
    piece = within // group_blocks

    row0, last = block * ROWS, rows - 1
    row = row0 + tl.arange(0, ROWS)
    y = local_ids(token_ids, row, last, vocab_size)
    c = row_factor(row_temperature, row, last, factor, HAS_ROW_TEMPERATURE, ROWS)
    rate = c * LOG2_E
    x_t, Q, R, H = empty_logit_sums(ROWS)
    u_t, S1, S2, S3 = empty_reward_sums(ROWS)
    x_y = tl.zeros((ROWS,), tl.float32)
    reward_y = tl.zeros((ROWS,), tl.float32)
    lower = first + piece * SLICE
    upper = tl.minimum(lower + SLICE, stop)
    for column0 in range(lower, upper, COLUMNS):
        column = tl.arange(0, COLUMNS)
        x = product_tile(
            hidden, weight, row0, column0, last, stop - 1, hidden_row, hidden_col, weight_row, weight_col, D,
            ROWS, COLUMNS, DEPTH, DESCRIPTORS, EVEN_D, UPCAST_D,
        )  # fmt: skip
        if HAS_BIAS:
            at = tl.minimum(column0 + column, stop - 1).to(tl.int64)
            x += tl.load(bias + at * bias_stride).to(tl.float32)[None, :]
        if SOFTCAP:
            x = soft_capped(x, scale, softcap)
        if RAGGED:
            x = tl.where((column0 + column < stop)[None, :], x, -float("inf"))
        x_y += pick_column(x, y - column0, ROWS, COLUMNS)
        tile_x, tile_Q, tile_R, tile_H, e = tile_logit_sums(x, rate, HAS_BIAS or RAGGED)
        if REWARD:
            u = product_tile(
                grad, table, row0, column0, last, table_last, grad_row, grad_col, table_row, table_col, K,
                ROWS, COLUMNS, DEPTH, DESCRIPTORS, EVEN_K, UPCAST_K,
            )  # fmt: skip
            reward_y += pick_column(u, y - column0, ROWS, COLUMNS)
            tile_u, tile_S1, tile_S2, tile_S3 = tile_reward_sums(u, e, HAS_BIAS or RAGGED)
            u_t, S1, S2, S3 = merge_reward_sums(
                x_t, Q, R, u_t, S1, S2, S3, tile_x, tile_Q, tile_R, tile_u, tile_S1, tile_S2, tile_S3, rate
            )
        x_t, Q, R, H = merge_logit_sums(x_t, Q, R, H, tile_x, tile_Q, tile_R, tile_H, rate)

    at = partials + piece.to(tl.int64) * rows * (8 if REWARD else 4)
    store_logit_sums(at, row, rows, x_t * c, Q, R, H)
    here = (y >= lower) & (y < upper)
    store_sampled(z_y, row, rows, here, x_y * c)
    if REWARD:
        store_reward_sums(at + 4 * rows, row, rows, u_t, S1, S2, S3)
        store_sampled(u_y, row, rows, here, reward_y)
