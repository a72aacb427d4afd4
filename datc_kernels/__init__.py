"""Fused ops for direction-aware token credit (DATC, arXiv 2610.32772), callable from any RL trainer.

Importing this package needs neither Triton nor a GPU.
"""

from .allocate_weights import allocate_weights, effective_sample_ratio, predicted_gain
from .candidate_advantages import candidate_advantages
from .dispatch import missing_backends
from .linear_credit import linear_credit
from .logits_credit import logits_credit
from .types import Candidates, TokenCredit, TokenWeights

__all__ = [
    "Candidates",
    "TokenCredit",
    "TokenWeights",
    "allocate_weights",
    "candidate_advantages",
    "effective_sample_ratio",
    "linear_credit",
    "logits_credit",
    "missing_backends",
    "predicted_gain",
]
