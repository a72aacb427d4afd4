"""Matrix products with float32 accumulation and float32 results, whatever the inputs' dtypes.

Promotion rule: bfloat16 or float16 pairs of one dtype go to the device's library as they are where it can return float32
(CUDA); everything else is converted to the compute dtype first (float32, or float64 where an input of the op is float64).
Nothing is ever rounded to a half precision on the way from the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def native_half(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    return a.dtype == b.dtype and a.dtype in HALF and a.device.type == "cuda" and dtype == torch.float32


def operand(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a` as the product with `b` wants it: converted once, where it is the side that is used again."""
    return a if native_half(a, b, dtype) else a.to(dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """a [n, k] @ b [k, m] as `dtype`; into `out` where given."""
    if native_half(a, b, dtype):
        result = torch.mm(a, b, out_dtype=dtype)
        return result if out is None else out.copy_(result)
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def product_tile(left: Tensor, table: Tensor, space: Tensor) -> Callable[[int, int], Tensor]:
    """(lo, hi) -> left [n, k] times rows lo to hi of table, [n, hi - lo], computed into `space` (flat, of the compute dtype)."""
    left = operand(left, table, space.dtype)

    def multiply(lo: int, hi: int) -> Tensor:
        out = space[: left.shape[0] * (hi - lo)].view(left.shape[0], hi - lo)
        return product(left, table[lo:hi].T, space.dtype, out)

    return multiply


def blocks(size: int, step: int) -> list[tuple[int, int]]:
    """[0, size) in steps, the last one shorter."""
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def tile_shape(device: torch.device) -> tuple[int, int]:
    """(rows, columns) of the tile in which the chunked backends work: a constant of the device, never of the input.

    On a CPU a float32 tile of 512 x 1024 is 2 MiB and stays in cache; three of them and a slice of each matrix are the
    whole workspace. Elsewhere 4096 x 4096 (64 MiB) keeps the matrix library busy.
    """
    return (512, 1024) if device.type == "cpu" else (4096, 4096)
