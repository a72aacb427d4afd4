"""`logits_credit` by a Triton row kernel that reads the logits once: GPUs from compute capability 8.0, or the interpreter.

Extra memory: partial states of at most 64 MiB, and [N] results. A row's bits do not depend on its batch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..launch_table import ROWS, Segment, Tiling, choose_tilings, split_columns
from ..triton_fold import fold_segments
from ..triton_gradient import logit_gradient_into
from ..triton_operands import TransformArguments, must_upcast, native_product, operand, use_descriptors
from .inputs import LogitsInputs
from .triton_kernel import logits_credit_kernel


def forward(x: LogitsInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    product = x.reward_grad is not None
    has_reward = product or x.reward is not None
    # What a mode does not use is a pointer that no kernel follows.
    grad = x.logits if x.reward_grad is None else x.reward_grad
    table = x.logits if x.reward_embedding is None else x.reward_embedding[: x.support.rewarded_columns]
    given = x.logits if x.reward is None else x.reward
    descriptors = product and use_descriptors(grad, table)
    transform, ids = TransformArguments.of(x.transform), x.token_ids.contiguous()
    tilings: tuple[Tiling, ...] = (ROWS,)
    if product:
        tilings = choose_tilings(grad.shape[1], half=native_product(grad, table), descriptors=descriptors)[-1:]

    def launch(segment: Segment, start: int, stop: int, partials: Tensor, z_y: Tensor, u_y: Tensor) -> None:
        t, multiply = segment.tiling, segment.rewarded and product
        left, logits, reward = grad[start:stop], x.logits[start:stop], given[start:stop]
        described = descriptors and multiply
        logits_credit_kernel[(triton.cdiv(stop - start, t.rows) * segment.slots,)](
            logits,
            reward,
            operand(left, (t.rows, t.depth), described),
            operand(table, (t.columns, t.depth), described),
            transform.temperatures(start, stop, otherwise=partials),
            ids[start:stop],
            partials,
            z_y,
            u_y,
            *(stride for tensor in (logits, reward, left, table) for stride in tensor.stride()),
            stop - start,
            segment.first,
            segment.stop,
            x.support.vocab_size,
            len(table) - 1,
            left.shape[1],
            *transform.numbers,
            ROWS=t.rows,
            COLUMNS=t.columns,
            DEPTH=t.depth,
            SLICE=t.slice,
            REWARD=segment.rewarded,
            PRODUCT=multiply,
            RAGGED=segment.ragged,
            DESCRIPTORS=described,
            EVEN_K=multiply and left.shape[1] % t.depth == 0,
            UPCAST=multiply and must_upcast(left, table),
            **transform.constants,
            num_warps=t.warps,
            num_stages=t.stages,
            enable_fp_fusion=True,
        )

    rewarded = x.support.rewarded_columns if has_reward else 0
    segments = split_columns(x.support.vocab_size, rewarded, tilings, (ROWS,))
    return fold_segments(len(ids), ids.device, segments, reward=has_reward, launch=launch)


def backward(x: LogitsInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor) -> Tensor:
    """Gradient of the logits, [N, V] in their dtype: (onehot(y) - p) times the incoming gradient, through the transform."""
    gradient = torch.zeros_like(x.logits, memory_format=torch.contiguous_format)
    columns = x.support.vocab_size
    raw, out = x.logits[:, :columns], gradient[:, :columns]
    logit_gradient_into(out, raw, 0, x.token_ids, x.support.ignore_index, grad_logprob, logprob, stats, x.transform)
    return gradient
