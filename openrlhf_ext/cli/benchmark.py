"""``python -m openrlhf_ext.cli.benchmark SUITE``: methods x learning rates x seeds, with one table at the end.

The suite file says what is run (``openrlhf_ext/benchmark/suite.py``; ``configs/benchmarks/countdown.yaml``). Finished
runs are kept, and the same command goes on where an interrupted one stopped: in the midst of a run after SIGTERM or
Ctrl-C, which save it, at its last checkpoint or its start after SIGKILL. A run that fails is reported, the others go
on, and the next call tries it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from openrlhf_ext.adapters.upstream_cli import build_parser, nest, validate
from openrlhf_ext.benchmark.suite import PlannedRun, Suite, load_suite, parts_key
from openrlhf_ext.benchmark.tables import write_results
from openrlhf_ext.checks import check, check_reward_file, read_prompt_files
from openrlhf_ext.run_dir import newest_metrics
from openrlhf_ext.settings import dump_settings, resolve

_POLL_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 1 when a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", help="suite file")
    parser.add_argument("--out", type=Path, help="folder of the results (default runs/benchmark/NAME)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each on engines of its own")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--learning-rates", nargs="+", type=float, help="only these")
    parser.add_argument("--seeds", nargs="+", type=int, help="only these")
    parser.add_argument(
        "--stall-minutes", type=float, default=30.0, help="a run without a new step for so long is ended"
    )
    parser.add_argument("--restart-engines", action="store_true", help="new processes for every run")
    parser.add_argument("--list", action="store_true", help="show the runs and their state, start none")
    args = parser.parse_args(argv)
    try:
        suite = load_suite(args.suite)
        out = (args.out or Path("runs/benchmark") / suite.name).absolute()
        every = [BenchmarkRun(plan, out / plan.folder) for plan in suite.runs()]
        chosen = _chosen(every, args)
        for run in chosen:
            run.check()
        _check_files(chosen)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for run in chosen:
            print(f"{run.state:<12} {run.plan.title}")
        return 0
    _write_index(out, suite, every)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    failed = Benchmark(
        chosen,
        out,
        budget=suite.rollouts,
        jobs=args.jobs,
        stall_s=60 * args.stall_minutes,
        reuse=not args.restart_engines,
    ).run()
    write_results(out)
    print((out / "results.md").read_text(encoding="utf-8"))
    print(f"figures: {out / 'results.json'}; plots: python -m openrlhf_ext.cli.report {out}")
    for run in failed:
        print(f"error: {run.plan.title} failed: {run.failure()}", file=sys.stderr)
    return 1 if failed else 0


class BenchmarkRun:
    """A planned run and its folder."""

    def __init__(self, plan: PlannedRun, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.key: tuple = ()
        """Runs with equal keys can share engines. Set by ``check``."""

    @property
    def state(self) -> str:
        for file, state in (("summary.json", "finished"), ("failed.json", "failed"), ("metrics.jsonl", "interrupted")):
            if (self.folder / file).exists():
                return state
        return "not started"

    def check(self) -> None:
        """Raises ValueError for what is wrong with its settings, or when its folder holds a run with others."""
        settings = resolve(
            self.plan.argv[1], [*self.plan.argv[2:], "--ext.run_dir", str(self.folder)], build_parser(), nest
        )
        config = self.folder / "config.yaml"
        if config.exists() and config.read_text("utf-8") != dump_settings(settings):
            raise ValueError(
                f"{self.folder} holds a run with other settings than {self.plan.title} has now (see its config.yaml); "
                "give another --out, or remove that folder"
            )
        self.key = (self.plan.stock, *parts_key(settings))
        unused = replace(settings.ext, run_dir=str(self.folder / "new"))  # the folder itself may hold a run to go on
        check(replace(settings, ext=unused))
        validate(settings.upstream)
        self.settings = settings

    def order(self) -> str:
        """The line that makes a worker train it: from its last checkpoint if there is one, else from the start."""
        argv = [*self.plan.argv, "--ext.run_dir", str(self.folder)]
        for name in ("failed.json", "error.log"):
            (self.folder / name).unlink(missing_ok=True)
        if self.plan.stock and self.folder.exists():  # OpenRLHF's own trainer has no checkpoint to go on from
            shutil.rmtree(self.folder)
        return json.dumps({"argv": argv, "stock": self.plan.stock}) + "\n"

    def num_rollouts(self) -> int:
        """Rollouts generated so far."""
        newest = newest_metrics(self.folder, "train")
        return newest["budget/rollouts_generated"] if newest else 0

    def fail(self, reason: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "error.log"
        if log.exists():
            reason = log.read_text("utf-8").partition("\n")[0].removeprefix("error: ")
        (self.folder / "failed.json").write_text(json.dumps({"error": reason}) + "\n", encoding="utf-8")

    def failure(self) -> str:
        return json.loads((self.folder / "failed.json").read_text("utf-8"))["error"]


class Worker:
    """A process that trains runs on engines of its own (``benchmark_worker.py``)."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(log, "ab")  # noqa: SIM115 (lives as long as the worker)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "openrlhf_ext.cli.benchmark_worker"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which then lets the run be saved
        )
        self.run: BenchmarkRun | None = None
        self._progress, self._since = 0, time.monotonic()

    def start(self, run: BenchmarkRun) -> None:
        self.run, self._progress, self._since = run, 0, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # seen as an ended process
            self._process.stdin.write(run.order())
            self._process.stdin.flush()

    def num_rollouts(self) -> int:
        """Rollouts of its run so far."""
        progress = self.run.num_rollouts() if self.run else 0
        if progress != self._progress:
            self._progress, self._since = progress, time.monotonic()
        return progress

    def idle_s(self) -> float:
        """Seconds without a new train step."""
        return time.monotonic() - self._since

    def exit_code(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        """Let it end by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """End it and everything it started, and wait."""
        self._process.terminate()
        self._process.wait()
        self._log.close()


class Benchmark:
    """Trains the runs that are not finished.

    Args:
        budget: rollouts of a run.
        jobs: workers at the same time.
        stall_s: a run without a new step for so long is ended as failed.
        reuse: a worker goes on with the next run that can share its engines.
    """

    def __init__(
        self, runs: Sequence[BenchmarkRun], out: Path, *, budget: int, jobs: int, stall_s: float, reuse: bool
    ) -> None:
        self._runs, self._out, self._budget = runs, out, budget
        self._jobs, self._stall_s, self._reuse = jobs, stall_s, reuse
        self._pending = [run for run in runs if run.state != "finished"]
        self._workers: list[Worker] = []
        self._failed: list[BenchmarkRun] = []
        self._num_workers = 0

    def run(self) -> list[BenchmarkRun]:
        """Returns the runs that failed."""
        total, self._done = len(self._runs), len(self._runs) - len(self._pending)
        bar = tqdm(
            total=total * self._budget,
            initial=self._done * self._budget,
            unit="rollout",
            unit_scale=True,
            mininterval=5,
        )
        try:
            while self._pending or self._workers:
                while self._pending and len(self._workers) < self._jobs:
                    self._hire()
                time.sleep(_POLL_S)
                for worker in list(self._workers):
                    self._look_after(worker)
                # After that: a run that has just ended is among those done.
                running = sum(min(worker.num_rollouts(), self._budget) for worker in self._workers)
                now = ", ".join(worker.run.plan.title for worker in self._workers if worker.run)
                bar.set_description(f"{self._done}/{total} runs, {len(self._failed)} failed; now {now}", refresh=False)
                bar.update(max(0, self._done * self._budget + running - bar.n))
        finally:
            for worker in self._workers:
                worker.end()
            bar.close()
        return self._failed

    def _hire(self) -> None:
        self._num_workers += 1
        worker = Worker(self._out / "logs" / f"worker-{time.strftime('%Y%m%d-%H%M%S')}-{self._num_workers}.log")
        self._workers.append(worker)
        worker.start(self._pending.pop(0))

    def _look_after(self, worker: Worker) -> None:
        """Take note of a run that ended, and give the worker its next one."""
        run, code = worker.run, worker.exit_code()
        if run is not None and run.state == "finished":
            self._done += 1
            worker.run = None
            following = [other for other in self._pending if other.key == run.key] if self._reuse else []
            if following and code is None:
                self._pending.remove(following[0])
                worker.start(following[0])
            else:
                worker.close()
        elif code is not None:
            if run is not None:
                self._give_up(run, f"its process ended with code {code}")
            worker.end()
            self._workers.remove(worker)
        elif run is not None and worker.idle_s() > self._stall_s:
            worker.end()
            self._workers.remove(worker)
            self._give_up(run, f"no new step for {self._stall_s / 60:g} minutes (--stall-minutes)")

    def _give_up(self, run: BenchmarkRun, reason: str) -> None:
        run.fail(reason)
        self._failed.append(run)
        self._done += 1


def _chosen(runs: Sequence[BenchmarkRun], args: argparse.Namespace) -> list[BenchmarkRun]:
    """Raises ValueError for a method, rate or seed that the suite does not have."""
    chosen = list(runs)
    for flag, wanted, value in (
        ("--methods", args.methods, lambda plan: plan.method),
        ("--learning-rates", args.learning_rates, lambda plan: plan.lr),
        ("--seeds", args.seeds, lambda plan: plan.seed),
    ):
        if wanted is None:
            continue
        valid = {value(run.plan): None for run in runs}
        for one in wanted:
            if one not in valid:
                raise ValueError(f"{flag}: {one} is not in the suite, which has {', '.join(map(str, valid))}")
        chosen = [run for run in chosen if value(run.plan) in wanted]
    return chosen


def _check_files(runs: Sequence[BenchmarkRun]) -> None:
    """Reads each prompt file once and loads each reward file once. Raises ValueError for what is wrong in them."""
    seen = set()
    for run in runs:
        flat = run.settings.flat
        files = tuple(str(flat[key]) for key in ("data.prompt_dataset", "eval.dataset", "reward.remote_url"))
        if files not in seen:
            check_reward_file(run.settings)
            read_prompt_files(run.settings)
        seen.add(files)


def _write_index(out: Path, suite: Suite, runs: Sequence[BenchmarkRun]) -> None:
    """``suite.json``, from which the tables and the report are made."""
    out.mkdir(parents=True, exist_ok=True)
    index = {
        "name": suite.name,
        "baselines": suite.baselines,
        "targets": suite.targets,
        "runs": [
            {"method": run.plan.method, "lr": run.plan.lr, "seed": run.plan.seed, "dir": run.plan.folder}
            for run in runs
        ],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "commit": _commit(),
    }
    (out / "suite.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
