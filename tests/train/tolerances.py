"""What rounding may do to the numbers of the tiny models, in float32.

The reward model, the larger one, has two layers over 96 numbers: 3 x 96 and 96 into attention, 2 x 96 and 192 through the
feed-forward layer, 96 at the head. (The policy has 64 instead of 96.)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from datc_kernels.testing.rounding import rounding

TERMS = 2 * (4 * 96 + 2 * 96 + 192) + 96  # `rounding.terms` of them
FORWARD = rounding(length=TERMS)  # a score or a log-probability, which are near 1
GRADIENT = rounding(length=2 * TERMS + 256)  # forwards, backwards, and a sum over a batch's tokens; of the norm or the largest
NORM = rounding(length=2 * TERMS + 256, condition=4)  # a norm of gradients, of responses of either sign
WEIGHT = rounding(length=TERMS, condition=8)  # exp of A times a credit in units of its spread
MEAN = rounding(length=256, condition=4)  # a mean of some dozens of numbers of either sign


def assert_same_update(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], farthest: float) -> None:
    """Parameters after AdamW's steps on gradients that differ by rounding.

    A step divides a gradient by its own size: where a gradient is rounding alone, so is its sign, and nothing is known but
    that the parameter moved by at most the learning rate, so that two of them are at most 2 learning rates x steps apart
    (`farthest`, with something to spare). That may be so for one entry in fifty.
    """
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        apart = (found[key] - value).abs()
        assert float(apart.max()) <= farthest, key
        assert float((apart > NORM * (value.abs() + farthest)).double().mean()) <= 0.02, key
