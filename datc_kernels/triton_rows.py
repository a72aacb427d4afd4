"""The row kernel of `logits_credit` over logits that lie in memory: its launch, and the fold of products made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import triton
from torch import Tensor

from .finalise import Support
from .fold import Tile
from .launch_table import ROWS, Segment, Tiling
from .logit_transform import LogitTransform
from .logits_credit.triton_kernel import logits_credit_kernel
from .products import blocks
from .triton_fold import fold_segments
from .triton_operands import TransformArguments, must_upcast, operand


@dataclass(frozen=True)
class Product:
    """Rewards as a product that the kernel makes itself, tile by tile."""

    grad: Tensor  # [n, K]
    table: Tensor  # [rows, K]
    descriptors: bool


def launch_rows(
    logits: Tensor,  # [n, columns] as the head gives them
    reward: Tensor | Product | None,  # [n, rows]
    token_ids: Tensor,  # [n] contiguous
    columns: tuple[int, int],  # first, stop
    tiling: Tiling,
    vocab_size: int,
    transform: TransformArguments,
    row_temperature: Tensor,  # [n] float32 where the transform has one a row
    partials: Tensor,
    z_y: Tensor,
    u_y: Tensor,
) -> None:
    """One launch over columns [first, stop): partial states, a slot a slice."""
    (first, stop), rows = columns, len(logits)
    product = reward if isinstance(reward, Product) else None
    # What a mode does not use is a pointer that no kernel follows.
    given = reward if isinstance(reward, Tensor) else logits
    grad, table = (logits, logits) if product is None else (product.grad, product.table)
    described = product is not None and product.descriptors
    slots = triton.cdiv(stop - first, tiling.slice)
    logits_credit_kernel[(triton.cdiv(rows, tiling.rows) * slots,)](
        logits,
        given,
        operand(grad, (tiling.rows, tiling.depth), described),
        operand(table, (tiling.columns, tiling.depth), described),
        row_temperature,
        token_ids,
        partials,
        z_y,
        u_y,
        *(stride for tensor in (logits, given, grad, table) for stride in tensor.stride()),
        rows,
        first,
        stop,
        vocab_size,
        len(table) - 1,
        grad.shape[1],
        *transform.numbers,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        SLICE=tiling.slice,
        REWARD=reward is not None,
        PRODUCT=product is not None,
        RAGGED=(stop - first) % tiling.columns != 0,
        DESCRIPTORS=described,
        EVEN_K=product is not None and grad.shape[1] % tiling.depth == 0,
        UPCAST=product is not None and must_upcast(grad, table),
        **transform.constants,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=True,
    )


def fold_tiles(
    tiles: Callable[[int, int], tuple[Tile, Tile | None]],  # (start, stop) -> the tiles of those rows, as the head gives them
    token_ids: Tensor,
    support: Support,
    transform: LogitTransform,
    *,
    reward: bool,
    tile: tuple[int, int],
) -> Tensor:
    """`fold.fold_rows` by the row kernel: `sums` [5 or 14, N], tiles made by the caller; `tile` is (rows, columns)."""
    arguments, of_rows = TransformArguments.of(transform), lru_cache(maxsize=1)(tiles)
    rewarded = support.rewarded_columns if reward else 0
    pieces = [(lo, hi, True) for lo, hi in blocks(rewarded, tile[1])]
    pieces += [(rewarded + lo, rewarded + hi, False) for lo, hi in blocks(support.vocab_size - rewarded, tile[1])]

    def launch(segment: Segment, start: int, stop: int, partials: Tensor, z_y: Tensor, u_y: Tensor) -> None:
        lo, hi = segment.first, segment.stop
        logits, rewards = of_rows(start, stop)
        here = logits(lo, hi), rewards(lo, hi) if segment.rewarded and rewards is not None else None
        ids = token_ids[start:stop] - lo
        temperature = arguments.temperatures(start, stop, otherwise=partials)
        launch_rows(*here, ids, (0, hi - lo), segment.tiling, hi - lo, arguments, temperature, partials, z_y, u_y)

    segments = [Segment(lo, hi, with_row, ROWS) for lo, hi, with_row in pieces]
    return fold_segments(len(token_ids), token_ids.device, segments, reward=reward, launch=launch, most_rows=tile[0])
