"""Run directories and suite folders as the report reads them: also unfinished ones, and ones written by others."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from openrlhf_ext.config_file import load_config
from openrlhf_ext.run_dir import read_metrics

WARM_UP_SHARE = 0.05
"""Share of the first steps that step times leave out: compilation and empty buffers are in them."""

_MAX_SAMPLES_BYTES = 20 << 20
_SAMPLES_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``train`` and ``evals`` are the lines of its metrics.jsonl by kind, in the order of writing.

    ``lr``, ``seed`` and ``error`` are None where nothing says them; ``config`` is flat, by dotted key.
    """

    path: Path
    label: str
    method: str
    lr: float | None
    seed: int | None
    status: str
    error: str | None
    train: list[dict]
    evals: list[dict]
    config: dict[str, object]

    def series(self, kind: str, x: str, y: str) -> np.ndarray:
        """(2, N): ``x`` and ``y`` of the lines (kind ``train`` or ``eval``) that have finite numbers for both."""
        rows = self.train if kind == "train" else self.evals
        points = [(row[x], row[y]) for row in rows if is_number(row.get(x)) and is_number(row.get(y))]
        return np.array(points, dtype=float).reshape(-1, 2).T

    def last(self, key: str) -> float | None:
        """The largest value of a figure that only grows; None where no line has it."""
        values = [row[key] for row in (*self.train, *self.evals) if is_number(row.get(key))]
        return max(values, default=None)

    def step_seconds(self) -> dict[str, list[float]]:
        """Seconds of every phase of the train steps after the first `WARM_UP_SHARE`, by name without ``timing/``."""
        seconds: dict[str, list[float]] = {}
        for row in self.train[math.ceil(WARM_UP_SHARE * len(self.train)) :]:
            for key, value in row.items():
                if key.startswith("timing/") and is_number(value):
                    seconds.setdefault(key.removeprefix("timing/"), []).append(value)
        return seconds


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite folder: its name and the text of results.md, None before that is written."""

    name: str
    results: str | None


def is_number(value: object) -> bool:
    """True for a finite number; null in JSON stands for one that is not."""
    return isinstance(value, int | float) and math.isfinite(value)


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[Suite]]:
    """All runs in the given run directories and suite folders, each once, and the suites.

    Labels are folder names, or paths where those are not unique. Raises ValueError for a folder that is neither, and
    for a file that cannot be read.
    """
    in_suites: list[Run] = []
    single: list[Run] = []
    suites = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; give the folder of a run or of a benchmark suite")
        if (folder / "suite.json").exists():
            runs, suite = _read_suite(folder)
            in_suites += runs
            suites.append(suite)
        elif (folder / "metrics.jsonl").exists():
            single.append(_read_run(folder, {}))
        else:
            raise ValueError(
                f"{folder}: neither metrics.jsonl nor suite.json is in it; give the folder of a run that has made a "
                "step, or of a benchmark suite"
            )
    unique = list({run.path.resolve(): run for run in (*_tell_variants_apart(single), *in_suites)}.values())
    if not unique:
        raise ValueError(f"{folders[0] / 'suite.json'}: it names no run; give a suite that has some")
    labels = Counter(run.label for run in unique)
    return [run if labels[run.label] == 1 else replace(run, label=str(run.path)) for run in unique], suites


def _tell_variants_apart(runs: Sequence[Run]) -> list[Run]:
    """Name runs of one method and lr by their folders if they differ in more than the seed."""
    variants: dict[tuple[str, float | None], set[str]] = {}
    for run in runs:
        variants.setdefault((run.method, run.lr), set()).add(_without_seed(run.config))
    return [
        replace(run, method=_folder_method(run.path)) if len(variants[run.method, run.lr]) > 1 else run for run in runs
    ]


def _without_seed(config: Mapping[str, object]) -> str:
    return repr(sorted((key, repr(value)) for key, value in config.items() if key != "train.seed"))


def _folder_method(folder: Path) -> str:
    return re.split("-(?:lr|seed)", folder.resolve().name)[0]


def _read_suite(folder: Path) -> tuple[list[Run], Suite]:
    file = folder / "suite.json"
    suite = _read_json(file)
    try:
        runs = [_read_run(folder / entry["dir"], entry) for entry in suite["runs"]]
    except KeyError as error:
        raise ValueError(f"{file}: no {error} in it or in one of its runs; write the suite again") from None
    results = folder / "results.md"
    return runs, Suite(suite.get("name", folder.name), results.read_text("utf-8") if results.exists() else None)


def _read_run(folder: Path, entry: Mapping) -> Run:
    """The run in ``folder``. Its method, lr and seed are the suite's, else its own, else the folder's name."""
    summary, failure = (_read_json(folder / name) for name in ("summary.json", "failed.json"))
    config_file = folder / "config.yaml"
    config = _flat_config(config_file) if config_file.exists() else {}
    rows = [row for row in read_metrics(folder) if is_number(row.get("step"))]
    finished, failed = ((folder / name).exists() for name in ("summary.json", "failed.json"))
    status = "finished" if finished else "failed" if failed else "running" if rows else "not started"
    return Run(
        path=folder,
        label=folder.resolve().name,
        method=entry.get("method") or summary.get("method") or _folder_method(folder),
        lr=entry.get("lr", config.get("actor.adam.lr")),
        seed=entry.get("seed", summary.get("seed", config.get("train.seed"))),
        status=status,
        error=failure.get("error") if status == "failed" else None,
        train=[row for row in rows if row.get("kind") == "train"],
        evals=[row for row in rows if row.get("kind") == "eval"],
        config=config,
    )


def _read_json(file: Path) -> dict:
    """The object in ``file``; empty without the file."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: not JSON ({error.msg}); write it again or remove it") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{file}: expected a JSON object, found {type(content).__name__}; write it again or remove it"
        )
    return content


def _flat_config(file: Path) -> dict[str, object]:
    """All settings by dotted key. Paths inside the run directory are given relative to it."""
    raw = load_config(file)
    flat = {**raw.upstream, **_flatten(raw.ext, "ext.")}
    run_dir = flat.pop("ext.run_dir", None)
    return {key: _relative(value, run_dir) for key, value in flat.items()}


def _flatten(nested: Mapping[str, object], prefix: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in nested.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _relative(value: object, run_dir: object) -> object:
    inside = isinstance(value, str) and isinstance(run_dir, str) and value.startswith(run_dir)
    return value.replace(run_dir, "(run directory)", 1) if inside else value


def config_differences(run: Run, base: Run) -> list[tuple[str, object, object]]:
    """(key, value in ``base``, value in ``run``) of every setting that differs; None where one has it not."""
    pairs = [(key, base.config.get(key), run.config.get(key)) for key in sorted({*base.config, *run.config})]
    return [(key, old, new) for key, old, new in pairs if old != new]


def read_samples(run: Run, per_step: int = 3) -> list[dict]:
    """Up to ``per_step`` lines of samples.jsonl of the first, the middle and the last step in it.

    Of a file of more than 20 MB only the beginning, the middle and the end are read, 1 MB each.
    """
    rows = [row for row in _sample_rows(run.path / "samples.jsonl") if is_number(row.get("step"))]
    steps = sorted({row["step"] for row in rows})
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return [row for step in chosen for row in [row for row in rows if row["step"] == step][:per_step]]


def _sample_rows(file: Path) -> Iterable[dict]:
    size = file.stat().st_size if file.exists() else 0
    whole = size <= _MAX_SAMPLES_BYTES
    starts = [0] if whole else [0, (size - _SAMPLES_WINDOW) // 2, size - _SAMPLES_WINDOW]
    for start in starts if size else []:
        with open(file, "rb") as stream:
            stream.seek(start)
            text = stream.read(size if whole else _SAMPLES_WINDOW).decode("utf-8", errors="replace")
        for line in text.split("\n"):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # cut off by a kill or by the window
                continue
            if isinstance(row, dict):
                yield row
