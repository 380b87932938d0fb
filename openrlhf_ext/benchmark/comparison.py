"""A suite of runs as one comparison: at equal rollouts, seed by seed, at every learning rate and at the best ones.

A suite folder has ``suite.json`` (``name``, ``baselines``, ``targets``, ``machine``, ``commit``, and ``runs`` with
``method``, ``lr``, ``seed`` and ``dir``) and the run directories it names. A run with a ``summary.json`` is finished;
the others are left out, and listed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from openrlhf_ext.benchmark.outcomes import (
    Evaluation,
    RunOutcome,
    accuracy_at_seconds,
    first_at,
    read_outcome,
    smoothed,
)
from openrlhf_ext.benchmark.statistics import Paired, Spread, paired_difference, paired_ratio, spread
from openrlhf_ext.evaluation import accuracy_over_rollouts, aes

COSTS = ("rollouts", "tokens", "step", "train_wall_s", "wall_s")
"""What a target costs: fields of ``Evaluation``, all since the start."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run. ``figures`` has those of ``outcomes.py`` and

    * ``accuracy_mean``: mean accuracy over the common grid of rollouts, the headline;
    * ``accuracy_final``: accuracy at the end of that grid;
    * ``accuracy_equal_time``: accuracy after ``Comparison.equal_seconds`` in train steps;
    * ``aes_<baseline>``: AES of the last evaluation against the baseline's, of the same lr and seed.
    """

    method: str
    lr: float
    seed: int
    figures: Mapping[str, float]
    curve: tuple[Evaluation, ...]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run of the suite that is not compared, and why."""

    method: str
    lr: float
    seed: int
    reason: str


@dataclass(frozen=True, slots=True)
class TargetCost:
    """What one method at one lr spends to a target: each of COSTS over seeds, and as ratios to each baseline."""

    target: float
    reached: int
    costs: Mapping[str, Spread]
    ratios: Mapping[str, Mapping[str, Paired]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One method at one lr over its finished seeds.

    ``differences`` are of ``accuracy_mean`` to each baseline, and like ``TargetCost.ratios`` paired by seed. A
    baseline is not compared with itself.
    """

    method: str
    lr: float
    seeds: tuple[int, ...]
    num_planned: int
    figures: Mapping[str, Spread]
    differences: Mapping[str, Paired]
    targets: tuple[TargetCost, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything of a suite that is reported.

    Attributes:
        num_planned: runs of the suite.
        grid_end: rollouts at the end of the common grid, which starts at 0; the smallest last evaluation.
        grid_points: points of the grid; as many as the run with the most evaluations has.
        shortest: the run that ends the grid.
        resolution: median rollouts between evaluations.
        equal_seconds: seconds in train steps at which accuracies are compared: the fewest a run has at its last
            evaluation; None where no run has measured them.
        window: evaluations over which accuracies are smoothed before they are held against a target.
        targets: accuracies; ``targets_from`` says where they come from.
        grid: every method at every lr, against each baseline at the same lr.
        best: every method at its best lr, against each baseline at the baseline's best lr. Best is the highest median
            of ``accuracy_mean``, the lower lr where two are equal.
    """

    name: str
    machine: str
    commit: str
    baselines: tuple[str, ...]
    num_planned: int
    left_out: tuple[LeftOut, ...]
    grid_end: int
    grid_points: int
    shortest: str
    resolution: float
    equal_seconds: float | None
    window: int
    targets: tuple[float, ...]
    targets_from: str
    grid: tuple[Cell, ...]
    best: tuple[Cell, ...]
    runs: tuple[Run, ...]


def compare_suite(suite_dir: Path, *, window: int = 3) -> Comparison:
    """Compare the finished runs of a suite.

    Raises:
        ValueError: no usable ``suite.json``, two runs with the same method, lr and seed, or no finished run.
    """
    suite = _read_suite(suite_dir / "suite.json")
    baselines = tuple(suite.get("baselines", []))
    runs, left_out = _read_runs(suite_dir, suite["runs"])
    if not runs:
        raise ValueError(
            f"{suite_dir}: none of the {len(left_out)} runs can be compared; the first: {left_out[0].reason}"
        )
    shortest = min(runs, key=lambda run: run.curve[-1].rollouts)
    grid_points = max(len(run.curve) for run in runs)
    seconds = [run.curve[-1].train_wall_s for run in runs if run.curve[-1].train_wall_s is not None]
    equal_seconds = min(seconds, default=None)
    runs = _with_common_figures(runs, baselines, grid_points, equal_seconds)

    by_cell: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        by_cell.setdefault((run.method, run.lr), []).append(run)
    best_lr = _best_lrs(by_cell)
    targets, origin = _targets(suite.get("targets", []), runs, baselines, by_cell, best_lr, window)
    num_planned = {key: sum((run["method"], run["lr"]) == key for run in suite["runs"]) for key in by_cell}

    def cell(key: tuple[str, float], rivals: Mapping[str, Sequence[Run]]) -> Cell:
        return _cell(by_cell[key], num_planned[key], rivals, targets, window)

    # Baselines first, then by name.
    order = sorted(by_cell, key=lambda key: (baselines.index(key[0]) if key[0] in baselines else math.inf, *key))
    best_rivals = {name: by_cell[name, best_lr[name]] for name in baselines if name in best_lr}
    return Comparison(
        name=suite["name"],
        machine=suite.get("machine", ""),
        commit=suite.get("commit", ""),
        baselines=baselines,
        num_planned=len(suite["runs"]),
        left_out=tuple(left_out),
        grid_end=shortest.curve[-1].rollouts,
        grid_points=grid_points,
        shortest=f"{shortest.method}, lr {shortest.lr:g}, seed {shortest.seed}",
        resolution=float(np.median(np.concatenate([np.diff([p.rollouts for p in run.curve]) for run in runs]))),
        equal_seconds=equal_seconds,
        window=window,
        targets=targets,
        targets_from=origin,
        grid=tuple(cell(key, {name: by_cell.get((name, key[1]), []) for name in baselines}) for key in order),
        best=tuple(cell(key, best_rivals) for key in order if key[1] == best_lr[key[0]]),
        runs=tuple(runs),
    )


def as_json(comparison: Comparison) -> str:
    """The comparison as one line of JSON, floats rounded to five significant digits; a curve is a list per field."""
    content = asdict(comparison)
    for run in content["runs"]:
        run["curve"] = {name: [point[name] for point in run["curve"]] for name in Evaluation.__slots__}
    return json.dumps(_rounded(content), sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _read_suite(path: Path) -> dict:
    if not path.exists():
        raise ValueError(f"{path} is missing: give the folder of a benchmark suite")
    try:
        suite = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    missing = [name for name in ("name", "runs") if not suite.get(name)]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} missing or empty; is this the folder of a suite?")
    keys = [(run["method"], run["lr"], run["seed"]) for run in suite["runs"]]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{path}: two runs of method {twice[0][0]}, lr {twice[0][1]:g}, seed {twice[0][2]}; drop one")
    return suite


def _read_runs(suite_dir: Path, entries: Sequence[dict]) -> tuple[list[Run], list[LeftOut]]:
    runs, left_out = [], []
    for entry in sorted(entries, key=lambda entry: (entry["method"], entry["lr"], entry["seed"])):
        key = (entry["method"], entry["lr"], entry["seed"])
        outcome = _outcome_or_reason(suite_dir / entry["dir"])
        if isinstance(outcome, str):
            left_out.append(LeftOut(*key, outcome))
        else:
            runs.append(Run(*key, outcome.figures, outcome.curve))
    return runs, left_out


def _outcome_or_reason(run_dir: Path) -> RunOutcome | str:
    """The outcome of a finished run, or why it cannot be compared."""
    failure = run_dir / "failed.json"
    if not (run_dir / "summary.json").exists():
        if not failure.exists():
            return "unfinished"
        lines = json.loads(failure.read_text("utf-8"))["error"].splitlines()
        return f"failed: {lines[0]}" if lines else "failed"
    try:
        return read_outcome(run_dir)
    except ValueError as error:
        return f"unusable: {error}"


def _with_common_figures(
    runs: Sequence[Run], baselines: Sequence[str], grid_points: int, equal_seconds: float | None
) -> list[Run]:
    """The runs with the figures that need the other runs."""
    curves = [{point.rollouts: point.accuracy for point in run.curve} for run in runs]
    _, *accuracies = accuracy_over_rollouts(curves, grid_points)
    by_key = {(run.method, run.lr, run.seed): run for run in runs}
    results = []
    for run, row in zip(runs, accuracies, strict=True):
        figures = {**run.figures, "accuracy_mean": float(row.mean()), "accuracy_final": float(row[-1])}
        if equal_seconds is not None and (at_time := accuracy_at_seconds(run.curve, equal_seconds)) is not None:
            figures["accuracy_equal_time"] = at_time
        for name in baselines:
            base = by_key.get((name, run.lr, run.seed))
            if base is not None and name != run.method and (score := _aes_against(run, base)) is not None:
                figures[f"aes_{name}"] = score
        results.append(replace(run, figures=figures))
    return results


def _aes_against(run: Run, base: Run) -> float | None:
    length, base_length, base_accuracy = run.figures.get("length"), base.figures.get("length"), base.curve[-1].accuracy
    if not (length and base_length and base_accuracy):
        return None
    return aes(run.curve[-1].accuracy, length, base_accuracy, base_length)


def _best_lrs(by_cell: Mapping[tuple[str, float], Sequence[Run]]) -> dict[str, float]:
    best: dict[str, tuple[float, float]] = {}
    for (method, lr), runs in by_cell.items():
        score = (float(np.median([run.figures["accuracy_mean"] for run in runs])), -lr)
        best[method] = max(best.get(method, score), score)
    return {method: -negative for method, (_, negative) in best.items()}


def _targets(
    given: Sequence[float],
    runs: Sequence[Run],
    baselines: Sequence[str],
    by_cell: Mapping[tuple[str, float], Sequence[Run]],
    best_lr: Mapping[str, float],
    window: int,
) -> tuple[tuple[float, ...], str]:
    """The suite's targets; without any, half and nine tenths of what the first baseline gains at its best lr."""
    if given:
        return tuple(given), "named in suite.json"
    if not baselines or baselines[0] not in best_lr:
        return (), "none: suite.json names none, and there is no finished run of a first baseline"
    baseline = baselines[0]
    start = float(np.mean([run.curve[0].accuracy for run in runs]))
    rivals = by_cell[baseline, best_lr[baseline]]
    end = float(np.median([smoothed([point.accuracy for point in run.curve], window)[-1] for run in rivals]))
    origin = (
        f"mean start accuracy of all runs {start:.4f}; last smoothed accuracy of {baseline} at its best lr "
        f"{best_lr[baseline]:g} {end:.4f} (median of {len(rivals)} seeds)"
    )
    if end <= start:
        return (), f"none: {origin}, which is no gain"
    return tuple(
        round(start + share * (end - start), 4) for share in (0.5, 0.9)
    ), f"50 % and 90 % of the way from {origin}"


def _cell(
    runs: Sequence[Run],
    num_planned: int,
    rivals: Mapping[str, Sequence[Run]],
    targets: Sequence[float],
    window: int,
) -> Cell:
    method, lr = runs[0].method, runs[0].lr
    rivals = {name: others for name, others in rivals.items() if name != method}
    names = sorted({name for run in runs for name in run.figures})
    means = _by_seed(runs)
    return Cell(
        method=method,
        lr=lr,
        seeds=tuple(run.seed for run in runs),
        num_planned=num_planned,
        figures={name: spread([run.figures[name] for run in runs if name in run.figures]) for name in names},
        differences={name: paired_difference(means, _by_seed(others)) for name, others in rivals.items()},
        targets=tuple(_target_cost(runs, rivals, target, window) for target in targets),
    )


def _by_seed(runs: Sequence[Run]) -> dict[int, float]:
    return {run.seed: run.figures["accuracy_mean"] for run in runs}


def _target_cost(runs: Sequence[Run], rivals: Mapping[str, Sequence[Run]], target: float, window: int) -> TargetCost:
    costs = {name: _costs(runs, target, name, window) for name in COSTS}
    return TargetCost(
        target=target,
        reached=sum(math.isfinite(cost) for cost in costs["rollouts"].values()),
        costs={name: spread(list(by_seed.values())) for name, by_seed in costs.items() if by_seed},
        ratios={
            rival: {name: paired_ratio(costs[name], _costs(others, target, name, window)) for name in COSTS}
            for rival, others in rivals.items()
        },
    )


def _costs(runs: Sequence[Run], target: float, name: str, window: int) -> dict[int, float]:
    """What each seed spends to the target: infinity where it is not reached, absent where it is not measured."""
    points = {run.seed: first_at(run.curve, target, window) for run in runs}
    costs = {seed: math.inf if point is None else getattr(point, name) for seed, point in points.items()}
    return {seed: cost for seed, cost in costs.items() if cost is not None}


def _rounded(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
