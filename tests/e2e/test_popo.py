"""POPO with a critic on the real stack: full batches, each stored group traced to its birth, at PPO's rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from command import Command
from laws import check_filled_in_order, check_filling

PROMPTS, GROUP = 16, 8


def test_filling_goes_with_a_critic(start: Callable[..., Command], countdown: Path, tmp_path: Path) -> None:
    command = start(
        "popo_ppo",
        tmp_path / "run",
        *("--critic.model_name_or_path", str(countdown / "model"), "--ext.max_steps", "3"),
        *("--ext.eval.at_start", "false", "--ext.log.samples_per_step", str(PROMPTS * GROUP)),
    )
    assert command.wait(250) == 0, command.output[-4000:]
    check_filled_in_order(check_filling(command.run_dir, PROMPTS, GROUP), PROMPTS)
    assert json.loads((command.run_dir / "summary.json").read_text())["method"] == "popo_ppo"
