"""scripts/ray_job.sh on the real stack: on a cluster that was there before, and with a Ray head of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from command import ENVIRONMENT, ROOT, Command

from openrlhf_ext.adapters.ray_job import free_port
from openrlhf_ext.run_dir import read_metrics

PROGRAM = ("bash", "scripts/ray_job.sh")
TOKEN = secrets.token_hex(16)
WITH_TOKEN = {**ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
SHORT = (*("--ext.eval.at_start", "false", "--eval.steps", "-1"), *("--ext.log.samples_per_step", "0"))


@dataclass(frozen=True)
class Cluster:
    """A Ray head that is not the command's own."""

    address: str
    temp: Path
    head: psutil.Process

    def of_jobs(self) -> list[str]:
        """Titles of the processes of jobs: all that a head without a job does not have."""
        titles = []
        for process in self.head.children(recursive=True):
            try:
                titles.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        idle = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
        return [
            title
            for title in titles
            if ("ray::" in title and not title.startswith(idle)) or "EngineCore" in title or "openrlhf_ext" in title
        ]

    def check_left_alone(self) -> None:
        """Fails unless the head runs and, within a minute, nothing of a job does."""
        give_up = time.monotonic() + 60
        while self.of_jobs() and time.monotonic() < give_up:
            time.sleep(0.2)
        assert self.of_jobs() == []
        assert self.head.is_running() and self.head.status() != psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    temp = Path(tempfile.mkdtemp(prefix="rj", dir="/tmp"))  # short: Ray's sockets are below it
    port = free_port()
    ports = ["--port=0", f"--dashboard-port={port}", "--dashboard-agent-listen-port=0"]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *ports, f"--temp-dir={temp}"]
        + ["--min-worker-port=0", "--max-worker-port=0", "--num-cpus=4", "--num-gpus=2", "--disable-usage-stats"],
        env={**WITH_TOKEN, "RAY_START_HOOK": "openrlhf_ext.adapters.ray_job.no_client_server"},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    head = psutil.Process(process.pid)
    try:
        give_up = time.monotonic() + 300
        while not (temp / "ray_current_cluster").exists():
            assert process.poll() is None and time.monotonic() < give_up, "ray start did not come up"
            time.sleep(0.2)
        yield Cluster(f"http://127.0.0.1:{port}", temp, head)
    finally:
        parts = [head, *head.children(recursive=True)]
        for part in parts:
            try:
                part.kill()
            except psutil.NoSuchProcess:
                pass
        process.wait()
        shutil.rmtree(temp, ignore_errors=True)


def script(folder: Path, text: str) -> str:
    """A program to run in place of the training; its path."""
    file = folder / "in_place_of_python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def variables_of(cluster: Cluster) -> dict[str, str]:
    """The other cluster's address in the variables that Ray's clients follow before any argument."""
    return {
        "RAY_ADDRESS": (cluster.temp / "ray_current_cluster").read_text(),
        "RAY_API_SERVER_ADDRESS": cluster.address,
    }


@pytest.fixture
def temp() -> Iterator[Path]:
    """A folder with a short path for a head of the command's own, which must leave nothing there."""
    folder = Path(tempfile.mkdtemp(prefix="rj", dir="/tmp"))
    yield folder
    assert os.listdir(folder) == []
    folder.rmdir()


def check_nothing_left(command: Command) -> None:
    """Fails if a process, a token or no log of the command's own head is left."""
    assert command.alive() == []
    (log,) = (command.run_dir / "logs").glob("job-driver-*.log")
    assert "Running entrypoint" in log.read_text()
    written = [file for file in command.run_dir.rglob("*") if file.is_file()]
    assert [file for file in written if TOKEN in file.read_text(errors="replace")] == []


def test_a_head_of_its_own_trains_with_the_code_that_was_uploaded(
    cluster: Cluster, start: Callable[..., Command], temp: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    shutil.copytree(ROOT / "openrlhf_ext", project / "openrlhf_ext", ignore=shutil.ignore_patterns("__pycache__"))
    marked = project / "openrlhf_ext/adapters/launch.py"
    marked.write_text(marked.read_text() + '\nprint("the uploaded copy runs", flush=True)\n')
    # The trainer passes this variable on as well, which Ray takes for a conflict if not told otherwise.
    (tmp_path / "env.yaml").write_text('env_vars: {OMP_NUM_THREADS: "1"}')
    command = start(
        "grpo",
        tmp_path / "run",
        *("--working-dir", str(project), "--runtime-env", str(tmp_path / "env.yaml")),
        *("--entrypoint-num-cpus", "1", "--ext.max_steps", "2", *SHORT),
        program=PROGRAM,
        environment={**WITH_TOKEN, **variables_of(cluster), "RAY_TMPDIR": str(temp)},
    )
    assert command.wait(400) == 0, command.output[-4000:]
    assert "the uploaded copy runs" in command.output
    assert "SUCCEEDED, exit code 0" in command.output
    assert [row["step"] for row in read_metrics(command.run_dir, "train")] == [1, 2]
    check_nothing_left(command)
    cluster.check_left_alone()


def test_a_second_ctrl_c_ends_a_head_of_its_own_at_once(
    cluster: Cluster, start: Callable[..., Command], temp: Path, tmp_path: Path
) -> None:
    command = start(
        "grpo",
        tmp_path / "run",
        *("--python", script(tmp_path, "trap '' TERM; echo started; while :; do sleep 0.1; done")),
        *("--ext.stop_deadline_s", "300"),
        program=PROGRAM,
        environment={**WITH_TOKEN, **variables_of(cluster), "RAY_TMPDIR": str(temp)},
    )
    command.wait_until(lambda: "\nstarted\n" in command.output, 180, "the job has started")
    command.process.send_signal(signal.SIGINT)
    command.wait_until(lambda: "again: end at once" in command.output, 60, "it says what it waits for")
    time.sleep(1.5)  # the same signal within a second counts once
    command.process.send_signal(signal.SIGINT)
    assert command.wait(120) == 128 + signal.SIGINT, command.output[-4000:]
    assert "ending the job and Ray at once" in command.output and "STOPPED" not in command.output
    check_nothing_left(command)
    cluster.check_left_alone()


def test_ctrl_c_ends_the_step_saves_it_and_leaves_the_cluster(
    cluster: Cluster, start: Callable[..., Command], tmp_path: Path
) -> None:
    command = start(
        "grpo",
        tmp_path / "run",
        *("--address", cluster.address, "--ckpt.save_steps", "100000"),
        *("--ext.max_steps", "100000", "--ext.stop_deadline_s", "300", *SHORT),
        program=PROGRAM,
        environment=WITH_TOKEN,
    )
    command.wait_for_steps(1, 400)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(400) == 128 + signal.SIGINT, command.output[-4000:]
    last = read_metrics(command.run_dir, "train")[-1]["step"]
    assert f"stopped after step {last}, which is saved" in command.output
    assert "STOPPED, exit code 130" in command.output
    assert (command.run_dir / f"checkpoints/ext/global_step{last}").is_dir()
    cluster.check_left_alone()


def test_sigterm_gives_the_job_more_time_than_ray_does_by_itself(
    cluster: Cluster, start: Callable[..., Command], tmp_path: Path
) -> None:
    # Ray kills a job 3 s after it was stopped if not told otherwise.
    program = "trap 'sleep 5; echo cleaned up; exit 143' TERM; echo started; while :; do sleep 0.1; done"
    command = start(
        "grpo",
        tmp_path / "run",
        *("--address", cluster.address, "--python", script(tmp_path, program), "--ext.stop_deadline_s", "300"),
        program=PROGRAM,
        environment=WITH_TOKEN,
    )
    command.wait_until(lambda: "\nstarted\n" in command.output, 120, "the job has started")
    command.process.send_signal(signal.SIGTERM)
    assert command.wait(120) == 128 + signal.SIGTERM, command.output[-4000:]
    assert "\ncleaned up\n" in command.output and "STOPPED, exit code 143" in command.output
    cluster.check_left_alone()


def test_no_secret_and_no_run_is_uploaded(cluster: Cluster, start: Callable[..., Command], tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("mine.py", ".env", "runs/summary.json", "old/metrics.jsonl", "old/model/config.json"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    command = start(
        "grpo",
        tmp_path / "run",
        *("--address", cluster.address, "--working-dir", str(project)),
        *("--python", script(tmp_path, 'echo "found: $(find . -type f | sort | xargs)"')),
        program=PROGRAM,
        environment={**WITH_TOKEN, "RAY_ADDRESS": "127.0.0.1:1", "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"},
    )
    assert command.wait(120) == 0, command.output[-4000:]
    assert "\nfound: ./mine.py\n" in command.output


@pytest.mark.parametrize(("ending", "code"), [("exit 85", 85), ("kill -9 $$", 137)])
def test_the_exit_code_is_passed_on(
    ending: str, code: int, cluster: Cluster, start: Callable[..., Command], tmp_path: Path
) -> None:
    command = start(
        "grpo",
        tmp_path / "run",
        *("--address", cluster.address, "--python", script(tmp_path, f"echo last words of $2; {ending}")),
        program=PROGRAM,
        environment=WITH_TOKEN,
    )
    assert command.wait(120) == code, command.output[-4000:]
    assert "last words of openrlhf_ext.cli.train_ppo_ray" in command.output
    assert f"FAILED, exit code {code}; Ray's logs: " in command.output


def test_a_wrong_token_is_refused(cluster: Cluster, start: Callable[..., Command], tmp_path: Path) -> None:
    command = start(
        "grpo",
        tmp_path / "run",
        *("--address", cluster.address),
        program=PROGRAM,
        environment={**WITH_TOKEN, "RAY_AUTH_TOKEN": "wrong"},
    )
    assert command.wait(120) == 2
    assert f"error: {cluster.address} wants a token: " in command.output


def test_a_bad_setting_is_refused_before_any_cluster_is_asked(start: Callable[..., Command], tmp_path: Path) -> None:
    command = start(
        "grpo",
        tmp_path / "run",
        *("--address", "http://127.0.0.1:1", "--rollout.batch_size", "0"),
        program=PROGRAM,
    )
    assert command.wait(60) == 2
    (message,) = command.output.strip().splitlines()
    assert message == "error: --rollout.batch_size must be at least 1, got 0"
    assert not (tmp_path / "run").exists()
