"""The Ray cluster of a run: the one in RAY_ADDRESS, or one of its own; and whether the run fits on it.

What Ray would wait for in silence, minutes or for ever, is asked for here first and is one error: a cluster that does
not answer or refuses the token, GPUs that are not there, a folder that another node does not see.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openrlhf_ext.adapters import cpu_platform
from openrlhf_ext.placement_needs import Node, lacking, needed_gpus
from openrlhf_ext.settings import Settings, looks_local

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_FREE_WAIT_S = 60.0
"""For GPUs that are in use: a run that has just ended gives them back within seconds."""
_WORKER_START_S = 300.0

_OWN = "or unset RAY_ADDRESS for a cluster of the run's own"


def address_from_environment() -> str | None:
    """RAY_ADDRESS as HOST:PORT; None for a cluster of the run's own.

    Raises:
        ValueError: it names no cluster, or one that this process cannot be a driver of.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return None
    shown, wanted = f"RAY_ADDRESS={address}", "HOST:PORT as ray start --head printed it (port 6379 by default)"
    if address == "auto":
        raise ValueError(f"{shown} would be any cluster that runs on this machine; give {wanted}, {_OWN}")
    if "://" in address:
        kind = "a Ray Client" if address.startswith("ray://") else "a dashboard"
        raise ValueError(
            f"{shown} is the address of {kind}, and the run must be a process of the cluster; start it on a node of "
            f"the cluster with {wanted}, or send it there with scripts/ray_job.sh --address http://HOST:8265"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{shown} is no address of a cluster; give {wanted}, {_OWN}")
    return address


def start_ray(settings: Settings) -> None:
    """Connect to the cluster in RAY_ADDRESS, or start one of our own; never to one that merely happens to run.

    Raises:
        ValueError: RAY_ADDRESS is refused, or its cluster does not answer or does not take this run.
    """
    address = address_from_environment()
    env = {
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        cpu_platform.DECIDED: str(int(cpu_platform.active())),
    }
    runtime_env: dict[str, object] = {"env_vars": env}
    resources: dict[str, object] = {}
    if cpu_platform.active():
        env |= cpu_platform.process_env()
        runtime_env["worker_process_setup_hook"] = cpu_platform.HOOK
        if not address:
            # Logical resources: upstream places its models on "GPUs", Ray does not ask for hardware.
            gpus = needed_gpus(settings.upstream)
            resources = {"num_cpus": gpus + 1, "num_gpus": gpus}
    # Ray's own handlers of SIGTERM exit with 1 or 15, so that nobody could tell a stop from a failure.
    ray._private.utils.set_sigterm_handler = lambda handler: None
    options = {
        "log_to_driver": settings.ext.log.worker_output == "console",
        "logging_level": logging.WARNING,
        "runtime_env": runtime_env,
    }
    if not address:
        ray.init(address="local", include_dashboard=False, **options, **resources)
        return
    _check_answers(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise ValueError(
            f"cannot join the Ray cluster at RAY_ADDRESS={address}: {' '.join(str(error).split())}; start the run on "
            "a node of that cluster, from the Python environment that the cluster was started from"
        ) from None


def _check_answers(address: str) -> None:
    """Within seconds; ``ray.init`` tries for three minutes, and does not say that the token is what is wrong.

    A port that is open but not Ray's takes half a minute, which is fixed in Ray.
    """
    shown = f"RAY_ADDRESS={address}"
    host, _, port = canonicalize_bootstrap_address(address).rpartition(":")
    problem = f"no Ray cluster answers at {shown}"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        GcsClient(address=f"{host}:{port}")
    except AuthenticationError as error:
        raise ValueError(
            f"the Ray cluster at {shown} refuses this run: {str(error).split('. ')[0]}; set RAY_AUTH_MODE=token, and "
            "the cluster's token in RAY_AUTH_TOKEN or in a file that RAY_AUTH_TOKEN_PATH names"
        ) from None
    except (OSError, RayError) as error:
        raise ValueError(f"{problem}: {error}; start it with ray start --head, correct the address, {_OWN}") from None


def check_placement(args: SimpleNamespace) -> None:
    """Whether the models and engines find their GPUs. GPUs that are in use are waited for, a minute.

    Raises:
        ValueError: what is missing, what every node has, and the way out; GPUs that this process does not see.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    total = {node["NodeID"]: _node(node) for node in alive}
    lack, free = lacking(args, list(total.values())), None
    if lack is None and address_from_environment() is not None:
        _check_same_kind(alive)
        lack, free = _lacking_free(args, total)
    if lack is None:
        return
    nodes = "; ".join(_describe(node, free and free[key]) for key, node in total.items())
    kind, way_out = ("free GPUs", "wait for the runs that use them") if free else ("GPUs", "add nodes or GPUs")
    if cpu_platform.active():
        way_out += " (without hardware, ray start --num-gpus N gives a node N logical ones)"
    raise ValueError(
        f"the Ray cluster has too few {kind}: {lack}. Its nodes are {nodes}. Every GPU is taken with a CPU. Either "
        f"{way_out}, or change the flags"
    )


def _check_same_kind(nodes: list[dict]) -> None:
    """The workers of a run are set up as its driver needs it: for GPUs, or for CPUs."""
    hardware = [node["NodeManagerHostname"] for node in nodes if any(map(_is_hardware, node["Resources"]))]
    if hardware and cpu_platform.active():
        raise ValueError(
            f"this process sees no GPU, so that the run would be set up for CPUs, but there are GPUs on "
            f"{', '.join(hardware)} of the Ray cluster; start it on one of these nodes, with CUDA_VISIBLE_DEVICES as "
            "it was for ray start"
        )


def _is_hardware(resource: str) -> bool:
    """Ray's name for a kind of GPU that it found, which logical ones do not have."""
    return resource.startswith("accelerator_type:")


def _describe(node: Node, free: Node | None) -> str:
    gpus, cpus = (f" ({free.gpus:g} free)", f" ({free.cpus:g} free)") if free else ("", "")
    return f"{node.name}: {node.gpus:g} GPUs{gpus}, {node.cpus:g} CPUs{cpus}"


def _lacking_free(args: SimpleNamespace, total: dict[str, Node]) -> tuple[str | None, dict[str, Node]]:
    """What is missing of GPUs that nobody uses, after a while at the most, and what each node has free."""
    give_up, told = time.monotonic() + _FREE_WAIT_S, False
    while True:
        left = available_resources_per_node()
        free = {
            key: Node(node.name, left.get(key, {}).get("GPU", 0), left.get(key, {}).get("CPU", 0))
            for key, node in total.items()
        }
        lack = lacking(args, list(free.values()))
        if lack is None or time.monotonic() > give_up:
            return lack, free
        if not told and time.monotonic() > give_up - _FREE_WAIT_S + 5:
            logger.warning("waiting up to %g s for GPUs that others use: %s", _FREE_WAIT_S, lack)
            told = True
        time.sleep(0.2)


def _node(entry: dict) -> Node:
    resources = entry["Resources"]
    return Node(entry["NodeManagerHostname"], resources.get("GPU", 0), resources.get("CPU", 0))


def check_folders(settings: Settings) -> None:
    """Whether every other node that may run a model or an engine sees the files it reads and the folders it writes.

    Raises:
        ValueError: a node that does not, or on which no worker can be started.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = {
        entry["NodeID"]: entry["NodeManagerHostname"]
        for entry in ray.nodes()
        if entry["Alive"] and entry["NodeID"] != here and _node(entry).room
    }
    if not nodes:
        return
    flat, args = settings.flat, settings.upstream
    read = ("actor.model_name_or_path", "critic.model_name_or_path", "reward.remote_url", "train.agent_func_path")
    paths = {name: key for key in read for name in str(flat[key] or "").split(",") if looks_local(name)}
    marker = f".seen-by-all-nodes-{uuid.uuid4().hex}"
    written = {
        "ext.run_dir": settings.ext.run_dir,
        "ckpt.path": args.ckpt.path,
        "ckpt.output_dir": args.ckpt.output_dir,
    }
    markers = [Path(folder) / marker for folder in written.values()]
    paths |= {str(path): key for path, key in zip(markers, written, strict=True)}
    try:
        for path in markers:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        unseen = _unseen(list(nodes), list(paths))
    finally:
        for path in markers:
            path.unlink(missing_ok=True)
    for node, missing in unseen.items():
        for path in missing:
            shown = path.removesuffix(f"/{marker}")
            raise ValueError(
                f"--{paths[path]} {shown} is not on the node {nodes[node]}; all nodes of the cluster must see the "
                "same file system there: use a path on shared storage"
            )


def _unseen(nodes: list[str], paths: list[str]) -> dict[str, list[str]]:
    """Those of the paths that are not there, by node."""
    find = ray.remote(num_cpus=0)(_missing)
    refs = [
        find.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(paths)
        for node in nodes
    ]
    try:
        return dict(zip(nodes, ray.get(refs, timeout=_WORKER_START_S), strict=True))
    except RayError as error:
        raise ValueError(
            f"a node of the Ray cluster runs no worker: {' '.join(str(error).split())}; the Python environment must "
            "be on every node at the same place"
        ) from None


def _missing(paths: list[str]) -> list[str]:
    return [path for path in paths if not Path(path).exists()]
