"""What ``cli.benchmark`` refuses before anything starts, and how it looks after its workers (fake ones)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf_ext.benchmark.suite import PlannedRun
from openrlhf_ext.cli import benchmark
from openrlhf_ext.cli.benchmark import Benchmark, BenchmarkRun

ROOT = Path(__file__).parents[2]
GRPO = f"{ROOT}/configs/cpu/grpo.yaml"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A suite file with the data and the model that its checks ask for."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"input": "1 2 = 3", "label": "[[1, 2], 3]"}\n')
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return 1.0\n")
    (tmp_path / "suite.yaml").write_text(
        "rollouts: 200\nevaluate_every: 10\nlearning_rates: [1e-4]\nseeds: [1, 2]\n"
        f"flags: {{actor.model_name_or_path: {tmp_path}/model, data.prompt_dataset: {tmp_path}/train.jsonl,\n"
        f"        eval.dataset: {tmp_path}/train.jsonl, reward.remote_url: {reward}}}\n"
        f"methods: {{grpo: {{config: {GRPO}}}}}\n"
    )
    return tmp_path


def call(task: Path, *argv: str) -> int:
    return benchmark.main([str(task / "suite.yaml"), "--out", str(task / "out"), *argv])


def test_the_list_says_what_state_every_run_is_in_and_starts_none(task: Path, capsys) -> None:
    first, second = (task / "out" / "runs" / f"grpo-lr0.0001-seed{seed}" for seed in (1, 2))
    first.mkdir(parents=True)
    (first / "summary.json").write_text("{}")
    assert call(task, "--list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "finished     grpo lr 0.0001 seed 1",
        "not started  grpo lr 0.0001 seed 2",
    ]
    assert not second.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--methods", "dapo"), "--methods: dapo is not in the suite, which has grpo"),
        (("--seeds", "7"), "--seeds: 7 is not in the suite, which has 1, 2"),
        (("--learning-rates", "1e-3"), "--learning-rates: 0.001 is not in the suite, which has 0.0001"),
    ],
)
def test_what_the_suite_does_not_have_cannot_be_chosen(task: Path, argv, message: str, capsys) -> None:
    assert call(task, *argv) == 2
    assert message in capsys.readouterr().err


def test_every_run_is_checked_before_the_first_one_starts(task: Path, capsys) -> None:
    suite = task / "suite.yaml"
    suite.write_text(
        suite.read_text().replace("methods: {", f"methods: {{bad: {{config: {GRPO}, flags: {{x.y: 1}}}}, ")
    )
    assert call(task) == 2
    assert "x.y" in capsys.readouterr().err
    assert not (task / "out").exists()


def test_a_folder_with_a_run_of_other_settings_is_not_taken_for_this_one(task: Path, capsys) -> None:
    folder = task / "out" / "runs" / "grpo-lr0.0001-seed1"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    (folder / "config.yaml").write_text("actor.adam.lr: 1.0\n")
    assert call(task, "--list") == 2
    assert "holds a run with other settings than grpo lr 0.0001 seed 1" in capsys.readouterr().err


class FakeWorker:
    """Does to a run what ``ends`` says: its process ends in the midst, it stalls, or it is finished."""

    ends: dict[str, str] = {}
    made: list[FakeWorker] = []

    def __init__(self, log: Path) -> None:
        self.run: BenchmarkRun | None = None
        self.trained: list[str] = []
        self.closed = self.ended = False
        self.made.append(self)

    def start(self, run: BenchmarkRun) -> None:
        self.run = run
        self.trained.append(run.plan.method)
        run.folder.mkdir(parents=True)
        if self.ends.get(run.plan.method) == "error":
            (run.folder / "error.log").write_text("error: out of luck\nTraceback ...\n")
        elif run.plan.method not in self.ends:
            (run.folder / "summary.json").write_text("{}")

    def _fate(self) -> str | None:
        return self.ends.get(self.run.plan.method) if self.run else None

    def num_rollouts(self) -> int:
        return 0

    def idle_s(self) -> float:
        return 1e9 if self._fate() == "stall" else 0.0

    def exit_code(self) -> int | None:
        return {"error": 1, "killed": -9}.get(self._fate() or "", 0 if self.closed else None)

    def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        self.ended = True


def run_suite(folder: Path, monkeypatch, methods: str, ends: dict[str, str], *, jobs: int = 1, reuse: bool = True):
    monkeypatch.setattr(benchmark, "_POLL_S", 0.0)
    monkeypatch.setattr(benchmark, "Worker", FakeWorker)
    FakeWorker.ends, FakeWorker.made = ends, []
    runs = [BenchmarkRun(PlannedRun(name, 1e-4, 1, name, name.isupper(), ()), folder / name) for name in methods]
    for run in runs:
        run.key = (run.plan.stock,)
    failed = Benchmark(runs, folder, budget=10, jobs=jobs, stall_s=60.0, reuse=reuse).run()
    return [worker.trained for worker in FakeWorker.made], {run.plan.method: run.failure() for run in failed}


def test_a_failed_run_is_reported_and_the_others_go_on_in_new_processes(tmp_path: Path, monkeypatch) -> None:
    ends = {"b": "error", "d": "killed", "e": "stall"}
    trained, failed = run_suite(tmp_path, monkeypatch, "abcdef", ends)
    assert trained == [["a", "b"], ["c", "d"], ["e"], ["f"]]
    assert failed == {
        "b": "out of luck",
        "d": "its process ended with code -9",
        "e": "no new step for 1 minutes (--stall-minutes)",
    }
    assert json.loads((tmp_path / "b" / "failed.json").read_text()) == {"error": "out of luck"}
    assert all(worker.ended for worker in FakeWorker.made)


def test_engines_are_shared_only_by_runs_that_can(tmp_path: Path, monkeypatch) -> None:
    assert run_suite(tmp_path / "1", monkeypatch, "aBcD", {}) == ([["a", "c"], ["B", "D"]], {})
    assert run_suite(tmp_path / "2", monkeypatch, "ab", {}, reuse=False) == ([["a"], ["b"]], {})
    assert run_suite(tmp_path / "3", monkeypatch, "abcd", {}, jobs=2) == ([["a", "c"], ["b", "d"]], {})


def test_finished_runs_are_kept_and_failed_ones_tried_again(tmp_path: Path, monkeypatch) -> None:
    run_suite(tmp_path, monkeypatch, "abc", {"b": "error"})
    (tmp_path / "b" / "error.log").unlink()
    (tmp_path / "b").rename(tmp_path / "gone")  # a worker's order removes what an interrupted run left
    assert run_suite(tmp_path, monkeypatch, "abc", {}) == ([["b"]], {})
