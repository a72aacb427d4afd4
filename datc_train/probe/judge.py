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
    """The point to take, and why: the cheapest, until a dearer one's correlation of A_y is clearly higher.

    Clearly: the 95 % interval of the difference, both taken on the same resamples, lies above 0.
    """
    (best, name, top), *dearer = points
    for point, its_name, one in dearer:
        gain = estimate(one.advantage - top.advantage)
        if gain.low is not None and gain.low > 0:
            best, name, top = point, its_name, one
    found = top.quality.advantage_pearson
    if found.value is None:
        return best, f"{name}: nothing varies, so that no point could be told from another"
    reason = f"{name}: its A_y correlates {found.value:.2f} with the truth, and no dearer point is clearly better"
    if found.low is None or found.low <= 0:
        reason += "; this is not told from 0, so credit would go by chance: probe more responses, or consider method: grpo"
    return best, reason
