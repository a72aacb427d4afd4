"""The definition: logits and first-order rewards of all columns at once, one state. Holds [N, V]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fold import fold_columns
from ..softmax_gradient import logprob_gradient
from .inputs import LinearInputs


def _logits(x: LinearInputs) -> Tensor:
    columns = x.support.vocab_size
    raw = x.hidden.to(x.dtype) @ x.weight[:columns].to(x.dtype).T
    if x.bias is not None:
        raw = raw + x.bias[:columns].to(x.dtype)
    return x.transform.apply_(raw)


def forward(x: LinearInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    z = _logits(x)
    u = None
    if x.reward_grad is not None and x.reward_embedding is not None:
        u = x.reward_grad.to(x.dtype) @ x.reward_embedding[: x.support.rewarded_columns].to(x.dtype).T
    return fold_columns(
        lambda lo, hi: z[:, lo:hi].clone(),
        None if u is None else lambda lo, hi: u[:, lo:hi].clone(),
        x.token_ids,
        x.support,
        chunk=x.support.vocab_size,
    ).sums()


def backward(
    x: LinearInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, in the compute dtype, weight and bias: (onehot(y) - p) times the incoming gradient, through the
    logit transform."""
    columns, skip = x.support.vocab_size, x.ignored[:, None]
    z = _logits(x)
    grad_z = logprob_gradient(z, 0, x.token_ids, grad_logprob.to(x.dtype), logprob, stats)
    grad_raw = x.transform.chain_(grad_z, z).masked_fill(skip, 0.0)

    def whole(part: Tensor, like: Tensor) -> Tensor:
        out = torch.zeros_like(like, memory_format=torch.contiguous_format)
        out[:columns] = part.to(like.dtype)
        return out

    return (
        grad_raw @ x.weight[:columns].to(x.dtype) if needs[0] else None,
        whole(grad_raw.T @ x.hidden.to(x.dtype).masked_fill(skip, 0.0), x.weight) if needs[1] else None,
        whole(grad_raw.sum(dim=0), x.bias) if needs[2] and x.bias is not None else None,
    )
