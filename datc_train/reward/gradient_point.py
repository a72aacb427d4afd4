"""What a credit point does to the reward model's pass: see `datc_train/credit_point.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from datc_train.reward.micro_batches import SplitRow


def off_the_ray(gradient: Tensor, embedding: Tensor) -> Tensor:
    """g - <g, e> e / |e|^2 along the last dimension, in at least float32; same dtype. g where e is 0.

    Each of the reward model's own tokens loses the part along its own embedding, before the tokens that spell one of the
    policy's are summed.
    """
    exact = torch.promote_types(gradient.dtype, torch.float32)
    g, e = gradient.to(exact), embedding.to(exact)
    length = torch.linalg.vector_norm(e, dim=-1, keepdim=True)
    unit = torch.where(length > 0, e / length, 0.0)
    return (g - (g * unit).sum(-1, keepdim=True) * unit).to(gradient.dtype)


def turns(row: SplitRow, start: Sequence[int], width: Sequence[int], passes: int) -> list[int]:
    """[len(row.rest)] in which of the passes each place of the rest moves; -1: in none.

    start, width: the places in `rest` of the response's mapped tokens, in their order. Tokens take turns; the places of one
    token move together, and a place that two tokens share moves with the first.
    """
    found = [-1] * len(row.rest)
    for token, (first, size) in enumerate(zip(start, width, strict=True)):
        for place in range(first, first + size):
            if found[place] < 0:
                found[place] = token % passes
    return found
