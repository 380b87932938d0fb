"""``python -m openrlhf_ext.cli.show_run RUN_DIR``: what a finished run learned and what it spent, as a table.

With several folders, their accuracies at equal rollouts, side by side; those runs may still be going on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, TypeVar, cast

from openrlhf_ext.evaluation import accuracy_over_rollouts
from openrlhf_ext.run_dir import read_metrics


class Measured(TypedDict, total=False):
    """The entries of ``summary.json`` that come from evaluations: shares in [0, 1] with their standard errors.

    Absent or None where no evaluation was made.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    accuracy_se_before: float | None
    accuracy_se_after: float | None
    accuracy_gain: float | None
    accuracy_gain_se: float | None
    eval_samples: int


class Summary(Measured):
    """``summary.json``."""

    method: str
    steps: int
    rollouts_generated: int
    tokens_generated: int
    startup_s: float
    wall_s: float
    train_wall_s: float
    step_seconds_median: dict[str, float]


class Ledger(TypedDict):
    """``ledger.json``: rollouts generated for training, and how many went where."""

    generated: int
    replayed: int
    waiting: int
    fates: dict[str, int]


T = TypeVar("T", Summary, Ledger)


def read_json(path: Path, kind: type[T]) -> T:
    """The JSON object in ``path``. Raises ValueError where the file or one of ``kind``'s entries is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the run did not finish, or this is not the folder of a run") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    missing = sorted(kind.__required_keys__ - content.keys())
    if missing:
        raise ValueError(f"{path}: missing {', '.join(missing)}; was it written by another version?")
    return cast(T, content)


def learned_lines(summary: Summary) -> list[str]:
    """Accuracy before and after, each with its standard error; a dash where none was measured."""
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    lines = [
        f"evaluation samples        {summary.get('eval_samples') or 0:,}",
        f"accuracy before           {_with_error(before, summary.get('accuracy_se_before'))}",
        f"accuracy after            {_with_error(after, summary.get('accuracy_se_after'))}",
    ]
    if summary.get("accuracy_gain") is not None:
        gain = f"{summary['accuracy_gain']:+.3f} +- {summary['accuracy_gain_se']:.3f}"
        lines.append(f"gain, prompt by prompt    {gain}")
    return lines


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if error is None else f"{value:.3f} +- {error:.3f}"


def spent_lines(summary: Summary, ledger: Ledger) -> list[str]:
    """Steps, seconds, tokens and rollouts, then the share of the rollouts that went to each place."""
    generated = ledger["generated"]
    seconds = (
        f"{summary['wall_s']:.0f}, of which start {summary['startup_s']:.0f}, steps {summary['train_wall_s']:.0f}"
    )
    phases = summary["step_seconds_median"]
    places = [*ledger["fates"].items(), ("waiting", ledger["waiting"])]
    split = ", ".join(f"{name} {value:.2f}" for name, value in phases.items() if name != "step_total")
    return [
        f"train steps               {summary['steps']}",
        f"seconds                   {seconds}",
        f"seconds a step (median)   {phases.get('step_total', 0.0):.2f}: {split}",
        f"tokens generated          {summary['tokens_generated']:,}",
        f"rollouts generated        {generated:,}",
        *(f"  {fate:<24}{count:,} ({count / generated:.1%})" for fate, count in places if count),
        *([f"rollouts trained again    {ledger['replayed']:,}"] if ledger["replayed"] else []),
    ]


def render(run_dir: Path) -> str:
    """The table of one run folder."""
    summary = read_json(run_dir / "summary.json", Summary)
    ledger = read_json(run_dir / "ledger.json", Ledger)
    parts = [
        [f"method                    {summary['method']}", *learned_lines(summary)],
        spent_lines(summary, ledger),
        [f"in {run_dir}:", *(f"  {path.name}" for path in sorted(run_dir.iterdir()))],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def compare(run_dirs: Sequence[Path], num_points: int = 11) -> str:
    """Accuracies of runs at equal rollouts, a line for each. Raises ValueError for a run without an evaluation."""
    curves = []
    for run_dir in run_dirs:
        rows = read_metrics(run_dir, "eval")
        curves.append({row["budget/rollouts_generated"]: row["eval/accuracy"] for row in rows})
        if not curves[-1]:
            raise ValueError(f"{run_dir / 'metrics.jsonl'}: no evaluation yet; is this the folder of a run?")
    grid, *accuracies = accuracy_over_rollouts(curves, num_points)
    width = max(len(str(run_dir)) for run_dir in run_dirs)
    lines = [f"{'accuracy after rollouts':<{width}}{''.join(f'{round(x):>8,}' for x in grid)}    mean"]
    for run_dir, row in zip(run_dirs, accuracies, strict=True):
        lines.append(f"{str(run_dir):<{width}}{''.join(f'{x:8.3f}' for x in row)}{row.mean():8.3f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="show_run", description="What a finished run learned and what it spent.")
    parser.add_argument("run_dir", type=Path, nargs="+", help="the folder that was given as --ext.run_dir")
    args = parser.parse_args(argv)
    try:
        print(render(args.run_dir[0]) if len(args.run_dir) == 1 else compare(args.run_dir))
    except ValueError as error:
        print(f"show_run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
