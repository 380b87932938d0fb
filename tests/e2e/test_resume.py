"""The real stack, killed and resumed: what all attempts leave behind together is what one unbroken run leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import Command
from laws import check_births, lines

from openrlhf_ext.run_dir import read_metrics

STEPS, SAVED_EVERY = 10, 2
FLAGS = (
    *("--ext.max_steps", str(STEPS), "--ckpt.save_steps", str(SAVED_EVERY), "--ext.resume", "auto"),
    *("--ext.rollout.seed_requests", "true", "--ext.replay.warmup_steps", "1"),
    *("--ext.eval.at_start", "false", "--ext.log.samples_per_step", "1000"),
    *("--train.micro_batch_size", "32", "--rollout.micro_batch_size", "32"),
    "--actor.adam.lr",
    "1e-3",  # high, so that other weights would sample other tokens
)
TIMED = ("timing/", "wall_s", "train_wall_s", "rollout/engine_busy_frac")


def test_a_run_killed_three_times_is_the_unbroken_run(start: Callable[..., Command], tmp_path: Path) -> None:
    unbroken = start("combined", tmp_path / "unbroken", *FLAGS)
    assert unbroken.wait(400) == 0, unbroken.output[-4000:]
    run_dir = tmp_path / "killed"
    for step in (1, 4, 7):
        start_and_kill(lambda: start("combined", run_dir, *FLAGS), run_dir / "metrics.jsonl", step)
    last = start("combined", run_dir, *FLAGS)
    assert last.wait(400) == 0, last.output[-4000:]
    assert "going on after step" in last.output

    expected, found = (read_metrics(run.run_dir) for run in (unbroken, last))
    assert [(row["kind"], row["step"]) for row in found] == [
        *(("train", step) for step in range(1, STEPS + 1)),
        ("eval", STEPS),
    ]
    for one, other in zip(found, expected, strict=True):
        check_metrics(one, other)
    for name in ("ledger.json", "summary.json"):
        contents = [json.loads((run.run_dir / name).read_text()) for run in (last, unbroken)]
        for key in ("generated", "tokens", "replayed", "waiting", "fates", "steps", "rollouts_generated"):
            assert contents[0].get(key) == contents[1].get(key), key
    assert lines(run_dir / "replay.jsonl") == lines(unbroken.run_dir / "replay.jsonl")
    assert sum(check_births(run_dir).values()) > 0
    assert sum(row.get("budget/rollouts_waiting", 0) for row in found) > 0
    samples = [[without_advantage(line) for line in lines(run.run_dir / "samples.jsonl")] for run in (last, unbroken)]
    assert samples[0] == samples[1]


def start_and_kill(start: Callable[[], Command], metrics: Path, step: int) -> None:
    """Kill an attempt once it has made ``step``, and a step after its checkpoint."""
    before = metrics.stat().st_ino if metrics.exists() else None
    num_lines = metrics.read_text().count("\n") if metrics.exists() else 0
    target = max(step, num_lines // SAVED_EVERY * SAVED_EVERY + 1)

    def is_reached() -> bool:
        # An attempt that goes on writes the file anew, without the steps that it does again.
        has_begun = metrics.exists() and metrics.stat().st_ino != before
        return has_begun and metrics.read_text().count("\n") >= target

    command = start()
    command.wait_until(is_reached, 400, f"step {target} is done")
    command.kill()
    assert metrics.read_text().count("\n") < STEPS


def check_metrics(found: dict, expected: dict) -> None:
    """Counts are the same; means of log-probabilities and the like are, up to the order of sums in threads.

    That includes the gap between the engine's and the trainer's log-probabilities: the engine has the trainer's
    weights in the first step of an attempt, too.
    """
    names = [name for name in found if not name.startswith(TIMED)]
    assert names == [name for name in expected if not name.startswith(TIMED)]
    for name in names:
        if isinstance(found[name], float):
            assert found[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-4), name
        else:
            assert found[name] == expected[name], name


def without_advantage(line: dict) -> dict:
    return {key: value for key, value in line.items() if key != "advantage"}
