"""Rollout replay, its naive baselines, and all methods together, over two actors; one actor is in test_variants.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import train_variants
from laws import check_pilots, check_rollout_replay

GENERATED = 128
CONFIGS = ("aper", "aper_uniform_pool", "aper_sigma_pool", "combined")


@pytest.fixture(scope="module")
def trained(countdown: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of each configuration."""
    folder = tmp_path_factory.mktemp("two_actors")
    flags = ("--ext.max_steps", "6", "--actor.num_gpus_per_node", "2")
    own = dict.fromkeys(CONFIGS, ())
    # About 6 of 24 prompts are committed: never a whole batch of 16, so that filling has something to do.
    own["combined"] = ("--ext.pilot.prompts_per_round", "24")
    return train_variants(folder, countdown, own, *flags)


def test_aper_adds_a_draw_to_every_fresh_informative_rollout(trained: Path) -> None:
    rows = check_rollout_replay(trained / "aper", max_age=10)
    stored = 0
    for row in rows:
        fresh = row["step/num_trained_fresh"]
        assert row["step/rollouts_generated"] == GENERATED == fresh + row["step/num_filtered_zero_variance"]
        assert row["rollout_replay/num_drawn"] == (0 if row["step"] == 1 else min(round(fresh / 2), stored))
        assert row["train/num_rows"] == fresh + row["rollout_replay/num_drawn"] == row["step/num_gradient_rollouts"]
        # An uneven number of rows over two actors, and still one optimizer step.
        assert row["train/num_optimizer_steps"] == 1 and row["groups/effective_frac_trained"] == 1.0
        stored += fresh
        assert row["rollout_buffer/num_rollouts"] == stored
    assert rows[-1]["rollout_replay/behavior_kl"] > 0
    assert json.loads((trained / "aper" / "summary.json").read_text())["method"] == "aper"


@pytest.mark.parametrize("name", ["aper_uniform_pool", "aper_sigma_pool"])
def test_a_naive_baseline_trains_as_many_rows_as_aper_would(trained: Path, name: str) -> None:
    stored = 0
    for row in check_rollout_replay(trained / name, max_age=10):
        informative = GENERATED - row["step/num_filtered_zero_variance"]
        wanted = informative if row["step"] == 1 else 8 * round(1.5 * informative / 8)
        assert row["train/num_rows"] == min(wanted, informative + stored)
        assert row["step/num_trained_fresh"] == informative - row["step/num_pool_not_drawn"]
        stored = row["rollout_buffer/num_rollouts"]


def test_all_methods_together(trained: Path) -> None:
    check_rollout_replay(trained / "combined", max_age=10)
    rows = check_pilots(trained / "combined", max_rounds=1)
    assert sum(row["replay/num_rows"] for row in rows) > 0 and sum(row["rollout_replay/num_rows"] for row in rows) > 0
    assert json.loads((trained / "combined" / "summary.json").read_text())["method"] == "pilot_commit_popo_aper"
