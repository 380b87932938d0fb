"""Rollout replay over two actors, alone and together with pilots and filling; more is in test_variants.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from command import Command
from laws import check_pilots, check_rollout_replay

GENERATED = 128


def test_aper_and_combined_on_two_actors(start: Callable[..., Command], tmp_path: Path) -> None:
    flags = (
        *("--ext.max_steps", "6", "--ext.eval.at_start", "false", "--ext.log.samples_per_step", str(GENERATED)),
        *("--ext.replay.warmup_steps", "2", "--actor.num_gpus_per_node", "2"),
        *("--train.micro_batch_size", "32", "--rollout.micro_batch_size", "32"),
    )
    runs = {name: start(name, tmp_path / name, *flags) for name in ("aper", "combined")}
    for name, command in runs.items():
        assert command.wait(400) == 0, f"{name}: {command.output[-4000:]}"
        assert command.alive() == []
    methods = [json.loads((run.run_dir / "summary.json").read_text())["method"] for run in runs.values()]
    assert methods == ["aper", "pilot_commit_popo_aper"]

    stored = 0
    for row in check_rollout_replay(runs["aper"].run_dir, max_age=10):
        fresh = row["step/num_trained_fresh"]
        # All fresh informative rollouts, and half as many old ones beside them; one optimizer step.
        assert row["step/rollouts_generated"] == GENERATED == fresh + row["step/num_filtered_zero_variance"]
        assert row["rollout_replay/num_drawn"] == (0 if row["step"] <= 2 else min(round(fresh / 2), stored))
        assert row["train/num_rows"] == fresh + row["rollout_replay/num_drawn"] == row["step/num_gradient_rollouts"]
        assert row["train/num_optimizer_steps"] == 1 and row["groups/effective_frac_trained"] == 1.0
        stored += fresh
        assert row["rollout_buffer/num_rollouts"] == stored
    assert row["rollout_replay/behavior_kl"] > 0

    check_rollout_replay(runs["combined"].run_dir, max_age=10)
    rows = check_pilots(runs["combined"].run_dir, max_rounds=1)
    assert sum(row["replay/num_rows"] for row in rows) > 0 and sum(row["rollout_replay/num_rows"] for row in rows) > 0
