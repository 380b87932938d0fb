"""A broken verifier, a dead engine and a folder without a model: one clear message and an exit code, never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from command import Command


def error_line(command: Command) -> str:
    (line,) = (line for line in command.output.splitlines() if line.startswith("error: "))
    return line


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
    message = error_line(command)
    assert message.startswith("error: step 1: ") and "The verifier works on no prompt" in message
    assert f"{reward} raised TypeError: list indices must be integers or slices, not str (broken.py:2)" in message
    assert "Traceback" in (command.run_dir / "error.log").read_text() and "Traceback" not in command.output
    assert command.alive() == []


def test_the_death_of_the_only_engine_ends_the_run(start: Callable[..., Command], tmp_path: Path) -> None:
    # 100 passes over a batch take far longer than its generation, so the kill falls into them.
    command = start(
        "grpo",
        tmp_path / "run",
        *("--train.max_epochs", "100", "--ext.eval.at_start", "false", "--ext.max_steps", "1000"),
    )
    command.wait_for_steps(1, 300)
    (engine,) = command.descendants("EngineCore")
    time.sleep(3.0)
    engine.kill()
    assert command.wait(90) == 1, command.output[-4000:]
    assert "vLLM engine" in error_line(command)
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
