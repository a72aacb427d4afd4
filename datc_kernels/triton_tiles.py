"""Tiles of logits and first-order rewards inside Triton kernels: one product a tile, and the logit transform."""

import triton
import triton.language as tl

from .triton_state import LOG2_E

# What varies with the number of rows is no part of a kernel's specialisation: one binary, and one row's bits, for every batch.
BATCH_INVARIANT = {
    "do_not_specialize": ["rows"],
    "do_not_specialize_on_alignment": ["row_temperature", "token_ids", "partials", "merged", "z_y", "u_y"],
}


@triton.jit
def product_tile(
    left,  # [left rows, width], a pointer or a descriptor
    right,  # [right rows, width], likewise
    left_first, right_first,  # first row of the tile
    left_last, right_last,  # last row that exists; pointers read it again beyond
    left_row_stride, left_stride, right_row_stride, right_stride,
    width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN: tl.constexpr,  # width is a multiple of DEPTH
    UPCAST: tl.constexpr,  # multiply in float32, exactly, instead of in the operands' own half precision
):  # fmt: skip
    """left right^T of ROWS rows and COLUMNS rows, float32 [ROWS, COLUMNS].

    Descriptors give zeros beyond the last row and beyond width. Row offsets are 64 bits wide.
    """
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    depth = tl.arange(0, DEPTH)
    left_rows = tl.minimum(left_first + tl.arange(0, ROWS), left_last).to(tl.int64)
    right_rows = tl.minimum(right_first + tl.arange(0, COLUMNS), right_last).to(tl.int64)
    for k in range(0, width, DEPTH):
        if DESCRIPTORS:
            a = left.load([left_first, k])
            b = right.load([right_first, k])
        else:
            inside = (k + depth)[None, :] < width
            at = (k + depth).to(tl.int64)[None, :]
            a_at = left + left_rows[:, None] * left_row_stride + at * left_stride
            b_at = right + right_rows[:, None] * right_row_stride + at * right_stride
            a = tl.load(a_at) if EVEN else tl.load(a_at, mask=inside, other=0.0)
            b = tl.load(b_at) if EVEN else tl.load(b_at, mask=inside, other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def given_tile(
    x, row, last, column0, stop, row_stride, column_stride, beyond, COLUMNS: tl.constexpr, RAGGED: tl.constexpr
):  # fmt: skip
    """Columns from column0 on of a matrix in memory, float32 [rows, COLUMNS]; RAGGED: `beyond` from column `stop` on."""
    column = column0 + tl.arange(0, COLUMNS)
    at = x + tl.minimum(row, last).to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    tile = tl.load(at, mask=(column < stop)[None, :], other=beyond) if RAGGED else tl.load(at)
    return tile.to(tl.float32)


@triton.jit
def given_column(x, row, column, inside, row_stride, column_stride):
    """x[row, column] [rows] of a matrix in memory, 0 where not `inside`."""
    at = x + row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def soft_capped(raw, scale, softcap):
    """softcap tanh(raw scale / softcap); a masked logit (-inf) stays masked."""
    v = raw * (scale / softcap)
    a = tl.exp2(tl.abs(v) * (-2 * LOG2_E))
    tanh = tl.where(v < 0, a - 1, 1 - a) / (1 + a)
    return tl.where(raw == -float("inf"), raw, softcap * tanh)


@triton.jit
def row_factor(row_temperature, rows, last, factor, HAS_ROW_TEMPERATURE: tl.constexpr, ROWS: tl.constexpr):
    """c [ROWS] of z = c x: `factor`, over the row's temperature where there is one a row."""
    c = tl.zeros((ROWS,), tl.float32) + factor
    if HAS_ROW_TEMPERATURE:
        c = c / tl.load(row_temperature + tl.minimum(rows, last))
    return c


@triton.jit
def local_ids(token_ids, rows, last, vocab_size):
    """Sampled ids of `rows` as int32, -1 where the id is outside the support (an ignored row's among them)."""
    y = tl.load(token_ids + tl.minimum(rows, last)).to(tl.int64)
    return tl.where((y >= 0) & (y < vocab_size), y, -1).to(tl.int32)


@triton.jit
def _half_of(x, column, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The half of x [ROWS, 2 HALF] that holds each row's column, and the column within it."""
    low, high = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    upper = column >= HALF
    return tl.where(upper[:, None], high, low), tl.where(upper, column - HALF, column)


@triton.jit
def pick_column(x, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x[row, column[row]] [ROWS] of a tile x [ROWS, COLUMNS], 0 where the column is outside.

    The high bits of a column choose between registers of one thread: halving by them takes one select an element, where a
    comparison with every column's index takes three and the registers for the indices.
    """
    if COLUMNS >= 256:
        x, column = _half_of(x, column, ROWS, 128)
    if COLUMNS >= 128:
        x, column = _half_of(x, column, ROWS, 64)
    if COLUMNS >= 64:
        x, column = _half_of(x, column, ROWS, 32)
    REST: tl.constexpr = 32 if COLUMNS >= 64 else COLUMNS
    return tl.sum(tl.where(tl.arange(0, REST)[None, :] == column[:, None], x, 0.0), axis=1)
