"""Row update over logits that exist, tile by tile of a given shape. Any device, exact."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fold import Tile, fold_rows
from ..products import blocks, product_tile
from ..softmax_gradient import logprob_gradient
from .inputs import LogitsInputs


def forward(x: LogitsInputs, shape: tuple[int, int], *, by_kernel: bool = False) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them; `shape` is (rows, columns) of a tile.

    `by_kernel`: the Triton row kernel reads the logits where they lie; otherwise every tile is copied.
    """
    space = x.logits.new_empty(0, dtype=x.dtype)
    if x.reward_embedding is not None:
        space = space.new_empty(min(shape[0], x.logits.shape[0]) * shape[1])

    def tiles(start: int, stop: int) -> tuple[Tile, Tile | None]:
        reward: Tile | None = None
        if x.reward_grad is not None and x.reward_embedding is not None:
            reward = product_tile(x.reward_grad[start:stop], x.reward_embedding, space)
        elif x.reward is not None:
            given = x.reward[start:stop]
            reward = lambda lo, hi: tile_of(given, lo, hi)  # noqa: E731
        logits = x.logits[start:stop]
        return lambda lo, hi: tile_of(logits, lo, hi), reward

    def tile_of(matrix: Tensor, lo: int, hi: int) -> Tensor:
        return matrix[:, lo:hi] if by_kernel else matrix[:, lo:hi].to(x.dtype, copy=True)

    if by_kernel:
        from ..triton_rows import fold_tiles

        return fold_tiles(tiles, x.token_ids, x.support, x.transform, reward=x.has_reward, tile=shape)
    return fold_rows(tiles, x.token_ids, x.support, x.transform, reward=x.has_reward, dtype=x.dtype, tile=shape)


def backward(x: LogitsInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor, shape: tuple[int, int]) -> Tensor:
    """Gradient of the logits, [N, V] in their dtype: (onehot(y) - p) times the incoming gradient, through the transform."""
    rows, columns = shape
    gradient = torch.zeros_like(x.logits, memory_format=torch.contiguous_format)
    incoming, skip = grad_logprob.to(x.dtype), (x.token_ids == x.support.ignore_index)[:, None]
    for start, stop in blocks(x.logits.shape[0], rows):
        row, transform = slice(start, stop), x.transform.rows(start, stop)
        for lo, hi in blocks(x.support.vocab_size, columns):
            z = transform.apply_(x.logits[row, lo:hi].to(x.dtype, copy=True))
            grad_z = logprob_gradient(z, lo, x.token_ids[row], incoming[row], logprob[row], stats[:, row])
            gradient[row, lo:hi] = transform.chain_(grad_z, z).masked_fill_(skip[row], 0.0).to(gradient.dtype)
    return gradient
