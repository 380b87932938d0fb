"""slurm/ray.sbatch with real Slurm, Ray, vLLM and DeepSpeed on two nodes: interruptions change no result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from vcluster import PYTHON, ROOT, Cluster, Job, wait_until

from openrlhf_ext.run_dir import read_metrics

STEPS, SAVED_EVERY, ROLLOUTS = 6, 2, 128

# Grades like the task's own, once the number in GATE is that of the rollout: the test says how far a run gets.
REWARD = """
import fcntl
import time
from pathlib import Path

from openrlhf_ext.rewards.countdown import reward_func as grade

FOLDER = Path({folder!r})


def reward_func(queries, prompts, labels):
    with open(FOLDER / "count", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(".")
        file.flush()
        number = file.tell()
    while number > int((FOLDER / "gate").read_text()):
        time.sleep(0.1)
    return grade(queries, prompts, labels)
"""

PROBE = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError

try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)
except AuthenticationError:
    print("refused")
"""


BUSY = """
import subprocess, time
import ray

ray.init()


@ray.remote
class Actor:
    def start(self):
        return subprocess.Popen(["sleep", "1000"]).pid


actor = Actor.remote()
print("started", ray.get(actor.start.remote()), flush=True)
time.sleep(1000)
"""


class Run(Job):
    """A training on two nodes, one rank of the actor on each, that generates up to a number of rollouts."""

    def __init__(self, cluster: Cluster, run_dir: Path, task: Path, rollouts: int) -> None:
        run_dir.mkdir()
        self.allow(rollouts, run_dir)
        reward = run_dir / "reward.py"
        reward.write_text(REWARD.format(folder=str(run_dir)))
        train = [
            *("python", "-m", "openrlhf_ext.cli.train_ppo_ray", "--config", "configs/cpu/popo.yaml"),
            *("--actor.num_nodes", "2", "--actor.num_gpus_per_node", "1"),
            *("--actor.model_name_or_path", str(task / "model"), "--reward.remote_url", str(reward)),
            *("--data.prompt_dataset", str(task / "train.jsonl"), "--eval.dataset", str(task / "eval.jsonl")),
            *("--ext.max_steps", str(STEPS), "--ckpt.save_steps", str(SAVED_EVERY), "--ext.resume", "auto"),
            *("--ext.rollout.seed_requests", "true", "--ext.reward.deadline_s", "600", "--ext.stop_deadline_s", "300"),
            *("--ext.eval.at_start", "false", "--eval.n_samples_per_prompt", "1", "--ext.eval.pass_at", "1"),
            *("--train.micro_batch_size", "32", "--rollout.micro_batch_size", "32", "--actor.adam.lr", "1e-3"),
            *("--ext.log.samples_per_step", "1000"),
        ]
        super().__init__(
            *(cluster, run_dir, train, "--cpus-per-task=4", "--mem=6000"),
            env={"OMP_NUM_THREADS": "1"},
            **{"RAY_GPUS_PER_NODE": "2", "READY_TIMEOUT_S": "300", "STOP_WAIT_S": "320"},
        )

    def allow(self, rollouts: int, run_dir: Path | None = None) -> None:
        gate = (run_dir or self.run_dir) / "gate"
        gate.with_suffix(".new").write_text(str(rollouts))
        gate.with_suffix(".new").rename(gate)

    def wait_for_steps(self, count: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        done = lambda: metrics.exists() and metrics.read_text().count("\n") == count  # noqa: E731
        wait_until(done, 600, f"{count} steps", self._all)


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    # Ray's processes may take some seconds to end, and until then a job that starts again is refused its steps. A node
    # that answers late, on a busy machine, is not lost.
    return {"VC_CRED_EXPIRE": "12", "VC_SLURMD_TIMEOUT": "300"}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from openrlhf_ext.tasks.countdown_data import write_dataset
    from openrlhf_ext.tasks.tiny_model import WarmStart, warm_start

    folder = tmp_path_factory.mktemp("countdown")
    write_dataset(folder, 200, 16, 0)
    warm_start(folder / "model", WarmStart(steps=90, num_eval=8))
    return folder


@pytest.fixture(scope="module")
def unbroken(cluster: Cluster, task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(cluster, tmp_path_factory.mktemp("runs") / "unbroken", task, rollouts=2 * ROLLOUTS)
    run.wait_for_steps(2)  # and in the midst of the third
    yield run


def test_cancel_leaves_no_process(cluster: Cluster, tmp_path: Path) -> None:
    # Not the files: a machine that is slow enough is killed before it has removed them.
    job = Job(cluster, tmp_path / "busy", ["python", "-c", BUSY], "--nodes=1", env={})
    job.wait_for("started", 300)
    assert any(command.startswith("sleep 1000") for command in cluster.processes_of_jobs())
    # The one fixed port is the job's: all others are the kernel's choice, so none of Ray's usual ones.
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    listening = cluster.run_on(1, "ss", "--listening", "--tcp", "--numeric", "--no-header").splitlines()
    ports = {int(line.split()[3].rpartition(":")[2]) for line in listening}
    assert {port for port in ports if port < lowest} == {6818, 20000 + int(job.id)}  # slurmd, Ray
    cluster.run("scancel", job.id)
    assert job.wait()[0] == "CANCELLED"
    nothing_runs(cluster)


def test_only_the_job_itself_gets_into_its_ray(unbroken: Run, cluster: Cluster) -> None:
    address = re.search(r"Ray at (\S+),", unbroken.output)
    assert address
    assert cluster.run_on(1, "env", "-u", "RAY_AUTH_TOKEN", PYTHON, "-c", PROBE, address[1]).endswith("refused\n")
    environment = ("env", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={'0' * 64}")
    assert cluster.run_on(2, *environment, PYTHON, "-c", PROBE, address[1]).endswith("refused\n")
    # No command line has the token.
    commands = cluster.processes_of_jobs()
    assert any("gcs_server" in command for command in commands)
    assert not any(re.search(r"[0-9a-f]{64}", command) for command in commands)


def test_two_nodes_train_to_the_end(unbroken: Run, cluster: Cluster) -> None:
    unbroken.allow(10**9)
    assert unbroken.wait(600) == ("COMPLETED", "0:0")
    assert "2 of 2 nodes, 4 of 4 GPUs" in unbroken.output
    assert len(read_metrics(unbroken.run_dir, "train")) == STEPS
    nothing_is_left(cluster)


def test_a_stop_on_request_and_a_new_start_change_nothing(
    unbroken: Run, cluster: Cluster, task: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = Run(cluster, tmp_path_factory.mktemp("runs") / "broken", task, rollouts=2 * ROLLOUTS)
    run.wait_for_steps(2)
    cluster.run(ROOT / "slurm/stop", run.id)
    run.wait_for("stopping after this train step", 120)
    run.allow(10**9)  # the third step ends
    assert run.wait(900) == ("COMPLETED", "0:0")
    assert run.output.count("queued again") == 1 and "going on after step 3" in run.output
    nothing_is_left(cluster)

    found, expected = (read_metrics(one.run_dir) for one in (run, unbroken))
    assert [(row["kind"], row["step"]) for row in found] == [(row["kind"], row["step"]) for row in expected]
    for one, other in zip(found, expected, strict=True):
        counts = [{name: value for name, value in row.items() if isinstance(value, int)} for row in (one, other)]
        assert counts[0] == counts[1]
    for name in ("ledger.json", "replay.jsonl"):
        assert (run.run_dir / name).read_text() == (unbroken.run_dir / name).read_text()
    assert samples(run) == samples(unbroken)


def samples(run: Run) -> list[dict]:
    """All rollouts. Advantages are means in an order that threads decide."""
    lines = (run.run_dir / "samples.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "advantage"} for line in lines]


def nothing_is_left(cluster: Cluster) -> None:
    nothing_runs(cluster)
    assert cluster.local_files(1) == cluster.local_files(2) == []


def nothing_runs(cluster: Cluster) -> None:
    left = cluster.processes_of_jobs
    wait_until(lambda: not left(), 60, "processes to end", lambda: "\n".join(left()))
