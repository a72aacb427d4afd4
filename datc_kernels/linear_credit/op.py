"""`linear_credit`: log-probability and directional credit from hidden states; logits never exist."""

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
from .inputs import LinearInputs


def linear_credit(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    token_ids: Tensor,  # [N]
    reward_grad: Tensor | None = None,  # [N, K]
    reward_embedding: Tensor | None = None,  # [rows, K]
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    process_group: object | None = None,
    vocab_start: int = 0,
    backend: str | None = None,
) -> TokenCredit:
    """Log-probability and directional credit of sampled tokens, without ever holding [N, V].

    With z = softcap * tanh(logit_scale * (hidden weight^T + bias) / softcap) / temperature, p = softmax(z) over the first
    `vocab_size` columns, u = reward_grad reward_embedding^T and A = u - <p, u>:

        logprob = log p_y           credit d = <p * A, onehot(y) - p>           (d > 0: raising p_y raises the reward)

    Args:
        hidden: policy hidden states that predict the tokens, [N, D] float32, bfloat16, float16 or float64.
        weight: LM head, [V, D]. If its dtype differs from hidden's, both are converted to float32 (float64 if one is).
        token_ids: sampled ids y, [N] int64 or int32; `ignore_index` marks rows whose fields are to be exact zeros.
        reward_grad: gradient of the raw reward score with respect to the reward model's input embedding at each token, [N, K].
        reward_embedding: what the reward model's embedding module returns for every id, [rows, K]. With fewer rows than
            columns, the reward fields are those of p conditioned on the columns that have a row (zero where y has none).
        bias: of the LM head, [V] of any float dtype; takes part in the dtype of the products.
        temperature: a number, or a tensor [N].
        softcap: soft-cap of the logits (Gemma), before the temperature. logit_scale: factor on the raw logits (Cohere, Granite).
        vocab_size: columns of the support; padded columns beyond it do not exist. None: all of them.
        process_group: of ranks that hold the head together. weight, bias and reward_embedding are then this rank's rows, from
            column `vocab_start` on, slices following each other in rank order, of any sizes; a rank may hold no row of
            reward_embedding. hidden, token_ids and reward_grad are the same on every rank, as is what comes back, bit for bit;
            ids and vocab_size are of the whole head. The gradient of hidden is summed over the ranks.
        vocab_start: this rank's first column.
        backend: None, "reference", "chunked", "cpu" (C++: CPU tensors, float32 results) or "triton" (the fused kernel: CUDA from
            compute capability 8.0, float32 results). On CPUs None takes "cpu" where the extension was built, and "chunked" where
            it was not or an input is float64.

    Returns:
        TokenCredit: fields [N] in float32 (float64 with float64 inputs). `logprob` is differentiable with respect to hidden,
        and to weight and bias where they require it; its backward computes probabilities again, tile by tile. Without
        reward_grad and reward_embedding the reward fields are None and no reward product runs.

    Raises:
        ValueError: beginning with the argument's name. On CPUs also for an id outside the support; on other devices every
            field of such a row is NaN.
        RuntimeError: the backend asked for cannot run here; an input has a forward-mode tangent.

    Example:
        >>> import torch
        >>> from datc_kernels import linear_credit
        >>> hidden, weight = torch.randn(8, 16), torch.randn(100, 16)      # policy: hidden states, LM head
        >>> grad, table = torch.randn(8, 12), torch.randn(100, 12)         # reward model: dR/de, embedding table
        >>> out = linear_credit(hidden, weight, torch.arange(8), grad, table)
        >>> out.credit.shape
        torch.Size([8])

    Source: DATC (arXiv 2610.32772). The derivation of the sums is in this folder's README.
    """
    checks.check_float("hidden", hidden, 2, "[N, D]")
    checks.check_float("weight", weight, 2, "[V, D]")
    checks.check_not_empty("weight", weight)
    n, device = hidden.shape[0], hidden.device
    checks.check_size("weight", weight, 1, hidden.shape[1], "D of hidden")
    checks.check_device("weight", weight, "hidden", device)
    checks.check_token_ids(token_ids, n, "N of hidden", device)
    if bias is not None:
        checks.check_float("bias", bias, 1, "[V]")
        checks.check_size("bias", bias, 0, weight.shape[0], "V of weight")
        checks.check_device("bias", bias, "hidden", device)
    checks.check_no_tangent(hidden=hidden, weight=weight, bias=bias)
    check_reward(reward_grad, reward_embedding, n, device, may_be_empty=process_group is not None)
    scalar, per_row = checks.check_temperature(temperature, n, device)
    group, support = checks.check_slice(process_group, vocab_start, vocab_size, weight.shape[0], "V of weight")
    logprob, stats = torch.ops.datc.linear_credit(
        hidden,
        weight,
        token_ids,
        reward_grad,
        reward_embedding,
        bias,
        per_row,
        scalar,
        checks.check_positive("logit_scale", logit_scale),
        None if softcap is None else checks.check_positive("softcap", softcap),
        support,
        checks.check_ignore_index(ignore_index),
        group,
        vocab_start,
        choose(backend, device, compute_dtype(hidden, weight, reward_grad, reward_embedding)),
    )
    return to_token_credit(logprob, stats)


@torch.library.custom_op("datc::linear_credit", mutates_args=())
def _forward_op(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor | None,
    reward_embedding: Tensor | None,
    bias: Tensor | None,
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
    forward = implementation("linear_credit", backend, hidden.device).forward
    transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
    rows = 0 if reward_embedding is None else reward_embedding.shape[0]
    part = Slice(group, vocab_start, weight.shape[0], rows, vocab_size, ignore_index)
    inputs = LinearInputs(hidden, weight, part.local_ids(token_ids), bias, transform, part.support, reward_grad, reward_embedding)
    with torch.autocast(hidden.device.type, enabled=False):
        return part.fields(inputs, forward, token_ids)


@_forward_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    reward_grad: Tensor | None,
    reward_embedding: Tensor | None,
    *_settings: object,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(hidden, weight, reward_grad, reward_embedding)
    fields = len(STATS) + (0 if reward_grad is None else len(REWARD_STATS))
    n = hidden.shape[0]
    return hidden.new_empty(n, dtype=dtype), hidden.new_empty((fields, n), dtype=dtype)


@torch.library.custom_op("datc::linear_credit_backward", mutates_args=())
def _backward_op(
    grad_logprob: Tensor,
    logprob: Tensor,
    stats: Tensor,
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    vocab_size: int,
    ignore_index: int,
    group: str,
    vocab_start: int,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; an empty tensor where not needed (an op cannot return None)."""
    transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
    part = Slice(group, vocab_start, weight.shape[0], 0, vocab_size, ignore_index)
    inputs = LinearInputs(hidden, weight, part.local_ids(token_ids), bias, transform, part.support)
    with torch.autocast(hidden.device.type, enabled=False):
        # A float64 reward gradient makes the forward's results float64, but not the gradients of float32 inputs.
        saved = logprob.to(inputs.dtype), stats.to(inputs.dtype)
        h, w, b = implementation("linear_credit", backend, hidden.device).backward(
            inputs, grad_logprob, *saved, (needs[0], needs[1], needs[2])
        )
    if h is not None:
        h = part.sum_over_ranks(h).to(hidden.dtype)
    return tuple(hidden.new_empty(0) if g is None else g for g in (h, w, b))  # type: ignore[return-value]


@_backward_op.register_fake
def _(
    grad_logprob: Tensor,
    logprob: Tensor,
    stats: Tensor,
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    vocab_size: int,
    ignore_index: int,
    group: str,
    vocab_start: int,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    def like(needed: bool, x: Tensor | None) -> Tensor:
        return x.new_empty(x.shape) if needed and x is not None else hidden.new_empty(0)

    return like(needs[0], hidden), like(needs[1], weight), like(needs[2], bias)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, token_ids, _grad, _embedding, bias, row_temperature, *settings = inputs
    logprob, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(hidden, weight, token_ids, bias, row_temperature, logprob, stats)
    ctx.settings = settings


def _backward(ctx, grad_logprob, _grad_stats):  # type: ignore[no-untyped-def]
    hidden, weight, token_ids, bias, row_temperature, logprob, stats = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 5)]
    grads = torch.ops.datc.linear_credit_backward(
        grad_logprob, logprob, stats, hidden, weight, token_ids, bias, row_temperature, *ctx.settings, needs
    )
    h, w, b = (g if needed else None for g, needed in zip(grads, needs, strict=True))
    return h, w, None, None, None, b, *([None] * 9)


_forward_op.register_autograd(_backward, setup_context=_setup_context)
