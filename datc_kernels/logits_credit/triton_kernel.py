"""The row kernel of `logits_credit`: logits are read once; u is not there, is given, or is a product of one tile at a time."""

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
from ..triton_tiles import (
    BATCH_INVARIANT,
    given_column,
    given_tile,
    local_ids,
    pick_column,
    product_tile,
    row_factor,
    soft_capped,
)


@triton.jit(**BATCH_INVARIANT)
def logits_credit_kernel(
    logits,  # [N, V]
    reward,  # [N, rows] where GIVEN
    grad, table,  # [N, K], [rows, K] where PRODUCT
    row_temperature, token_ids,  # [N], [N]
    partials,  # from this launch's first slot on: [slots, 8, N], [slots, 4, N] without REWARD
    z_y, u_y,  # [N], written by the one program that meets the sampled column
    logits_row, logits_col, reward_row, reward_col, grad_row, grad_col, table_row, table_col,  # strides
    rows, first, stop, vocab_size, table_last, K,
    scale, softcap, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICE: tl.constexpr,
    REWARD: tl.constexpr, PRODUCT: tl.constexpr, RAGGED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_ROW_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """Partial states of columns [first, stop), a slot a slice of SLICE columns.

    RAGGED: the last tile reaches beyond `stop` and is masked; otherwise stop - first is a multiple of COLUMNS. The sampled
    column's numbers that lie in memory are read once more, the same bits.
    """
    n_slices = tl.cdiv(stop - first, SLICE)
    block = tl.program_id(0) // n_slices
    piece = tl.program_id(0) % n_slices
    row0, last = block * ROWS, rows - 1
    row = row0 + tl.arange(0, ROWS)
    y = local_ids(token_ids, row, last, vocab_size)
    c = row_factor(row_temperature, row, last, factor, HAS_ROW_TEMPERATURE, ROWS)
    rate = c * LOG2_E
    x_t, Q, R, H = empty_logit_sums(ROWS)
    u_t, S1, S2, S3 = empty_reward_sums(ROWS)
    lower = first + piece * SLICE
    upper = tl.minimum(lower + SLICE, stop)
    here = (y >= lower) & (y < upper)
    x_y = given_column(logits, row, y, here & (row < rows), logits_row, logits_col)
    if SOFTCAP:
        x_y = soft_capped(x_y, scale, softcap)
    reward_y = tl.zeros((ROWS,), tl.float32)
    if REWARD and not PRODUCT:
        reward_y = given_column(reward, row, y, here & (row < rows), reward_row, reward_col)
    for column0 in range(lower, upper, COLUMNS):
        x = given_tile(logits, row, last, column0, upper, logits_row, logits_col, -float("inf"), COLUMNS, RAGGED)
        if SOFTCAP:
            x = soft_capped(x, scale, softcap)
        tile_x, tile_Q, tile_R, tile_H, e = tile_logit_sums(x, rate, MASKABLE=True)
        if REWARD:
            if PRODUCT:
                u = product_tile(
                    grad, table, row0, column0, last, table_last, grad_row, grad_col, table_row, table_col, K,
                    ROWS, COLUMNS, DEPTH, DESCRIPTORS, EVEN_K, UPCAST,
                )  # fmt: skip
                reward_y += pick_column(u, y - column0, ROWS, COLUMNS)
            else:
                u = given_tile(reward, row, last, column0, upper, reward_row, reward_col, 0.0, COLUMNS, RAGGED)
            tile_u, tile_S1, tile_S2, tile_S3 = tile_reward_sums(u, e, MASKABLE=True)
            u_t, S1, S2, S3 = merge_reward_sums(
                x_t, Q, R, u_t, S1, S2, S3, tile_x, tile_Q, tile_R, tile_u, tile_S1, tile_S2, tile_S3, rate
            )
        x_t, Q, R, H = merge_logit_sums(x_t, Q, R, H, tile_x, tile_Q, tile_R, tile_H, rate)

    at = partials + piece.to(tl.int64) * rows * (8 if REWARD else 4)
    store_logit_sums(at, row, rows, x_t * c, Q, R, H)
    store_sampled(z_y, row, rows, here, x_y * c)
    if REWARD:
        store_reward_sums(at + 4 * rows, row, rows, u_t, S1, S2, S3)
        store_sampled(u_y, row, rows, here, reward_y)
