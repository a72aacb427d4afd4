"""The policy's objective: a surrogate of each token, a KL term, a reduction. Responses lie end to end.

Legend: N tokens, B responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from datc_train.losses.bounded import k3
from datc_train.losses.reductions import count_responses, count_tokens, takes_part
from datc_train.losses.types import LossTerms, Surrogate, Totals

SurrogateFunction = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Surrogate]
Reduction = Callable[[Tensor, Tensor, Totals, torch.dtype], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss knows nothing of credit: token credit comes in through `token_advantage` = A w, and w = 1 is the loss as published.

    token     c (surrogate - beta k3)                                   c the sampler's correction, 1 without one
    k3        exp(r) - r - 1,  r = logp_ref - logp                      the KL estimate, not weighted by w
    loss      - sum_t share_t token_t                                   share from the reduction
    """

    surrogate: SurrogateFunction
    reduction: Reduction
    divides_by_deviation: bool = True  # False: the paper's advantage is r - mean, not divided by the group's std

    def __call__(
        self,
        logprob: Tensor,  # [N], differentiable
        old_logprob: Tensor,  # [N]
        token_advantage: Tensor,  # [N]  A w
        lengths: Tensor,  # [B] int64, sums to N
        *,
        reference_logprob: Tensor | None = None,  # [N]
        beta: float = 0.0,
        clip: float = 0.2,
        clip_high: float | None = None,
        response_mask: Tensor | None = None,  # [B] bool
        importance: Tensor | None = None,  # [N]  c
        total_responses: Tensor | float | None = None,
        total_tokens: Tensor | int | None = None,
        max_tokens: int | None = None,
    ) -> LossTerms:
        """A response that is masked (truncated, say) or empty is missing from sums and counts alike, whatever its numbers hold;
        if none is left the loss is exactly 0 and so is its gradient. When a batch is split into micro-batches, give each the
        whole batch's totals (`count_responses`, `count_tokens`): their losses and gradients then add up to the batch's.

        A response with A = 0 keeps the gradient of its KL term. Exponentials are continued by their tangent where the exponent
        is above 20, so nothing overflows and the gradient there keeps its sign. Everything but `logprob` is a constant. The
        order of summation is fixed by N and B.

        Args:
            clip, clip_high: the ratio stays within [1 - clip, 1 + clip_high]; None: clip_high is clip.
            importance: `correction.importance_weights`; None: 1.
            max_tokens: the longest that a response may be, for the reduction that divides by it.

        Raises ValueError for shapes that do not fit, a response_mask that is not bool, beta > 0 without reference_logprob, a
        negative beta, a clip outside [0, 1), a negative clip_high and a max_tokens that is needed and missing. Lengths that
        are on a GPU are not read back to be checked.
        """
        high = clip if clip_high is None else clip_high
        _check(logprob, old_logprob, token_advantage, lengths, reference_logprob, importance, beta, clip, high, response_mask)
        old, advantage = old_logprob.detach(), token_advantage.detach()
        reference = None if reference_logprob is None else reference_logprob.detach()
        part = takes_part(lengths, response_mask)
        totals = _totals(lengths, response_mask, total_responses, total_tokens, max_tokens, logprob.device)
        share, counted = (
            x.repeat_interleave(lengths, output_size=logprob.shape[0])
            for x in (self.reduction(lengths, part, totals, logprob.dtype), part)
        )
        if response_mask is not None:  # a product with 0 would let a masked NaN or infinity through
            logprob, old, advantage = (torch.where(counted, x, 0.0) for x in (logprob, old, advantage))
            reference = None if reference is None else torch.where(counted, reference, 0.0)
            importance = None if importance is None else torch.where(counted, importance, 0.0)

        surrogate = self.surrogate(logprob, old, advantage, lengths, clip, high)
        objective = surrogate.objective
        kl = None if reference is None else k3(logprob, reference)
        if kl is not None and beta > 0.0:
            objective = objective - beta * kl
        if importance is not None:
            objective = importance.detach() * objective
        return LossTerms(
            loss=-(share * objective).sum(),
            kl_sum=None if kl is None else kl.detach().sum(),
            clipped_count=surrogate.clipped.sum(dtype=torch.float32),
            token_count=counted.sum(dtype=torch.float32),
        )


def _totals(
    lengths: Tensor,
    response_mask: Tensor | None,
    responses: Tensor | float | None,
    tokens: Tensor | int | None,
    max_tokens: int | None,
    device: torch.device,
) -> Totals:
    if responses is None:
        responses = count_responses(lengths, response_mask)
    if tokens is None:
        tokens = count_tokens(lengths, response_mask)
    return Totals(torch.as_tensor(responses, device=device), torch.as_tensor(tokens, device=device), max_tokens)


def _check(
    logprob: Tensor,
    old_logprob: Tensor,
    token_advantage: Tensor,
    lengths: Tensor,
    reference_logprob: Tensor | None,
    importance: Tensor | None,
    beta: float,
    clip: float,
    clip_high: float,
    response_mask: Tensor | None,
) -> None:
    if logprob.dim() != 1:
        raise ValueError(f"logprob: expected [N], got {list(logprob.shape)}")
    others = {
        "old_logprob": old_logprob,
        "token_advantage": token_advantage,
        "reference_logprob": reference_logprob,
        "importance": importance,
    }
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
    if not 0.0 <= clip_high < float("inf"):
        raise ValueError(f"clip_high: expected a finite number >= 0, got {clip_high}")
