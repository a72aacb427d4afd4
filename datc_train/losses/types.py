"""What a loss gives back, and what its parts hand to each other.

Legend: N tokens, B responses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """A loss to minimise, and what its metrics are made of: sums over the tokens that count, so that micro-batches add.

    All are 0-dimensional tensors on the loss's device (nothing waits for it); only `loss` carries a gradient.
    """

    loss: Tensor
    kl_sum: Tensor | None  # sum of k3 over tokens; None without a reference
    clipped_count: Tensor  # float32, tokens whose ratio the clip held: their gradient stopped, or for cispo was cut
    token_count: Tensor  # float32, tokens that count


@dataclass(frozen=True)
class Surrogate:
    """The policy's part of the objective before the KL term and the reduction."""

    objective: Tensor  # [N], differentiable, to be maximised
    clipped: Tensor  # [N] bool


@dataclass(frozen=True)
class Totals:
    """Of the whole batch, so that the losses of its micro-batches add up to its own."""

    responses: Tensor  # 0-dimensional: those that take part
    tokens: Tensor  # 0-dimensional: theirs
    max_tokens: int | None = None  # the longest that a response may be
