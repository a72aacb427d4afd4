"""From tokens to one number: each token's share in the sum, from the whole batch's totals.

Legend: N tokens, B responses; R responses take part, with M tokens in all. A response that is masked or empty is missing from
sums and counts alike; with nothing left every share is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datc_train.losses.types import Totals


def takes_part(lengths: Tensor, response_mask: Tensor | None) -> Tensor:
    """[B] bool: not empty and, where a mask is given, True in it."""
    return lengths > 0 if response_mask is None else response_mask & (lengths > 0)


def count_responses(lengths: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """R, 0-dimensional float32: the responses that are not empty and, where a mask is given, True in it."""
    return takes_part(lengths, response_mask).sum(dtype=torch.float32)


def count_tokens(lengths: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """M, 0-dimensional int64: the tokens of those responses."""
    return torch.where(takes_part(lengths, response_mask), lengths, 0).sum(dtype=torch.int64)


def mean_of_means(lengths: Tensor, takes_part: Tensor, totals: Totals, dtype: torch.dtype) -> Tensor:
    """1 / (R length_b): the mean over a response's tokens, then over responses (arXiv 2402.03300); [B]"""
    return takes_part.to(dtype) / (lengths.clamp(min=1) * totals.responses.clamp(min=1)).to(dtype)


def token_mean(lengths: Tensor, takes_part: Tensor, totals: Totals, dtype: torch.dtype) -> Tensor:
    """1 / M: every token alike, long responses weigh more (arXiv 2503.14476); [B]"""
    return takes_part.to(dtype) / totals.tokens.clamp(min=1).to(dtype)


def constant_length(lengths: Tensor, takes_part: Tensor, totals: Totals, dtype: torch.dtype) -> Tensor:
    """1 / (R max_tokens): no response's length in the denominator (arXiv 2503.20783); [B]"""
    if totals.max_tokens is None:
        raise ValueError("max_tokens: expected the longest that a response may be, got None")
    return takes_part.to(dtype) / (totals.responses.clamp(min=1) * totals.max_tokens).to(dtype)
