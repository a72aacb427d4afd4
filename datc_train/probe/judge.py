"""From forecasts and truth to a verdict.

    A_y = sum_v p_v (R_y - R_v)      p: the policy given that it samples y or one of the drawn alternatives; the forecast has
                                     <g, E_y - E_v> in place of R_y - R_v

Legend: S resamples of the responses, P positions, k alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datc_train.credit_point import CreditPoint
from datc_train.probe.replacements import Drawn
from datc_train.probe.statistics import Values, estimate, mean, pearson, spearman
from datc_train.probe.types import Quality

# From the cheapest on. Fixed, so that two runs recommend the same.
POINTS = (
    CreditPoint(),
    CreditPoint("tangent"),
    CreditPoint("integrated", 1),
    CreditPoint("integrated", 2),
    CreditPoint("integrated", 4),
)


@dataclass(frozen=True)
class Verdict:
    """A point's correlations of one kind of position, and A_y's over the resamples."""

    quality: Quality
    advantage: Values  # [1 + S] Pearson's of A_y; the first is that of the responses themselves


def verdict(drawn: Sequence[Drawn], forecast: Sequence[Values], change: Sequence[Values], counts: Values) -> Verdict:
    """forecast, change: [k] of each drawn position; counts [1 + S, responses] as of `resamples`."""
    guess, truth = np.stack(forecast), np.stack(change)
    weight = counts[:, [one.response for one in drawn]]
    every = np.repeat(weight, truth.shape[1], axis=1)
    alone = np.ones((1, truth.shape[1]))
    p = np.stack([np.exp(one.log_probability - np.logaddexp.reduce(one.log_probability)) for one in drawn])[:, 1:]
    guess_y, truth_y = -(p * guess).sum(1), -(p * truth).sum(1)
    advantage = pearson(guess_y, truth_y, weight)
    quality = Quality(
        all_pearson=estimate(pearson(guess.ravel(), truth.ravel(), every)),
        all_spearman=estimate(spearman(guess.ravel(), truth.ravel(), every)),
        within_pearson=estimate(mean(pearson(guess, truth, alone), weight)),
        within_spearman=estimate(mean(np.array([spearman(g, t, alone)[0] for g, t in zip(guess, truth, strict=True)]), weight)),
        advantage_pearson=estimate(advantage),
        advantage_spearman=estimate(spearman(guess_y, truth_y, weight)),
    )
    return Verdict(quality, advantage)


def recommend(points: Sequence[tuple[CreditPoint, str, Verdict]]) -> tuple[CreditPoint, str]:
    """The point to take of these, cheapest first, and why.

    The cheapest whose correlation of A_y is told from 0 (its 95 % interval lies above), and from there on a dearer one only where
    its correlation is clearly higher: the 95 % interval of the difference, both taken on the same resamples, lies above 0. Where
    none is told from 0, the cheapest.
    """
    told = [i for i, (_, _, one) in enumerate(points) if _above_0(one.advantage)]
    (best, name, top), *dearer = points[told[0] if told else 0 :]
    for point, its_name, one in dearer:
        if _above_0(one.advantage - top.advantage):
            best, name, top = point, its_name, one
    found = top.quality.advantage_pearson.value
    if found is None:
        return best, f"{name}: nothing varies, so that no point could be told from another"
    if told:
        return best, f"{name}: its A_y correlates {found:.2f} with the truth, and no dearer point is clearly better"
    return best, (
        f"{name}: its A_y correlates {found:.2f} with the truth, and no point's is told from 0: credit would go by chance; probe "
        "more responses, or consider method: grpo"
    )


def _above_0(found: Values) -> bool:
    low = estimate(found).low
    return low is not None and low > 0
