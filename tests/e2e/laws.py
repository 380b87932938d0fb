"""What holds for every run of a method, whatever it learned. Runs log all of their samples."""

from __future__ import annotations

import json
from pathlib import Path

from openrlhf_ext.run_dir import read_metrics


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check_births(run_dir: Path) -> dict[int, int]:
    """Everything replayed was sampled in an earlier step, in a group whose rewards differ; rollouts by step."""
    rewards: dict[tuple[int, str], set[float]] = {}
    prompts: dict[tuple[int, str], str] = {}
    for line in lines(run_dir / "samples.jsonl"):
        key = (line["policy_version"] + 1, line["group_id"])
        rewards.setdefault(key, set()).add(line["reward"])
        prompts[key] = line["prompt_id"]
    replayed: dict[int, int] = {}
    for line in lines(run_dir / "replay.jsonl"):
        for group in line["groups"]:
            born = (group["born_step"], group["group_id"])
            assert group["born_step"] < line["step"] and prompts[born] == group["prompt_id"] and len(rewards[born]) > 1
            replayed[line["step"]] = replayed.get(line["step"], 0) + group["rollouts"]
    return replayed


def check_filling(run_dir: Path, num_groups: int, group_size: int) -> list[dict]:
    """POPO, where unfilled slots are kept; returns the train rows."""
    rows = read_metrics(run_dir, "train")
    replayed = check_births(run_dir)
    for row in rows:
        # GRPO's rollouts, and not one more; GRPO's rows in GRPO's number of optimizer steps.
        assert row["step/rollouts_generated"] == row["train/num_rows"] == num_groups * group_size
        assert row["train/num_optimizer_steps"] == 1
        assert row["step/num_trained_fresh"] + row["step/num_replaced_zero_variance"] == num_groups * group_size
        assert row["step/num_replayed"] == row["replay/num_rows"] == replayed.get(row["step"], 0)
        assert row["replay/num_rows"] == group_size * row["replay/num_groups"]
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["replayed"] == sum(replayed.values())
    return rows


def check_filled_in_order(rows: list[dict], num_groups: int) -> None:
    """POPO without limits: every slot is filled as far as the buffer reaches, and only replayed rows are weighted."""
    stored = 0
    for row in rows:
        missing = num_groups - round(row["groups/effective_frac_generated"] * num_groups)
        assert row["replay/num_groups"] == min(missing, stored)
        assert (row["groups/effective_frac_trained"] == 1.0) == (missing <= stored)
        stored = row["group_buffer/num_groups"]
        # One optimizer step: nothing has moved away from the proximal policy yet, so the clip cuts nothing.
        assert row.get("replay/ratio_clipped_frac", 0.0) == row["fresh/ratio_clipped_frac"] == 0.0
    # Rows of one step ago are weighted by how far the policy has moved since, which is not far.
    assert 0 < rows[1]["replay/behavior_kl_age_01"] == rows[1]["replay/behavior_kl"] < 0.5
    assert 0.5 < rows[1]["replay/weight_mean"] < 2 and rows[1]["replay/weight_max"] != 1.0


def check_rollout_replay(run_dir: Path, *, max_age: int) -> list[dict]:
    """APER and what contains it; returns the train rows."""
    rows = read_metrics(run_dir, "train")
    replayed = check_births(run_dir)
    for row in rows:
        drawn = row["rollout_replay/num_drawn"]
        assert row["step/num_replayed"] == drawn + row.get("replay/num_rows", 0) == replayed.get(row["step"], 0)
        assert row.get("rollout_replay/age_max", 0) <= max_age
    return rows


def check_pilots(run_dir: Path, *, max_rounds: int = 10) -> list[dict]:
    """Every step generates its pilots and commits, and nothing else; returns the train rows."""
    batch, group, pilot = 16, 8, 4
    rows = read_metrics(run_dir, "train")
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) + ledger["waiting"]
    waiting = 0
    for row in rows:
        pilots, commits = row["pilot/num_pilot_rollouts"], row["pilot/num_commit_rollouts"]
        failed = sum(row[f"step/num_{fate}"] for fate in ledger["fates"] if fate.startswith("failed"))
        assert row["step/rollouts_generated"] == pilots + commits + failed
        assert pilots % pilot == 0 and pilots <= max_rounds * 3 * batch * pilot
        assert commits == row["pilot/num_committed_groups"] * (group - pilot) <= batch * (group - pilot)
        assert row["step/num_trained_fresh"] + row["step/num_replaced_zero_variance"] == (
            row["pilot/num_committed_groups"] * group
        )
        # What came in is trained, dropped for a reason, or waits.
        went = sum(row[f"step/num_{fate}"] for fate in ledger["fates"]) + row["budget/rollouts_waiting"] - waiting
        assert went == row["step/rollouts_generated"]
        waiting = row["budget/rollouts_waiting"]
        assert waiting == row["pilot/num_survivors_waiting"] * pilot
        assert row.get("pilot/survivor_age_max", 0) <= 4
        assert sum(row[f"pilot/{verdict}_frac"] for verdict in ("commit", "too_hard", "too_easy", "solved")) > 0.999
    return rows
