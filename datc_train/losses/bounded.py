"""Exponentials of differences of log-probabilities that never overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXPONENT_BOUND = 20.0  # exp is continued by its tangent beyond this: exp(20) = 4.9e8, far outside of any trust region


def k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """exp(r) - r - 1 with r = logp_ref - logp, elementwise; 0 at r = 0, and by its tangent above r = 20."""
    r = reference_logprob - logprob
    bounded = r.clamp(max=EXPONENT_BOUND)
    return torch.expm1(bounded) - bounded + math.expm1(EXPONENT_BOUND) * torch.relu(r - EXPONENT_BOUND)


def exp(x: Tensor) -> Tensor:
    """exp(x), by its tangent above 20. (With x - clamp(x) for the relu, gradients of e^20 would cancel at every x.)"""
    return torch.exp(x.clamp(max=EXPONENT_BOUND)) + math.exp(EXPONENT_BOUND) * torch.relu(x - EXPONENT_BOUND)
