"""DAPO over two actors and two engines with ZeRO-3 and a reference model; GRPO-filter with a verifier that hangs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

from command import ROOT, Command

from openrlhf_ext.run_dir import read_metrics


def test_dapo_on_two_ranks_and_two_engines(start: Callable[..., Command], tmp_path: Path) -> None:
    steps, prompts, group = 3, 7, 4
    command = start(
        "dapo",
        tmp_path / "dapo",
        *("--ext.max_steps", str(steps), "--ext.eval.at_start", "false", "--ext.log.samples_per_step", "24"),
        *("--rollout.batch_size", str(prompts), "--rollout.n_samples_per_prompt", str(group)),
        *("--train.batch_size", "28", "--train.micro_batch_size", "14", "--rollout.micro_batch_size", "8"),
        # One round, whose informative groups are about as many as a batch has: some batches have a surplus, others
        # stay short. 2 ranks share an odd number of groups.
        *("--ext.dapo.prompts_per_round", "40", "--ext.dapo.max_rounds", "1"),
        *("--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2", "--ds.zero_stage", "3"),
        *("--ref.num_nodes", "1", "--ref.num_gpus_per_node", "2"),
        *("--algo.kl.init_coef", "1e-3", "--algo.kl.use_loss", "--algo.kl.estimator", "k3"),
        *("--actor.adam.lr", "1e-3"),  # high, so that three steps show
    )
    command.wait_until(lambda: len(command.descendants("EngineCore")) == 2, 300, "two engines run")
    assert command.wait(300) == 0, command.output[-4000:]
    assert command.alive() == []

    rows = read_metrics(command.run_dir, "train")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        kept, filtered, surplus = (
            row[f"step/num_{fate}"] for fate in ("trained_fresh", "filtered_zero_variance", "surplus")
        )
        assert row["step/rollouts_generated"] == 40 * group == kept + filtered + surplus
        assert kept == row["train/num_rows"] <= prompts * group
        assert kept == prompts * group or surplus == 0
        assert row["groups/effective_frac_trained"] == 1.0
        assert row["rollout/engine_log_prob_abs_diff_mean"] < 0.05
    # The policy starts as the reference, up to bf16 in batches of another shape, and leaves it.
    assert abs(rows[0]["train/kl"]) < 1e-4 < rows[-1]["train/kl"]
    ledger = json.loads((command.run_dir / "ledger.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) == rows[-1]["budget/rollouts_generated"]
    assert ledger["fates"]["filtered_zero_variance"] > 0
    assert json.loads((command.run_dir / "summary.json").read_text())["method"] == "dapo"
    assert (command.run_dir / "model" / "config.json").exists()


HANGS = """
import importlib.util, time
spec = importlib.util.spec_from_file_location("countdown", {countdown!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def reward_func(queries, prompts, labels):
    if "-" in queries[0][len(prompts[0]):]:
        time.sleep(1000)
    return module.reward_func(queries, prompts, labels)
"""


def test_grpo_filter_goes_on_while_the_verifier_hangs_and_stops_at_sigterm(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    reward = tmp_path / "hangs.py"
    reward.write_text(HANGS.format(countdown=str(ROOT / "openrlhf_ext/rewards/countdown.py")))
    command = start(
        "grpo_filter",
        tmp_path / "filter",
        *("--ext.max_steps", "1000", "--ext.eval.at_start", "false"),
        *("--reward.remote_url", str(reward), "--ext.reward.deadline_s", "0.25"),
        *("--rollout.batch_size", "8", "--train.batch_size", "64"),
        *("--train.micro_batch_size", "32", "--rollout.micro_batch_size", "32", "--ext.fp32", "true"),
    )
    metrics = command.run_dir / "metrics.jsonl"
    command.wait_for_steps(6, 400)
    asked_at = time.monotonic()
    command.process.send_signal(signal.SIGTERM)
    assert command.wait(60) == 128 + signal.SIGTERM, command.output[-4000:]
    assert time.monotonic() - asked_at < 45
    assert command.alive() == []

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert sum(row["step/num_reward_timeouts"] for row in rows) > 0
    for row in rows:
        assert row["step/rollouts_generated"] == 64 == row["train/num_rows"] + row["step/num_filtered_zero_variance"]
        # In float32 engine and trainer agree, step after step; bfloat16 leaves 0.01 to 0.05.
        assert row.get("rollout/engine_log_prob_abs_diff_mean", 0) < 1e-4
        assert row.get("rollout/engine_kl_mean", 0) < 1e-6
    assert 0 < min(row["train/num_rows"] for row in rows if row["train/num_rows"]) < 64
    # A stopped run has no outcome; what it spent is on disk all the same.
    assert not (command.run_dir / "summary.json").exists()
    assert json.loads((command.run_dir / "ledger.json").read_text())["generated"] == 64 * len(rows)
