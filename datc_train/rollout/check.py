"""Does the sampler draw from the policy that the loss sees?"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}


def check_sampler(sampler_logprob: Tensor, training_logprob: Tensor, *, dtype: torch.dtype) -> float:
    """Mean |sampler_logprob - training_logprob| over the tokens whose sampler log-probability is known.

    Both [N], of the same tokens at the same weights; `dtype` is the one the policy computes in. A NaN of the sampler's
    is "not known" and does not count. Returns the mean, for the log.

    Raises RuntimeError when the mean is above 1e-3 (float32) or 0.05 (bfloat16, float16), when a training
    log-probability is not finite, and when no sampler log-probability is known; ValueError for a shape or dtype that
    cannot be.
    """
    if sampler_logprob.shape != training_logprob.shape:
        raise ValueError(
            f"sampler_logprob: expected the shape of training_logprob {tuple(training_logprob.shape)}, "
            f"got {tuple(sampler_logprob.shape)}"
        )
    if dtype not in TOLERANCE:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, TOLERANCE))}, got {dtype}")
    training = training_logprob.detach().double()
    sampler = sampler_logprob.detach().to(training)
    if not bool(training.isfinite().all()):
        raise RuntimeError("the training log-probabilities are not finite: the policy's logits hold NaN or infinity")
    known = ~sampler.isnan()
    if not bool(known.any()):
        raise RuntimeError("the sampler gave no log-probabilities: whether it samples from the policy cannot be checked")
    mean = float((sampler - training)[known].abs().mean())
    if mean > TOLERANCE[dtype]:
        raise RuntimeError(
            f"the sampler's log-probabilities are not the policy's: mean difference {mean:.3g}, at most "
            f"{TOLERANCE[dtype]:g} expected in {dtype}. Usual causes: another temperature, top_k, top_p or repetition "
            "penalty in the sampler; an adapter or update that it has not loaded; dropout on in the training pass; "
            "another vocabulary size, prompt or position ids"
        )
    return mean
