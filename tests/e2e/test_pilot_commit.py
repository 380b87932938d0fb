"""Pilot-Commit and MoPPS on the real stack: exact budget, survivors over steps, a dead engine, an empty pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from command import Command

from openrlhf_ext.run_dir import read_metrics

BATCH, GROUP, PILOT = 16, 8, 4


def check_budget(run_dir: Path, *, max_rounds: int = 10) -> list[dict]:
    """Every step generates its pilots and commits, and nothing else; returns the train rows."""
    rows = read_metrics(run_dir, "train")
    waiting = 0
    for row in rows:
        pilots, commits = row["pilot/num_pilot_rollouts"], row["pilot/num_commit_rollouts"]
        failed = sum(count for key, count in row.items() if key.startswith("step/num_failed_") and "groups" not in key)
        assert row["step/rollouts_generated"] == pilots + commits + failed
        assert pilots % PILOT == 0 and pilots <= max_rounds * 3 * BATCH * PILOT
        assert commits == row["pilot/num_committed_groups"] * (GROUP - PILOT) <= BATCH * (GROUP - PILOT)
        assert row["step/num_trained_fresh"] + row["step/num_replaced_zero_variance"] == (
            row["pilot/num_committed_groups"] * GROUP
        )
        # What came in is trained, dropped for a reason, or waits.
        went = sum(row[f"step/num_{fate}"] for fate in fates(run_dir)) + row["budget/rollouts_waiting"] - waiting
        assert went == row["step/rollouts_generated"]
        waiting = row["budget/rollouts_waiting"]
        assert waiting == row["pilot/num_survivors_waiting"] * PILOT
        assert row.get("pilot/survivor_age_max", 0) <= 4
        assert sum(row[f"pilot/{v}_frac"] for v in ("commit", "too_hard", "too_easy", "solved")) > 0.999
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) + ledger["waiting"]
    return rows


def fates(run_dir: Path) -> list[str]:
    return list(json.loads((run_dir / "ledger.json").read_text())["fates"])


def test_pilot_commit_on_two_actors_and_two_engines_of_which_one_dies(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    command = start(
        "pilot_commit",
        tmp_path / "run",
        *("--ext.max_steps", "8", "--ext.eval.at_start", "false", "--ext.log.samples_per_step", "128"),
        *(
            "--actor.num_gpus_per_node",
            "2",
            "--vllm.num_engines",
            "2",
            "--train.micro_batch_size",
            "64",
            "--rollout.micro_batch_size",
            "64",
        ),
    )
    metrics = command.run_dir / "metrics.jsonl"
    command.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 400, "2 steps are done")
    command.descendants("EngineCore")[0].kill()
    assert command.wait(300) == 0, command.output[-4000:]
    assert command.alive() == []

    rows = check_budget(command.run_dir)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert "died and is left out (1 remain)" in command.output
    for row in rows:
        # A committed prompt has right and wrong pilots, so every trained group is informative.
        assert row["pilot/precision"] == row["groups/effective_frac_trained"] == 1.0
        assert 0.5 < row["rollout/engine_busy_frac"] <= 1.0
    # The first step has nobody waiting; later ones commit prompts whose pilots ran along with earlier commits.
    assert rows[0]["step/num_rounds"] >= 2 and rows[0]["pilot/survivor_age_max"] == 0
    assert max(row["pilot/survivor_age_max"] for row in rows[1:]) >= 1
    # The weights that the engine that is left samples with are the trainer's: prefixes of old weights would show.
    assert rows[-1]["rollout/engine_log_prob_abs_diff_mean"] < 0.1
    # No prompt twice in a step.
    samples = [json.loads(line) for line in (command.run_dir / "samples.jsonl").read_text().splitlines()]
    for step in range(1, 9):
        groups = {line["group_id"]: line["prompt_id"] for line in samples if line["step"] == step}
        assert len(set(groups.values())) == len(groups)


def test_selection_pilots_and_filling_go_together(start: Callable[..., Command], tmp_path: Path) -> None:
    names = ("pilot_commit_unbound", "mopps", "mopps_popo", "pilot_commit_popo")
    for pair in (names[:2], names[2:]):
        commands = {
            name: start(name, tmp_path / name, "--ext.max_steps", "4", "--ext.eval.at_start", "false") for name in pair
        }
        for name, command in commands.items():
            assert command.wait(400) == 0, f"{name}: {command.output[-4000:]}"
            if name.startswith("pilot"):
                rows = check_budget(command.run_dir, max_rounds=1 if name.endswith("popo") else 10)
            else:
                rows = read_metrics(command.run_dir, "train")
                assert all(row["step/rollouts_generated"] == BATCH * GROUP for row in rows)
            summary = json.loads((command.run_dir / "summary.json").read_text())
            if name == "pilot_commit_unbound":
                assert all(row["pilot/survivor_age_max"] == 0 for row in rows)
            if name.endswith("popo"):
                assert summary["method"] == name
                assert sum(row["step/num_replayed"] for row in rows) > 0
                assert all(row["groups/num_trained"] <= BATCH for row in rows)


def test_a_pool_with_nothing_left_ends_the_run_with_a_report(start: Callable[..., Command], tmp_path: Path) -> None:
    # Every answer is right, so every pilot is solved and every prompt excluded: 200 prompts are gone within a step.
    reward = tmp_path / "right.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': 1.0, 'scores': 1.0}\n")
    command = start(
        "pilot_commit",
        tmp_path / "run",
        *("--ext.max_steps", "50", "--ext.eval.at_start", "false", "--reward.remote_url", str(reward)),
        *("--ext.pool.floor", "0", "--ext.pool.exclude_min_rollouts", "1", "--ext.pool.exclude_min_visits", "1"),
    )
    assert command.wait(300) == 0, command.output[-4000:]
    rows = read_metrics(command.run_dir, "train")
    assert [row["step/num_pilot_too_easy"] for row in rows] == [200 * PILOT]
    assert rows[0]["pool/num_excluded"] == 200 and rows[0]["train/num_rows"] == 0
    summary = json.loads((command.run_dir / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["accuracy_after"] == 1.0
    assert "no prompt is left: all 200 are excluded for good" in summary["ended"]
    assert "the run ends after 1 of 50 steps" in command.output
