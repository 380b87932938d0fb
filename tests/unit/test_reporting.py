import json

import pytest

from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.reporting import RunReporter, StepClock
from openrlhf_ext.run_dir import RunDirectory, read_metrics


class Recorder:
    def __init__(self):
        self.logged, self.closed = [], False

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def close(self):
        self.closed = True


def run_steps(reporter, first, last, tracker, ledger):
    reporter.open([tracker], start=first - 1)
    if first == 1:
        reporter.evaluation(0, {"eval/accuracy": 0.2, "eval/accuracy_se": 0.1}, {"a": 0.2})
    for step in range(first, last + 1):
        ledger.generated(8, tokens=80)
        ledger.assign("trained_fresh", 8)
        metrics = {**ledger.close_step(), "timing/step_total": float(step), "loss": None}
        reporter.train_step(step, metrics, ledger)
    reporter.evaluation(last, {"eval/accuracy": 0.5, "eval/accuracy_se": 0.1}, {"a": 0.5})
    reporter.close()


def test_every_place_gets_the_same_figures(tmp_path):
    tracker, ledger = Recorder(), RolloutLedger()
    reporter = RunReporter(RunDirectory(tmp_path), max_steps=3, started=0.0)
    run_steps(reporter, 1, 3, tracker, ledger)
    rows = read_metrics(tmp_path)
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 3)
    ]  # fmt: skip
    for row, (step, metrics) in zip(rows, tracker.logged, strict=True):
        assert step == row["step"]
        assert metrics == {key: value for key, value in row.items() if key not in ("kind", "step", "loss")}
    assert tracker.closed
    assert json.loads((tmp_path / "ledger.json").read_text())["generated"] == 24
    # 1 + 2 + 3 seconds in train steps, evaluation not among them.
    assert rows[-1]["train_wall_s"] == 6.0


def test_the_summary_of_a_resumed_run_covers_both_attempts(tmp_path):
    ledger, run_dir = RolloutLedger(), RunDirectory(tmp_path)
    run_steps(RunReporter(run_dir, max_steps=4, started=0.0), 1, 2, Recorder(), ledger)
    reporter = RunReporter(run_dir, max_steps=4, started=0.0)
    run_steps(reporter, 3, 4, Recorder(), ledger)
    reporter.num_skipped_rows = 3
    reporter.summary(method="grpo", seed=1, ledger=ledger, steps=4, ended="no prompt is left")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.2, 0.5)
    assert summary["accuracy_gain"] == pytest.approx(0.3)
    assert summary["rollouts_generated"] == 32 and summary["prompt_rows_skipped"] == 3
    assert (summary["steps"], summary["ended"]) == (4, "no prompt is left")
    # Median of 1, 2, 3, 4.
    assert summary["step_seconds_median"] == {"step_total": 2.5}


def test_without_an_evaluation_at_the_end_there_is_no_accuracy_after(tmp_path):
    reporter = RunReporter(RunDirectory(tmp_path), max_steps=5, started=0.0)
    run_steps(reporter, 1, 2, Recorder(), RolloutLedger())
    reporter.summary(method="grpo", seed=1, ledger=RolloutLedger(), steps=5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy_after"] is None and summary["accuracy_gain"] is None


def test_phases_and_the_rest_add_up_to_the_step():
    clock = StepClock()
    clock.lap("generation")
    clock.lap("ppo_train")
    metrics = clock.metrics()
    total = metrics.pop("timing/step_total")
    assert set(metrics) == {"timing/generation", "timing/ppo_train", "timing/other"}
    assert sum(metrics.values()) == pytest.approx(total)
