"""What the run asks Ray for is what ``placement_needs`` says it needs: upstream's own code, with Ray recorded."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace as Space

import openrlhf.trainer.ray.launcher as launcher
import openrlhf.trainer.ray.vllm_engine as vllm_engine
import pytest

from openrlhf_ext.adapters import placement
from openrlhf_ext.adapters.placement import create_engines, create_models
from openrlhf_ext.config import ExtConfig
from openrlhf_ext.placement_needs import needed_gpus

ALL = [
    dict(zip(("everything", "actor_ref", "critic_reward", "kl", "gae", "parallel"), values, strict=True))
    for values in product(*[(False, True)] * 5, (1, 2))
]


class Group:
    """A placement group; ``used`` is what the processes in each of its bundles take."""

    def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
        assert strategy == "PACK" and all(bundle == {"GPU": 1, "CPU": 1} for bundle in bundles)
        self.used = [{"GPU": 0.0, "CPU": 0.0} for _ in bundles]

    def wait(self, timeout_seconds: float) -> bool:
        assert 0 < timeout_seconds < 600
        return True

    def ready(self) -> None:
        return None


class ActorClass:
    """A decorated actor class; an actor of it takes its share of the bundle that it is scheduled on."""

    def options(self, *, num_cpus: float, num_gpus: float, scheduling_strategy: Space, **_more: object) -> ActorClass:
        used = scheduling_strategy.placement_group.used[scheduling_strategy.placement_group_bundle_index]
        used["GPU"] += num_gpus
        used["CPU"] += num_cpus
        return self

    def remote(self, *_args: object, **_kwargs: object) -> Space:
        return Space(get_master_addr_port=Space(remote=lambda: ("10.0.0.1", 20000)))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Every placement group that is made, in order."""
    made: list[Group] = []

    def placement_group(bundles: list[dict[str, float]], strategy: str) -> Group:
        made.append(Group(bundles, strategy))
        return made[-1]

    fake = Space(get=lambda refs: refs, remote=lambda **_options: lambda _plain: ActorClass())
    for module in (placement, launcher, vllm_engine):
        monkeypatch.setattr(module, "ray", fake)
        monkeypatch.setattr(module, "placement_group", placement_group)
    for module in (launcher, vllm_engine):
        monkeypatch.setattr(module, "PlacementGroupSchedulingStrategy", Space)
    monkeypatch.setattr(vllm_engine, "RolloutRayActor", None)  # create_engines puts its own there
    monkeypatch.setattr(
        vllm_engine, "get_bundle_indices", lambda _group, index, length: [*range(index * length, (index + 1) * length)]
    )
    return made


def arguments(*, everything, actor_ref, critic_reward, kl, gae, parallel) -> Space:
    """Actor of 2 x 2 GPUs; what must be of its size is, other parts are smaller."""
    shared_reference = everything or actor_ref
    return Space(
        actor=Space(num_nodes=2, num_gpus_per_node=2, model_name_or_path="model"),
        ref=Space(num_nodes=2 if shared_reference else 1, num_gpus_per_node=2 if shared_reference else 3),
        critic=Space(num_nodes=1, num_gpus_per_node=1, model_name_or_path="model" if gae else None),
        reward=Space(remote_url=["reward.py"]),
        train=Space(
            colocate_all=everything,
            colocate_actor_ref=actor_ref,
            colocate_critic_reward=critic_reward,
            seed=1,
            full_determinism_enable=False,
            agent_func_path=None,
        ),
        algo=Space(
            kl=Space(init_coef=0.1 if kl else 0.0),
            advantage=Space(estimator="gae" if gae else "rloo", is_correction_level="off"),
        ),
        vllm=Space(
            num_engines=4 // parallel if everything else 3,
            tensor_parallel_size=parallel,
            enable_prefix_caching=False,
            enforce_eager=True,
            gpu_memory_utilization=0.5,
            enable_sleep=False,
        ),
        data=Space(max_len=64, max_images_per_prompt=0),
        ds=Space(ring_attn_size=1, tensor_parallel_size=1),
    )


@pytest.mark.parametrize("how", ALL, ids=lambda how: "-".join(f"{k}={v:d}" for k, v in how.items()))
def test_the_groups_that_are_made_have_the_gpus_that_are_needed(how: dict, groups: list[Group]) -> None:
    args = arguments(**how)
    models = create_models(args)
    create_engines(args, ExtConfig(run_dir="run"), models.shared)

    assert sum(len(group.used) for group in groups) == needed_gpus(args)
    # vLLM's own workers, not the engine's actor, take GPUs where an engine has several.
    unseen = how["parallel"] == 2 and not how["everything"]
    for group in groups[: -1 if unseen else None]:
        for used in group.used:
            assert 0 < used["GPU"] <= 1 and used["CPU"] <= 1
    assert (models.reference is not None, models.critic is not None) == (how["kl"], how["gae"])
    assert (models.shared is not None) == how["everything"]


def test_gpus_that_are_gone_since_the_start_end_the_run(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Group] = []
    monkeypatch.setattr(Group, "wait", lambda self, timeout_seconds: False)
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    how = dict.fromkeys(("everything", "actor_ref", "critic_reward", "kl", "gae"), False)
    with pytest.raises(RuntimeError, match="did not give 4 GPUs with a CPU each within 120 s"):
        create_models(arguments(**how, parallel=1))
    assert removed == groups
