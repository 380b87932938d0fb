"""How the real parts are started."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, signal, sys, threading
from types import SimpleNamespace as Space

import ray

from openrlhf_ext.adapters import launch
from openrlhf_ext.supervisor import supervise


def init(**settings):
    print("threads:", [thread.name for thread in threading.enumerate()], flush=True)
    {in_init}


ray.init = init
args = Space(
    actor=Space(num_nodes=1, num_gpus_per_node=1),
    train=Space(colocate_all=False, colocate_actor_ref=False, colocate_critic_reward=False),
    algo=Space(kl=Space(init_coef=0.0), advantage=Space(estimator="rloo")),
    vllm=Space(num_engines=1, tensor_parallel_size=1),
)
ext = Space(log=Space(worker_output="file"), run_dir={run_dir!r})
settings = Space(upstream=args, ext=ext)
sys.exit(supervise(lambda: launch._train_all(iter([launch.Run(settings, {{}})]), 0.0)))
"""


def run(in_init: str, run_dir: object = "", **environment: str) -> subprocess.CompletedProcess[str]:
    code = CODE.format(in_init=in_init, run_dir=str(run_dir))
    return subprocess.run(
        [sys.executable, "-c", f"import os; os.environ.update({environment!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_no_thread_of_ours_runs_while_ray_forks_its_processes() -> None:
    # A lock that an import in another thread holds is never released in the child: under load, runs hung at start.
    done = run("raise SystemExit(7)", RAY_ADDRESS="")
    assert done.returncode == 7, done.stderr
    assert "threads: ['MainThread']" in done.stdout


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGUSR1", 85)])
def test_a_stop_while_ray_starts_has_its_own_exit_code(name: str, code: int) -> None:
    # Ray sets handlers for SIGTERM as it starts, which exit with 1 and with 15.
    sets = "ray._private.utils.set_sigterm_handler(lambda *_: sys.exit(1))"
    done = run(f"{sets}; signal.raise_signal(signal.{name})", RAY_ADDRESS="")
    assert done.returncode == code, done.stderr


def test_a_cluster_that_cannot_be_used_is_exit_code_2_and_one_line(tmp_path) -> None:
    done = run("raise AssertionError", tmp_path / "run", RAY_ADDRESS="auto")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: RAY_ADDRESS=auto would be any cluster")
