"""The definition: all columns as one tile. Any device, exact."""

from __future__ import annotations

from torch import Tensor

from . import tiled
from .inputs import LogitsInputs


def _shape(x: LogitsInputs) -> tuple[int, int]:
    return max(1, x.logits.shape[0]), max(1, x.support.vocab_size)


def forward(x: LogitsInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    return tiled.forward(x, _shape(x))


def backward(x: LogitsInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor) -> Tensor:
    """Gradient of the logits, [N, V] in their dtype."""
    return tiled.backward(x, grad_logprob, logprob, stats, _shape(x))
