"""How the real parts are started."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import threading
from types import SimpleNamespace

import ray

from openrlhf_ext.adapters import launch


def init(**settings):
    print("threads:", [thread.name for thread in threading.enumerate()])
    raise SystemExit(7)


ray.init = init
part = SimpleNamespace(num_nodes=1, num_gpus_per_node=1, model_name_or_path=None)
args = SimpleNamespace(
    actor=part, critic=part, algo=SimpleNamespace(kl=SimpleNamespace(init_coef=0.0)),
    vllm=SimpleNamespace(num_engines=1, tensor_parallel_size=1),
)
ext = SimpleNamespace(log=SimpleNamespace(worker_output="file"))
launch._train_all(iter([launch.Run(SimpleNamespace(upstream=args, ext=ext), {})]), 0.0)
"""


def test_no_thread_of_ours_runs_while_ray_forks_its_processes() -> None:
    # A lock that an import in another thread holds is never released in the child: under load, runs hung at start.
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    assert "threads: ['MainThread']" in done.stdout
