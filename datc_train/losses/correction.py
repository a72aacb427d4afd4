"""What a sampler's own arithmetic does to its samples, put right by importance weights."""

from __future__ import annotations

from typing import Literal

from torch import Tensor


def importance_weights(
    old_logprob: Tensor, sampler_logprob: Tensor, mode: Literal["truncate", "mask"], bound: float
) -> tuple[Tensor, Tensor]:
    """c = exp(logp_old - logp_sampler) of every token, held within a bound, and where the bound acted; constants.

        truncate    min(c, bound)
        mask        c where 1 / bound <= c <= bound, else 0: a token out of the band has no gradient, and still counts in means

    A log-probability that the sampler did not give (NaN) means c = 1.

    Args:
        old_logprob: [N] of the training model at the weights that sampled. sampler_logprob: [N].

    Returns:
        [N] in old_logprob's dtype, [N] bool.
    """
    if mode not in ("truncate", "mask"):
        raise ValueError(f"mode: expected truncate or mask, got {mode!r}")
    if not 1 <= bound < float("inf"):
        raise ValueError(f"bound: expected a finite number of at least 1, got {bound}")
    difference = old_logprob.detach() - sampler_logprob.to(old_logprob)
    weight = difference.exp().masked_fill(difference.isnan(), 1.0)
    if mode == "truncate":
        return weight.clamp(max=bound), weight > bound
    outside = (weight > bound) | (weight < 1 / bound)
    return weight.masked_fill(outside, 0.0), outside
