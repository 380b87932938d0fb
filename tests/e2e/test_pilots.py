"""Pilot-Commit on the real stack: exact budget, survivors over steps, a dead engine, a pool that runs empty."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from command import Command
from laws import check_pilots

from openrlhf_ext.run_dir import read_metrics

PILOT = 4


def test_pilot_commit_on_two_actors_and_two_engines_of_which_one_dies(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    command = start(
        "pilot_commit",
        tmp_path / "run",
        *("--ext.max_steps", "8", "--ext.eval.at_start", "false", "--ext.log.samples_per_step", "128"),
        *("--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"),
        *("--train.micro_batch_size", "64", "--rollout.micro_batch_size", "64"),
    )
    command.wait_for_steps(2, 400)
    command.descendants("EngineCore")[0].kill()
    assert command.wait(300) == 0, command.output[-4000:]
    assert command.alive() == []

    rows = check_pilots(command.run_dir)
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
