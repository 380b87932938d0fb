"""Run and suite folders written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def eval_line(step: int, accuracy: float, **more: object) -> dict:
    """An evaluation after ``step`` steps of 100 rollouts, 1000 tokens and 2 s each; 3 s more in ``wall_s`` a step."""
    return {
        "kind": "eval",
        "step": step,
        "eval/accuracy": accuracy,
        "eval/accuracy_se": 0.01,
        "budget/rollouts_generated": 100 * step,
        "budget/tokens_generated": 1000 * step,
        "train_wall_s": 2.0 * step,
        "wall_s": 10.0 + 5.0 * step,
        **more,
    }


def train_line(step: int, **more: object) -> dict:
    return {"kind": "train", "step": step, "budget/rollouts_generated": 100 * step, "timing/step_total": 2.0, **more}


def write_lines(folder: Path, lines: Sequence[Mapping[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder: Path, accuracies: Sequence[float], **last: object) -> None:
    """A finished run that is evaluated after every step; ``last`` goes into its last evaluation."""
    evals = [eval_line(step, accuracy) for step, accuracy in enumerate(accuracies)]
    evals[-1] |= last
    write_lines(folder, [*evals, *(train_line(step) for step in range(1, len(accuracies)))])
    (folder / "summary.json").write_text(json.dumps({"startup_s": 10.0}))


def write_suite(folder: Path, runs: Sequence[tuple[str, float, int]], **more: object) -> None:
    """``suite.json``; the run of (method, lr, seed) is in the folder that ``run_folder`` names."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        {"method": method, "lr": lr, "seed": seed, "dir": run_folder(method, lr, seed)} for method, lr, seed in runs
    ]
    content = {"name": "toy", "baselines": ["grpo", "dapo"], "targets": [], "machine": "2 cores", "commit": "abc"}
    (folder / "suite.json").write_text(json.dumps({**content, "runs": entries, **more}))


def run_folder(method: str, lr: float, seed: int) -> str:
    return f"runs/{method}-lr{lr:g}-seed{seed}"
