"""A broken verifier, a dead engine and a folder without a model: one clear message and an exit code, never a hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from command import Command


def test_a_verifier_that_always_raises_ends_the_run_with_its_error(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': labels['target']}\n")
    command = start(
        "grpo",
        tmp_path / "run",
        *("--reward.remote_url", str(reward), "--ext.eval.at_start", "false", "--ext.max_steps", "2"),
    )
    assert command.wait(300) == 1, command.output[-4000:]
    last = command.output.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: step 1: ") and "The verifier works on no prompt" in last
    assert f"{reward} raised TypeError: list indices must be integers or slices, not str (broken.py:2)" in last
    assert command.alive() == []


def test_the_death_of_the_only_engine_ends_the_run(start: Callable[..., Command], tmp_path: Path) -> None:
    command = start("grpo", tmp_path / "run", *("--ext.eval.at_start", "false", "--ext.max_steps", "1000"))
    metrics = command.run_dir / "metrics.jsonl"
    command.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, 300, "a step is done")
    (engine,) = command.descendants("EngineCore")
    engine.kill()
    assert command.wait(90) == 1, command.output[-4000:]
    assert "vLLM engine" in command.output.strip().splitlines()[-1]
    assert command.alive() == []


def test_a_folder_without_a_model_is_refused_before_anything_starts(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    command = start("grpo", tmp_path / "run", *("--actor.model_name_or_path", str(tmp_path / "model")))
    assert command.wait(60) == 2
    (message,) = command.output.strip().splitlines()
    assert message.startswith(f"error: --actor.model_name_or_path: {tmp_path / 'model'} has no config.json")
    assert not (tmp_path / "run").exists()
