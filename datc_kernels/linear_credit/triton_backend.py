"""`linear_credit` by the fused Triton kernel: GPUs from compute capability 8.0, or CPU tensors in Triton's interpreter.

Extra memory: partial states of at most 64 MiB, and [N] results. A row's bits do not depend on its batch: tile shapes and the
split of the vocabulary follow V, D, K, dtypes, strides and the architecture.
"""

from __future__ import annotations

import triton
from torch import Tensor

from ..launch_table import GROUP, Segment, choose_tilings, split_columns
from ..triton_fold import fold_segments
from ..triton_gradient import logit_gradient
from ..triton_operands import TransformArguments, must_upcast, native_product, operand, use_descriptors
from . import chunked
from .inputs import LinearInputs
from .triton_kernel import linear_credit_kernel


def forward(x: LinearInputs) -> Tensor:
    """The sums of all columns, [5 or 14, N], as `finalise.SUMS` names them."""
    reward = x.reward_grad is not None
    # Without the reward half its operands are pointers that no kernel follows.
    grad = x.hidden if x.reward_grad is None else x.reward_grad
    table = x.weight if x.reward_embedding is None else x.reward_embedding
    weight, table = x.weight[: x.support.vocab_size], table[: x.support.rewarded_columns if reward else None]
    descriptors = use_descriptors(x.hidden, weight, grad, table)
    half = native_product(x.hidden, weight) and native_product(grad, table)
    width = x.hidden.shape[1] + grad.shape[1] * reward
    transform, ids = TransformArguments.of(x.transform), x.token_ids.contiguous()
    constants = transform.constants | {
        "DESCRIPTORS": descriptors,
        "UPCAST_D": must_upcast(x.hidden, weight),
        "UPCAST_K": must_upcast(grad, table),
        "HAS_BIAS": x.bias is not None,
    }

    def launch(segment: Segment, start: int, stop: int, partials: Tensor, z_y: Tensor, u_y: Tensor) -> None:
        t = segment.tiling
        left, left_reward = x.hidden[start:stop], grad[start:stop]
        operands = (left, weight, left_reward, table)
        shapes = ((t.rows, t.depth), (t.columns, t.depth), (t.rows, t.depth), (t.columns, t.depth))
        linear_credit_kernel[(triton.cdiv(stop - start, t.rows) * segment.slots,)](
            *(operand(tensor, shape, descriptors) for tensor, shape in zip(operands, shapes, strict=True)),
            weight if x.bias is None else x.bias,
            transform.temperatures(start, stop, otherwise=partials),
            ids[start:stop],
            partials,
            z_y,
            u_y,
            *(stride for tensor in operands for stride in tensor.stride()),
            0 if x.bias is None else x.bias.stride(0),
            stop - start,
            segment.first,
            segment.stop,
            x.support.vocab_size,
            len(table) - 1,
            left.shape[1],
            left_reward.shape[1],
            *transform.numbers,
            ROWS=t.rows,
            COLUMNS=t.columns,
            DEPTH=t.depth,
            SLICE=t.slice,
            GROUP=GROUP,
            EVEN_D=left.shape[1] % t.depth == 0,
            EVEN_K=left_reward.shape[1] % t.depth == 0,
            REWARD=segment.rewarded,
            RAGGED=segment.ragged,
            **constants,
            num_warps=t.warps,
            num_stages=t.stages,
            enable_fp_fusion=True,
        )

    plain = x.bias is None and x.transform.softcap is None
    tilings = choose_tilings(width, half=half, descriptors=descriptors, plain=plain)
    segments = split_columns(x.support.vocab_size, x.support.rewarded_columns if reward else 0, tilings)
    return fold_segments(len(ids), ids.device, segments, reward=reward, launch=launch)


def backward(
    x: LinearInputs, grad_logprob: Tensor, logprob: Tensor, stats: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden (float32), weight and bias: the library's products of a tile, one kernel between. Deterministic."""
    return chunked.backward(x, grad_logprob, logprob, stats, needs, logit_gradient)
