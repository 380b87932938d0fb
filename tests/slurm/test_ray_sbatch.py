"""slurm/ray.sbatch on a real Slurm, with stand-ins for Ray and the trainer: what they and Slurm are told."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vcluster import HERE, PYTHON, ROOT, Cluster, Job, wait_until

TRAINER = HERE / "stub/trainer.py"
Start = Callable[..., Job]


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return {"VC_SLURMD_TIMEOUT": "5"}


@pytest.fixture(scope="module")
def bin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``python`` and ``ray``."""
    folder = tmp_path_factory.mktemp("bin")
    python = f"exec {shlex.quote(str(PYTHON))} -S"
    for name, command in (("python", python), ("ray", f"{python} {shlex.quote(str(HERE / 'stub/ray_cli.py'))}")):
        file = folder / name
        file.write_text(f'#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(HERE / "stub/site"))}\n{command} "$@"\n')
        file.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def start(cluster: Cluster, bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("runs")

    def start(
        name: str,
        *flags: str,
        go: bool = False,
        options: tuple[str, ...] = (),
        env: dict | None = None,
        **settings: str,
    ) -> Job:
        """``go``: the trainer ends as soon as it has started."""
        run_dir = folder / name
        run_dir.mkdir()
        if go:
            (run_dir / "go").touch()
        settings = {"BIN_DIR": str(bin_dir), **settings}
        return Job(cluster, run_dir, ["python", str(TRAINER), *flags], *options, env=env or {}, **settings)

    return start


@pytest.fixture(scope="module")
def jobs(start: Start) -> dict[str, Job]:
    """Jobs that need nothing from their test, all at once."""
    lost = {"STUB_RAY": "node2:hangs"}
    return {
        "ok": start("o k%j", go=True, options=("--gpus-per-node=1", "--mem=100")),
        "uneven": start("uneven", go=True, options=("--gpus=2", "--mem-per-cpu=50")),
        "fails": start("fails", "--exit", "73", go=True),
        "refuses": start("refuses", "--refuse"),
        "dies": start("dies", go=True, env={"STUB_RAY": "node2:fails"}),
        "late": start("late", env=lost, READY_TIMEOUT_S="2", MAX_RESTARTS="0"),
        "long": start("long", go=True, env={"TMPDIR": f"/tmp/{'x' * 120}"}),
    }


def test_success(jobs: dict[str, Job], cluster: Cluster) -> None:
    job = jobs["ok"]
    assert job.wait() == ("COMPLETED", "0:0")
    assert (job.latest / "driver.log").read_text().endswith("trainer: the last line, 0\n")
    assert "trainer: the last line, 0\n" in job.output
    head, worker = ((job.latest / f"ray-node{i}.log").read_text() for i in (1, 2))
    port = 20000 + int(job.id) % 10000
    assert f"--head --port={port} --include-dashboard=false --no-monitor hook=ray_start_hook.no_ray_client" in head
    assert f"--address=10.77.0.11:{port}" in worker and "--head" not in worker
    memory = 100 * 2**20
    for i, log in ((1, head), (2, worker)):
        assert f"--node-name=node{i} --node-ip-address=10.77.0.1{i}" in log
        assert "--num-cpus=2 --num-gpus=1" in log
        given = {name: int(value) for name, value in re.findall(r"--(memory|object-store-memory)=(\d+)", log)}
        assert sum(given.values()) == memory and given["object-store-memory"] == memory * 3 // 10
        assert (job.latest / f"ray-node{i}/raylet.out").read_text() == "the end of the raylet\n"
    assert "Ray is complete" in job.output and "2 of 2 nodes, 2 of 2 GPUs" in job.output


def test_gpus_and_memory_in_other_words(jobs: dict[str, Job]) -> None:
    job = jobs["uneven"]
    assert job.wait() == ("COMPLETED", "0:0")
    assert "2 of 2 nodes, 2 of 2 GPUs" in job.output
    for i in (1, 2):
        log = (job.latest / f"ray-node{i}.log").read_text()
        assert "--num-gpus=1" in log
        assert sum(int(value) for value in re.findall(r"memory=(\d+)", log)) == 2 * 50 * 2**20


def test_the_token_is_in_no_file(jobs: dict[str, Job]) -> None:
    job = jobs["ok"]
    job.wait()
    files = [file for file in job.run_dir.rglob("*") if file.is_file()]
    assert len(files) >= 8
    for file in files:
        assert not re.search(r"[0-9a-f]{64}", file.read_text()), file


@pytest.mark.parametrize(("name", "code"), [("fails", 73), ("refuses", 2)])
def test_a_failure_of_the_trainer_is_the_job_s_and_final(jobs: dict[str, Job], name: str, code: int) -> None:
    job = jobs[name]
    assert job.wait() == ("FAILED", f"{code}:0")
    assert job.show()["Restarts"] == "0"
    assert f"exit code {code}; logs in {job.run_dir}/slurm/{job.id}/attempt0" in job.output


def test_ray_that_ends_while_it_starts_is_started_again(jobs: dict[str, Job]) -> None:
    job = jobs["dies"]
    assert job.wait() == ("COMPLETED", "0:0")
    assert job.show()["Restarts"] == "1"
    assert "stub on node2: told to fail" in job.output
    assert "Ray ended while it started" in job.output
    assert (job.latest.parent / job.id / "attempt0/ray-node2.log").exists()
    assert job.latest.resolve().name == "attempt1"


def test_a_missing_node_is_named(jobs: dict[str, Job], cluster: Cluster) -> None:
    job = jobs["late"]
    assert job.wait() == ("FAILED", "71:0")
    assert "1 of 2 nodes, 0 of 0 GPUs" in job.output
    assert "node2 is missing; the end of" in job.output
    assert "stub on node2: start --block" in job.output
    assert "node1 is missing" not in job.output
    assert "not queued again: MAX_RESTARTS=0" in job.output


def test_a_long_tmpdir(jobs: dict[str, Job]) -> None:
    assert jobs["long"].wait() == ("COMPLETED", "0:0")


def test_nothing_is_left_by_jobs_that_ended(jobs: dict[str, Job], cluster: Cluster) -> None:
    for job in jobs.values():
        job.wait()
    nothing_is_left(cluster)


@pytest.fixture(scope="module")
def interrupted(start: Start, cluster: Cluster, containers: dict[str, dict]) -> dict[str, Job]:
    """Jobs that run until something is done to them; done to all, so that their waits to start again are one."""
    hangs = {"STUB_RAY": "node2:hangs"}
    jobs = {
        "stopped": start("stopped"),
        "limited": start("limited", MAX_RESTARTS="1"),
        "last": start("last"),
        "fixed": start("fixed", options=("--no-requeue",)),
        "deaf": start("deaf", "--deaf", STOP_WAIT_S="1"),
        "early": start("early", go=True, env=hangs),
        "lost": start("lost"),
        "array": start("array", options=("--array=0-1", "--nodes=1"), SEEDS="(5 7)"),
        **{kind: start(kind, **settings) for kind, settings in containers.items()},
    }
    for name, job in jobs.items():
        if name == "early":
            wait_until(lambda job=job: "1 of 2 nodes" in read(job.latest / "ready.log"), 60, "node1")
        else:
            job.wait_for("trainer: Ray at", count=2 if name == "array" else 1)
    kill_ray(cluster, jobs["lost"], node=2)
    cluster.run(ROOT / "slurm/stop", "--no-requeue", jobs["last"].id)
    # Of the array only the task that has the array's own id, which is also the name of all of its tasks.
    cluster.run(ROOT / "slurm/stop", f"{jobs['array'].id}_{own_task(jobs['array'])}")
    for name in jobs.keys() - {"lost", "last", "array"}:
        said = cluster.run(ROOT / "slurm/stop", jobs[name].id)
        assert said == f"{jobs[name].id}: asked to save; then it is queued again and goes on\n"
    return jobs


def test_stop_saves_and_goes_on(interrupted: dict[str, Job]) -> None:
    job = interrupted["stopped"]
    job.wait_for("trainer: Ray at", count=2)
    saved = re.search(r"trainer: saved step (\d+)", job.output)
    assert saved and f"starts at step {saved[1]}\n" in (job.latest / "driver.log").read_text()
    (job.run_dir / "go").touch()
    assert job.wait() == ("COMPLETED", "0:0")
    assert job.show()["Restarts"] == "1"


def test_stop_for_good(interrupted: dict[str, Job]) -> None:
    job = interrupted["last"]
    assert job.wait() == ("FAILED", "85:0")
    assert "the next job with this run directory goes on from here" in job.output


def test_a_job_that_may_not_be_queued_again(interrupted: dict[str, Job]) -> None:
    job = interrupted["fixed"]
    assert job.wait() == ("FAILED", "85:0")
    assert "not queued again (sbatch --no-requeue?)" in job.output


def test_the_limit_of_restarts(interrupted: dict[str, Job], cluster: Cluster) -> None:
    job = interrupted["limited"]
    job.wait_for("trainer: Ray at", count=2)
    cluster.run(ROOT / "slurm/stop", job.id)
    assert job.wait() == ("FAILED", "85:0")
    assert "not queued again: MAX_RESTARTS=1" in job.output
    assert job.output.count("trainer: saved step") == 2


def test_stop_while_ray_starts(interrupted: dict[str, Job]) -> None:
    job = interrupted["early"]
    assert job.wait() == ("COMPLETED", "0:0")
    assert "asked to stop while Ray started" in job.output
    assert job.show()["Restarts"] == "1"


def test_a_trainer_that_does_not_stop_is_killed(interrupted: dict[str, Job]) -> None:
    job = interrupted["deaf"]
    job.wait_for("trainer: Ray at", count=2)
    (job.run_dir / "go").touch()
    assert job.wait() == ("COMPLETED", "0:0")
    assert "the trainer has not ended and is killed" in job.output
    assert "the trainer ended without saving" in job.output


def test_ray_that_ends_under_the_trainer(interrupted: dict[str, Job]) -> None:
    job = interrupted["lost"]
    job.wait_for("trainer: Ray at", count=2)
    (job.run_dir / "go").touch()
    assert job.wait() == ("COMPLETED", "0:0")
    assert "Ray ended on at least one node" in job.output
    assert "Ray ended under the trainer" in job.output


def own_task(array: Job) -> int:
    return next(task for task in (0, 1) if array.show(f"{array.id}_{task}")["JobId"] == array.id)


def test_array_tasks_are_queued_again_one_by_one(interrupted: dict[str, Job]) -> None:
    job = interrupted["array"]
    own = own_task(job)
    job.wait_for("trainer: Ray at", count=3)
    for seed in (5, 7):
        (job.run_dir / f"seed-{seed}/go").touch()
        assert f"seed {seed}, starts at step 0\n" in job.output
    states = lambda: [job.show(f"{job.id}_{task}")["JobState"] for task in (own, 1 - own)]  # noqa: E731
    wait_until(lambda: states() == ["COMPLETED", "COMPLETED"], 60, "both tasks", lambda: job.output)
    assert [job.show(f"{job.id}_{task}")["Restarts"] for task in (own, 1 - own)] == ["1", "0"]


MOUNTED = "/data:/data,/models:/m"


@pytest.fixture(scope="module")
def containers(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Stand-ins that write down what they get, and run the command outside of any container."""
    settings = {}
    for kind in ("apptainer", "pyxis"):
        folder = tmp_path_factory.mktemp(kind)
        write_down = f'#!/bin/bash\necho "$*" >>{folder}/record\n'
        if kind == "apptainer":
            name, body = "apptainer", 'while [[ $1 != image.sif ]]; do shift; done\nshift\nexec "$@"\n'
        else:
            name, body = (
                "srun",
                (
                    'for a; do shift; [[ $a == --container-* ]] || set -- "$@" "$a"; done\n'
                    f'exec {shutil.which("srun")} "$@"\n'
                ),
            )
        (folder / name).write_text(write_down + body)
        (folder / name).chmod(0o755)
        settings[kind] = {
            "options": ("--gpus-per-node=1",),
            "env": {"PATH": f"{folder}:{bin_dir}:{os.environ['PATH']}", "RECORD": str(folder / "record")},
            **{"BIN_DIR": "", "CONTAINER": kind, "CONTAINER_IMAGE": "image.sif", "CONTAINER_MOUNTS": MOUNTED},
        }
    return settings


@pytest.mark.parametrize("kind", ["apptainer", "pyxis"])
def test_containers(interrupted: dict[str, Job], containers: dict[str, dict], kind: str) -> None:
    job = interrupted[kind]
    job.wait_for("trainer: Ray at", count=2)
    (job.run_dir / "go").touch()
    assert job.wait() == ("COMPLETED", "0:0")
    mounts = f"{ROOT}:{ROOT},{job.run_dir}:{job.run_dir},/tmp/local:/tmp/local,{MOUNTED}"
    lines = Path(containers[kind]["env"]["RECORD"]).read_text().splitlines()
    if kind == "apptainer":
        begin = f"exec --bind {mounts} --pwd {ROOT} --nv image.sif "
        assert all(line.startswith(begin) for line in lines)
        # In each of two attempts: Ray on both nodes, the probe, the trainer.
        assert sum(line.startswith(f"{begin}ray start") for line in lines) == 4
        assert sum(line.startswith(f"{begin}python {TRAINER}") for line in lines) == 2
        assert len(lines) == 8
    else:
        name = f"--container-image=image.sif --container-name=ray-{job.id}"
        flags = f"{name} --container-mounts={mounts} --container-workdir={ROOT}"
        assert len(lines) == 6 and all(flags in line for line in lines)


def test_nothing_is_left_by_jobs_that_were_interrupted(interrupted: dict[str, Job], cluster: Cluster) -> None:
    for job in interrupted.values():
        for folder in (job.run_dir, *job.run_dir.glob("seed-*")):
            (folder / "go").touch()
        job.wait()
    nothing_is_left(cluster)


def test_a_signal_to_the_steps_alone_ends_nothing(start: Start, cluster: Cluster) -> None:
    job = start("forgot")
    job.wait_for("trainer: Ray at")
    cluster.run("scancel", "--signal=USR1", job.id)
    cluster.run("scancel", "--signal=USR1", f"{job.id}.0")
    (job.run_dir / "go").touch()
    assert job.wait() == ("COMPLETED", "0:0")
    assert job.show()["Restarts"] == "0"


@pytest.mark.parametrize("how", ["scancel", "stop"])
def test_cancel(start: Start, cluster: Cluster, how: str) -> None:
    job = start(f"canceled-{how}")
    job.wait_for("trainer: Ray at")
    assert cluster.local_files(1) == [f"ray-{job.id}.0"] and cluster.local_files(2) == [f"ray-{job.id}.1"]
    if how == "scancel":
        cluster.run("scancel", job.id)
    else:
        cluster.run(ROOT / "slurm/stop", "--now", job.id)
    assert job.wait()[0] == "CANCELLED"
    assert job.show()["Restarts"] == "0"
    nothing_runs(cluster)
    clear_files(cluster)


def test_cancel_while_ray_starts(start: Start, cluster: Cluster) -> None:
    job = start("canceled-early", env={"STUB_RAY": "node2:hangs"})
    wait_until(lambda: "1 of 2 nodes" in read(job.latest / "ready.log"), 60, "node1")
    cluster.run("scancel", job.id)
    assert job.wait()[0] == "CANCELLED"
    nothing_runs(cluster)
    clear_files(cluster)


def test_stop_says_what_it_cannot_do(start: Start, cluster: Cluster) -> None:
    held = start("held", options=("--hold",))
    said = cluster.run(ROOT / "slurm/stop", held.id, check=False)
    assert said == f"{held.id}: PENDING, not running: nothing to save there; slurm/stop --now {held.id} cancels it\n"
    cluster.run(ROOT / "slurm/stop", "--now", held.id)
    assert held.wait()[0] == "CANCELLED"
    assert cluster.run(ROOT / "slurm/stop", "999999", check=False) == "999999: no such job in the queue\n"
    assert "Asks a job" not in cluster.run(ROOT / "slurm/stop", "--now", held.id, check=False)
    assert "slurm/stop [--no-requeue | --now] JOB..." in cluster.run(ROOT / "slurm/stop", "me", check=False)


def test_a_trainer_that_fails_because_ray_ended(start: Start, cluster: Cluster) -> None:
    # The other way round: the trainer's failure is seen first, and then that Ray has ended, too.
    job = start("lost-both", "--exit", "1", MAX_RESTARTS="0")
    job.wait_for("trainer: Ray at")
    (job.run_dir / "go").touch()
    kill_ray(cluster, job, node=2)
    assert job.wait() == ("FAILED", "72:0")


def test_a_trainer_that_fails_because_ray_lost_a_node_whose_processes_are_still_there(
    start: Start, cluster: Cluster
) -> None:
    job = start("lost-silently", "--exit", "1", MAX_RESTARTS="0")
    job.wait_for("trainer: Ray at")
    kill_ray(cluster, job, node=2, signal="HUP")
    (job.run_dir / "go").touch()
    assert job.wait() == ("FAILED", "72:0")
    assert "node2 is missing" in read(job.latest / "ready_after.log")


def test_two_jobs_on_one_node(start: Start, cluster: Cluster) -> None:
    both = [start(f"neighbor{i}", options=("--nodes=1", "--nodelist=node1")) for i in (1, 2)]
    for job in both:
        job.wait_for("trainer: Ray at")
    assert set(cluster.local_files(1)) == {f"ray-{job.id}.0" for job in both}
    (both[0].run_dir / "go").touch()
    assert both[0].wait() == ("COMPLETED", "0:0")
    wait_until(lambda: cluster.local_files(1) == [f"ray-{both[1].id}.0"], 20, "the files of the other job alone")
    assert both[1].show()["JobState"] == "RUNNING"
    (both[1].run_dir / "go").touch()
    assert both[1].wait() == ("COMPLETED", "0:0")
    addresses = [re.search(r"trainer: Ray at (\S+),", job.output) for job in both]
    assert addresses[0] and addresses[1] and addresses[0][1] != addresses[1][1]


def test_a_port_that_is_taken(start: Start, cluster: Cluster, tmp_path: Path) -> None:
    job = start("port", go=True, options=("--hold",))
    port = 20000 + int(job.id) % 10000
    listen = f"import socket, time; listener = socket.create_server(('', {port})); time.sleep(3600)"
    with cluster.start_on(1, PYTHON, "-S", "-c", listen) as neighbor:
        is_there = lambda: f":{port} " in cluster.run_on(1, "ss", "--listening", "--tcp", "--numeric")  # noqa: E731
        wait_until(is_there, 20, "the listener")
        cluster.run("scontrol", "release", job.id)
        assert job.wait() == ("COMPLETED", "0:0")
        neighbor.kill()
    assert f"port {port} is taken, trying another" in job.output
    assert f"Ray at 10.77.0.11:{port + 101}" in job.output


BAD = {
    "empty": ({}, "must be a readable file"),
    "syntax": ({"SEEDS": "(1"}, "is not a bash file that sets variables"),
    "root": ({"ROOT": "here"}, "ROOT must be an absolute path, is 'here'"),
    "no-root": ({"ROOT": "/nowhere"}, "ROOT=/nowhere is not this repository"),
    "train": ({}, "TRAIN, the training command, is empty"),
    "number": ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS must be a whole number, is 'many'"),
    "container": ({"CONTAINER": "docker"}, "CONTAINER must be none, pyxis or apptainer, is 'docker'"),
    "image": ({"CONTAINER": "pyxis"}, "CONTAINER=pyxis needs CONTAINER_IMAGE"),
    "bin": ({"BIN_DIR": "/tmp"}, "BIN_DIR: no python in /tmp on node1"),
    "setup": ({"SETUP": "/nowhere"}, "SETUP: /nowhere failed with 1"),
    "nic": ({"RAY_NIC": "ib7"}, "RAY_NIC: no interface 'ib7' with an IPv4 address on node1"),
    "tmp": ({"RAY_TMP_ROOT": f"/tmp/{'x' * 60}"}, "is too long by"),
    "tmp-missing": ({"RAY_TMP_ROOT": "/nowhere"}, "RAY_TMP_ROOT: cannot make /nowhere/ray-"),
    "run-dir": ({"RUN_DIR": "/proc/run"}, "RUN_DIR: cannot write to /proc/run"),
}


@pytest.fixture(scope="module")
def bad_jobs(start: Start) -> dict[str, Job]:
    started = {}
    for name, (settings, _message) in BAD.items():
        options = ("--hold", "--nodes=1", "--nodelist=node1")
        job = start(f"bad-{name}", go=True, options=options, **settings)
        job_env = job.run_dir / "job.env"
        if name == "empty":
            job_env.write_text("")
        elif name == "train":
            job_env.write_text(re.sub(r"TRAIN=.*", "TRAIN=()", job_env.read_text()))
        job.cluster.run("scontrol", "release", job.id)
        started[name] = job
    return started


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_one_line_and_exit_code_2(bad_jobs: dict[str, Job], name: str) -> None:
    job = bad_jobs[name]
    assert job.wait() == ("FAILED", "2:0"), job.output
    assert BAD[name][1] in job.output
    assert job.show()["Restarts"] == "0"


def test_an_array_needs_seeds(start: Start) -> None:
    job = start("no-seeds", options=("--array=3", "--nodes=1"), SEEDS="(1 2)")
    wait_until(lambda: job.show(f"{job.id}_3")["JobState"] == "FAILED", 60, "the end")
    assert "no SEEDS[3] for this array task, of 2" in job.output


def test_a_node_without_power(start: Start, cluster: Cluster) -> None:
    job = start("power")
    job.wait_for("trainer: Ray at")
    cluster.cut_power(2)
    wait_until(lambda: job.show()["JobState"] == "PENDING", 60, "the job to be queued again", lambda: job.output)
    cluster.boot(2)
    job.wait_for("trainer: Ray at", count=2)
    (job.run_dir / "go").touch()
    assert job.wait() == ("COMPLETED", "0:0")
    assert job.show()["Restarts"] == "1"


def kill_ray(cluster: Cluster, job: Job, node: int, signal: str = "KILL") -> None:
    """A signal for ``ray start`` of a job on a node, by its process id."""
    pids = cluster.run_on(node, "pgrep", "--full", f"ray_cli.py start .*ray-{job.id}[.]").split()
    assert len(pids) == 1
    cluster.run_on(node, "kill", f"-{signal}", *pids)


def nothing_is_left(cluster: Cluster) -> None:
    nothing_runs(cluster)
    assert cluster.local_files(1) == cluster.local_files(2) == []


def nothing_runs(cluster: Cluster) -> None:
    wait_until(
        lambda: not cluster.processes_of_jobs(), 60, "processes to end", lambda: str(cluster.processes_of_jobs())
    )


def clear_files(cluster: Cluster) -> None:
    """scancel signals srun as well, which then kills what would have removed the files, if it is not done by then."""
    for node in (1, 2):
        cluster.run_on(node, "find", "/tmp/local", "-mindepth", "1", "-delete")


def read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
