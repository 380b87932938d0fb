"""Median and range over seeds, and paired comparisons."""

import math

import numpy as np
import pytest

from openrlhf_ext.benchmark.statistics import (
    Paired,
    Spread,
    bootstrap_interval,
    paired_difference,
    paired_ratio,
    spread,
)


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0, count=3)
    assert spread([3.0, 1.0]).median == 2.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([10.0, math.inf, 20.0], Spread(20.0, 10.0, None, 3)),  # two of three reach: the later of them
        ([10.0, math.inf], Spread(None, 10.0, None, 2)),  # half of them: between 10 and never
        ([math.inf, math.inf, 10.0], Spread(None, 10.0, None, 3)),
        ([math.inf], Spread(None, None, None, 1)),
    ],
)
def test_a_seed_that_does_not_reach_is_later_than_all_that_do(values: list[float], expected: Spread) -> None:
    assert spread(values) == expected


def test_a_difference_is_over_the_seeds_that_both_have() -> None:
    found = paired_difference({1: 0.3, 2: 0.5, 9: 9.0}, {1: 0.2, 2: 0.2, 8: 8.0})
    assert found.estimate == pytest.approx(0.2)  # (0.1 + 0.3) / 2
    assert (found.used, found.pairs) == (2, 2)


def test_below_three_pairs_there_is_no_interval() -> None:
    two, three = ({seed: float(seed) for seed in range(n)} for n in (2, 3))
    assert paired_difference(two, dict.fromkeys(two, 0.0)).low is None
    found = paired_difference(three, dict.fromkeys(three, 0.0))
    assert found.low is not None and found.low < found.estimate < found.high  # type: ignore[operator]


def test_without_a_common_seed_there_is_no_estimate() -> None:
    assert paired_difference({1: 0.3}, {2: 0.3}) == Paired(None, None, None, 0, 0)


def test_a_ratio_is_the_geometric_mean_so_that_twice_and_half_cancel() -> None:
    found = paired_ratio({1: 200.0, 2: 50.0}, {1: 100.0, 2: 100.0})
    assert found.estimate == pytest.approx(1.0)
    assert paired_ratio({1: 100.0}, {1: 400.0}).estimate == pytest.approx(0.25)


def test_the_ratio_the_other_way_round_is_the_inverse() -> None:
    ours, theirs = {1: 300.0, 2: 500.0, 3: 800.0}, {1: 700.0, 2: 600.0, 3: 500.0}
    there, back = paired_ratio(ours, theirs), paired_ratio(theirs, ours)
    assert there.estimate * back.estimate == pytest.approx(1.0)  # type: ignore[operator]
    assert there.low < there.estimate < there.high  # type: ignore[operator]


@pytest.mark.parametrize("cost", [math.inf, 0.0])
def test_a_pair_without_two_costs_has_no_ratio_but_is_counted(cost: float) -> None:
    found = paired_ratio({1: 50.0, 2: cost}, {1: 100.0, 2: 100.0})
    assert found.estimate == pytest.approx(0.5)
    assert (found.used, found.pairs) == (1, 2)
    assert paired_ratio({2: cost}, {2: 100.0}) == Paired(None, None, None, 0, 1)


def test_the_interval_is_of_the_mean_and_repeatable() -> None:
    values = list(np.random.default_rng(1).normal(5.0, 2.0, size=400))
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    # Of many values it is the normal interval: mean -+ 1.96 standard errors, here 0.1.
    mean, error = np.mean(values), np.std(values) / 20
    assert (low, high) == (pytest.approx(mean - 1.96 * error, abs=0.03), pytest.approx(mean + 1.96 * error, abs=0.03))
    narrow_low, narrow_high = bootstrap_interval(values, level=0.5)
    assert low < narrow_low < narrow_high < high


def test_equal_values_have_an_interval_without_width() -> None:
    assert bootstrap_interval([0.25, 0.25, 0.25]) == (0.25, 0.25)
