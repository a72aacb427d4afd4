"""`logits_credit` by the C++ extension: a vectorised pass that reads the logits once, row by row.

Extra memory: at most 64 MiB, and [N] results. With the rewards given a row has the same bits whatever its batch; where they are
a product, as far as the platform's matrix library does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..native_head import head_arguments
from .inputs import LogitsInputs


def forward(x: LogitsInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    sums: Tensor = torch.ops.datc_cpu.logits_credit(
        x.logits,
        x.token_ids.to(torch.int64).contiguous(),
        x.reward_grad,
        x.reward_embedding,
        x.reward,
        *head_arguments(None, x.transform)[1:],
        x.support.vocab_size,
        *native.tile_shape(1 if x.reward_grad is None else x.reward_grad.shape[1]),
        native.LEVEL,
    )
    return sums


def backward(x: LogitsInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor) -> Tensor:
    """Gradient of the logits, [N, V] in their dtype: (onehot(y) - p) times the incoming gradient, through the transform."""
    gradient: Tensor = torch.ops.datc_cpu.logits_credit_backward(
        grad_logprob.to(torch.float32).contiguous(),
        logprob.contiguous(),
        stats.contiguous(),
        x.logits,
        x.token_ids.to(torch.int64).contiguous(),
        *head_arguments(None, x.transform)[1:],
        x.support.vocab_size,
        x.support.ignore_index,
        native.tile_shape(1)[1],
        native.LEVEL,
    )
    return gradient
