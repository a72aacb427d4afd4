"""What the ratio to the policy that sampled does to a token: three surrogates.

Legend: N tokens, B responses; rho_t = exp(logp_t - logp_old_t), a = A w the token's advantage, [1 - low, 1 + high] the clip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datc_kernels.allocate_weights.segments import Segments
from datc_train.losses.bounded import exp
from datc_train.losses.types import Surrogate


def token_ratio(logprob: Tensor, old: Tensor, advantage: Tensor, lengths: Tensor, low: float, high: float) -> Surrogate:
    """min(rho a, clip(rho, 1 - low, 1 + high) a)         PPO's, as GRPO uses it (arXiv 2402.03300)"""
    return _clipped(exp(logprob - old), advantage, low, high)


def sequence_ratio(logprob: Tensor, old: Tensor, advantage: Tensor, lengths: Tensor, low: float, high: float) -> Surrogate:
    """The same with one ratio a response, its gradient through each token's own log-probability (arXiv 2507.18071, GSPO-token).

        s_b = exp(mean over the response of logp - logp_old)          rho_t := sg[s_b] exp(logp_t - sg[logp_t])

    Its value is s_b and its gradient s_b grad logp_t, so that token advantages keep their say: in the sequence's own
    min(s a, clip(s) a) mean-1 weights would cancel.
    """
    difference = (logprob - old).detach()
    segments = Segments(lengths.to(torch.int64), len(difference))
    mean = segments.reduce(difference, "sum") / lengths.clamp(min=1)
    return _clipped(exp(segments.spread(mean)) * torch.exp(logprob - logprob.detach()), advantage, low, high)


def capped_weight(logprob: Tensor, old: Tensor, advantage: Tensor, lengths: Tensor, low: float, high: float) -> Surrogate:
    """sg[min(rho, 1 + high)] a logp          CISPO (arXiv 2506.13585)

    The cap cuts a token's weight and never drops its gradient. As in the paper's runs there is no lower bound: `low` is not
    used. Its value is no reward; only its gradient means anything.
    """
    ratio = exp((logprob - old).detach())
    return Surrogate(ratio.clamp(max=1.0 + high) * advantage * logprob, ratio > 1.0 + high)


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Surrogate:
    objective = torch.minimum(ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage)
    stopped = ((ratio > 1.0 + high) & (advantage > 0.0)) | ((ratio < 1.0 - low) & (advantage < 0.0))
    return Surrogate(objective, stopped)
