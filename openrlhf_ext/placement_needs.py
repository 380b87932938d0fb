"""How many GPUs a run needs, and in which shape, by OpenRLHF's placement flags. Known before anything starts.

Every model process and every part of an engine has a GPU, and a CPU beside it. Colocated ones share: they take the
GPUs of the actor and need none of their own.

==================================  =============================  =====================================
model                               GPUs                           shares the actor's
==================================  =============================  =====================================
actor                               nodes x GPUs on each
reference (with a KL coefficient)   nodes x GPUs on each           ``colocate_actor_ref``, ``colocate_all``
critic (estimator gae)              nodes x GPUs on each           ``colocate_all`` without
                                                                   ``colocate_critic_reward``
vLLM engines                        engines x tensor parallel      ``colocate_all``
==================================  =============================  =====================================

There is no reward model: rewards are verified (``checks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True, slots=True)
class Need:
    """``blocks`` times ``size`` GPUs; those of one block are on one node, several blocks may share a node."""

    what: str
    blocks: int
    size: int
    flags: str
    """With their values, as in ``--actor.num_nodes 2 --actor.num_gpus_per_node 8``."""
    shared: bool = False
    """On the GPUs of the actor, and so not counted again."""

    @property
    def gpus(self) -> int:
        return self.blocks * self.size


def needs(args: SimpleNamespace) -> list[Need]:
    """What each model and the engines need, the actor first. ``args`` are nested and checked (`checks.check`)."""
    train = args.train

    def model(name: str, shared: bool = False) -> Need:
        part = getattr(args, name)
        flags = f"--{name}.num_nodes {part.num_nodes} --{name}.num_gpus_per_node {part.num_gpus_per_node}"
        return Need(name, part.num_nodes, part.num_gpus_per_node, flags, shared)

    found = [model("actor")]
    if args.algo.kl.init_coef > 0:
        found.append(model("ref", train.colocate_all or train.colocate_actor_ref))
    if args.algo.advantage.estimator == "gae":
        found.append(model("critic", train.colocate_all and not train.colocate_critic_reward))
    vllm = args.vllm
    flags = f"--vllm.num_engines {vllm.num_engines} --vllm.tensor_parallel_size {vllm.tensor_parallel_size}"
    found.append(Need("vllm", vllm.num_engines, vllm.tensor_parallel_size, flags, train.colocate_all))
    return found


def needed_gpus(args: SimpleNamespace) -> int:
    """GPUs of the whole run; as many CPUs, too."""
    return sum(need.gpus for need in needs(args) if not need.shared)


@dataclass(frozen=True, slots=True)
class Node:
    """What a node of the cluster has, or has left."""

    name: str
    gpus: float
    cpus: float

    @property
    def room(self) -> int:
        """Processes that can have a whole GPU and a CPU."""
        return int(min(self.gpus, self.cpus))


def lacking(args: SimpleNamespace, nodes: Sequence[Node]) -> str | None:
    """What is missing on these nodes for the run, or None where it fits.

    Ray itself would wait for ever for GPUs that are not there, and would spread a block over several nodes.
    """
    for need in needs(args):
        found = sum(node.room // need.size for node in nodes)
        if found < need.blocks:
            each = f", each {need.size} on one node" if need.size > 1 else ""
            room = f"there is room for {found} x {need.size}"
            return f"{need.flags} needs {need.blocks} x {need.size} GPUs{each}, and {room}"
    wanted, found = needed_gpus(args), sum(node.room for node in nodes)
    if wanted > found:
        parts = " + ".join(f"{need.gpus} ({need.flags})" for need in needs(args) if not need.shared)
        return f"the run needs {wanted} GPUs, {parts}, and there is room for {found}"
    return None
