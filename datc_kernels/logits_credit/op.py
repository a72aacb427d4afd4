"""`logits_credit`: log-probability and directional credit where the logits already exist."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..dispatch import choose, implementation
from ..finalise import REWARD_STATS, STATS
from ..logit_transform import LogitTransform, compute_dtype
from ..reward_half import check_reward, to_token_credit
from ..types import TokenCredit
from ..vocabulary_parallel import Slice
from .inputs import LogitsInputs


def logits_credit(
    logits: Tensor,  # [N, V]
    token_ids: Tensor,  # [N]
    reward_grad: Tensor | None = None,  # [N, K]
    reward_embedding: Tensor | None = None,  # [rows, K]
    *,
    reward: Tensor | None = None,  # [N, rows]
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    process_group: object | None = None,
    vocab_start: int = 0,
    backend: str | None = None,
) -> TokenCredit:
    """`linear_credit` for those who have the logits; nothing else of size [N, V] is made in the forward.

    The mathematics is that of `linear_credit`, with z = softcap * tanh(logit_scale * logits / softcap) / temperature. The
    first-order rewards u are reward_grad reward_embedding^T, computed tile by tile, or `reward` where they exist too.

    Args:
        logits: as the model gives them (before temperature), [N, V] float32, bfloat16, float16 or float64. -inf is a masked
            column. Every argument not listed here is that of `linear_credit`.
        reward: u, [N, V] or [N, rows]; columns without one are those that have no reward row. Instead of reward_grad and
            reward_embedding.
        backend: as there, or "cuda" (CUDA C++ where it was built; float32 results).

    Returns:
        TokenCredit; `logprob` is differentiable with respect to logits (the gradient is [N, V], in the logits' dtype).

    Raises:
        ValueError, RuntimeError: as `linear_credit`.

    Example:
        >>> import torch
        >>> from datc_kernels import logits_credit
        >>> logits = torch.randn(8, 100)
        >>> logits_credit(logits, logits.argmax(1)).sum_p2.shape
        torch.Size([8])
    """
    checks.check_float("logits", logits, 2, "[N, V]")
    n, columns = logits.shape
    if columns == 0:
        checks.fail("logits", "at least one column", tuple(logits.shape))
    device = logits.device
    checks.check_token_ids(token_ids, n, "N of logits", device)
    checks.check_no_tangent(logits=logits)
    if reward is not None:
        if reward_grad is not None or reward_embedding is not None:
            checks.fail("reward", "None beside reward_grad and reward_embedding (one of the two ways)", "both")
        checks.check_float("reward", reward, 2, "[N, V]")
        checks.check_size("reward", reward, 0, n, "N of logits")
        if process_group is None:
            checks.check_not_empty("reward", reward[:0].new_empty(reward.shape[1]))
        checks.check_device("reward", reward, "logits", device)
    check_reward(reward_grad, reward_embedding, n, device, may_be_empty=process_group is not None)
    scalar, per_row = checks.check_temperature(temperature, n, device)
    group, support = checks.check_slice(process_group, vocab_start, vocab_size, columns, "V of logits")
    logprob, stats = torch.ops.datc.logits_credit(
        logits,
        token_ids,
        reward_grad,
        reward_embedding,
        reward,
        per_row,
        scalar,
        checks.check_positive("logit_scale", logit_scale),
        None if softcap is None else checks.check_positive("softcap", softcap),
        support,
        checks.check_ignore_index(ignore_index),
        group,
        vocab_start,
        choose(backend, device, compute_dtype(logits, reward_grad, reward_embedding, reward)),
    )
    return to_token_credit(logprob, stats)


@torch.library.custom_op("datc::logits_credit", mutates_args=())
def _forward_op(
    logits: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor | None,
    reward_embedding: Tensor | None,
    reward: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    vocab_size: int,
    ignore_index: int,
    group: str,
    vocab_start: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    checks.check_row_temperature(row_temperature, token_ids, ignore_index)
    forward = implementation("logits_credit", backend, logits.device).forward
    rows = 0 if reward_embedding is None else reward_embedding.shape[0]
    rows = rows if reward is None else reward.shape[1]
    transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
    part = Slice(group, vocab_start, logits.shape[1], rows, vocab_size, ignore_index)
    inputs = LogitsInputs(logits, part.local_ids(token_ids), transform, part.support, reward_grad, reward_embedding, reward)
    with torch.autocast(logits.device.type, enabled=False):
        return part.fields(inputs, forward, token_ids)


@_forward_op.register_fake
def _(
    logits: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor | None,
    reward_embedding: Tensor | None,
    reward: Tensor | None,
    *_settings: object,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(logits, reward_grad, reward_embedding, reward)
    fields = len(STATS) + (0 if reward_grad is None and reward is None else len(REWARD_STATS))
    return logits.new_empty(logits.shape[0], dtype=dtype), logits.new_empty((fields, logits.shape[0]), dtype=dtype)


@torch.library.custom_op("datc::logits_credit_backward", mutates_args=())
def _backward_op(
    grad_logprob: Tensor,
    logprob: Tensor,
    stats: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    vocab_size: int,
    ignore_index: int,
    group: str,
    vocab_start: int,
    backend: str,
) -> Tensor:
    transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
    part = Slice(group, vocab_start, logits.shape[1], 0, vocab_size, ignore_index)
    inputs = LogitsInputs(logits, part.local_ids(token_ids), transform, part.support)
    with torch.autocast(logits.device.type, enabled=False):
        # A float64 reward makes the forward's results float64, but not the gradient of float32 logits.
        saved = logprob.to(inputs.dtype), stats.to(inputs.dtype)
        return implementation("logits_credit", backend, logits.device).backward(inputs, grad_logprob, *saved)


@_backward_op.register_fake
def _(grad_logprob: Tensor, logprob: Tensor, stats: Tensor, logits: Tensor, *_settings: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, token_ids, _grad, _embedding, _reward, row_temperature, *settings = inputs
    logprob, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(logits, token_ids, row_temperature, logprob, stats)
    ctx.settings = settings


def _backward(ctx, grad_logprob, _grad_stats):  # type: ignore[no-untyped-def]
    logits, token_ids, row_temperature, logprob, stats = ctx.saved_tensors
    gradient = None
    if ctx.needs_input_grad[0]:
        gradient = torch.ops.datc.logits_credit_backward(
            grad_logprob, logprob, stats, logits, token_ids, row_temperature, *ctx.settings
        )
    return gradient, *([None] * 13)


_forward_op.register_autograd(_backward, setup_context=_setup_context)
