"""GPUs that a run needs, by OpenRLHF's placement flags, and what a cluster lacks of them: worked by hand."""

from __future__ import annotations

from types import SimpleNamespace as Space

import pytest

from openrlhf_ext.placement_needs import Node, lacking, needed_gpus, needs

# Reference and critic have sizes of their own, as OpenRLHF's flags allow.
SIZES = {"actor": (2, 4), "ref": (1, 3), "critic": (1, 2)}


def args(*, kl: float = 0.0, estimator: str = "rloo", engines: int = 3, parallel: int = 2, **train: bool) -> Space:
    colocate = dict.fromkeys(("colocate_all", "colocate_actor_ref", "colocate_critic_reward"), False)
    models = {name: Space(num_nodes=nodes, num_gpus_per_node=gpus) for name, (nodes, gpus) in SIZES.items()}
    return Space(
        train=Space(**(colocate | train)),
        algo=Space(kl=Space(init_coef=kl), advantage=Space(estimator=estimator)),
        vllm=Space(num_engines=engines, tensor_parallel_size=parallel),
        **models,
    )


@pytest.mark.parametrize(
    ("setting", "gpus"),
    [
        ({}, 8 + 6),
        ({"kl": 0.1}, 8 + 3 + 6),
        ({"estimator": "gae"}, 8 + 2 + 6),
        ({"kl": 0.1, "estimator": "gae"}, 8 + 3 + 2 + 6),
        ({"kl": 0.1, "colocate_actor_ref": True}, 8 + 6),
        ({"colocate_actor_ref": True}, 8 + 6),
        # The critic has no reward model to share with, but gets GPUs of its own.
        ({"estimator": "gae", "colocate_critic_reward": True}, 8 + 2 + 6),
        ({"kl": 0.1, "estimator": "gae", "colocate_actor_ref": True, "colocate_critic_reward": True}, 8 + 2 + 6),
        ({"colocate_all": True}, 8),
        ({"kl": 0.1, "estimator": "gae", "colocate_all": True}, 8),
        ({"kl": 0.1, "estimator": "gae", "colocate_all": True, "colocate_critic_reward": True}, 8 + 2),
        ({"engines": 1, "parallel": 8}, 8 + 8),
    ],
)
def test_gpus_of_a_run(setting: dict, gpus: int) -> None:
    assert needed_gpus(args(**setting)) == gpus


def test_the_shape_of_each_part() -> None:
    found = needs(args(kl=0.1, estimator="gae", colocate_actor_ref=True))
    shapes = {need.what: (need.blocks, need.size, need.shared) for need in found}
    assert shapes == {"actor": (2, 4, False), "ref": (1, 3, True), "critic": (1, 2, False), "vllm": (3, 2, False)}
    assert found[0].flags == "--actor.num_nodes 2 --actor.num_gpus_per_node 4"
    assert found[-1].flags == "--vllm.num_engines 3 --vllm.tensor_parallel_size 2"


def nodes(*gpus: float, cpus: float = 64) -> list[Node]:
    return [Node(f"node{i}", count, cpus) for i, count in enumerate(gpus, 1)]


@pytest.mark.parametrize(
    "there",
    [
        nodes(8, 8),
        nodes(14),  # two of the actor's "nodes" on one
        nodes(5, 5, 4),  # 4 + 1, 4 + 1, 4: Ray packs single GPUs, not the blocks
        nodes(0, 7, 7),
        nodes(14, cpus=14),
    ],
)
def test_a_run_of_14_gpus_fits(there: list[Node]) -> None:
    assert lacking(args(), there) is None


ACTOR = "--actor.num_nodes 2 --actor.num_gpus_per_node 4"
ENGINES = "--vllm.num_engines 3 --vllm.tensor_parallel_size 2"


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        ([], f"{ACTOR} needs 2 x 4 GPUs, each 4 on one node, and there is room for 0 x 4"),
        (nodes(7, 3, 3, 3), f"{ACTOR} needs 2 x 4 GPUs, each 4 on one node, and there is room for 1 x 4"),
        (nodes(8, 5), f"the run needs 14 GPUs, 8 ({ACTOR}) + 6 ({ENGINES}), and there is room for 13"),
        # A GPU without a CPU beside it, and the rest of one that others use, are no room.
        (nodes(14, cpus=13), f"the run needs 14 GPUs, 8 ({ACTOR}) + 6 ({ENGINES}), and there is room for 13"),
        (nodes(8.5, 5.5), f"the run needs 14 GPUs, 8 ({ACTOR}) + 6 ({ENGINES}), and there is room for 13"),
    ],
)
def test_what_a_run_of_14_gpus_lacks(there: list[Node], problem: str) -> None:
    assert lacking(args(), there) == problem


def test_an_engine_is_on_one_node_also_where_it_shares() -> None:
    shared = args(colocate_all=True, engines=1, parallel=8)
    assert lacking(shared, nodes(8)) is None
    assert lacking(shared, nodes(4, 4)) == (
        "--vllm.num_engines 1 --vllm.tensor_parallel_size 8 needs 1 x 8 GPUs, each 8 on one node, and there is room "
        "for 0 x 8"
    )


def test_single_gpus_may_be_anywhere() -> None:
    single = args(engines=14, parallel=1, colocate_all=False)
    single.actor = Space(num_nodes=1, num_gpus_per_node=1)
    assert lacking(single, nodes(*[1] * 15)) is None
    assert "there is room for 14" in str(lacking(single, nodes(*[1] * 14)))
    assert lacking(single, nodes(*[1] * 13)) == (
        "--vllm.num_engines 14 --vllm.tensor_parallel_size 1 needs 14 x 1 GPUs, and there is room for 13 x 1"
    )
