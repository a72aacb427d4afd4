"""Products of the platform's matrix library over tiles of bounded size, with a row update after each. Any device, exact.

On GPUs with Triton the row update is the row kernel of `logits_credit`, elsewhere plain PyTorch.

Extra memory: a few tiles of `products.tile_shape`, [N] states and, in the backward, the gradients themselves in float32
([N, D], and one slice of [V, D] at a time); never [N, V].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..dispatch import row_kernel_runs
from ..fold import Tile, fold_rows
from ..logit_transform import LogitTransform
from ..products import blocks, operand, product, product_tile, tile_shape
from ..softmax_gradient import logprob_gradient
from .inputs import LinearInputs


def forward(x: LinearInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    shape = tile_shape(x.hidden.device)
    space = torch.empty(2, min(shape[0], x.hidden.shape[0]) * shape[1], dtype=x.dtype, device=x.hidden.device)

    def tiles(start: int, stop: int) -> tuple[Tile, Tile | None]:
        product = product_tile(x.hidden[start:stop], x.weight, space[0])
        reward = None
        if x.reward_grad is not None and x.reward_embedding is not None:
            reward = product_tile(x.reward_grad[start:stop], x.reward_embedding, space[1])
        return lambda lo, hi: _with_bias(product(lo, hi), x.bias, lo, hi), reward

    if row_kernel_runs(x.hidden.device, x.dtype):
        from ..triton_rows import fold_tiles

        return fold_tiles(tiles, x.token_ids, x.support, x.transform, reward=x.has_reward, tile=shape)
    return fold_rows(tiles, x.token_ids, x.support, x.transform, reward=x.has_reward, dtype=x.dtype, tile=shape)


def _with_bias(raw: Tensor, bias: Tensor | None, lo: int, hi: int) -> Tensor:
    return raw if bias is None else raw.add_(bias[lo:hi].to(raw.dtype))


def tile_gradient(
    raw: Tensor,  # [n, c], what the head gives before its bias; overwritten
    lo: int,  # its first column
    token_ids: Tensor,  # [n]
    ignore_index: int,
    incoming: Tensor,  # [n]
    logprob: Tensor,  # [n]
    stats: Tensor,  # [5 or more, n]
    transform: LogitTransform,
    bias: Tensor | None,  # [c]
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of sum(incoming * logprob) with respect to raw, [n, c] in `dtype`; zeros in ignored rows."""
    z = transform.apply_(raw if bias is None else raw.add_(bias.to(raw.dtype)))
    grad_z = logprob_gradient(z, lo, token_ids, incoming, logprob, stats)
    return transform.chain_(grad_z, z).masked_fill_((token_ids == ignore_index)[:, None], 0.0).to(dtype)


def backward(
    x: LinearInputs,
    grad_logprob: Tensor,
    logprob: Tensor,
    stats: Tensor,
    needs: tuple[bool, bool, bool],
    gradient_of: Callable[..., Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, in the compute dtype, weight and bias; probabilities are computed again, tile by tile.

    Sums run over tiles in a fixed order in the compute dtype. `gradient_of` is what happens to a tile between
    its products; None: the kernel where there is one, else `tile_gradient`.
    """
    if gradient_of is None:
        gradient_of = tile_gradient
        if row_kernel_runs(x.hidden.device, x.dtype):
            from ..triton_gradient import logit_gradient

            gradient_of = logit_gradient
    (n, width), dtype, device = x.hidden.shape, x.dtype, x.hidden.device
    rows, columns = tile_shape(device)
    incoming = grad_logprob.to(dtype)
    grad_hidden = torch.zeros(n, width, dtype=dtype, device=device) if needs[0] else None
    grad_weight = torch.zeros_like(x.weight, memory_format=torch.contiguous_format) if needs[1] else None
    grad_bias = torch.zeros_like(x.bias) if needs[2] and x.bias is not None else None
    space = torch.empty(min(rows, n) * columns, dtype=dtype, device=device)
    # Per block of rows: its logits, its share of `transform`, and its hidden states with the ignored rows blanked, since
    # zero times a NaN that lies in one would spoil the weight's gradient.
    parts = [(slice(a, b), product_tile(x.hidden[a:b], x.weight, space), x.transform.rows(a, b)) for a, b in blocks(n, rows)]
    clean = operand(x.hidden.masked_fill(x.ignored[:, None], 0.0), x.weight, dtype) if needs[1] else None
    for lo, hi in blocks(x.support.vocab_size, columns):
        weight = operand(x.weight[lo:hi], x.hidden, dtype)
        weight_sum = torch.zeros(hi - lo, width, dtype=dtype, device=device) if needs[1] else None
        bias_sum = torch.zeros(hi - lo, dtype=dtype, device=device) if grad_bias is not None else None
        for row, raw, transform in parts:
            grad_raw = gradient_of(
                raw(lo, hi),
                lo,
                x.token_ids[row],
                x.support.ignore_index,
                incoming[row],
                logprob[row],
                stats[:, row],
                transform,
                None if x.bias is None else x.bias[lo:hi],
                weight.dtype if bias_sum is None else dtype,
            )
            factor = grad_raw.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[row] += product(factor, weight, dtype)
            if weight_sum is not None and clean is not None:
                weight_sum += product(factor.T, clean[row], dtype)
            if bias_sum is not None:
                bias_sum += grad_raw.sum(dim=0)
        if grad_weight is not None and weight_sum is not None:
            grad_weight[lo:hi] = weight_sum.to(grad_weight.dtype)
        if grad_bias is not None and bias_sum is not None:
            grad_bias[lo:hi] = bias_sum.to(grad_bias.dtype)
    return grad_hidden, grad_weight, grad_bias
