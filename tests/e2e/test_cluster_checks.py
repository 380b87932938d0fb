"""A real Ray cluster with a token, which runs already: what a run says that may not use it, or does not fit."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from command import ENVIRONMENT, Command

GPUS = 3

CLUSTER = f"""
import json, sys
import ray
from ray._common.usage import usage_constants

node = ray.init(address="local", num_cpus={GPUS + 1}, num_gpus={GPUS}, include_dashboard=False)
print(node.address_info["gcs_address"], flush=True)
for line in sys.stdin:
    if line == "hold a GPU\\n":
        group = ray.util.placement_group([{{"GPU": 1, "CPU": 1}}])
        assert group.wait(60)
    elif line == "free it\\n":
        ray.util.remove_placement_group(group)
    elif line == "be another version\\n":
        versions = json.dumps({{"ray_version": "1.2.3", "python_version": "3.4.5"}}).encode()
        client = ray._private.worker._global_node.get_gcs_client()
        key, space = usage_constants.CLUSTER_METADATA_KEY, ray._private.ray_constants.KV_NAMESPACE_CLUSTER
        client.internal_kv_put(key, versions, True, space)
    print("done", flush=True)
"""

DRIVER = """
import json, sys
from types import SimpleNamespace as Space
from openrlhf_ext.adapters import cluster
from openrlhf_ext.config import ExtConfig

cluster._FREE_WAIT_S = 2.0
try:
    cluster.start_ray(Space(ext=ExtConfig(run_dir="run"), upstream=None))
    for engines in json.loads(sys.argv[1]):
        cluster.check_placement(Space(
            actor=Space(num_nodes=1, num_gpus_per_node=1),
            train=Space(colocate_all=False, colocate_actor_ref=False, colocate_critic_reward=False),
            algo=Space(kl=Space(init_coef=0.0), advantage=Space(estimator="rloo")),
            vllm=Space(num_engines=engines, tensor_parallel_size=1),
        ))
        print("fits", engines)
except ValueError as error:
    print(error)
"""


class Shared:
    """A cluster of ``GPUS`` logical GPUs on one node, and a driver of it."""

    def __init__(self) -> None:
        self.environment = {**ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], env=self.environment, stdin=-1, stdout=-1, text=True
        )
        self.address = self.process.stdout.readline().strip()

    def tell(self, what: str) -> None:
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def driver(self, *engines: int, **changes: str | None) -> str:
        """The output of a driver that asks whether an actor and so many engines fit; None takes a variable away."""
        environment = {**self.environment, "RAY_ADDRESS": self.address, **changes}
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, json.dumps(engines)],
            env={name: value for name, value in environment.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    cluster = Shared()
    yield cluster
    cluster.process.stdin.close()
    cluster.process.wait(60)


def test_a_run_that_fits_is_told_so_and_one_that_does_not_is_told_what_is_missing(shared: Shared) -> None:
    found = shared.driver(GPUS - 1, GPUS)
    assert found.startswith(f"fits {GPUS - 1}\nthe Ray cluster has too few GPUs: the run needs {GPUS + 1} GPUs, 1 (")
    assert f"{GPUS} GPUs, {GPUS + 1} CPUs. Every GPU is taken with a CPU." in found


def test_gpus_that_another_driver_holds_are_missing_until_it_gives_them_back(shared: Shared) -> None:
    shared.tell("hold a GPU")
    found = shared.driver(GPUS - 1)
    assert found.startswith(f"the Ray cluster has too few free GPUs: the run needs {GPUS} GPUs, 1 (")
    assert f"{GPUS} GPUs ({GPUS - 1} free), {GPUS + 1} CPUs ({GPUS} free)." in found
    shared.tell("free it")
    assert shared.driver(GPUS - 1) == f"fits {GPUS - 1}\n"


@pytest.mark.parametrize(
    "token",
    [
        {"RAY_AUTH_TOKEN": "another-token-of-some-length"},
        {"RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": None, "HOME": "/nonexistent"},
        {"RAY_AUTH_MODE": "disabled"},
    ],
    ids=["wrong", "missing", "off"],
)
def test_a_run_without_the_token_is_refused_and_the_token_is_not_shown(
    shared: Shared, token: Mapping[str, str | None]
) -> None:
    found = shared.driver(1, **token)
    assert found.startswith(f"the Ray cluster at RAY_ADDRESS={shared.address} refuses this run: ")
    assert "set RAY_AUTH_MODE=token, and the cluster's token in RAY_AUTH_TOKEN or in a file" in found
    assert shared.environment["RAY_AUTH_TOKEN"] not in found and "another-token" not in found


def test_the_command_ends_with_2_before_an_engine_starts(
    shared: Shared, start: Callable[..., Command], tmp_path: Path
) -> None:
    environment = {**shared.environment, "RAY_ADDRESS": shared.address}
    command = start("grpo", tmp_path / "run", "--vllm.num_engines", str(GPUS), environment=environment)
    assert command.wait(300) == 2
    assert f"error: the Ray cluster has too few GPUs: the run needs {GPUS + 1} GPUs" in command.output
    assert "too few GPUs" in (command.run_dir / "error.log").read_text()
    assert command.alive() == []


def test_a_cluster_of_another_version_is_refused(shared: Shared) -> None:
    shared.tell("be another version")  # for good: the last test on this cluster
    found = shared.driver(1)
    assert found.startswith(f"cannot join the Ray cluster at RAY_ADDRESS={shared.address}: Version mismatch: ")
    assert "Ray: 1.2.3 Python: 3.4.5" in found and found.count("\n") == 1


# -- asked to stop before the first step --

SLOW = "import pathlib, time\npathlib.Path({seen!r}).touch()\ntime.sleep(600)\n"


def test_sigusr1_before_anything_has_started_asks_for_another_start(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    reward, seen = tmp_path / "slow.py", tmp_path / "seen"
    reward.write_text(SLOW.format(seen=str(seen)))
    command = start("grpo", tmp_path / "run", "--reward.remote_url", str(reward))
    command.wait_until(seen.exists, 300, "the reward file is being loaded")
    command.process.send_signal(signal.SIGUSR1)
    assert command.wait(60) == 85, command.output[-4000:]
    psutil.wait_procs(command.alive(), timeout=60)
    assert command.alive() == []


def test_sigusr1_while_engines_load_asks_for_another_start_and_leaves_nothing(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    command = start("grpo", tmp_path / "run")
    command.wait_until(lambda: bool(command.descendants("EngineActor")), 300, "an engine is being started")
    command.process.send_signal(signal.SIGUSR1)
    assert command.wait(60) == 85, command.output[-4000:]
    assert command.alive() == []
    assert not (command.run_dir / "summary.json").exists()
