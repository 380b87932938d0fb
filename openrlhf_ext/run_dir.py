"""The run directory: everything a run leaves behind, readable while it runs.

==================  ================================================================================
config.yaml         the resolved configuration, loadable as ``--config``; without secrets
metrics.jsonl       one JSON object per train step (``kind: train``) and evaluation (``kind: eval``)
ledger.json         ``generated`` and ``fates``, whose values sum to it
eval_prompts.jsonl  accuracy by prompt id, one line for each evaluation
replay.jsonl        which stored groups each step trained, and the step that generated each
samples.jsonl       a few rollouts of every step, as text
summary.json        the outcome, written at the end
logs/               a link to Ray's worker logs
==================  ================================================================================

Figures go to TensorBoard and Weights & Biases as well when those are switched on (``trackers.py``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_TAIL_BYTES = 2**18
"""Many times a line, which is a few thousand bytes."""


class RunDirectory:
    """Writes the files above. Every line is flushed, whole files are replaced atomically."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def write_config(self, text: str) -> None:
        self._replace("config.yaml", text)

    def log(self, kind: str, step: int, metrics: Mapping[str, object]) -> None:
        """Append one line to metrics.jsonl. Numbers that are not finite become null (JSON has none)."""
        self._append("metrics.jsonl", [{"kind": kind, "step": step, **metrics}])

    def log_eval_prompts(self, step: int, accuracy: Mapping[str, float]) -> None:
        self._append("eval_prompts.jsonl", [{"step": step, "accuracy": accuracy}])

    def log_samples(self, samples: Iterable[Mapping[str, object]]) -> None:
        self._append("samples.jsonl", samples)

    def log_replayed(self, step: int, origin: str, births: Sequence[tuple[str, str, int, int]]) -> None:
        """Trace what a step replays: (group id, prompt id, step of birth, rollouts) each."""
        names = ("group_id", "prompt_id", "born_step", "rollouts")
        groups = [dict(zip(names, birth, strict=True)) for birth in births]
        if groups:
            self._append("replay.jsonl", [{"step": step, "origin": origin, "groups": groups}])

    def write_json(self, name: str, content: Mapping[str, object]) -> None:
        self._replace(name, json.dumps(_finite(content), indent=2) + "\n")

    def link_logs(self, target: str) -> None:
        """Point ``logs`` at a folder of worker logs (of the latest attempt)."""
        link = self.path / "logs"
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(target)

    def forget_after(self, step: int, *, evaluated: int | None = None) -> None:
        """Drop the lines of steps after ``step``, and the outcome: a run that goes on from there does those again.

        Args:
            evaluated: the last step whose evaluation is kept, where that is an earlier one.
        """
        last_evaluated = step if evaluated is None else evaluated
        for name in ("metrics.jsonl", "eval_prompts.jsonl", "replay.jsonl", "samples.jsonl"):
            file = self.path / name
            if file.exists():
                lines = [
                    line
                    for line in file.read_text("utf-8").splitlines()
                    if _step_of(line) <= (last_evaluated if _is_evaluation(name, line) else step)
                ]
                self._replace(name, "".join(line + "\n" for line in lines))
        (self.path / "summary.json").unlink(missing_ok=True)

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            for row in rows:
                # Lone surrogates, which models do emit, are escaped by ensure_ascii and stay readable as JSON.
                file.write(json.dumps(_finite(row)) + "\n")

    def _replace(self, name: str, text: str) -> None:
        replace_text(self.path / name, text)


def replace_text(file: Path, text: str) -> None:
    """Write a file whole: whoever reads it sees the old or the new content."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def read_metrics(run_dir: str | Path, kind: str | None = None) -> list[dict]:
    """The lines of a run's metrics.jsonl, of one kind or all."""
    return [row for row in _read(Path(run_dir) / "metrics.jsonl") if kind is None or row["kind"] == kind]


def newest_metrics(run_dir: str | Path, kind: str) -> dict | None:
    """The last line of one kind in a run's metrics.jsonl, read from its end: for those who look every second."""
    try:
        with open(Path(run_dir) / "metrics.jsonl", "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines[1:] if start else lines):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["kind"] == kind:
            return row
    return None


def read_eval_prompts(run_dir: str | Path) -> dict[int, dict[str, float]]:
    """Accuracy by prompt id for each evaluated step."""
    return {row["step"]: row["accuracy"] for row in _read(Path(run_dir) / "eval_prompts.jsonl")}


def _read(file: Path) -> list[dict]:
    """The rows of a JSON Lines file; none without the file. A line cut off by a kill is left out."""
    rows = []
    for line in file.read_text("utf-8").splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return math.inf  # a line cut off by a kill


def _is_evaluation(name: str, line: str) -> bool:
    return name == "eval_prompts.jsonl" or line.startswith('{"kind": "eval"')


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
