"""Two passes in one over tiles of bounded size: the sums of `linear_credit`, and a running choice of candidates.

Extra memory: a few tiles of `products.tile_shape` and some [N, k]; never [N, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..anchored_state import AnchoredState
from ..dispatch import row_kernel_runs
from ..finalise import Fold
from ..fold import Tile, fold_columns
from ..logit_transform import LogitTransform
from ..products import blocks, product_tile, tile_shape
from .inputs import CandidateInputs
from .picks import Picks, TopPicks


def forward(x: CandidateInputs, *, by_kernel: bool | None = None) -> tuple[Tensor, Tensor]:
    """Ids [N, k] and values [1 or 2, N, k], as `reference.forward` gives them.

    `by_kernel`: the sums of a tile come from the Triton row kernel; None: where there is one.
    """
    by_kernel = row_kernel_runs(x.hidden.device, x.dtype) if by_kernel is None else by_kernel
    n, device = x.hidden.shape[0], x.hidden.device
    shape = tile_shape(device)
    k = x.top_k if x.candidate_ids is None else x.candidate_ids.shape[1]
    ids = torch.empty(n, k, dtype=torch.int64, device=device)
    values = torch.empty(1 if x.reward_grad is None else 2, n, k, dtype=x.dtype, device=device)
    space = torch.empty(2, min(shape[0], n) * shape[1], dtype=x.dtype, device=device)
    for start, stop in blocks(n, shape[0]):
        ids[start:stop], values[:, start:stop] = _block(x, slice(start, stop), space, shape[1], by_kernel)
    return ids, values


def _block(x: CandidateInputs, rows: slice, space: Tensor, chunk: int, by_kernel: bool) -> tuple[Tensor, Tensor]:
    count = rows.stop - rows.start
    picks: Picks = TopPicks(count, x.top_k, x.dtype, x.hidden.device)
    if x.candidate_ids is not None:
        picks = Picks(x.candidate_ids[rows], x.dtype)
    raw = product_tile(x.hidden[rows], x.weight, space[0])
    transform = x.transform.rows(rows.start, rows.stop)

    def logit_tile(lo: int, hi: int) -> Tensor:
        z = raw(lo, hi)
        z = transform.apply_(z if x.bias is None else z.add_(x.bias[lo:hi].to(z.dtype)))
        picks.logits(z, lo)
        return z

    reward_tile: Tile | None = None
    if x.reward_grad is not None and x.reward_embedding is not None:
        reward = product_tile(x.reward_grad[rows], x.reward_embedding, space[1])

        def picked_reward(lo: int, hi: int) -> Tensor:
            u = reward(lo, hi)
            picks.rewards(u, lo)
            return u

        reward_tile = picked_reward

    nobody = torch.zeros(count, dtype=torch.int64, device=x.hidden.device)  # no column is the sampled one here
    if by_kernel:
        from ..triton_rows import fold_tiles

        def tiles(start: int, stop: int) -> tuple[Tile, Tile | None]:
            assert (start, stop) == (0, count)  # one block of rows: the picks are of all of them
            return logit_tile, reward_tile

        sums = fold_tiles(tiles, nobody, x.support, LogitTransform(), reward=reward_tile is not None, tile=(count, chunk))
        fold = Fold.of(sums)
    else:
        fold = fold_columns(logit_tile, reward_tile, nobody, x.support, chunk)
    return picks.ids, candidate_values(fold, picks, x.support.rewarded_columns)


def candidate_values(fold: Fold, picks: Picks, rewarded_columns: int) -> Tensor:
    """[1 or 2, N, k]: probability and, with rewards, advantage of what was picked on the way."""
    values = [_probability(fold.whole, picks.z)]
    if fold.rewarded is not None:
        values.append(_advantage(fold.rewarded, picks, rewarded_columns))
    return torch.stack(values)


def _probability(s: AnchoredState, z: Tensor) -> Tensor:
    return torch.exp(z - s.z_t[:, None]) / (1 + s.Q)[:, None]


def _advantage(s: AnchoredState, picks: Picks, rewarded_columns: int) -> Tensor:
    """A_v = (u_v - u_t) - s1; 0 without a reward row, or where every column that has one is masked."""
    assert s.reward is not None
    mean = s.reward.S1 / (1 + s.Q)
    A = (picks.u - s.reward.u_t[:, None]) - mean[:, None]
    exists = (s.z_t > -torch.inf) | s.z_t.isnan()
    return torch.where((picks.ids < rewarded_columns) & exists[:, None], A, 0.0)
