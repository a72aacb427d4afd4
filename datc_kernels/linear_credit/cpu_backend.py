"""`linear_credit` by the C++ extension: library products into a tile that stays in cache, then one vectorised pass over it.

Extra memory: at most 64 MiB and [N] results; in the backward also the gradients, hidden's and bias's in float32. The row pass
gives a row the same bits whatever its batch and the number of threads; the products, and so the results, only as far as the
platform's matrix library does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..native_head import head_arguments
from .inputs import LinearInputs


def forward(x: LinearInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    widths = [m.shape[1] for m in (x.hidden, x.reward_grad) if m is not None]
    sums: Tensor = torch.ops.datc_cpu.linear_credit(
        x.hidden,
        x.weight,
        x.token_ids.to(torch.int64).contiguous(),
        x.reward_grad,
        x.reward_embedding,
        *head_arguments(x.bias, x.transform),
        x.support.vocab_size,
        *native.tile_shape(max(widths)),
        native.LEVEL,
    )
    return sums


def backward(
    x: LinearInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, in float32, weight and bias; probabilities are computed again, tile by tile. Deterministic."""
    h, w, b = torch.ops.datc_cpu.linear_credit_backward(
        grad_logprob.to(torch.float32).contiguous(),
        logprob.contiguous(),
        stats.contiguous(),
        x.hidden,
        x.weight,
        x.token_ids.to(torch.int64).contiguous(),
        *head_arguments(x.bias, x.transform),
        x.support.vocab_size,
        x.support.ignore_index,
        needs[0],
        needs[1],
        needs[2] and x.bias is not None,
        *native.tile_shape(x.hidden.shape[1]),
        native.LEVEL,
    )
    return (
        h if needs[0] else None,
        w if needs[1] else None,
        b.to(x.bias.dtype) if needs[2] and x.bias is not None else None,
    )
