"""One pass over the vocabulary: tiles of columns folded in order, the sampled column picked on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .anchored_state import empty_state, merge, tile_state_
from .finalise import REWARD_SUMS, SUMS, Fold, Support
from .logit_transform import LogitTransform
from .products import blocks

Tile = Callable[[int, int], Tensor]  # (lo, hi) -> columns lo to hi of every row, [n, hi - lo], to be overwritten


def fold_columns(logit_tile: Tile, reward_tile: Tile | None, token_ids: Tensor, support: Support, chunk: int) -> Fold:
    """Fold columns [0, vocab_size) in chunks, in order.

    Chunks end at `rewarded_columns`, so that the columns with a reward row are a fold of their own.
    """
    z_y: Tensor | None = None
    u_y: Tensor | None = None
    rewarded = rest = None
    split = support.rewarded_columns if reward_tile is not None else 0
    for lo, hi in [
        *blocks(split, chunk),
        *((split + a, split + b) for a, b in blocks(support.vocab_size - split, chunk)),
    ]:
        z = logit_tile(lo, hi)
        if z_y is None or u_y is None:
            z_y = z.new_full(token_ids.shape, -torch.inf)
            u_y = torch.zeros_like(z_y)
        here = (token_ids >= lo) & (token_ids < hi)
        column = (token_ids - lo).clamp(0, hi - lo - 1).to(torch.int64)[:, None]
        z_y = torch.where(here, z.gather(1, column).squeeze(1), z_y)
        if reward_tile is not None and hi <= split:
            u = reward_tile(lo, hi)
            u_y = torch.where(here, u.gather(1, column).squeeze(1), u_y)
            tile = tile_state_(z, u)
            rewarded = tile if rewarded is None else merge(rewarded, tile)
        else:
            tile = tile_state_(z, None)
            rest = tile if rest is None else merge(rest, tile)
    assert z_y is not None  # the support has at least one column
    if reward_tile is not None and rewarded is None:
        rewarded = empty_state(len(token_ids), dtype=z_y.dtype, device=z_y.device)
    whole = [s.without_reward() for s in (rewarded, rest) if s is not None]
    return Fold(merge(*whole) if len(whole) == 2 else whole[0], rewarded, z_y, None if reward_tile is None else u_y)


def fold_rows(
    tiles: Callable[[int, int], tuple[Tile, Tile | None]],  # (start, stop) -> the tiles of those rows, as the head gives them
    token_ids: Tensor,
    support: Support,
    transform: LogitTransform,
    *,
    reward: bool,
    dtype: torch.dtype,
    tile: tuple[int, int],
) -> Tensor:
    """`sums` [5 or 14, N] of all rows, block of rows after block of rows; `tile` is (rows, columns)."""
    n = len(token_ids)
    sums = torch.empty(len(SUMS) + len(REWARD_SUMS) * reward, n, dtype=dtype, device=token_ids.device)
    for start, stop in blocks(n, tile[0]):
        raw, rewards = tiles(start, stop)
        here, ids = transform.rows(start, stop), token_ids[start:stop]
        sums[:, start:stop] = fold_columns(_logits(raw, here), rewards, ids, support, chunk=tile[1]).sums()
    return sums


def _logits(raw: Tile, transform: LogitTransform) -> Tile:
    return lambda lo, hi: transform.apply_(raw(lo, hi))
