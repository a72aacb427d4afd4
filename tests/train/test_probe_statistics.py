"""The probe's weighted correlations against the same of data with each value repeated, and its verdict by hand."""

from __future__ import annotations

import numpy as np
import pytest

from datc_train.credit_point import CreditPoint
from datc_train.probe.judge import Verdict, recommend, verdict
from datc_train.probe.replacements import Drawn
from datc_train.probe.statistics import estimate, mean, pearson, ranks, resamples, spearman


def mean_ranks(x: np.ndarray) -> np.ndarray:
    return np.array([(x < value).sum() + ((x == value).sum() + 1) / 2 for value in x])


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_repetitions(seed: int) -> None:
    chance = np.random.default_rng(seed)
    x, y = np.round(chance.normal(size=(2, 30)), 1)  # ties
    x[:4] = y[:4]
    weight = chance.integers(0, 4, size=(7, 30)).astype(float)
    for count, r, rank, average in zip(weight, pearson(x, y, weight), spearman(x, y, weight), mean(x, weight), strict=True):
        a, b = (np.repeat(values, count.astype(int)) for values in (x, y))
        assert r == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-12)
        assert rank == pytest.approx(np.corrcoef(mean_ranks(a), mean_ranks(b))[0, 1], abs=1e-12)
        assert average == pytest.approx(a.mean(), abs=1e-12)
    assert ranks(x, np.ones((1, 30)))[0] == pytest.approx(mean_ranks(x))


def test_what_does_not_vary_has_no_correlation() -> None:
    for constant in (0.1, 1e9, -7.3, 0.0):
        for many in (3, 7, 1000):
            some = np.linspace(0, 1, many)
            weight = np.ones((2, many)) * [[1], [0.3]]
            assert np.isnan(pearson(np.full(many, constant), some, weight)).all()
            assert np.isnan(spearman(some, np.full(many, constant), weight)).all()
    one = np.ones((1, 4))
    assert np.isnan(pearson(np.ones(4), np.arange(4.0), one)).all()
    assert np.isnan(spearman(np.arange(4.0), np.zeros(4), one)).all()
    assert np.isnan(mean(np.full(4, np.nan), one)).all()
    assert mean(np.array([np.nan, 1.0, np.nan, 3.0]), one)[0] == 2
    assert estimate(np.array([np.nan, 1.0])).value is None
    alone = estimate(np.array([0.5, np.nan, np.nan]))
    assert (alone.value, alone.low, alone.high) == (0.5, None, None)


def test_resamples() -> None:
    counts = resamples(8, seed=3)
    assert (counts[0] == 1).all()
    assert (counts.sum(1) == 8).all()
    assert counts[1:].mean() == pytest.approx(1)
    assert counts[1:].std() == pytest.approx((7 / 8) ** 0.5, rel=0.05)  # of a binomial
    assert np.array_equal(counts, resamples(8, seed=3))
    assert not np.array_equal(counts, resamples(8, seed=4))


def test_an_interval_covers_as_often_as_it_says() -> None:
    """Two noisy values a response: of 200 bootstrap intervals of a correlation that is 0.6, about 95 % hold it."""
    chance = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        common = chance.normal(size=40).repeat(2)
        x, noise = (common + chance.normal(size=80) for _ in range(2))
        y = x + noise
        counts = resamples(40, trial)[:, np.arange(40).repeat(2)]
        found = estimate(pearson(x, y, counts))
        truth = 2 + 2 * 0.5  # cov(x, y) = var x + cov(x, noise) = 2 + 1;  var y = 2 + 2 + 2
        held += found.low <= truth / (2 * 6) ** 0.5 <= found.high  # type: ignore[operator]
    assert 0.85 <= held / 200 <= 1.0


def drawn(response: int, probabilities: list[float]) -> Drawn:
    return Drawn(response, 0, 0, False, 0, np.log(probabilities), tuple(range(1, len(probabilities))))


def test_a_y_by_hand() -> None:
    """A_y = R_y - sum p R over the token and its alternatives, p renormalised."""
    some = [drawn(0, [0.2, 0.1, 0.1]), drawn(1, [0.5, 0.25, 0.05]), drawn(2, [0.1, 0.3, 0.2]), drawn(2, [0.3, 0.3, 0.3])]
    change = [np.array(x) for x in ([1.0, 3.0], [-1.0, 2.0], [0.5, -2.0], [1.0, 1.5])]
    guess = [np.array(x) for x in ([2.0, 1.0], [-1.0, 0.0], [0.0, -3.0], [1.0, -1.0])]
    by_hand = {
        name: np.array(
            [
                -(x[0][0] + x[0][1]) / 4,
                -(0.25 * x[1][0] + 0.05 * x[1][1]) / 0.8,
                -(0.3 * x[2][0] + 0.2 * x[2][1]) / 0.6,
                -(x[3][0] + x[3][1]) / 3,
            ]
        )
        for name, x in (("guess", guess), ("truth", change))
    }
    found = verdict(some, guess, change, resamples(3, 0)).quality
    assert found.advantage_pearson.value == pytest.approx(np.corrcoef(by_hand["guess"], by_hand["truth"])[0, 1])
    flat = [np.concatenate(x) for x in (guess, change)]
    assert found.all_pearson.value == pytest.approx(np.corrcoef(*flat)[0, 1])
    assert found.all_spearman.value == pytest.approx(np.corrcoef(mean_ranks(flat[0]), mean_ranks(flat[1]))[0, 1])
    assert found.within_pearson.value == found.within_spearman.value == pytest.approx((-1 + 1 + 1 - 1) / 4)


def test_the_recommendation_climbs_only_clear_steps() -> None:
    chance = np.random.default_rng(0)
    some = [drawn(i, [0.4, 0.3, 0.1]) for i in range(60)]
    truth = list(chance.normal(size=(60, 2)))
    counts = resamples(60, 0)

    def point(noise: float) -> Verdict:
        return verdict(some, [t + noise * chance.normal(size=2) for t in truth], truth, counts)

    points = [CreditPoint("integrated", passes) for passes in (1, 2, 3, 4)]

    def choose(*noises: float) -> int:
        best, reason = recommend([(p, p.name, point(n)) for p, n in zip(points, noises, strict=True)])
        assert reason.startswith(best.name)
        return best.passes

    assert choose(1.0, 1.0, 1.0, 1.0) == 1
    assert choose(3.0, 3.0, 0.5, 0.5) == 3
    assert choose(3.0, 1.0, 3.0, 0.1) == 4
    assert choose(0.1, 3.0, 3.0, 3.0) == 1
    assert choose(1e6, 1.0, 1.0, 1.0) == 2  # what is not told from 0 is not where to begin


def test_where_no_point_is_told_from_0_the_cheapest_stays() -> None:
    chance = np.random.default_rng(1)
    some, truth = [drawn(i, [0.4, 0.3, 0.1]) for i in range(60)], list(chance.normal(size=(60, 2)))
    points = [
        (CreditPoint("integrated", passes), "p", verdict(some, list(chance.normal(size=(60, 2))), truth, resamples(60, 0)))
        for passes in (1, 2)
    ]
    best, reason = recommend(points)
    assert best.passes == 1
    assert "no point's is told from 0" in reason
