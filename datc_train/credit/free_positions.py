"""Statistics of each response over its free positions, in float64, in an order that only the lengths decide."""

from __future__ import annotations

import torch
from torch import Tensor

from datc_kernels.allocate_weights.segments import Segments


class FreePositions:
    """B responses end to end [N]; values at frozen positions are never read."""

    def __init__(self, lengths: Tensor, frozen: Tensor) -> None:
        self.free = ~frozen
        self.segments = Segments(lengths, len(frozen))
        self.lengths = lengths
        self.count = self.segments.reduce(self.free.double(), "sum")  # [B]

    def spread(self, values: Tensor) -> Tensor:
        """[B] to [N]"""
        return self.segments.spread(values)

    def sum(self, x: Tensor) -> Tensor:
        return self.segments.reduce(torch.where(self.free, x.double(), 0.0), "sum")

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.count.clamp(min=1)

    def std(self, x: Tensor) -> Tensor:
        """Population standard deviation."""
        return self.mean((x.double() - self.spread(self.mean(x))).square()).sqrt()

    def min(self, x: Tensor) -> Tensor:
        """inf without a free position."""
        return self.segments.reduce(torch.where(self.free, x.double(), torch.inf), "min")

    def max(self, x: Tensor) -> Tensor:
        """-inf without a free position."""
        return self.segments.reduce(torch.where(self.free, x.double(), -torch.inf), "max")

    def softmax(self, x: Tensor) -> Tensor:
        """[N], sums to 1 over the free positions; 0 at the frozen ones."""
        e = torch.where(self.free, (x.double() - self.spread(self.max(x))).exp(), 0.0)
        return torch.where(self.free, e / self.spread(self.sum(e)), 0.0)

    def quantile(self, x: Tensor, q: float) -> Tensor:
        """[B], with linear interpolation between the two nearest; 0 without a free position."""
        owner = self.spread(torch.arange(len(self.lengths), device=x.device))
        by_value = torch.where(self.free, x.double(), torch.inf).argsort(stable=True)
        ordered = x.double()[by_value[owner[by_value].argsort(stable=True)]]
        first = self.lengths.cumsum(0) - self.lengths
        place = q * (self.count - 1).clamp(min=0)
        low, high = place.floor(), torch.minimum(place.ceil(), (self.count - 1).clamp(min=0))
        padded = torch.cat([ordered, ordered.new_zeros(1)])
        below = padded[(first + low.long()).clamp(max=len(ordered))]
        above = padded[(first + high.long()).clamp(max=len(ordered))]
        return torch.where(self.count > 0, below + (place - low) * (above - below), 0.0)

    def to_mean_one(self, weight: Tensor) -> Tensor:
        """Weights scaled to mean 1 over the free positions, 1 at the frozen ones and where their sum is 0."""
        mean = self.spread(self.mean(weight))
        return torch.where(self.free & (mean > 0), weight.double() / torch.where(mean > 0, mean, 1.0), 1.0)
