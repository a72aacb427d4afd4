"""Correlations, and how sure they are: a bootstrap that draws whole responses.

A resample is a count for each response, so that every statistic is one of weighted data: exactly what it is of the data with
each response repeated so often.

Legend: S resamples, n values.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from datc_train.probe.types import Estimate

Values = NDArray[np.float64]
RESAMPLES = 1000
_LEVEL = (2.5, 97.5)
_ROUNDING = 1e-24  # of a mean square: less than that a variance is the mean's rounding


def resamples(responses: int, seed: int) -> Values:
    """[1 + S, responses] how often each response is in: once each, then S draws of as many with replacement."""
    drawn = np.random.default_rng((seed, 0xB007)).multinomial(responses, np.full(responses, 1 / responses), size=RESAMPLES)
    return np.concatenate([np.ones((1, responses)), drawn])


def pearson(x: Values, y: Values, weight: Values) -> Values:
    """[S] correlations of x and y, [n] or [S, n], in which value i counts weight[:, i] times; NaN where one does not vary."""
    total = weight.sum(-1, keepdims=True)
    weight = weight / np.where(total > 0, total, 1.0)
    a, b = (values - (weight * values).sum(-1, keepdims=True) for values in (x, y))
    aa, bb, ab = ((weight * u * v).sum(-1) for u, v in ((a, a), (b, b), (a, b)))
    varies = (aa > _ROUNDING * (weight * x * x).sum(-1)) & (bb > _ROUNDING * (weight * y * y).sum(-1))
    return np.where(varies, np.clip(ab / np.sqrt(np.where(varies, aa * bb, 1.0)), -1.0, 1.0), np.nan)


def ranks(x: Values, weight: Values) -> Values:
    """[S, n] ranks of x [n] with value i there weight[:, i] times; equal values share their mean rank."""
    _, of = np.unique(x, return_inverse=True)
    order = np.argsort(of, kind="stable")
    starts = np.flatnonzero(np.diff(of[order], prepend=-1))
    count = np.add.reduceat(weight[:, order], starts, axis=1)
    return (count.cumsum(1) - (count - 1) / 2)[:, of]


def spearman(x: Values, y: Values, weight: Values) -> Values:
    """[S] rank correlations; arguments as for `pearson`, x and y [n]."""
    return pearson(ranks(x, weight), ranks(y, weight), weight)


def mean(x: Values, weight: Values) -> Values:
    """[S] weighted means of x [n] over the values that are not NaN; NaN where none is left."""
    there = ~np.isnan(x)
    size = weight[:, there].sum(1)
    return np.where(size > 0, (weight[:, there] * x[there]).sum(1) / np.where(size > 0, size, 1.0), np.nan)


def estimate(found: Values) -> Estimate:
    """The first of `found` [1 + S], and the interval that the others span; resamples in which it is undefined are left out."""
    if not np.isfinite(found[0]):
        return Estimate(None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all of them undefined
        low, high = np.nanpercentile(found[1:], _LEVEL)
    if not np.isfinite(low):
        return Estimate(float(found[0]), None, None)
    return Estimate(float(found[0]), float(low), float(high))
