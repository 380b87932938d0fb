"""A comparison as Markdown tables, narrow enough to be read as plain text. A dash is what was not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from openrlhf_ext.benchmark.comparison import Cell, Comparison, TargetCost, as_json, compare_suite
from openrlhf_ext.benchmark.statistics import Paired, Spread

Column = tuple[str, str, str]
"""Heading, name of a figure, and how it is formatted."""

_GROUPS: tuple[Column, ...] = (
    ("effective, generated", "effective_generated", ".3f"),
    ("effective, trained", "effective_trained", ".3f"),
    ("reward variance, trained", "reward_variance_trained", ".3f"),
    ("gradient rows a rollout", "gradient_rollouts", ".2f"),
    ("prompts left in the pool", "prompts_left", ",.0f"),
)
_POLICY: tuple[Column, ...] = (
    ("distance", "distance", ".3g"),
    ("relative", "distance_relative", ".2%"),
    ("gradient norm", "grad_norm", ".3g"),
    ("entropy", "entropy", ".3f"),
    ("fresh", "share_fresh", ".2f"),
    ("filled", "share_filled", ".2f"),
    ("replayed", "share_replayed", ".2f"),
)
_SECONDS: tuple[Column, ...] = (
    ("accuracy at equal time", "accuracy_equal_time", ".3f"),
    ("steps", "steps", ",.0f"),
    ("step s", "step_s", ".2f"),
    ("start s", "startup_s", ".1f"),
    ("evaluation s", "eval_s", ".1f"),
    ("run s", "wall_s", ".0f"),
)
_PASS: tuple[Column, ...] = tuple((f"pass@{k}", f"pass@{k}", ".3f") for k in (1, 2, 4, 8, 16, 32))
_LENGTHS: tuple[Column, ...] = (
    ("tokens", "length", ".1f"),
    ("correct", "length_correct", ".1f"),
    ("wrong", "length_wrong", ".1f"),
    ("AES to start", "aes_base", "+.2f"),
)


def write_results(suite_dir: Path, *, window: int = 3) -> Comparison:
    """Compare a suite and write ``results.json`` and ``results.md`` into its folder. Raises as ``compare_suite``."""
    comparison = compare_suite(suite_dir, window=window)
    (suite_dir / "results.json").write_text(as_json(comparison), "utf-8")
    (suite_dir / "results.md").write_text(render_markdown(comparison), "utf-8")
    return comparison


def render_markdown(comparison: Comparison) -> str:
    """The page: what was compared, then the tables."""
    grid, best, baselines = comparison.grid, comparison.best, comparison.baselines
    aes = (*_LENGTHS, *((f"AES to {name}", f"aes_{name}", "+.2f") for name in baselines))
    parts = [
        _introduction(comparison),
        "## Accuracy at equal rollouts",
        "Mean over the grid, and at its end. Differences are of the mean, to the baseline at the same lr and seed.",
        _accuracy_table(grid, baselines),
        *_target_parts(comparison),
        "## Best against best",
        "Every method at the lr with its highest median of the mean accuracy, against each baseline at the baseline's "
        "own best lr, paired by seed. The lr is chosen on the runs that are shown, so this flatters every method with "
        "more lrs than its rival has.",
        _accuracy_table(best, baselines),
        *_per_target(comparison, best, "rollouts"),
        "## Wall-clock time",
        _time_sentence(comparison),
        _figure_table(grid, _SECONDS),
        *_per_target(comparison, grid, "train_wall_s"),
        "Share of the time in train steps by phase:",
        _phase_table(grid),
        "## Diagnostics",
        "Groups count as effective when their rewards differ. Gradient rows a rollout: trained rows with an advantage "
        "other than 0 for each generated rollout; replayed rows count each time.",
        _figure_table(grid, _GROUPS),
        "How far the policy is from the start (L2 norm of the parameters' change, and relative to their norm at the "
        "start), entropy in nats a token over the last tenth of the steps, and trained rows by origin.",
        _figure_table(grid, _POLICY),
        "## pass@k, response lengths and AES",
        "Of the last evaluation, which samples each prompt more often than the others. AES (O1-Pruner, arXiv "
        "2501.12570; alpha 1, beta 3, gamma 5) against the run's own start, and against the baseline of the same lr "
        "and seed. Lengths are mean tokens per response.",
        _figure_table(grid, _PASS),
        _figure_table(grid, aes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(comparison: Comparison) -> str:
    c = comparison
    left_out = [f"- Left out: {run.method}, lr {run.lr:g}, seed {run.seed}: {run.reason}" for run in c.left_out]
    lines = [
        f"# Benchmark {c.name}",
        "",
        f"- {len(c.runs)} of {c.num_planned} runs are compared.",
        *left_out,
        f"- Machine: {c.machine or '-'}; commit: {c.commit or '-'}.",
        f"- Common grid: {c.grid_points} points from 0 to {c.grid_end:,} rollouts, the end of the shortest run "
        f"({c.shortest}), linear between evaluations (one every {c.resolution:,.0f} rollouts, median).",
        "- Over seeds: median [lowest, highest]. A seed that does not reach a target counts as later than the others.",
        "- Paired by seed: mean of differences, geometric mean of ratios, [95 % bootstrap interval over seeds] from "
        "three pairs on, (pairs used/pairs). With so few seeds the interval is narrower than its level says.",
    ]
    return "\n".join(lines)


def _target_parts(comparison: Comparison) -> list[str]:
    c = comparison
    targets = ", ".join(f"{target:.4f}" for target in c.targets) or "-"
    smoothing = f"a centered mean of {c.window} evaluations" if c.window > 1 else "not smoothed"
    return [
        "## Rollouts to a target accuracy",
        f"Targets: {targets}; {c.targets_from}. Reached at the first evaluation at or above the target ({smoothing}); "
        "nothing is extrapolated. Ratios below 1 are fewer rollouts, over the pairs in which both runs reach it.",
        *_per_target(c, c.grid, "rollouts"),
    ]


def _time_sentence(comparison: Comparison) -> str:
    seconds = comparison.equal_seconds
    equal = "Train times were not measured." if seconds is None else f"Equal time is {seconds:,.1f} s in train steps."
    return f"{equal} Seconds a step are medians. Train seconds leave out start-up and evaluation; run seconds do not."


def _accuracy_table(cells: Sequence[Cell], baselines: Sequence[str]) -> str:
    header = ["method", "lr", "seeds", "mean accuracy", "final accuracy", *(f"minus {name}" for name in baselines)]
    rows = [
        [
            *_name(cell),
            f"{len(cell.seeds)}/{cell.num_planned}",
            _spread(cell.figures["accuracy_mean"], ".3f"),
            _spread(cell.figures["accuracy_final"], ".3f"),
            *(_paired(cell.differences.get(name), "+.3f") for name in baselines),
        ]
        for cell in cells
    ]
    return _table(header, rows)


def _per_target(comparison: Comparison, cells: Sequence[Cell], cost: str) -> list[str]:
    """A caption and a table for each target, of ``cost`` and its ratios: rollouts or train_wall_s."""
    is_time = cost == "train_wall_s"
    parts = []
    for i, target in enumerate(comparison.targets):
        header = ["method", "lr", "reached", "train s" if is_time else "rollouts"]
        header += [f"ratio to {name}" for name in comparison.baselines]
        header += ["steps", "wall s"] if is_time else ["tokens"]
        rows = [[*_name(cell), *_target_row(cell, cell.targets[i], cost, comparison.baselines)] for cell in cells]
        parts += [f"Accuracy {target:.4f}:", _table(header, rows)]
    return parts


def _target_row(cell: Cell, found: TargetCost, cost: str, baselines: Sequence[str]) -> list[str]:
    others = [("step", ",.0f"), ("wall_s", ",.0f")] if cost == "train_wall_s" else [("tokens", ",.0f")]
    return [
        f"{found.reached}/{len(cell.seeds)}",
        _spread(found.costs.get(cost), ",.1f" if cost == "train_wall_s" else ",.0f"),
        *(_paired(found.ratios[name][cost] if name in found.ratios else None, ".2f") for name in baselines),
        *(_median(found.costs.get(name), spec) for name, spec in others),
    ]


def _phase_table(cells: Sequence[Cell]) -> str:
    rows = []
    for cell in cells:
        phases = {name: x.median for name, x in cell.figures.items() if name.startswith("phase/")}
        shares = [f"{name.removeprefix('phase/')} {share:.0%}" for name, share in phases.items()]
        rows.append([*_name(cell), ", ".join(shares) or "-"])
    return _table(["method", "lr", "median share"], rows)


def _figure_table(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    """Medians over seeds; ranges are in results.json."""
    header = ["method", "lr", *(heading for heading, _, _ in columns)]
    rows = [[*_name(cell), *(_median(cell.figures.get(name), spec) for _, name, spec in columns)] for cell in cells]
    return _table(header, rows)


def _name(cell: Cell) -> list[str]:
    return [cell.method, f"{cell.lr:g}"]


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _median(found: Spread | None, spec: str) -> str:
    return _number(found.median if found else None, spec)


def _spread(found: Spread | None, spec: str) -> str:
    """``median [lowest, highest]``; a dash where no seed has the figure."""
    if found is None or found.low is None:
        return "-"
    return f"{_number(found.median, spec)} [{_number(found.low, spec)}, {_number(found.high, spec)}]"


def _paired(found: Paired | None, spec: str) -> str:
    """``estimate [low, high] (used/pairs)``; a dash for the interval below three pairs, and where none is used."""
    if found is None or not found.pairs:
        return "-"
    interval = "-" if found.low is None else f"{_number(found.low, spec)}, {_number(found.high, spec)}"
    estimate = "-" if found.estimate is None else f"{_number(found.estimate, spec)} [{interval}]"
    return f"{estimate} ({found.used}/{found.pairs})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["| " + " | ".join(x.ljust(width) for x, width in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)
