"""Figures over seeds: median and range, and paired comparisons with a bootstrap interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Resampling one or two pairs gives an interval that says nothing.
_MIN_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of one figure over ``count`` seeds; None stands for a target that is not reached."""

    median: float | None
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Paired:
    """A comparison over ``used`` of ``pairs`` pairs of runs with the same seed.

    ``low`` and ``high`` are the ends of a 95 % interval; None below three used pairs. ``estimate`` is None without a
    used pair.
    """

    estimate: float | None
    low: float | None
    high: float | None
    used: int
    pairs: int


def spread(values: Sequence[float]) -> Spread:
    """Median and range of at least one value. Infinity is a target that is not reached.

    A seed that does not reach its target counts as later than every seed that does, so the median is None unless more
    than half of the seeds reach it. A median over those that reach it would flatter a method that seldom does.
    """
    figures = (float(np.median(values)), min(values), max(values))
    median, low, high = (value if math.isfinite(value) else None for value in figures)
    return Spread(median, low, high, len(values))


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of ``values`` (Efron and Tibshirani 1993, chapter 13).

    With the three to five seeds of a benchmark it is narrower than its level says. The same values in the same order
    give the same interval.
    """
    means = np.random.default_rng(seed).choice(values, size=(num_resamples, len(values))).mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    """Mean of ours minus theirs over the seeds that both have. The mappings are from seed to figure."""
    seeds = sorted(ours.keys() & theirs.keys())
    return _paired([ours[seed] - theirs[seed] for seed in seeds], len(seeds))


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    """Geometric mean of ours divided by theirs over the seeds that both have; 1 when neither costs more.

    The geometric mean, because twice and half then cancel, and the ratio of theirs to ours is the inverse. Used are
    the pairs in which both are finite and above 0: a target that a run does not reach, or is at from the start, has
    no ratio.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    pairs = [(ours[seed], theirs[seed]) for seed in seeds]
    logs = [math.log(a / b) for a, b in pairs if 0 < a < math.inf and 0 < b < math.inf]
    found = _paired(logs, len(seeds))
    estimate, low, high = (None if x is None else math.exp(x) for x in (found.estimate, found.low, found.high))
    return Paired(estimate, low, high, found.used, found.pairs)


def _paired(values: Sequence[float], pairs: int) -> Paired:
    if not values:
        return Paired(None, None, None, 0, pairs)
    low, high = bootstrap_interval(values) if len(values) >= _MIN_PAIRS else (None, None)
    return Paired(float(np.mean(values)), low, high, len(values), pairs)
