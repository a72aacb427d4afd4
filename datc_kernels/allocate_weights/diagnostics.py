"""What is worth logging about weights; functions of the result, so that the op returns only what training needs."""

from __future__ import annotations

from torch import Tensor

from .segments import Segments


def effective_sample_ratio(weight: Tensor, lengths: Tensor) -> Tensor:
    """(sum w)^2 / (T sum w^2) of each response, [B], in (0, 1]; 1 for uniform weights and for empty responses.

    weight [N] end to end with lengths [B]. With a ceiling c it is at least 1 / (c + 1/c - 1).
    """
    segments = Segments(lengths, weight.shape[0])
    total, squares = segments.reduce(weight, "sum"), segments.reduce(weight.square(), "sum")
    ratio = total.square() / (lengths * squares).clamp(min=1e-30)
    return ratio.where(lengths > 0, 1.0)


def at_band(weight: Tensor, lengths: Tensor, ceiling: float) -> Tensor:
    """Whether a response has a weight at the edge of [1/ceiling, ceiling], within a ten-thousandth: [B] bool.

    weight [N] end to end with lengths [B]. A weight of exactly 1 is at no edge, also where ceiling is 1.
    """
    segments = Segments(lengths, weight.shape[0])
    edge = ((weight >= ceiling * (1 - 1e-4)) | (weight <= (1 + 1e-4) / ceiling)) & (weight != 1.0)
    return segments.reduce(edge.float(), "sum") > 0


def predicted_gain(credit: Tensor, advantage: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    """sum (w - 1) A d of each response, [B]: first-order reward that the weights add; not negative up to rounding.

    credit and weight [N] end to end with lengths [B], advantage [B].
    """
    segments = Segments(lengths, weight.shape[0])
    gain = (weight.double() - 1) * segments.spread(advantage).double() * credit.double()
    return segments.reduce(gain.where(weight != 1, 0.0), "sum").to(weight.dtype)
