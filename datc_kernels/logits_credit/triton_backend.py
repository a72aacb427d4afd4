"""`logits_credit` by a Triton row kernel that reads the logits once: GPUs from compute capability 8.0, or the interpreter.

Extra memory: partial states of at most 64 MiB, and [N] results. A row's bits do not depend on its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch_table import ROWS, Segment, Tiling, choose_tilings, split_columns
from ..triton_fold import fold_segments
from ..triton_gradient import logit_gradient_into
from ..triton_operands import TransformArguments, native_product, use_descriptors
from ..triton_rows import Product, launch_rows
from .inputs import LogitsInputs


def forward(x: LogitsInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    table = x.reward_embedding[: x.support.rewarded_columns] if x.reward_embedding is not None else None
    descriptors = x.reward_grad is not None and table is not None and use_descriptors(x.reward_grad, table)
    transform, ids = TransformArguments.of(x.transform), x.token_ids.contiguous()
    tilings: tuple[Tiling, ...] = (ROWS,)
    if x.reward_grad is not None and table is not None:
        half = native_product(x.reward_grad, table)
        tilings = choose_tilings(x.reward_grad.shape[1], half=half, descriptors=descriptors)[-1:]

    def launch(segment: Segment, start: int, stop: int, partials: Tensor, z_y: Tensor, u_y: Tensor) -> None:
        reward: Tensor | Product | None = None
        if segment.rewarded and x.reward is not None:
            reward = x.reward[start:stop]
        elif segment.rewarded and x.reward_grad is not None and table is not None:
            reward = Product(x.reward_grad[start:stop], table, descriptors)
        launch_rows(
            x.logits[start:stop],
            reward,
            ids[start:stop],
            (segment.first, segment.stop),
            segment.tiling,
            x.support.vocab_size,
            transform,
            transform.temperatures(start, stop, otherwise=partials),
            partials,
            z_y,
            u_y,
        )

    rewarded = x.support.rewarded_columns if x.has_reward else 0
    segments = split_columns(x.support.vocab_size, rewarded, tilings, (ROWS,))
    return fold_segments(len(ids), ids.device, segments, reward=x.has_reward, launch=launch)


def backward(x: LogitsInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor) -> Tensor:
    """Gradient of the logits, [N, V] in their dtype: (onehot(y) - p) times the incoming gradient, through the transform."""
    gradient = torch.zeros_like(x.logits, memory_format=torch.contiguous_format)
    columns = x.support.vocab_size
    raw, out = x.logits[:, :columns], gradient[:, :columns]
    logit_gradient_into(out, raw, 0, x.token_ids, x.support.ignore_index, grad_logprob, logprob, stats, x.transform)
    return gradient
