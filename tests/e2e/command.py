"""Starts the real command line and keeps track of every process that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]

# DeepSpeed looks for ninja on the PATH.
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

TRAIN = (sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray")


class Command:
    """One run of ``program``, training by default, in a process of its own, with its output in a file."""

    def __init__(
        self,
        config: str,
        run_dir: Path,
        *flags: str,
        program: Sequence[str] = TRAIN,
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        self.run_dir = run_dir
        self._output = run_dir.with_name(f"{run_dir.name}.{time.time_ns()}.txt")
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [*program, "--config", f"configs/cpu/{config}.yaml", "--ext.run_dir", str(run_dir), *flags],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._top = psutil.Process(self.process.pid)
        self._seen: set[psutil.Process] = {self._top}

    @property
    def output(self) -> str:
        """What the terminal shows, carriage returns of the progress bar as line ends."""
        return self._output.read_text("utf-8", errors="replace").replace("\r", "\n")

    def wait(self, timeout_s: float) -> int:
        """The exit code. Fails, with the output, when the command takes longer."""
        self.wait_until(lambda: self.process.poll() is not None, timeout_s, "end")
        return self.process.returncode

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Watch the processes until ``condition``. Fails, with the output, when that takes longer."""
        give_up = time.monotonic() + timeout_s
        while not condition():
            self._watch()
            ended = self.process.poll() is not None and not condition()
            if ended or time.monotonic() > give_up:
                self.stop()
                how = f"ended with {self.process.returncode} before" if ended else f"took over {timeout_s:g} s until"
                raise AssertionError(f"the command {how} {what}:\n{self.output[-4000:]}")
            time.sleep(0.2)

    def wait_for_steps(self, count: int, timeout_s: float) -> None:
        """Wait until ``count`` lines of metrics are written: train steps, in a run that evaluates at its end only."""
        metrics = self.run_dir / "metrics.jsonl"
        done = lambda: metrics.exists() and metrics.read_text().count("\n") >= count  # noqa: E731
        self.wait_until(done, timeout_s, f"{count} steps are done")

    def kill(self) -> None:
        """SIGKILL for the driver, then for everything else: nothing of the run gets to clean up."""
        self._watch()
        for driver in self._top.children():
            driver.kill()
        self.stop()

    def stop(self) -> None:
        """End everything that is left. For a test that has already failed."""
        for process in self.alive():
            process.kill()
        self.process.wait()

    def descendants(self, name: str) -> list[psutil.Process]:
        """Running processes below the command with ``name`` in their title, such as ``EngineCore``."""
        self._watch()
        return [process for process in self.alive() if name in _title(process)]

    def alive(self) -> list[psutil.Process]:
        """Processes of this run that still exist, zombies apart."""
        return [p for p in self._seen if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]

    def num_seen(self) -> int:
        return len(self._seen)

    def _watch(self) -> None:
        try:
            self._seen.update(self._top.children(recursive=True))
        except psutil.NoSuchProcess:
            pass


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def train_variants(folder: Path, task: Path, flags: Mapping[str, Sequence[str]], *common: str) -> Path:
    """Train several configurations on the same real parts, each from the same model, in a folder of its name.

    Args:
        task: the ``countdown`` fixture.
        flags: of each configuration by itself.
        common: flags for all.
    """
    arguments = [
        *("--actor.model_name_or_path", str(task / "model")),
        *("--data.prompt_dataset", str(task / "train.jsonl"), "--eval.dataset", str(task / "eval.jsonl")),
        *("--eval.n_samples_per_prompt", "1", "--ext.eval.pass_at", "1", "--ext.eval.at_start", "false"),
        *("--ext.log.samples_per_step", "128", "--vllm.enable_prefix_caching"),
        *("--train.micro_batch_size", "32", "--rollout.micro_batch_size", "32", "--actor.adam.lr", "3e-5"),
        *common,
    ]
    runs = {}
    for name, own in flags.items():
        warmup = ("--ext.replay.warmup_steps", "1") if "aper" in name or "combined" in name else ()
        runs[name] = [f"configs/cpu/{name}.yaml", *arguments, *own, *warmup]
    return train_on_one_stack(folder, runs)


def train_on_one_stack(folder: Path, runs: Mapping[str, Sequence[str]], *, stock: bool = False) -> Path:
    """Train one after the other on the same engines and actors, as a benchmark's worker does.

    Args:
        runs: configuration file and flags of each run, by the name of its folder.
        stock: by OpenRLHF's own trainer.
    """
    argvs = [["--config", *run, "--ext.run_dir", str(folder / name)] for name, run in runs.items()]
    # To a file: a pipe that nobody reads would block once it is full.
    with open(folder / "output.txt", "wb") as output:
        code = subprocess.run(
            [sys.executable, "-m", "openrlhf_ext.cli.benchmark_worker"],
            cwd=ROOT,
            env=ENVIRONMENT,
            input="".join(json.dumps({"argv": argv, "stock": stock}) + "\n" for argv in argvs).encode(),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=900,
        ).returncode
    assert code == 0, (folder / "output.txt").read_text(errors="replace")[-4000:]
    return folder
