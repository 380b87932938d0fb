"""Every configuration of a method or ablation trains three or more real steps, on one engine and one actor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import ROOT, train_variants
from laws import check_filled_in_order, check_filling, check_pilots, check_rollout_replay

from openrlhf_ext.run_dir import read_metrics

# What other tests of this folder train with more to show is left out here.
ELSEWHERE = {"grpo", "dapo", "grpo_filter", "popo_kl", "popo_ppo", "pilot_commit"}
CONFIGS = sorted(
    path.stem
    for path in (ROOT / "configs/cpu").glob("*.yaml")
    if path.stem not in ELSEWHERE and not path.stem.startswith("smollm2")
)
# Of 24 prompts a round, about 6 are committed: never a whole batch of 16, so that filling has something to do.
FEW_PILOTS = ("--ext.pilot.prompts_per_round", "24")
FLAGS = {
    "popo": ("--ext.max_steps", "6"),  # by then the buffer holds enough for a full batch
    "popo_stale": ("--ext.fill.min_age", "2"),  # old enough within three steps
    # What filling takes from its buffer is not drawn again, so both need some steps' groups.
    "combined_capped": ("--ext.throttle.max_row_frac", "0.2", "--ext.max_steps", "6"),
    "combined": ("--ext.max_steps", "6", *FEW_PILOTS),
    "arpo": ("--ext.max_steps", "10"),
    "pilot_commit_popo": ("--ext.max_steps", "5", *FEW_PILOTS),
}
GROUP_SIZE = {"popo_k4": 4, "popo_k16": 16, "popo_k32": 32}
GENERATED = 128


@pytest.fixture(scope="module")
def trained(countdown: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of every configuration, on one actor."""
    folder = tmp_path_factory.mktemp("variants")
    # 16 prompts, so that ARPO meets a prompt again in every step.
    few = folder / "few.jsonl"
    few.write_text("".join((countdown / "train.jsonl").read_text().splitlines(keepends=True)[:16]))
    flags = {name: FLAGS.get(name, ()) for name in CONFIGS}
    flags["arpo"] = ("--data.prompt_dataset", str(few), *flags["arpo"])
    return train_variants(folder, countdown, flags, "--ext.max_steps", "3")


@pytest.mark.parametrize("name", CONFIGS)
def test_it_trains_and_every_rollout_is_accounted_for(trained: Path, name: str) -> None:
    rows = read_metrics(trained / name, "train")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 3
    ledger = json.loads((trained / name / "ledger.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) + ledger["waiting"]
    for row in rows:
        assert row["train/num_rows"] == row["step/num_trained_fresh"] + row["step/num_replayed"]
        # However many rows: one optimizer step, as without replay.
        assert row["train/num_optimizer_steps"] == (row["train/num_rows"] > 0)
    if name.startswith("pilot_commit") or name.startswith("combined"):
        check_pilots(trained / name, max_rounds=1 if "popo" in name or "combined" in name else 10)
    if name.startswith("popo") and name != "popo_ineff":
        size = GROUP_SIZE.get(name, 8)
        check_filling(trained / name, GENERATED // size, size)
    if name.startswith(("aper", "combined")) or name == "pilot_commit_aper":
        check_rollout_replay(trained / name, max_age=30 if name == "aper_age30" else 10)
        assert sum(row["rollout_replay/num_rows"] for row in rows) > 0


@pytest.fixture
def rows_of(trained: Path) -> Callable[[str], list[dict]]:
    return lambda name: read_metrics(trained / name, "train")


def test_popo_fills_the_batch_with_informative_groups(rows_of: Callable) -> None:
    rows = rows_of("popo")
    check_filled_in_order(rows, 16)
    assert rows[-1]["groups/effective_frac_trained"] == 1.0 > rows[-1]["groups/effective_frac_generated"]


def test_popo_ineff_fills_every_slot_from_a_buffer_of_all_groups(rows_of: Callable) -> None:
    rows = rows_of("popo_ineff")
    assert [row["group_buffer/num_groups"] for row in rows] == [16, 16, 16]
    assert [row["step/num_replayed"] // 8 for row in rows[1:]] == [
        16 - round(row["groups/effective_frac_generated"] * 16) for row in rows[1:]
    ]


def test_popo_stale_takes_no_group_that_is_too_young(rows_of: Callable) -> None:
    rows = rows_of("popo_stale")
    stored, _, _ = (row["group_buffer/num_groups"] for row in rows)
    missing = 16 - round(rows[2]["groups/effective_frac_generated"] * 16)
    assert [row["replay/num_groups"] for row in rows] == [0, 0, min(stored, missing)]
    assert rows[2].get("replay/age_max", 2) == 2


@pytest.mark.parametrize("name", ["popo_on_policy", "popo_behavior_clip"])
def test_the_uncorrected_objectives_weigh_nothing(rows_of: Callable, name: str) -> None:
    replayed = [row for row in rows_of(name) if row["replay/num_rows"]]
    assert replayed and all(row["replay/weight_max"] == 1.0 for row in replayed)


@pytest.mark.parametrize("name", ["aper_pool", "aper_sigma_pool", "aper_uniform_pool"])
def test_a_pool_baseline_trains_as_many_rows_as_aper_would(rows_of: Callable, name: str) -> None:
    rows = rows_of(name)
    for before, row in zip(rows[1:], rows[2:], strict=False):
        informative = GENERATED - row["step/num_filtered_zero_variance"]
        wanted = round(1.5 * informative) if name == "aper_pool" else 8 * round(1.5 * informative / 8)
        assert row["train/num_rows"] == min(wanted, informative + before["rollout_buffer/num_rollouts"])
        assert row["step/num_trained_fresh"] == informative - row["step/num_pool_not_drawn"]


def test_whole_groups_are_drawn_where_groups_are_the_unit(rows_of: Callable) -> None:
    assert all(row["step/num_replayed"] % 8 == 0 for row in rows_of("aper_group"))


def test_the_decoupled_form_weighs_replayed_rollouts(rows_of: Callable) -> None:
    assert rows_of("aper_decoupled")[2]["rollout_replay/weight_max"] != 1.0


def test_limits_on_replay_hold(rows_of: Callable) -> None:
    rows = rows_of("combined_capped")
    assert all(row["replay/num_groups"] <= 4 for row in rows)
    assert min(row["throttle/share"] for row in rows) < 1.0


def test_unbound_pilots_are_committed_in_their_own_step(rows_of: Callable) -> None:
    assert all(row["pilot/survivor_age_max"] == 0 for row in rows_of("pilot_commit_unbound"))


@pytest.mark.parametrize("name", ["mopps_popo", "pilot_commit_popo"])
def test_selection_goes_with_filling(trained: Path, rows_of: Callable, name: str) -> None:
    assert json.loads((trained / name / "summary.json").read_text())["method"] == name
    assert sum(row["step/num_replayed"] for row in rows_of(name)) > 0


def test_arpo_gives_failed_groups_a_success_of_their_prompt(rows_of: Callable) -> None:
    rows = rows_of("arpo")
    for row in rows:
        assert row["train/num_rows"] == GENERATED == row["step/rollouts_generated"]
        assert row["step/num_replaced_by_success"] == row["step/num_replayed"]
        assert row["groups/effective_frac_trained"] == pytest.approx(
            row["groups/effective_frac_generated"] + row["step/num_replayed"] / 16
        )
    assert rows[0]["step/num_replayed"] == 0 < sum(row["step/num_replayed"] for row in rows)
