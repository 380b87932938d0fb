"""Which cluster a run uses, and what it says of one that it cannot use. With real clusters: tests/e2e."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace as Space

import pytest
import ray

from openrlhf_ext.adapters import cluster
from openrlhf_ext.adapters.cluster import address_from_environment, check_folders, check_placement, start_ray
from openrlhf_ext.config import ExtConfig

SETTINGS = Space(ext=ExtConfig(run_dir="run"), upstream=None)


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """``start_ray`` keeps Ray from setting its handlers; here only for the test."""
    monkeypatch.setattr(ray._private.utils, "set_sigterm_handler", ray._private.utils.set_sigterm_handler)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("auto", "would be any cluster that runs on this machine; give HOST:PORT"),
        ("ray://head:10001", "is the address of a Ray Client, and the run must be a process of the cluster; start it"),
        ("http://127.0.0.1:8265", "is the address of a dashboard, .* scripts/ray_job.sh --address"),
        ("head", "is no address of a cluster; give HOST:PORT"),
        ("head:", "is no address of a cluster"),
        (":6379", "is no address of a cluster"),
        ("head:0", "is no address of a cluster"),
        ("head:65536", "is no address of a cluster"),
    ],
)
def test_an_address_that_names_no_cluster_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str, problem: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=f"^RAY_ADDRESS={address} {problem}"):
        start_ray(SETTINGS)


@pytest.mark.parametrize(
    ("address", "used"),
    [("", None), ("local", None), ("10.0.0.1:6379", "10.0.0.1:6379"), ("[fd00::1]:6379", "[fd00::1]:6379")],
)
def test_an_address_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, address: str, used: str | None) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert address_from_environment() == used


def test_without_an_address_a_run_starts_a_cluster_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "needed_gpus", lambda args: 3)
    monkeypatch.setattr(cluster.cpu_platform, "active", lambda: True)
    found: dict = {}
    monkeypatch.setattr(ray, "init", lambda **options: found.update(options))
    start_ray(SETTINGS)
    assert (found["address"], found["num_gpus"], found["num_cpus"]) == ("local", 3, 4)


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else can answer there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(cluster, "canonicalize_bootstrap_address", lambda address: address)
        with pytest.raises(ValueError, match=f"^no Ray cluster answers at RAY_ADDRESS={address}: .*refused; start it"):
            start_ray(SETTINGS)


def test_what_ray_says_of_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_options: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.54.0\n    Python: 3.12.1\n")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(cluster, "_check_answers", lambda address: None)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError) as refused:
        start_ray(SETTINGS)
    assert str(refused.value) == (
        "cannot join the Ray cluster at RAY_ADDRESS=10.0.0.1:6379: Version mismatch: The cluster was started with: "
        "Ray: 2.54.0 Python: 3.12.1; start the run on a node of that cluster, from the Python environment that the "
        "cluster was started from"
    )


# -- placement, on recorded clusters --


def node(name: str, gpus: float, cpus: float, *, alive: bool = True) -> dict:
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return {"NodeID": f"id-{name}", "NodeManagerHostname": name, "Alive": alive, "Resources": resources}


def arguments(nodes: int, gpus: int, engines: int) -> Space:
    return Space(
        actor=Space(num_nodes=nodes, num_gpus_per_node=gpus),
        train=Space(colocate_all=False, colocate_actor_ref=False, colocate_critic_reward=False),
        algo=Space(kl=Space(init_coef=0.0), advantage=Space(estimator="rloo")),
        vllm=Space(num_engines=engines, tensor_parallel_size=1),
    )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Space:
    """The cluster: ``nodes`` as ``ray.nodes`` gives them, ``free`` by node id."""
    found = Space(nodes=[], free={})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(cluster.cpu_platform, "active", lambda: False)
    monkeypatch.setattr(cluster, "_FREE_WAIT_S", 0.0)
    monkeypatch.setattr(ray, "nodes", lambda: found.nodes)
    monkeypatch.setattr(cluster, "available_resources_per_node", lambda: found.free)
    return found


def test_gpus_that_the_cluster_does_not_have_are_named_at_once(
    recorded: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_FREE_WAIT_S", 1e9)  # nobody waits for what is not there
    recorded.nodes = [node("a", 4, 16), node("b", 2, 16), node("gone", 8, 16, alive=False), node("head", 0, 4)]
    with pytest.raises(ValueError) as refused:
        check_placement(arguments(nodes=2, gpus=4, engines=1))
    assert str(refused.value) == (
        "the Ray cluster has too few GPUs: --actor.num_nodes 2 --actor.num_gpus_per_node 4 needs 2 x 4 GPUs, each 4 "
        "on one node, and there is room for 1 x 4. Its nodes are a: 4 GPUs, 16 CPUs; b: 2 GPUs, 16 CPUs; head: 0 "
        "GPUs, 4 CPUs. Every GPU is taken with a CPU. Either add nodes or GPUs, or change the flags"
    )


def test_gpus_that_others_use_are_named(recorded: Space) -> None:
    recorded.nodes = [node("a", 4, 16), node("b", 4, 16)]
    recorded.free = {"id-a": {"GPU": 1.5, "CPU": 16.0}, "id-b": {"CPU": 16.0}}
    with pytest.raises(ValueError) as refused:
        check_placement(arguments(nodes=1, gpus=2, engines=2))
    assert str(refused.value) == (
        "the Ray cluster has too few free GPUs: --actor.num_nodes 1 --actor.num_gpus_per_node 2 needs 1 x 2 GPUs, "
        "each 2 on one node, and there is room for 0 x 2. Its nodes are a: 4 GPUs (1.5 free), 16 CPUs (16 free); b: "
        "4 GPUs (0 free), 16 CPUs (16 free). Every GPU is taken with a CPU. Either wait for the runs that use them, "
        "or change the flags"
    )


def test_gpus_that_another_run_is_giving_back_are_waited_for(recorded: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_FREE_WAIT_S", 1e9)
    recorded.nodes = [node("a", 3, 3)]
    answers = iter([{}, {"id-a": {"GPU": 2.0, "CPU": 3.0}}, {"id-a": {"GPU": 3.0, "CPU": 3.0}}])
    monkeypatch.setattr(cluster, "available_resources_per_node", lambda: next(answers))
    check_placement(arguments(nodes=1, gpus=1, engines=2))
    assert next(answers, None) is None


def test_a_cluster_of_its_own_is_used_by_nobody_else(recorded: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(cluster, "available_resources_per_node", dict)
    recorded.nodes = [node("a", 3, 3)]
    check_placement(arguments(nodes=1, gpus=1, engines=2))
    with pytest.raises(ValueError, match="too few GPUs: the run needs 4 GPUs"):
        check_placement(arguments(nodes=1, gpus=2, engines=2))


def test_without_hardware_the_way_out_is_logical_gpus(recorded: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.cpu_platform, "active", lambda: True)
    recorded.nodes = [node("a", 0, 3)]
    with pytest.raises(ValueError, match=r"add nodes or GPUs \(without hardware, ray start --num-gpus N gives a node"):
        check_placement(arguments(nodes=1, gpus=1, engines=1))


def test_a_driver_without_a_gpu_does_not_set_up_nodes_that_have_some_for_cpus(
    recorded: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.nodes = [node("a", 3, 3), node("b", 3, 3)]
    recorded.nodes[1]["Resources"]["accelerator_type:H100"] = 1.0
    recorded.free = {"id-a": {"GPU": 3.0, "CPU": 3.0}}
    check_placement(arguments(nodes=1, gpus=1, engines=2))
    monkeypatch.setattr(cluster.cpu_platform, "active", lambda: True)
    with pytest.raises(ValueError, match="this process sees no GPU, .* GPUs on b of the Ray cluster; start it on one"):
        check_placement(arguments(nodes=1, gpus=1, engines=2))
    del recorded.nodes[1]["Resources"]["accelerator_type:H100"]
    check_placement(arguments(nodes=1, gpus=1, engines=2))


@pytest.mark.parametrize(("found", "said"), [(True, "1"), (False, "0")])
def test_workers_are_told_what_the_driver_found(monkeypatch: pytest.MonkeyPatch, found: bool, said: str) -> None:
    # An actor that takes no GPU itself sees none: an engine with workers of its own took itself for one on a CPU.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "needed_gpus", lambda args: 3)
    monkeypatch.setattr(cluster.cpu_platform, "active", lambda: found)
    given: dict = {}
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options["runtime_env"]["env_vars"]))
    start_ray(SETTINGS)
    monkeypatch.undo()
    monkeypatch.setenv(cluster.cpu_platform.DECIDED, given[cluster.cpu_platform.DECIDED])
    assert given[cluster.cpu_platform.DECIDED] == said
    assert cluster.cpu_platform.active() is found


# -- folders --


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This node, one that runs models, and a head without GPUs, which nobody asks."""
    monkeypatch.setattr(ray, "nodes", lambda: [node("here", 1, 4), node("other", 1, 4), node("head", 0, 4)])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: Space(get_node_id=lambda: "id-here"))


def folder_settings(tmp_path: Path, **flat: str) -> Space:
    flat = {"actor.model_name_or_path": "hub/model", "reward.remote_url": "http://there/reward"} | flat
    flat = dict.fromkeys(("critic.model_name_or_path", "train.agent_func_path")) | flat
    ckpt = Space(path=str(tmp_path / "run" / "checkpoints"), output_dir=str(tmp_path / "run" / "model"))
    return Space(ext=ExtConfig(run_dir=str(tmp_path / "run")), upstream=Space(ckpt=ckpt), flat=flat)


@pytest.mark.usefixtures("two_nodes")
def test_a_shared_file_system_passes_and_keeps_nothing_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple] = []

    def unseen(nodes: list[str], paths: list[str]) -> dict[str, list[str]]:
        asked.append((nodes, len(paths)))
        return {name: cluster._missing(paths) for name in nodes}

    monkeypatch.setattr(cluster, "_unseen", unseen)
    (tmp_path / "model").mkdir()
    check_folders(folder_settings(tmp_path, **{"actor.model_name_or_path": str(tmp_path / "model")}))
    assert asked == [(["id-other"], 4)]  # the model, and the three folders that are written
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("lost", "flag"),
    [
        ("model", "--actor.model_name_or_path {}/model"),
        ("run/.", "--ext.run_dir {}/run"),
        ("run/checkpoints/.", "--ckpt.path {}/run/checkpoints"),
        ("run/model/.", "--ckpt.output_dir {}/run/model"),
    ],
)
def test_a_folder_that_another_node_does_not_see_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, flag: str
) -> None:
    def unseen(nodes: list[str], paths: list[str]) -> dict[str, list[str]]:
        assert cluster._missing(paths) == []
        return {name: [path for path in paths if path.startswith(f"{tmp_path}/{lost}")] for name in nodes}

    monkeypatch.setattr(cluster, "_unseen", unseen)
    (tmp_path / "model").mkdir()
    settings = folder_settings(tmp_path, **{"actor.model_name_or_path": str(tmp_path / "model")})
    with pytest.raises(ValueError) as refused:
        check_folders(settings)
    assert str(refused.value) == (
        f"{flag.format(tmp_path)} is not on the node other; all nodes of the cluster must see the same file system "
        "there: use a path on shared storage"
    )


def test_a_cluster_of_one_node_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_nodes: None) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [node("here", 1, 4), node("head", 0, 4)])
    monkeypatch.setattr(cluster, "_unseen", None)
    check_folders(folder_settings(tmp_path))


# -- addresses of workers --


@pytest.mark.parametrize(
    ("num_nodes", "given", "used"), [(1, None, None), (2, None, "lo"), (2, "ib0", "ib0")], ids=["one", "two", "told"]
)
def test_on_several_nodes_ranks_meet_at_the_address_that_ray_has_of_a_node(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, given: str | None, used: str | None
) -> None:
    # Left alone gloo takes what the hostname resolves to: 127.0.1.1 on a Debian node, where no other node finds it.
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [node(f"n{i}", 1, 1, alive=i < num_nodes) for i in range(3)])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    cluster.cpu_platform._meet_other_nodes()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == used
