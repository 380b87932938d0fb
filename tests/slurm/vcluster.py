"""A Slurm cluster of vcluster.sh, and jobs of slurm/ray.sbatch on it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHON = Path(sys.executable).absolute()  # not resolved: the environment is where the link is


DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "unshare", "cat"}


class StartError(RuntimeError):
    """No cluster can be started here."""


class Cluster:
    """Two nodes. ``settings``: variables of vcluster.sh."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        with open(folder / "vcluster.log", "wb") as log:
            self._process = subprocess.Popen(
                ["bash", HERE / "vcluster.sh", folder, "2"],
                env={**os.environ, **settings},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(self._has_started, 60, "the cluster to start", self._log)
        except BaseException:
            self.close()
            raise
        self._ctl = psutil.Process(self._process.pid).children()[0]

    def close(self) -> None:
        """The end of the first process of its namespace is the end of all."""
        self._process.kill()
        self._process.communicate()

    def run(self, *command: object, check: bool = True, **environment: str) -> str:
        """The output of a command on the controller."""
        done = subprocess.run(
            self._on_ctl(command),
            env={**os.environ, "SLURM_CONF": str(self.folder / "etc/slurm.conf"), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def run_on(self, node: int, *command: object, check: bool = True) -> str:
        """The output of a command on a node."""
        return self.run(*self._on(node, command), check=check)

    def start_on(self, node: int, *command: object) -> subprocess.Popen:
        """A command on a node that goes on. To be killed; what it starts by itself stays."""
        return subprocess.Popen(self._on_ctl(self._on(node, command)))

    def cut_power(self, node: int) -> None:
        self.run("kill", "-KILL", self._init(node))

    def boot(self, node: int) -> None:
        self.run("bash", HERE / "vcluster.sh", "boot", self.folder, node)
        ready = lambda: f"node{node}" in self.run("sinfo", "-hN", "-t", "idle,mix,alloc", "-o", "%N ")  # noqa: E731
        wait_until(ready, 60, f"node{node} to come back")

    def processes_of_jobs(self) -> list[str]:
        """Command lines of everything that runs on the cluster and is not the cluster itself."""
        found = []
        for process in self._ctl.children(recursive=True):
            try:
                is_idle = process.name() == "sleep" and _is_init(process.parent())
                own = is_idle or process.name() in DAEMONS or _is_init(process)
                if not own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()) or process.name())
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                pass
        return found

    def local_files(self, node: int) -> list[str]:
        """What is in the folder for temporary files that each node has for itself."""
        return self.run_on(node, "ls", "-A", "/tmp/local").split()

    def _on_ctl(self, command: Sequence[object]) -> list[str]:
        return ["nsenter", f"--target={self._ctl.pid}", "--all", f"--wdns={ROOT}", *map(str, command)]

    def _on(self, node: int, command: Sequence[object]) -> list[object]:
        return ["nsenter", f"--target={self._init(node)}", "--all", *command]

    def _init(self, node: int) -> str:
        return (self.folder / "run" / f"node{node}").read_text().strip()

    def _has_started(self) -> bool:
        if self._process.poll() is not None:
            raise StartError(f"vcluster.sh ended with {self._process.returncode}: {self._log()}")
        return self._log().endswith("ready\n")

    def _log(self) -> str:
        return (self.folder / "vcluster.log").read_text(errors="replace")[-3000:]


def _is_init(process: psutil.Process) -> bool:
    """Is this a node's first process?"""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")) == "1"


class Job:
    """A job of slurm/ray.sbatch.

    Args:
        run_dir: its run directory.
        train: the training command.
        options: of sbatch.
        settings: of JOB_ENV; a value in parentheses is an array.
    """

    def __init__(
        self,
        cluster: Cluster,
        run_dir: Path,
        train: Sequence[str],
        *options: str,
        env: dict[str, str],
        **settings: str,
    ) -> None:
        self.cluster = cluster
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        settings = {
            **{
                "ROOT": str(ROOT),
                "RUN_DIR": str(run_dir),
                "BIN_DIR": str(PYTHON.parent),
                "RAY_TMP_ROOT": "/tmp/local",
            },
            **{"READY_TIMEOUT_S": "120", "STOP_WAIT_S": "60"},
            **settings,
        }
        lines = [f"{name}={shlex.quote(value)}" for name, value in settings.items() if not value.startswith("(")]
        lines += [f"{name}={value}" for name, value in settings.items() if value.startswith("(")]
        job_env = run_dir / "job.env"
        job_env.write_text("\n".join([*lines, f"TRAIN=({shlex.join(train)})", ""]))
        output = f"{str(run_dir).replace('%', '%%')}/job-%A.out"
        self.id = cluster.run(
            *(
                "sbatch",
                "--parsable",
                "--nodes=2",
                "--cpus-per-task=2",
                f"--output={output}",
                *options,
            ),
            *(ROOT / "slurm/ray.sbatch", job_env),
            **env,
        ).strip()

    @property
    def output(self) -> str:
        file = self.run_dir / f"job-{self.id}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def latest(self) -> Path:
        """Folder of the latest attempt's logs."""
        return self.run_dir / "slurm/latest"

    def show(self, job: str = "") -> dict[str, str]:
        """What ``scontrol show job`` says."""
        words = self.cluster.run("scontrol", "show", "job", "--oneliner", job or self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, text: str, seconds: float = 60, count: int = 1) -> None:
        """Until the output has ``text`` so many times."""
        wait_until(lambda: self.output.count(text) >= count, seconds, f"'{text}' in job {self.id}", self._all)

    def wait(self, seconds: float = 60) -> tuple[str, str]:
        """State and exit code, such as ("FAILED", "73:0")."""
        ended = lambda: self.show()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")  # noqa: E731
        wait_until(ended, seconds, f"the end of job {self.id}", self._all)
        shown = self.show()
        return shown["JobState"], shown["ExitCode"]

    def _all(self) -> str:
        logs = [*self.run_dir.glob("slurm/*/*/*.log")]
        return self.output[-4000:] + "".join(f"\n-- {log}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def wait_until(condition: Callable[[], bool], seconds: float, what: str, more: Callable[[], str] = str) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"waited {seconds:g} s for {what}\n{more()}"
        time.sleep(0.1)
