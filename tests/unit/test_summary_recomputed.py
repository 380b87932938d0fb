"""summary.json against figures recomputed from the lines of the run, without the code that wrote it.

``OPENRLHF_EXT_RUN_DIRS`` names finished run folders (separated by colons) to check as well.
"""

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.reporting import RunReporter
from openrlhf_ext.run_dir import RunDirectory

REAL_RUNS = [Path(name) for name in os.environ.get("OPENRLHF_EXT_RUN_DIRS", "").split(":") if name]


def lines(path: Path) -> Iterator[dict]:
    if path.exists():
        yield from map(json.loads, path.read_text("utf-8").splitlines())


def recomputed(run_dir: Path, steps: int) -> dict[str, object]:
    """What summary.json must say of a run of ``steps`` train steps; without what only the process knows."""
    train = [line for line in lines(run_dir / "metrics.jsonl") if line["kind"] == "train"]
    evals = {line["step"]: line for line in lines(run_dir / "metrics.jsonl") if line["kind"] == "eval"}
    prompts = {line["step"]: line["accuracy"] for line in lines(run_dir / "eval_prompts.jsonl")}
    before, after = prompts.get(0, {}), prompts.get(steps, {})
    gains = [after[prompt] - before[prompt] for prompt in before if prompt in after]
    phases = {key for line in train for key in line if key.startswith("timing/")}
    return {
        "steps": max(line["step"] for line in train),
        "rollouts_generated": train[-1]["budget/rollouts_generated"],
        "tokens_generated": train[-1]["budget/tokens_generated"],
        "train_wall_s": sum(line["timing/step_total"] for line in train),
        "step_seconds_median": {
            key.split("/")[1]: statistics.median(line[key] for line in train if key in line) for key in phases
        },
        "accuracy_before": evals.get(0, {}).get("eval/accuracy"),
        "accuracy_after": evals.get(steps, {}).get("eval/accuracy"),
        "accuracy_se_before": evals.get(0, {}).get("eval/accuracy_se"),
        "accuracy_se_after": evals.get(steps, {}).get("eval/accuracy_se"),
        "accuracy_gain": sum(gains) / len(gains) if gains else None,
        "accuracy_gain_se": statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0 if gains else None,
    }


def check(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    for name, value in recomputed(run_dir, summary["steps"]).items():
        assert summary[name] == (value if value is None else pytest.approx(value)), f"{run_dir.name}: {name}"
    if (run_dir / "ledger.json").exists():  # runs of other libraries have none
        ledger = json.loads((run_dir / "ledger.json").read_text("utf-8"))
        assert ledger["generated"] == summary["rollouts_generated"]
        assert ledger["generated"] == sum(ledger["fates"].values()) + ledger["waiting"]


def write_run(run_dir: Path, *, steps: int, evaluated: bool = True) -> None:
    """A run through RunReporter whose steps differ in seconds, rollouts and tokens."""
    reporter, ledger = RunReporter(RunDirectory(str(run_dir)), max_steps=steps, started=0.0), RolloutLedger()
    reporter.open([], start=0)
    for step in range(steps + 1):
        if step:
            ledger.generated(8 * step, tokens=70 * step)
            ledger.assign("trained_fresh", 8)
            ledger.assign("surplus", 8 * (step - 1))
            timing = {"timing/generation": 0.25 * step**2, "timing/step_total": 0.5 * step**2}
            reporter.train_step(step, {**ledger.close_step(), **timing}, ledger)
        if evaluated and step % 2 == 0:
            by_prompt = {"a": 0.1 * step, "b": 0.05 * step**2, "c": 0.3}
            metrics = {"eval/accuracy": sum(by_prompt.values()) / 3, "eval/accuracy_se": 0.01 * (step + 1)}
            reporter.evaluation(step, metrics, by_prompt)
    reporter.close()
    reporter.summary(method="grpo", seed=1, ledger=ledger, steps=steps)


@pytest.mark.parametrize("steps", [3, 4])  # with 3, the last step is not evaluated
def test_the_summary_says_what_the_lines_say(tmp_path: Path, steps: int) -> None:
    write_run(tmp_path, steps=steps)
    check(tmp_path)


def test_the_summary_of_a_run_without_evaluations_says_what_the_lines_say(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2, evaluated=False)
    check(tmp_path)


@pytest.mark.parametrize("name", ["train_wall_s", "rollouts_generated", "accuracy_after", "accuracy_gain_se"])
def test_a_summary_that_says_something_else_is_found(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, steps=4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps({**summary, name: summary[name] * 1.01}))
    with pytest.raises(AssertionError, match=name):
        check(tmp_path)


@pytest.mark.skipif(not REAL_RUNS, reason="OPENRLHF_EXT_RUN_DIRS names no run folder")
def test_the_summary_of_a_given_run_says_what_its_lines_say() -> None:
    for run_dir in REAL_RUNS:
        check(run_dir)
