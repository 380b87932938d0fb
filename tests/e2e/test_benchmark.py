"""A suite on the real stack: interrupted and gone on with, a run that fails, and runs in whatever order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from command import ENVIRONMENT, ROOT

from openrlhf_ext.run_dir import read_metrics

SUITE = """\
rollouts: 384
evaluate_every: 200
final_samples: 4
learning_rates: [1e-3]
seeds: [1]
baselines: [first]
flags:
  actor.model_name_or_path: {task}/model
  data.prompt_dataset: {task}/train.jsonl
  eval.dataset: {task}/eval.jsonl
  eval.n_samples_per_prompt: 2
  ext.eval.pass_at: [1, 2, 4]
  vllm.enable_prefix_caching: true
  train.micro_batch_size: 32
  rollout.micro_batch_size: 32
methods:
  first: {{config: configs/cpu/grpo.yaml}}
  popo: {{config: configs/cpu/popo.yaml}}
  again: {{config: configs/cpu/grpo.yaml}}
  popo_again: {{config: configs/cpu/popo.yaml}}
  broken: {{config: configs/cpu/grpo.yaml, flags: {{eval.dataset: {folder}/broken.jsonl}}}}
"""


class SuiteCommand:
    """``cli.benchmark`` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / f"output-{time.time_ns()}.txt"
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "openrlhf_ext.cli.benchmark", str(folder / "suite.yaml")]
                + ["--out", str(folder / "out")],
                cwd=ROOT,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._output.read_text("utf-8", errors="replace").replace("\r", "\n")

    def wait(self) -> int:
        try:
            return self.process.wait(500)
        except subprocess.TimeoutExpired:
            self.fail()

    def fail(self) -> NoReturn:
        self.process.terminate()
        self.process.wait()
        raise AssertionError(self.output[-4000:])


@pytest.fixture(scope="module")
def interrupted(countdown: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[psutil.Process]]:
    """The folder of a suite that got SIGTERM in its second run, its exit code, and its processes that are left."""
    folder = tmp_path_factory.mktemp("suite")
    rows = [json.loads(line) for line in (countdown / "eval.jsonl").read_text().splitlines()]
    broken = "".join(json.dumps({**row, "label": "no puzzle"}) + "\n" for row in rows)
    (folder / "broken.jsonl").write_text(broken)
    (folder / "suite.yaml").write_text(SUITE.format(task=countdown, folder=folder))
    command = SuiteCommand(folder)
    second = folder / "out" / "runs" / "popo-lr0.001-seed1" / "metrics.jsonl"
    give_up = time.monotonic() + 500
    while not second.exists() and command.process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.2)
    if not second.exists():
        command.fail()
    started = psutil.Process(command.process.pid).children(recursive=True)
    command.process.send_signal(signal.SIGTERM)
    code = command.wait()
    return folder, code, [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def finished(interrupted) -> tuple[Path, int, str]:
    """The same suite after the same command once more: its folder, exit code and output."""
    folder = interrupted[0]
    (folder / "first-summary.json").write_bytes(summary(folder, "first").read_bytes())
    command = SuiteCommand(folder)
    return folder / "out", command.wait(), command.output


def summary(folder: Path, method: str) -> Path:
    return folder / "out" / "runs" / f"{method}-lr0.001-seed1" / "summary.json"


def test_an_interrupted_suite_leaves_no_process_and_keeps_what_is_finished(interrupted) -> None:
    folder, code, left = interrupted
    assert (code, left) == (128 + signal.SIGTERM, [])
    assert summary(folder, "first").exists() and not summary(folder, "popo").exists()


def test_it_goes_on_without_making_a_finished_run_again(finished) -> None:
    out = finished[0]
    assert summary(out.parent, "first").read_bytes() == (out.parent / "first-summary.json").read_bytes()
    for method in ("first", "popo", "again", "popo_again"):
        steps = [row["step"] for row in read_metrics(summary(out.parent, method).parent, "train")]
        assert steps == [1, 2, 3]


def test_a_run_that_fails_is_reported_and_the_others_are_compared(finished) -> None:
    out, code, output = finished
    assert code == 1
    assert "error: broken lr 0.001 seed 1 failed: evaluation at step 0" in output
    results = json.loads((out / "results.json").read_text())
    assert {run["method"] for run in results["runs"]} == {"first", "popo", "again", "popo_again"}
    assert "broken" in (out / "results.md").read_text()


def figures(folder: Path, method: str) -> list[dict]:
    """Everything that the run of a method measured, but for its speed."""
    rows = read_metrics(summary(folder, method).parent)
    speed = ("timing/", "wall_s", "train_wall_s", "rollout/engine_busy_frac")
    return [{key: value for key, value in row.items() if not key.startswith(speed)} for row in rows]


def test_the_same_run_gives_the_same_figures_after_others_and_in_another_process(finished) -> None:
    first = figures(finished[0].parent, "first")
    assert first == figures(finished[0].parent, "again")
    assert first[-1]["policy/distance"] > 0


def test_an_interrupted_run_goes_on_to_the_same_figures_as_one_that_was_not(finished) -> None:
    folder = finished[0].parent
    assert (summary(folder, "popo").parent / "checkpoints" / "ext").is_dir()
    popo = figures(folder, "popo")
    assert popo == figures(folder, "popo_again")
    assert popo != figures(folder, "first")


def test_evaluations_come_at_the_same_rollouts_and_the_last_has_more_samples(finished) -> None:
    rows = read_metrics(summary(finished[0].parent, "first").parent, "eval")
    assert [row["budget/rollouts_generated"] for row in rows] == [0, 256, 384]
    assert [row["eval/num_samples"] for row in rows] == [16 * 2, 16 * 2, 16 * 4]
    assert ["eval/pass@4" in row for row in rows] == [False, False, True]
