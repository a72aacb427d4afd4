"""How errors are measured, and how large they may be.

The error of a field in a row is |got - true| over a scale: |true| + rms of the field for what scales with the reward or falls to
zero with 1 - p_y, 1 for logarithms and the cosine. So small values beside large ones are judged by the batch, all of them
together by themselves. The mean reward is a mean of numbers of either sign: the spread of the advantages joins its scale.
"""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from ..types import TokenCredit
from .rounding import rounding

ABSOLUTE = ("logprob", "cosine")

# For float32 results, on the golden vectors and wherever the inputs' own rounding does not decide. The first three are what the
# vectors' authors demand.
CREDIT, LOGPROB, WEIGHT = 1e-4, 2e-5, 1e-5
# Sums over a few hundred columns of terms whose logits are products over a few dozen numbers; longer ones are taken in parts.
_SUM = rounding(length=512, condition=2)
BUDGETS: dict[str, float] = {
    "logprob": LOGPROB,
    "entropy": _SUM,
    "logsumexp": _SUM / 10,  # an error of the sum, relative, is one of its logarithm, absolute, beside the largest logit
    "sum_p2": _SUM,
    "credit": CREDIT,
    "advantage": _SUM,
    "reward_mean": _SUM,
    "displacement_norm": CREDIT,
    "force_norm": _SUM,
    "cosine": CREDIT,
}
# At p = 1 - 1e-12 all others share 1e-12 by a gap of near 30 between logits, a sum of few products that float32 has rounded.
SHARP: dict[str, float] = BUDGETS | {
    name: max(budget, rounding(length=4, condition=32))
    for name, budget in BUDGETS.items()
    if name not in ("logprob", "logsumexp")
}
# Of allocate_weights' temperature in float32: found in float64 and rounded once; and found in float32.
TEMPERATURE, TEMPERATURE32 = rounding(condition=2), rounding(length=512)


def field_names(result: TokenCredit) -> list[str]:
    """Fields that are there, `cosine` with them."""
    names = [f.name for f in fields(result) if getattr(result, f.name) is not None]
    return names if result.cosine is None else [*names, "cosine"]


def error(name: str, got: TokenCredit, true: TokenCredit) -> Tensor:
    """Error of a field in every row, [N] float64."""
    exact: Tensor = getattr(true, name)
    difference = (getattr(got, name).detach().cpu().double() - exact).abs()
    if name in ABSOLUTE or exact.numel() == 0:
        return difference
    scale = exact.abs() + exact.square().mean().sqrt()
    if name == "reward_mean" and true.advantage is not None:
        scale = scale + true.advantage.square().mean().sqrt()
    return difference / scale.where(scale > 0, 1.0)


def worst(name: str, got: TokenCredit, true: TokenCredit) -> float:
    """Largest error of a field over all rows; NaN if one is NaN."""
    errors = error(name, got, true)
    return float(errors.max()) if errors.numel() else 0.0


def assert_within_budget(got: TokenCredit, true: TokenCredit, budgets: dict[str, float] = BUDGETS) -> None:
    """Every field of `got` is there and within its budget."""
    assert field_names(got) == field_names(true), (field_names(got), field_names(true))
    errors = {name: worst(name, got, true) for name in field_names(true)}
    over = {name: (value, budgets[name]) for name, value in errors.items() if not value <= budgets[name]}
    assert not over, f"error, budget: {over}"


def assert_as_good_as(got: TokenCredit, reference: TokenCredit, true: TokenCredit, floor: float = rounding(length=16)) -> None:
    """Every field's error is at most twice that of the float32 reference, or what 16 roundings explain (`floor`)."""
    for name in field_names(true):
        ours, theirs = worst(name, got, true), worst(name, reference, true)
        assert ours <= max(2 * theirs, floor), f"{name}: error {ours:.2e}, the reference's {theirs:.2e}"
