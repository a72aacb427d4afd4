"""The policy's objective: pure functions of log-probabilities and token advantages, responses laid end to end.

Legend: N tokens, B responses. A loss knows nothing of credit: DATC comes in through `token_advantage` = A w, and with
w = 1 the same function is GRPO. A new loss is one function and one line in `LOSSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EXPONENT_BOUND = 20.0  # exp is continued by its tangent beyond this: exp(20) = 4.9e8, far outside of any trust region


@dataclass(frozen=True)
class LossTerms:
    """A loss to minimise, and what its metrics are made of: sums over the tokens that count, so that micro-batches add.

    All are 0-dimensional tensors on the loss's device (nothing waits for it); only `loss` carries a gradient.
    """

    loss: Tensor
    kl_sum: Tensor | None  # sum of k3 over tokens; None without a reference
    clipped_count: Tensor  # float32, tokens whose gradient the clip stopped
    token_count: Tensor  # float32, tokens that count


def grpo_loss(
    logprob: Tensor,  # [N], differentiable
    old_logprob: Tensor,  # [N]
    token_advantage: Tensor,  # [N]  A w
    lengths: Tensor,  # [B] int64, sums to N
    *,
    reference_logprob: Tensor | None = None,  # [N]
    beta: float = 0.0,
    clip: float = 0.2,
    response_mask: Tensor | None = None,  # [B] bool
    total_responses: Tensor | float | None = None,
) -> LossTerms:
    """GRPO: the clipped surrogate, its mean over a response's tokens, then over responses.

        token     min(rho A w, clip(rho, 1 - eps, 1 + eps) A w) - beta k3          eps = `clip`
        rho       exp(logp - logp_old)
        k3        exp(r) - r - 1,  r = logp_ref - logp                             the KL estimate, not weighted by w
        loss      -(1 / R) sum_b (1 / length_b) sum_{t in b} token_t

    R counts the responses that take part: not empty, and True in `response_mask`. A response that is masked (truncated,
    say) or empty is missing from sum and count alike, whatever its numbers hold; if none is left the loss is exactly 0
    and so is its gradient. When a batch is split into micro-batches, give each the whole batch's R as `total_responses`
    (`count_responses`): their losses and gradients then add up to the batch's.

    A response with A = 0 keeps the gradient of its KL term. Both exponentials are continued by their tangent where the
    exponent is above 20, so nothing overflows and the gradient there keeps its sign. Everything but `logprob` is a
    constant. The order of summation is fixed by N and B.

    Raises ValueError for shapes that do not fit, a response_mask that is not bool, beta > 0 without reference_logprob,
    a negative beta and a clip outside [0, 1). Lengths that are on a GPU are not read back to be checked.
    """
    _check(logprob, old_logprob, token_advantage, lengths, reference_logprob, beta, clip, response_mask)
    old, advantage = old_logprob.detach(), token_advantage.detach()
    reference = None if reference_logprob is None else reference_logprob.detach()
    coefficient, counted = _mean_of_means(lengths, response_mask, total_responses, logprob)
    if response_mask is not None:  # a product with 0 would let a masked NaN or infinity through
        logprob, old, advantage = (torch.where(counted, x, 0.0) for x in (logprob, old, advantage))
        reference = None if reference is None else torch.where(counted, reference, 0.0)

    ratio = _exp(logprob - old)
    objective = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)
    kl = None if reference is None else k3(logprob, reference)
    if kl is not None and beta > 0.0:
        objective = objective - beta * kl
    loss = -(coefficient * objective).sum()

    clipped = ((ratio > 1.0 + clip) & (advantage > 0.0)) | ((ratio < 1.0 - clip) & (advantage < 0.0))
    return LossTerms(
        loss=loss,
        kl_sum=None if kl is None else kl.detach().sum(),
        clipped_count=clipped.sum(dtype=torch.float32),
        token_count=counted.sum(dtype=torch.float32),
    )


LOSSES: dict[str, Callable[..., LossTerms]] = {"grpo": grpo_loss}


def count_responses(lengths: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """R, 0-dimensional float32: the responses that are not empty and, where a mask is given, True in it."""
    return _takes_part(lengths, response_mask).sum(dtype=torch.float32)


def k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """exp(r) - r - 1 with r = logp_ref - logp, elementwise; 0 at r = 0, and by its tangent above r = 20."""
    r = reference_logprob - logprob
    bounded = r.clamp(max=EXPONENT_BOUND)
    return torch.expm1(bounded) - bounded + math.expm1(EXPONENT_BOUND) * torch.relu(r - EXPONENT_BOUND)


def _exp(x: Tensor) -> Tensor:
    """exp(x), by its tangent above 20. (With x - clamp(x) for the relu, gradients of e^20 would cancel at every x.)"""
    return torch.exp(x.clamp(max=EXPONENT_BOUND)) + math.exp(EXPONENT_BOUND) * torch.relu(x - EXPONENT_BOUND)


def _takes_part(lengths: Tensor, response_mask: Tensor | None) -> Tensor:
    """[B] bool"""
    return lengths > 0 if response_mask is None else response_mask & (lengths > 0)


def _mean_of_means(
    lengths: Tensor, response_mask: Tensor | None, total_responses: Tensor | float | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Each token's share 1 / (R length_b) in the mean over responses, [N], and whether it counts, [N] bool."""
    takes_part = _takes_part(lengths, response_mask)
    total = takes_part.sum() if total_responses is None else torch.as_tensor(total_responses, device=like.device)
    share = takes_part.to(like.dtype) / (lengths.clamp(min=1) * total.clamp(min=1)).to(like.dtype)
    n = like.shape[0]
    return (
        share.repeat_interleave(lengths, output_size=n),
        takes_part.repeat_interleave(lengths, output_size=n),
    )


def _check(
    logprob: Tensor,
    old_logprob: Tensor,
    token_advantage: Tensor,
    lengths: Tensor,
    reference_logprob: Tensor | None,
    beta: float,
    clip: float,
    response_mask: Tensor | None,
) -> None:
    if logprob.dim() != 1:
        raise ValueError(f"logprob: expected [N], got {list(logprob.shape)}")
    others = {"old_logprob": old_logprob, "token_advantage": token_advantage, "reference_logprob": reference_logprob}
    for name, value in others.items():
        if value is not None and value.shape != logprob.shape:
            raise ValueError(f"{name}: expected the shape of logprob {list(logprob.shape)}, got {list(value.shape)}")
    if lengths.dim() != 1 or lengths.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"lengths: expected integers [B], got {list(lengths.shape)} of {lengths.dtype}")
    if lengths.device.type == "cpu" and int(lengths.sum()) != logprob.shape[0]:
        raise ValueError(f"lengths: expected a sum of {logprob.shape[0]}, the tokens of logprob, got {int(lengths.sum())}")
    if response_mask is not None and (response_mask.shape != lengths.shape or response_mask.dtype != torch.bool):
        raise ValueError(
            f"response_mask: expected bool {list(lengths.shape)}, got {response_mask.dtype} {list(response_mask.shape)}"
        )
    if not 0.0 <= beta < float("inf"):
        raise ValueError(f"beta: expected a finite number >= 0, got {beta}")
    if beta > 0.0 and reference_logprob is None:
        raise ValueError(f"reference_logprob: expected one with beta {beta}, got None")
    if not 0.0 <= clip < 1.0:
        raise ValueError(f"clip: expected a number in [0, 1), got {clip}")
