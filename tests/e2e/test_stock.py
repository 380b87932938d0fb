"""Stock OpenRLHF with and without dynamic filtering: what its runs leave behind, and what it throws away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import train_on_one_stack

from openrlhf_ext.run_dir import read_eval_prompts, read_metrics

PROMPTS, GROUP = 16, 8


@pytest.fixture(scope="module")
def stock(countdown: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs openrlhf_dapo and openrlhf, on one engine and one actor."""
    folder = tmp_path_factory.mktemp("stock")
    # One and a half batches: the second batch of a pass is short.
    few = folder / "few.jsonl"
    few.write_text("".join((countdown / "train.jsonl").read_text().splitlines(keepends=True)[: PROMPTS * 3 // 2]))
    task = (
        *("--actor.model_name_or_path", str(countdown / "model")),
        *("--data.prompt_dataset", str(countdown / "train.jsonl"), "--eval.dataset", str(countdown / "eval.jsonl")),
        *("--eval.n_samples_per_prompt", "2", "--ext.eval.pass_at", "1", "2", "4"),
        *("--train.micro_batch_size", "32", "--rollout.micro_batch_size", "32", "--actor.adam.lr", "1e-3"),
        *("--ext.log.distance", "true", "--vllm.enable_prefix_caching", "--ext.max_steps", "2"),
        *("--ext.eval.final_samples", "4", "--algo.advantage.is_correction_level", "token"),
    )
    runs = {
        "openrlhf_dapo": ("--algo.dynamic_filtering_enable",),
        "openrlhf": (
            *("--data.prompt_dataset", str(few), "--ext.max_steps", "null", "--ext.max_rollouts", "300"),
            *("--ext.eval.at_start", "false", "--ext.eval.every_rollouts", "150"),
        ),
    }
    config = "configs/cpu/grpo.yaml"
    return train_on_one_stack(folder, {name: [config, *task, *flags] for name, flags in runs.items()}, stock=True)


@pytest.fixture
def rows_of(stock: Path) -> Callable[[str], list[dict]]:
    return lambda name: read_metrics(stock / name, "train")


@pytest.mark.parametrize("name", ["openrlhf_dapo", "openrlhf"])
def test_every_generated_rollout_is_trained_filtered_or_left_out(stock: Path, rows_of: Callable, name: str) -> None:
    fates = ("trained_fresh", "filtered_zero_variance", "surplus")
    total = tokens = 0
    for row in rows_of(name):
        assert row["step/rollouts_generated"] == GROUP * row["step/num_prompts"] == GROUP * row["groups/num_generated"]
        assert row["step/rollouts_generated"] == sum(row[f"step/num_{fate}"] for fate in fates)
        total, tokens = total + row["step/rollouts_generated"], tokens + row["step/tokens_generated"]
    ledger = json.loads((stock / name / "ledger.json").read_text())
    summary = json.loads((stock / name / "summary.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) == total == summary["rollouts_generated"]
    assert ledger["tokens"] == tokens > total
    assert (summary["method"], summary["ended"]) == (name, None)


def test_with_filtering_a_batch_is_full_of_groups_with_spread(rows_of: Callable) -> None:
    rows = rows_of("openrlhf_dapo")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["groups/num_trained"] == PROMPTS and row["groups/effective_frac_trained"] == 1.0
        assert row["train/num_rows"] == row["step/num_gradient_rollouts"] == PROMPTS * GROUP
        filtered = row["step/num_filtered_zero_variance"] // GROUP
        assert filtered > 0 and row["step/num_prompts"] == PROMPTS + filtered
        assert row["groups/effective_frac_generated"] == pytest.approx(PROMPTS / row["step/num_prompts"])
        assert row["train/num_optimizer_steps"] == 1 and row["train/actor_lr"] == 1e-3
        parts = ("generation", "make_experience", "ppo_train", "broadcast", "other")
        assert sum(row[f"timing/{part}"] for part in parts) == pytest.approx(row["timing/step_total"])


def test_evaluations_are_this_packages_with_more_samples_at_the_end(stock: Path) -> None:
    before, after = read_metrics(stock / "openrlhf_dapo", "eval")
    assert (before["step"], after["step"], before["policy/distance"]) == (0, 2, 0.0)
    assert after["policy/distance"] > 0
    assert (before["eval/num_samples"], after["eval/num_samples"]) == (16 * 2, 16 * 4)
    assert 0 < before["eval/accuracy"] < 1 and "eval/pass@4" not in before
    assert after["eval/pass@1"] <= after["eval/pass@2"] <= after["eval/pass@4"]
    assert [len(found) for found in read_eval_prompts(stock / "openrlhf_dapo").values()] == [16, 16]
    summary = json.loads((stock / "openrlhf_dapo" / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (before["eval/accuracy"], after["eval/accuracy"])


def test_the_short_batch_of_a_pass_waits_in_the_gradient_and_the_run_ends_at_its_budget(rows_of: Callable) -> None:
    # 24 prompts: batches of 128 and 64 rollouts, of which the second fills two of the four micro-batches of an
    # optimizer step; the next pass finds those two in its gradient.
    rows = rows_of("openrlhf")
    assert [row["budget/rollouts_generated"] for row in rows] == [128, 192, 320]
    assert [row["train/num_rows"] for row in rows] == [128, 64, 128]
    assert [row["train/num_optimizer_steps"] for row in rows] == [1, 0, 1]


def test_evaluation_follows_the_rollouts_not_the_steps(stock: Path) -> None:
    evaluated = [row["budget/rollouts_generated"] for row in read_metrics(stock / "openrlhf", "eval")]
    assert evaluated == [192, 320]


def test_new_weights_reach_the_engine(rows_of: Callable) -> None:
    assert all(abs(row["train/vllm_kl"]) < 0.01 for row in rows_of("openrlhf"))
