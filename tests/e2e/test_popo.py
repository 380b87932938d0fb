"""POPO on the real stack: the batch is full of informative groups, each traced to its birth, at GRPO's rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command

from openrlhf_ext.run_dir import read_metrics

STEPS, PROMPTS, GROUP = 6, 16, 8

# Every file of configs/cpu with filling, apart from those that a test below runs with more to show.
VARIANTS = ("ineff", "on_policy", "behavior_clip", "stale", "rloo", "ppo", "k4", "k16", "k32")


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_replay(run_dir: Path, num_groups: int, group_size: int) -> list[dict]:
    """The laws of filling over a finished run; returns its train rows."""
    rows = read_metrics(run_dir, "train")
    replayed = {line["step"]: line["groups"] for line in lines(run_dir / "replay.jsonl")}
    trained = {(line["step"], line["group_id"]): line for line in lines(run_dir / "samples.jsonl")}
    spread = {
        key: {line["reward"] for line in lines(run_dir / "samples.jsonl") if (line["step"], line["group_id"]) == key}
        for key in trained
    }
    for row in rows:
        step, groups = row["step"], replayed.get(row["step"], [])
        # GRPO's rollouts, and not one more; every one of them has one fate.
        assert row["step/rollouts_generated"] == num_groups * group_size
        assert row["step/num_trained_fresh"] + row["step/num_replaced_zero_variance"] == num_groups * group_size
        # What is trained: fresh rows and replayed ones, all of them, in GRPO's number of optimizer steps.
        assert row["train/num_rows"] == row["step/num_trained_fresh"] + row["step/num_replayed"]
        assert row["train/num_rows"] == num_groups * group_size
        assert row["train/num_optimizer_steps"] == 1
        assert row["step/num_replayed"] == group_size * len(groups) == row["replay/num_rows"]
        for group in groups:
            # Born in an earlier step, trained fresh there, with rewards that differ.
            born = (group["born_step"], group["group_id"])
            assert group["born_step"] < step and trained[born]["prompt_id"] == group["prompt_id"]
            assert len(spread[born]) > 1
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) == len(rows) * num_groups * group_size
    assert ledger["replayed"] == sum(row["step/num_replayed"] for row in rows)
    return rows


def test_the_batch_is_full_of_informative_groups_once_the_buffer_holds_enough(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    command = start(
        "popo",
        tmp_path / "popo",
        *("--ext.max_steps", str(STEPS), "--ext.log.samples_per_step", str(PROMPTS * GROUP)),
        *("--ext.eval.at_start", "false"),
    )
    assert command.wait(300) == 0, command.output[-4000:]
    rows = check_replay(command.run_dir, PROMPTS, GROUP)

    stored = 0
    assert sum(row["step/num_replayed"] for row in rows) > 0
    for row in rows:
        missing = PROMPTS - round(row["groups/effective_frac_generated"] * PROMPTS)
        assert row["replay/num_groups"] == min(missing, stored)
        assert (row["groups/effective_frac_trained"] == 1.0) == (missing <= stored)
        stored = row["group_buffer/num_groups"]
    assert rows[-1]["groups/effective_frac_trained"] == 1.0 > rows[-1]["groups/effective_frac_generated"]
    # Rows of one step ago are weighted by how far the policy has moved since, which is not far.
    assert 0 < rows[1]["replay/behavior_kl_age_01"] == rows[1]["replay/behavior_kl"] < 0.5
    assert 0.5 < rows[1]["replay/weight_mean"] < 2 and rows[1]["replay/weight_max"] != 1.0
    # One optimizer step: nothing has moved away from the proximal policy yet, so the clip cuts nothing.
    assert rows[-1]["replay/ratio_clipped_frac"] == rows[-1]["fresh/ratio_clipped_frac"] == 0.0
    assert json.loads((command.run_dir / "summary.json").read_text())["method"] == "popo"


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


@pytest.mark.parametrize("names", [VARIANTS[i : i + 3] for i in range(0, len(VARIANTS), 3)], ids=" ".join)
def test_every_variant_trains(
    start: Callable[..., Command], countdown: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    flags = {
        # Old enough within three steps.
        "stale": ("--ext.fill.min_age", "2"),
        # The ratio is clipped where the policy has moved away from the behavior policy.
        "behavior_clip": ("--actor.adam.lr", "1e-3"),
    }
    size = {"k4": 4, "k16": 16, "k32": 32}
    commands = {
        name: start(
            f"popo_{name}",
            tmp_path / name,
            *("--ext.max_steps", "3", "--ext.eval.at_start", "false", "--ext.log.samples_per_step", "128"),
            *(("--critic.model_name_or_path", str(countdown / "model")) if name == "ppo" else ()),
            *flags.get(name, ()),
        )
        for name in names
    }
    for name, command in commands.items():
        assert command.wait(400) == 0, f"{name}: {command.output[-4000:]}"
        rows = read_metrics(command.run_dir, "train")
        if name == "ineff":
            assert [row["group_buffer/num_groups"] for row in rows] == [16, 16, 16]
            assert [row["step/num_replayed"] // 8 for row in rows[1:]] == [
                16 - round(row["groups/effective_frac_generated"] * 16) for row in rows[1:]
            ]
        else:
            check_replay(command.run_dir, 128 // size.get(name, 8), size.get(name, 8))
        if name == "stale":
            assert [row["step/num_replayed"] > 0 for row in rows] == [False, False, True]
            assert rows[2]["replay/age_max"] == 2
        if name in ("on_policy", "behavior_clip"):
            assert all(row["replay/weight_max"] == 1.0 for row in rows[1:])
        if name == "behavior_clip":
            assert rows[2]["replay/ratio_clipped_frac"] > 0 == rows[2]["fresh/ratio_clipped_frac"]
