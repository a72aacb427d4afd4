"""Tiles of bounded size. Extra memory: two of `products.tile_shape`, and [N] results. Any device, exact."""

from __future__ import annotations

from torch import Tensor

from ..products import tile_shape
from . import tiled
from .inputs import LogitsInputs


def forward(x: LogitsInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    return tiled.forward(x, tile_shape(x.logits.device))


def backward(x: LogitsInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor) -> Tensor:
    """Gradient of the logits, [N, V] in their dtype."""
    return tiled.backward(x, grad_logprob, logprob, stats, tile_shape(x.logits.device))
