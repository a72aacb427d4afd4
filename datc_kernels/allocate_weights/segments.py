"""Sums over responses that lie end to end, without reading their lengths back from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """B responses end to end; values are [N], one value a response is [B]."""

    lengths: Tensor  # [B] int64, sums to total
    total: int

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """ "sum", "max" or "min" of every response, [B]; 0, -inf and inf for empty ones."""
        start = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[how]
        if self.lengths.numel() == 0:
            return values.new_empty(0)
        return torch.segment_reduce(values, how, lengths=self.lengths, unsafe=True, initial=start)

    def spread(self, values: Tensor) -> Tensor:
        """[B] to [N]: each response's value at each of its tokens."""
        return torch.repeat_interleave(values, self.lengths, output_size=self.total)
