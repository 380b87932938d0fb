"""Lines over runs: thinned, put on a common grid, averaged over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openrlhf_ext.evaluation import accuracy_over_rollouts
from openrlhf_ext.report.runs import Run

MAX_POINTS = 400
"""Most points of a line."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Runs that share method and learning rate; ``members`` make the line, ``others`` are drawn beside it.

    Members are the finished runs, since one that has just begun would cut the common grid short. Where no run is
    finished, all are members.
    """

    method: str
    lr: float | None
    members: list[Run]
    others: list[Run]


@dataclass(frozen=True, slots=True)
class Band:
    """A line (N,) and its band (N,) each."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def group_runs(runs: Sequence[Run]) -> list[Curve]:
    """One curve for each method and learning rate, in the order of the runs."""
    groups: dict[tuple[str, float | None], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.lr), []).append(run)
    curves = []
    for (method, lr), members in groups.items():
        finished = [run for run in members if run.status == "finished"]
        others = [run for run in members if run.status != "finished"]
        curves.append(Curve(method, lr, finished, others) if finished else Curve(method, lr, members, []))
    return curves


def thin(series: np.ndarray, max_points: int = MAX_POINTS) -> np.ndarray:
    """At most ``max_points`` columns of a (2, N) series, each the mean of as many neighbors; the last of fewer."""
    size = max(1, -(-series.shape[1] // max_points))
    parts = [series[:, i : i + size].mean(axis=1) for i in range(0, series.shape[1], size)]
    return np.array(parts).reshape(-1, 2).T


def seed_band(series: Sequence[np.ndarray], max_points: int = MAX_POINTS) -> Band | None:
    """Mean, smallest and largest value over seeds, at every x that one of them has and all of them cover.

    Args:
        series: (2, N) for each seed, x ascending; linear in between, never continued beyond its ends.

    Returns:
        None where no x is covered by all seeds.
    """
    series = [thin(one, max_points) for one in series if one.shape[1]]
    if not series:
        return None
    start, end = max(one[0, 0] for one in series), min(one[0, -1] for one in series)
    grid = np.unique(np.concatenate([one[0] for one in series]))
    grid = grid[(grid >= start) & (grid <= end)]
    if not len(grid):
        return None
    if len(grid) > MAX_POINTS:
        grid = np.linspace(start, end, MAX_POINTS)
    values = np.array([np.interp(grid, *one) for one in series])
    return Band(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def mean_accuracies(runs: Sequence[Run]) -> tuple[dict[str, float], float]:
    """Accuracy averaged over a common grid of rollouts by run label, and the end of the grid.

    The grid goes to the smallest last evaluation of the finished runs, or of all runs while none is finished; runs
    outside of that choice have no entry.
    """
    curves = {run.label: run.series("eval", "budget/rollouts_generated", "eval/accuracy") for run in runs}
    measured = [run for run in runs if curves[run.label].shape[1]]
    chosen = [run for run in measured if run.status == "finished"] or measured
    if not chosen:
        return {}, 0.0
    grid, *rows = accuracy_over_rollouts([dict(curves[run.label].T.tolist()) for run in chosen])
    return {run.label: float(row.mean()) for run, row in zip(chosen, rows, strict=True)}, float(grid[-1])
