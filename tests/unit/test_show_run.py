"""The table of a finished run."""

import json
from pathlib import Path

import pytest

from openrlhf_ext.cli.show_run import main

SUMMARY = {
    "method": "dapo",
    "steps": 30,
    "accuracy_before": 0.25,
    "accuracy_after": 0.5,
    "accuracy_se_before": 0.02,
    "accuracy_se_after": 0.03,
    "accuracy_gain": 0.25,
    "accuracy_gain_se": 0.0125,
    "eval_samples": 512,
    "rollouts_generated": 4000,
    "tokens_generated": 56789,
    "startup_s": 29.6,
    "wall_s": 120.4,
    "train_wall_s": 61.0,
    "step_seconds_median": {"generation": 0.2, "ppo_train": 0.3, "step_total": 0.5},
}
LEDGER = {
    "generated": 4000,
    "replayed": 12,
    "waiting": 40,
    "fates": {"trained_fresh": 3000, "filtered_zero_variance": 960, "surplus": 0},
}


def write_run(folder: Path, summary: dict[str, object]) -> None:
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "ledger.json").write_text(json.dumps(LEDGER))


def rows(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_table_shows_learning_cost_and_where_rollouts_went(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path, SUMMARY)
    assert main([str(tmp_path)]) == 0
    assert rows(capsys.readouterr().out) == [
        "method dapo",
        "evaluation samples 512",
        "accuracy before 0.250 +- 0.020",
        "accuracy after 0.500 +- 0.030",
        "gain, prompt by prompt +0.250 +- 0.013",
        "",
        "train steps 30",
        "seconds 120, of which start 30, steps 61",
        "seconds a step (median) 0.50: generation 0.20, ppo_train 0.30",
        "tokens generated 56,789",
        "rollouts generated 4,000",
        "trained_fresh 3,000 (75.0%)",  # 3000 / 4000
        "filtered_zero_variance 960 (24.0%)",
        "waiting 40 (1.0%)",
        "rollouts trained again 12",
        "",
        f"in {tmp_path}:",
        "ledger.json",
        "summary.json",
    ]


def test_missing_evaluation_shows_a_dash_and_no_change(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path, {name: value for name, value in SUMMARY.items() if "before" not in name})
    assert main([str(tmp_path)]) == 0
    shown = rows(capsys.readouterr().out)
    assert "accuracy before -" in shown
    assert not [row for row in shown if row.startswith("change")]


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        (None, "did not finish"),
        ("{", "summary.json:1: not JSON"),
        ("[]", "found list"),
        ("{}", "missing method, rollouts_generated"),
    ],
)
def test_unusable_run_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, summary: str | None, message: str
) -> None:
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_several_runs_are_compared_at_equal_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, evaluations in (("a", {0: 0.2, 100: 0.4}), ("b", {0: 0.4, 200: 0.8})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(
                json.dumps({"kind": "eval", "step": n, "budget/rollouts_generated": n, "eval/accuracy": x}) + "\n"
                for n, x in evaluations.items()
            )
        )
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    _, first, second = rows(capsys.readouterr().out)
    # At 0, 10, ... 100 rollouts: 0.2 to 0.4, and 0.4 to 0.6.
    assert first.split()[1:] == [f"{0.2 + 0.02 * i:.3f}" for i in range(11)] + ["0.300"]
    assert second.split()[1:] == [f"{0.4 + 0.02 * i:.3f}" for i in range(11)] + ["0.500"]
    assert main([str(tmp_path / "a"), str(tmp_path)]) == 1
    assert "no evaluation yet" in capsys.readouterr().err
