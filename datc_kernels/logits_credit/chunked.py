"""Tiles of bounded size. Extra memory: two of `products.tile_shape`, and [N] results. Any device, exact.

On GPUs with Triton the row kernel reads the logits where they lie, and rewards are products of the library.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import row_kernel_runs
from ..products import tile_shape
from . import tiled
from .inputs import LogitsInputs


def forward(x: LogitsInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    return tiled.forward(x, tile_shape(x.logits.device), by_kernel=row_kernel_runs(x.logits.device, x.dtype))


def backward(x: LogitsInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor) -> Tensor:
    """Gradient of the logits, [N, V] in their dtype."""
    return tiled.backward(x, grad_logprob, logprob, stats, tile_shape(x.logits.device))
