"""What is kept of the candidates' columns while tiles of the vocabulary pass by: id, logit and first-order reward.

Logits and rewards come from the very tiles that the sums are made of. A pass calls `logits` for every tile in order, and
`rewards` right after it where the tile's columns have reward rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Picks:
    """Candidates that are given: ids [n, k]."""

    def __init__(self, ids: Tensor, dtype: torch.dtype) -> None:
        self.ids = ids
        self.z = torch.full(ids.shape, -torch.inf, dtype=dtype, device=ids.device)
        self.u = torch.zeros_like(self.z)

    def logits(self, tile: Tensor, lo: int) -> None:
        """tile [n, c]: columns lo to lo + c."""
        self.z = self._where_inside(tile, lo, self.z)

    def rewards(self, tile: Tensor, lo: int) -> None:
        self.u = self._where_inside(tile, lo, self.u)

    def _where_inside(self, tile: Tensor, lo: int, before: Tensor) -> Tensor:
        width = tile.shape[1]
        inside = (self.ids >= lo) & (self.ids < lo + width)
        return torch.where(inside, tile.gather(1, (self.ids - lo).clamp(0, width - 1)), before)


class TopPicks(Picks):
    """The k columns of largest logit so far, sorted by falling logit; of equal ones the lower id comes first."""

    def __init__(self, rows: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.zeros(rows, 0, dtype=torch.int64, device=device), dtype)
        self.k = k

    def logits(self, tile: Tensor, lo: int) -> None:
        column = _largest(tile, min(self.k, tile.shape[1]))
        z = torch.cat([self.z, tile.gather(1, column)], dim=1)
        ids = torch.cat([self.ids, column + lo], dim=1)
        u = torch.cat([self.u, self.u.new_zeros(column.shape)], dim=1)
        # Earlier columns stand in front, so a stable sort keeps the lower id of equal logits in front.
        order = z.sort(dim=1, descending=True, stable=True).indices[:, : self.k]
        self.z, self.ids, self.u = z.gather(1, order), ids.gather(1, order), u.gather(1, order)


def _largest(tile: Tensor, k: int) -> Tensor:
    """Columns [n, k] of the k largest entries of each row: those above the k-th, then those equal to it, each by rising index.

    `topk` alone may take any of several equal entries. A NaN counts as above everything.
    """
    kth = tile.topk(k, dim=1, sorted=True).values[:, -1:]
    width = tile.shape[1]
    rank = torch.arange(width, 0, -1, dtype=torch.float32, device=tile.device)  # exact: a tile is narrower than 2^23
    key = torch.where(tile == kth, rank, torch.where(tile <= kth, -1.0, rank + width))
    return key.topk(k, dim=1, sorted=True).indices
