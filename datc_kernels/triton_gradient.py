"""Gradient of log p_y with respect to what the LM head gives, in one pass over a tile that lies in memory."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logit_transform import LogitTransform
from .triton_operands import TransformArguments
from .triton_state import LOG2_E
from .triton_tiles import BATCH_INVARIANT, row_factor, soft_capped

_ROWS, _COLUMNS = 4, 1024


@triton.jit(**BATCH_INVARIANT)
def logit_gradient_kernel(
    raw, out,  # [n, columns]; out may be raw
    bias, row_temperature, token_ids,  # [columns], [n], [n]
    incoming, rest_y, logit_max, log_partition,  # [n]; rest_y = 1 - p_y
    raw_row, raw_col, out_row, out_col, bias_stride,  # strides
    rows, columns, lo, ignore_index,
    scale, softcap, factor,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_ROW_TEMPERATURE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(onehot(y) - p) * incoming * dz/draw for columns lo to lo + columns; zeros in ignored rows."""
    n_tiles = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // n_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % n_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inside_row, inside_column = row < rows, column < columns
    inside = inside_row[:, None] & inside_column[None, :]
    wide_row, wide_column = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    x = tl.load(raw + wide_row * raw_row + wide_column * raw_col, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + column.to(tl.int64) * bias_stride, mask=inside_column, other=0.0).to(tl.float32)[None, :]
    slope = scale
    if SOFTCAP:
        x = soft_capped(x, scale, softcap)
        tanh = tl.maximum(x / softcap, -1.0)  # -inf where masked
        slope = scale * (1 - tanh * tanh)
    c = row_factor(row_temperature, row, rows - 1, factor, HAS_ROW_TEMPERATURE, ROWS)
    y = tl.load(token_ids + row, mask=inside_row, other=0).to(tl.int64)
    z_t = tl.load(logit_max + row, mask=inside_row, other=0.0)
    log_Z = tl.load(log_partition + row, mask=inside_row, other=0.0)
    p = tl.exp2(((x * c[:, None] - z_t[:, None]) - log_Z[:, None]) * LOG2_E)
    sampled = (lo + column)[None, :] == y[:, None]
    gradient = tl.where(sampled, tl.load(rest_y + row, mask=inside_row, other=0.0)[:, None], -p)
    gradient *= tl.load(incoming + row, mask=inside_row, other=0.0)[:, None] * c[:, None]
    gradient = tl.where((y == ignore_index)[:, None], 0.0, gradient * slope if SOFTCAP else gradient)
    tl.store(out + wide_row * out_row + wide_column * out_col, gradient, mask=inside)


def logit_gradient(
    raw: Tensor,  # [n, c], what the head gives before its bias; overwritten
    lo: int,  # its first column
    token_ids: Tensor,  # [n]
    ignore_index: int,
    incoming: Tensor,  # [n]
    logprob: Tensor,  # [n]
    stats: Tensor,  # [5 or more, n]
    transform: LogitTransform,
    bias: Tensor | None,  # [c]
    dtype: torch.dtype,
) -> Tensor:
    """`chunked.tile_gradient` in one kernel: into raw itself where that has the dtype."""
    return logit_gradient_into(
        raw if raw.dtype == dtype else torch.empty(raw.shape, dtype=dtype, device=raw.device),
        raw, lo, token_ids, ignore_index, incoming, logprob, stats, transform, bias,
    )  # fmt: skip


def logit_gradient_into(
    out: Tensor,  # [n, c], may be raw
    raw: Tensor,
    lo: int,
    token_ids: Tensor,
    ignore_index: int,
    incoming: Tensor,
    logprob: Tensor,
    stats: Tensor,
    transform: LogitTransform,
    bias: Tensor | None = None,
) -> Tensor:
    """`out`, filled with the gradient of sum(incoming * logprob) with respect to raw, zeros in ignored rows."""
    (rows, columns), arguments = raw.shape, TransformArguments.of(transform)
    with torch.cuda.device(raw.device) if raw.device.type == "cuda" else nullcontext():
        if rows and columns:
            logit_gradient_kernel[(triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS),)](
                raw,
                out,
                raw if bias is None else bias,
                arguments.temperatures(0, rows, otherwise=raw),
                token_ids.contiguous(),
                incoming.float().contiguous(),
                -torch.expm1(logprob),
                stats[3].contiguous(),
                stats[4].contiguous(),
                *raw.stride(),
                *out.stride(),
                0 if bias is None else bias.stride(0),
                rows,
                columns,
                lo,
                ignore_index,
                *arguments.numbers,
                HAS_BIAS=bias is not None,
                **arguments.constants,
                ROWS=_ROWS,
                COLUMNS=_COLUMNS,
                num_warps=4,
                enable_fp_fusion=True,
            )
    return out
