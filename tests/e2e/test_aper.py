"""Rollout replay, its naive baselines, POPO-KL and all methods together, over two actors; test_variants.py has one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import train_variants
from laws import check_pilots, check_rollout_replay

from openrlhf_ext.run_dir import read_metrics

GENERATED = 128
CONFIGS = ("aper", "aper_uniform_pool", "aper_sigma_pool", "combined", "popo_kl")
# Groups and their size in popo_kl: an odd number of informative ones gives the two actors different numbers of rows.
ODD, SIZE = 9, 6


@pytest.fixture(scope="module")
def trained(countdown: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of each configuration."""
    folder = tmp_path_factory.mktemp("two_actors")
    flags = ("--ext.max_steps", "6", "--actor.num_gpus_per_node", "2")
    own = dict.fromkeys(CONFIGS, ())
    # About 6 of 24 prompts are committed: never a whole batch of 16, so that filling has something to do.
    own["combined"] = ("--ext.pilot.prompts_per_round", "24")
    own["popo_kl"] = (
        *("--rollout.batch_size", str(ODD), "--rollout.n_samples_per_prompt", str(SIZE), "--train.batch_size", "54"),
        *("--train.micro_batch_size", "27", "--rollout.micro_batch_size", "8"),
        *("--ext.groups.ineffective", "drop", "--ext.fill.max_age", "2"),
    )
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


def test_popo_kl_drops_what_it_cannot_fill(trained: Path) -> None:
    rows = read_metrics(trained / "popo_kl", "train")
    for row in rows:
        fresh, replayed = row["step/num_trained_fresh"], row["step/num_replayed"]
        assert row["step/rollouts_generated"] == ODD * SIZE
        assert row["step/rollouts_generated"] == (
            fresh + row["step/num_replaced_zero_variance"] + row["step/num_filtered_zero_variance"]
        )
        assert row["train/num_rows"] == fresh + replayed <= ODD * SIZE
        if row["train/num_rows"]:
            assert row["groups/effective_frac_trained"] == 1.0
        assert row.get("replay/age_max", 0) <= 2
    assert rows[0]["train/num_rows"] < ODD * SIZE
    assert sum(row["step/num_replayed"] for row in rows) > 0
