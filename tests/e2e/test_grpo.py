"""GRPO with one actor and one engine: what a run leaves behind, and that its weights arrive."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from command import Command
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ext.ledger import FATES
from openrlhf_ext.rewards.countdown import reward_func
from openrlhf_ext.run_dir import read_metrics

STEPS = 6
PROMPTS, GROUP = 16, 8
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def finished(start: Callable[..., Command], tmp_path_factory: pytest.TempPathFactory) -> Command:
    run_dir = tmp_path_factory.mktemp("runs") / "grpo"
    command = start(
        "grpo",
        run_dir,
        *("--ext.max_steps", str(STEPS), "--ext.log.samples_per_step", "128"),
        # High, so that the weights move far in a few steps.
        *("--actor.adam.lr", "1e-3"),
        *("--logger.tensorboard_dir", str(run_dir / "tensorboard")),
        *("--ext.log.wandb", "offline", "--logger.wandb.key", KEY),
    )
    command.wait_until(lambda: bool(command.descendants("raylet") and command.descendants("EngineCore")), 300, "start")
    assert command.wait(300) == 0, command.output[-4000:]
    return command


@pytest.fixture
def steps(finished: Command) -> list[dict]:
    return read_metrics(finished.run_dir, "train")[:STEPS]


def read_json(finished: Command, name: str) -> dict:
    return json.loads((finished.run_dir / name).read_text())


def samples(finished: Command) -> list[dict]:
    return [json.loads(line) for line in (finished.run_dir / "samples.jsonl").read_text().splitlines()]


def test_the_fates_of_every_step_sum_to_its_rollouts_and_the_budget_is_cumulative(steps: list[dict]) -> None:
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for step, row in enumerate(steps, start=1):
        fates = sum(row[f"step/num_{fate}"] for fate in FATES)
        assert row["step/rollouts_generated"] == fates == row["train/num_rows"] == PROMPTS * GROUP
        assert row["budget/rollouts_generated"] == step * PROMPTS * GROUP


def test_the_ledger_has_a_fate_for_every_rollout(finished: Command) -> None:
    ledger = read_json(finished, "ledger.json")
    assert set(ledger["fates"]) == set(FATES)
    assert ledger["generated"] == sum(ledger["fates"].values()) == STEPS * PROMPTS * GROUP


def test_evaluations_before_and_after_are_in_metrics_and_summary(finished: Command) -> None:
    before, after = read_metrics(finished.run_dir, "eval")
    summary = read_json(finished, "summary.json")
    assert (before["step"], after["step"]) == (0, STEPS)
    for row, name in ((before, "before"), (after, "after")):
        assert row["eval/accuracy"] == pytest.approx(row["eval/pass@1"]) == summary[f"accuracy_{name}"]
        assert row["eval/pass@1"] <= row["eval/pass@2"] <= row["eval/pass@4"]
        assert row["eval/num_samples"] == summary["eval_samples"] == 16 * 4
    assert (before["budget/rollouts_generated"], after["budget/rollouts_generated"]) == (0, STEPS * PROMPTS * GROUP)
    assert (summary["method"], summary["steps"]) == ("grpo", STEPS)
    assert summary["rollouts_generated"] == STEPS * PROMPTS * GROUP
    # The step is split completely: every part has its seconds.
    parts = summary["step_seconds_median"]
    assert set(parts) == {"generation", "make_experience", "ppo_train", "broadcast", "other", "step_total"}


def test_samples_belong_to_the_prompts_and_their_rewards_are_the_verifiers(finished: Command, countdown: Path) -> None:
    rows = {row["id"]: row for row in map(json.loads, (countdown / "train.jsonl").read_text().splitlines())}
    lines = samples(finished)
    assert len(lines) == STEPS * PROMPTS * GROUP
    for line in lines:
        row = rows[line["prompt_id"]]
        assert line["prompt"] == row["input"]
        value = reward_func([line["prompt"] + line["response"]], [line["prompt"]], [row["label"]])
        assert (line["reward"], line["policy_version"]) == (value["rewards"], line["step"] - 1)
    assert {line["reward"] for line in lines} == {0.0, 1.0}


def test_the_engine_samples_from_the_trained_weights(finished: Command, steps: list[dict], countdown: Path) -> None:
    """At the last step the engine agrees with the trainer; the weights that it started with would not."""
    gap = steps[-1]["rollout/engine_log_prob_abs_diff_mean"]
    assert gap < 0.05
    stale = _mean_gap(countdown / "model", finished.run_dir / "model", samples(finished)[-64:])
    assert stale > 10 * gap


def _mean_gap(first: Path, second: Path, lines: list[dict]) -> float:
    """Mean over tokens of the absolute difference of two models' log-probabilities of the same responses."""
    tokenizer = AutoTokenizer.from_pretrained(first)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (first, second)]
    gaps = []
    for line in lines:
        prompt, response = (
            tokenizer(line[key], return_tensors="pt", add_special_tokens=False)["input_ids"][0].long()
            for key in ("prompt", "response")
        )
        tokens = torch.cat([prompt, response])[None]
        with torch.inference_mode():
            logits = [model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float() for model in models]
        a, b = (values.log_softmax(-1).gather(-1, response[:, None]) for values in logits)
        gaps += (a - b).abs().flatten().tolist()
    return sum(gaps) / len(gaps)


def test_the_figures_are_in_tensorboard_and_wandb_and_no_file_holds_the_key(finished: Command) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(finished.run_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("budget/rollouts_generated")] == [0, *range(1, STEPS + 1), STEPS]
    assert list(finished.run_dir.glob("wandb/offline-run-*/*.wandb"))
    logs = finished.run_dir / "logs"
    files = [path for folder in (finished.run_dir, logs.resolve()) for path in folder.rglob("*") if path.is_file()]
    assert logs.is_symlink() and any(path.parent == logs.resolve() for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_the_written_config_gives_the_same_settings_again(finished: Command) -> None:
    text = (finished.run_dir / "config.yaml").read_text()
    printed = subprocess.run(
        [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", "--config", finished.run_dir / "config.yaml"]
        + ["--print-config"],
        cwd=finished.run_dir,  # paths in it do not depend on the folder
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert yaml.safe_load(printed) == yaml.safe_load(text)
    assert yaml.safe_load(text)["actor.adam.lr"] == 1e-3


def test_no_process_is_left(finished: Command) -> None:
    # raylet, gcs_server, workers, engine, reward processes
    assert finished.num_seen() > 8
    assert finished.alive() == []
