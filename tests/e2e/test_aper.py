"""Rollout replay on the real stack, with one and two actors: fresh-anchored, its pool baselines, and all in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command

from openrlhf_ext.run_dir import read_metrics

GENERATED = 128
ABLATIONS = ("group", "sigma", "uniform", "pool", "capacity", "no_eviction", "age30", "decoupled", "sigma_pool")


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check_replay(run_dir: Path) -> list[dict]:
    """The laws of rollout replay over a finished run; returns its train rows."""
    rows = read_metrics(run_dir, "train")
    births = {row["step"]: set() for row in rows}
    for line in lines(run_dir / "samples.jsonl"):
        births[line["step"]].add(line["group_id"])
    for line in lines(run_dir / "replay.jsonl"):
        assert sum(group["rollouts"] for group in line["groups"]) > 0
        for group in line["groups"]:
            assert group["born_step"] < line["step"] and group["group_id"] in births[group["born_step"]]
    for row in rows:
        assert row["train/num_rows"] == row["step/num_trained_fresh"] + row["step/num_replayed"]
        # However many rows: one optimizer step, as without replay.
        assert row["train/num_optimizer_steps"] == (row["train/num_rows"] > 0)
        drawn = row.get("rollout_replay/num_drawn", 0)
        assert row["step/num_replayed"] == drawn + row.get("replay/num_rows", 0)
        assert row.get("rollout_replay/age_max", 0) <= 10 or "age30" in run_dir.name
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) + ledger["waiting"]
    assert ledger["replayed"] == sum(row["step/num_replayed"] for row in rows)
    return rows


@pytest.mark.parametrize("actors", [1, 2])
def test_aper_adds_a_draw_to_every_fresh_informative_rollout(
    start: Callable[..., Command], tmp_path: Path, actors: int
) -> None:
    command = start(
        "aper",
        tmp_path / "aper",
        *("--ext.max_steps", "6", "--ext.eval.at_start", "false", "--ext.log.samples_per_step", str(GENERATED)),
        *("--ext.replay.warmup_steps", "2", "--actor.num_gpus_per_node", str(actors)),
        *("--train.micro_batch_size", "32", "--rollout.micro_batch_size", "32"),
    )
    assert command.wait(400) == 0, command.output[-4000:]
    rows = check_replay(command.run_dir)
    stored = 0
    for row in rows:
        fresh = row["step/num_trained_fresh"]
        assert row["step/rollouts_generated"] == GENERATED == fresh + row["step/num_filtered_zero_variance"]
        assert (
            row["groups/effective_frac_trained"] == 1.0 and row["step/num_gradient_rollouts"] == row["train/num_rows"]
        )
        assert row["rollout_replay/num_drawn"] == (0 if row["step"] <= 2 else min(round(fresh / 2), stored))
        stored += fresh
        assert row["rollout_buffer/num_rollouts"] == stored
    assert rows[-1]["rollout_replay/behavior_kl"] > 0
    assert json.loads((command.run_dir / "summary.json").read_text())["method"] == "aper"


@pytest.mark.parametrize("names", [ABLATIONS[i : i + 3] for i in range(0, len(ABLATIONS), 3)], ids=" ".join)
def test_every_ablation_trains(start: Callable[..., Command], tmp_path: Path, names: tuple[str, ...]) -> None:
    commands = {
        name: start(
            f"aper_{name}",
            tmp_path / name,
            *("--ext.max_steps", "3", "--ext.eval.at_start", "false", "--ext.replay.warmup_steps", "1"),
            *("--ext.log.samples_per_step", str(GENERATED)),
        )
        for name in names
    }
    for name, command in commands.items():
        assert command.wait(400) == 0, f"{name}: {command.output[-4000:]}"
        rows = check_replay(command.run_dir)
        assert sum(row["step/num_replayed"] for row in rows) > 0
        for row in rows[1:]:
            informative = GENERATED - row["step/num_filtered_zero_variance"]
            if name == "group":
                assert row["step/num_replayed"] % 8 == 0
            if "pool" in name and row["step"] == 3:
                # As many rows as fresh-anchored replay trains, whichever they are.
                whole = round(1.5 * informative) if name == "pool" else 8 * round(1.5 * informative / 8)
                assert row["train/num_rows"] == min(whole, informative + rows[-2]["rollout_buffer/num_rollouts"])
            if name == "decoupled":
                assert row["rollout_replay/weight_max"] != 1.0


def test_all_methods_together_with_and_without_limits(start: Callable[..., Command], tmp_path: Path) -> None:
    common = ("--ext.max_steps", "5", "--ext.eval.at_start", "false", "--ext.log.samples_per_step", str(GENERATED))
    two_actors = ("--actor.num_gpus_per_node", "2", "--train.micro_batch_size", "32")
    commands = {
        "combined": (*two_actors, "--rollout.micro_batch_size", "32"),
        "combined_capped": ("--ext.throttle.max_row_frac", "0.2"),
    }
    runs = {
        name: start(name, tmp_path / name, *common, "--ext.replay.warmup_steps", "2", *flags)
        for name, flags in commands.items()
    }
    for name, command in runs.items():
        assert command.wait(400) == 0, f"{name}: {command.output[-4000:]}"
        rows = check_replay(command.run_dir)
        assert sum(row["replay/num_rows"] for row in rows) > 0
        assert sum(row["rollout_replay/num_rows"] for row in rows) > 0
        assert json.loads((command.run_dir / "summary.json").read_text())["method"] == "pilot_commit_popo_aper"
    capped = read_metrics(runs["combined_capped"].run_dir, "train")
    assert all(row["replay/num_groups"] <= 4 for row in capped)
    assert min(row["throttle/share"] for row in capped) < 1.0


def test_arpo_gives_failed_groups_a_success_of_their_prompt(
    start: Callable[..., Command], countdown: Path, tmp_path: Path
) -> None:
    # 16 prompts, so that every step meets the same ones.
    few = tmp_path / "few.jsonl"
    few.write_text("".join((countdown / "train.jsonl").read_text().splitlines(keepends=True)[:16]))
    command = start(
        "arpo",
        tmp_path / "arpo",
        *("--ext.max_steps", "10", "--ext.eval.at_start", "false", "--data.prompt_dataset", str(few)),
    )
    assert command.wait(400) == 0, command.output[-4000:]
    rows = read_metrics(command.run_dir, "train")
    for row in rows:
        assert row["train/num_rows"] == GENERATED == row["step/rollouts_generated"]
        assert (
            row["step/num_replaced_by_success"]
            == row["step/num_replayed"]
            == GENERATED - row["step/num_trained_fresh"]
        )
        assert row["groups/effective_frac_trained"] == pytest.approx(
            row["groups/effective_frac_generated"] + row["step/num_replayed"] / 16
        )
    assert rows[0]["step/num_replayed"] == 0 < sum(row["step/num_replayed"] for row in rows)
    assert json.loads((command.run_dir / "summary.json").read_text())["method"] == "arpo"
