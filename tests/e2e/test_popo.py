"""POPO on the real stack: the batch is full of informative groups, each traced to its birth, at GRPO's rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from command import Command
from laws import check_filling

from openrlhf_ext.run_dir import read_metrics

PROMPTS, GROUP = 16, 8


def test_the_batch_is_full_of_informative_groups_once_the_buffer_holds_enough(
    start: Callable[..., Command], countdown: Path, tmp_path: Path
) -> None:
    flags = ("--ext.eval.at_start", "false", "--ext.log.samples_per_step", str(PROMPTS * GROUP))
    critic = ("--critic.model_name_or_path", str(countdown / "model"))
    runs = {"popo": ("--ext.max_steps", "6"), "popo_ppo": ("--ext.max_steps", "3", *critic)}
    for name, own in runs.items():
        command = start(name, tmp_path / name, *flags, *own)
        assert command.wait(250) == 0, command.output[-4000:]
        rows = check_filling(command.run_dir, PROMPTS, GROUP)
        stored = 0
        for row in rows:
            missing = PROMPTS - round(row["groups/effective_frac_generated"] * PROMPTS)
            assert row["replay/num_groups"] == min(missing, stored)
            assert (row["groups/effective_frac_trained"] == 1.0) == (missing <= stored)
            stored = row["group_buffer/num_groups"]
        assert rows[-1]["groups/effective_frac_trained"] > rows[-1]["groups/effective_frac_generated"]
        # Rows of one step ago are weighted by how far the policy has moved since, which is not far.
        assert 0 < rows[1]["replay/behavior_kl_age_01"] == rows[1]["replay/behavior_kl"] < 0.5
        assert 0.5 < rows[1]["replay/weight_mean"] < 2 and rows[1]["replay/weight_max"] != 1.0
        # One optimizer step: nothing has moved away from the proximal policy yet, so the clip cuts nothing.
        assert rows[-1]["replay/ratio_clipped_frac"] == rows[-1]["fresh/ratio_clipped_frac"] == 0.0
        assert json.loads((command.run_dir / "summary.json").read_text())["method"] == name
    assert read_metrics(tmp_path / "popo", "train")[-1]["groups/effective_frac_trained"] == 1.0


def test_popo_kl_on_two_actors_drops_what_it_cannot_fill(start: Callable[..., Command], tmp_path: Path) -> None:
    # 9 groups of 6: with an odd number of informative ones the two actors get different numbers of rows.
    num_groups, size = 9, 6
    command = start(
        "popo_kl",
        tmp_path / "kl",
        *("--ext.max_steps", "4", "--ext.eval.at_start", "false", "--ext.groups.ineffective", "drop"),
        *("--rollout.batch_size", str(num_groups), "--rollout.n_samples_per_prompt", str(size)),
        *("--train.batch_size", "54", "--train.micro_batch_size", "27", "--rollout.micro_batch_size", "8"),
        *("--actor.num_gpus_per_node", "2", "--ext.fill.max_age", "2"),
        *("--algo.advantage.is_correction_level", "token"),
    )
    assert command.wait(400) == 0, command.output[-4000:]
    rows = read_metrics(command.run_dir, "train")
    for row in rows:
        fresh, replayed = row["step/num_trained_fresh"], row["step/num_replayed"]
        assert row["step/rollouts_generated"] == num_groups * size
        assert row["step/rollouts_generated"] == (
            fresh + row["step/num_replaced_zero_variance"] + row["step/num_filtered_zero_variance"]
        )
        assert row["train/num_rows"] == fresh + replayed <= num_groups * size
        if row["train/num_rows"]:
            assert row["groups/effective_frac_trained"] == 1.0
        assert row.get("replay/age_max", 0) <= 2
    assert rows[0]["train/num_rows"] < num_groups * size
    assert sum(row["step/num_replayed"] for row in rows) > 0
