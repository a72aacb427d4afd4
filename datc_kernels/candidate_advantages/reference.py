"""The definition: p, u and A of every column, then the candidates' columns of them. Holds [N, V]."""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import CandidateInputs


def forward(x: CandidateInputs) -> tuple[Tensor, Tensor]:
    """Ids [N, k] and values [1 or 2, N, k]: probability and, with a reward gradient, advantage."""
    columns = x.support.vocab_size
    z = x.hidden.to(x.dtype) @ x.weight[:columns].to(x.dtype).T
    if x.bias is not None:
        z = z + x.bias[:columns].to(x.dtype)
    z = x.transform.apply_(z)
    ids = z.sort(dim=1, descending=True, stable=True).indices[:, : x.top_k] if x.candidate_ids is None else x.candidate_ids
    values = [torch.softmax(z, dim=1).gather(1, ids)]
    if x.reward_grad is not None and x.reward_embedding is not None:
        values.append(_advantages(x, z).gather(1, ids))
    return ids, torch.stack(values)


def _advantages(x: CandidateInputs, z: Tensor) -> Tensor:
    """A [N, V] of p conditioned on the columns that have a reward row; 0 in the others."""
    assert x.reward_grad is not None
    assert x.reward_embedding is not None
    rows = x.support.rewarded_columns
    u = x.reward_grad.to(x.dtype) @ x.reward_embedding[:rows].to(x.dtype).T
    # Relative to the most likely column, so that a mean close to its own u cancels nothing.
    top, t = z[:, :rows].max(dim=1, keepdim=True)
    delta = u - u.gather(1, t)
    p = torch.softmax(z[:, :rows], dim=1)
    A = delta - torch.where(p > 0, p * delta, 0.0).sum(dim=1, keepdim=True)
    nothing = top == -torch.inf  # no column with a reward row is left
    A = A.masked_fill(p.isnan(), torch.nan).masked_fill(nothing, 0.0)
    return torch.cat([A, A.new_zeros(len(A), z.shape[1] - rows)], dim=1)
