"""Gradient of log p_y with respect to one tile of logits."""

from __future__ import annotations

import torch
from torch import Tensor


def logprob_gradient(z: Tensor, lo: int, token_ids: Tensor, incoming: Tensor, logprob: Tensor, stats: Tensor) -> Tensor:
    """(onehot(y) - p) * incoming for columns lo to lo + c, [n, c]; z [n, c] is kept.

    p is rebuilt from the saved maximum and log-partition (stats rows 3 and 4), the sampled column is -expm1(logprob), so that
    1 - p_y keeps its digits when p_y is near 1.
    """
    if not z.shape[1]:  # a rank of a vocabulary-parallel head may have no column of the support
        return torch.empty_like(z)
    gradient = (z - stats[3, :, None]).sub_(stats[4, :, None]).exp_().neg_()
    here = ((token_ids >= lo) & (token_ids < lo + z.shape[1]))[:, None]
    column = (token_ids - lo).clamp(0, z.shape[1] - 1).to(torch.int64)[:, None]
    sampled = torch.where(here, -torch.expm1(logprob[:, None]), gradient.gather(1, column))
    return gradient.scatter_(1, column, sampled).mul_(incoming[:, None])
