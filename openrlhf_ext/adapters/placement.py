"""Which models run where: OpenRLHF's placement rules with this package's actor classes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import openrlhf.trainer.ray.vllm_engine as vllm_engine
import ray
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.utils import get_strategy
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from openrlhf_ext.adapters.actors import CriticActor, PolicyActor, ReferenceActor
from openrlhf_ext.adapters.engine import EngineActor, Float32EngineActor
from openrlhf_ext.adapters.precision import FP32
from openrlhf_ext.config import ExtConfig
from openrlhf_ext.placement_needs import needs
from openrlhf_ext.settings import Settings

_MAX_GROUPS_IN_ENGINE = 100_000

_BUNDLE = {"GPU": 1, "CPU": 1}
"""Of one process, or of several that share it."""

# Upstream's for colocated models. One that has its bundle to itself has the whole GPU with it, too.
_SHARED_FRACTION = 0.2

_RESERVE_S = 120.0


class ActorGroup(RayActorGroup):
    """Upstream's group of Ray actors, addressable by data-parallel rank."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks; actors of one ring or tensor-parallel group count once."""
        return len(self._actor_handlers) // self.duplicate_actors

    def actors_of_rank(self, rank: int) -> list:
        first = rank * self.duplicate_actors
        return self._actor_handlers[first : first + self.duplicate_actors]


def _no_print(*words) -> None:
    """Upstream prints whole models and all arguments, the API key among them."""


def quiet_strategy(settings: Settings):
    """Upstream's strategy, with what the actors need to know of the plan and without anything secret."""
    args = settings.upstream
    args.logger.wandb.key = None  # trackers are ours; upstream's would copy the key into its files
    args.logger.tensorboard_dir = None
    if settings.ext.fp32:
        args.ds.param_dtype = FP32
    strategy = get_strategy(args)
    strategy.print = _no_print
    rows = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    # Which checkpoints are kept is decided in ``checkpoints.py``.
    args.ckpt.max_num = args.ckpt.max_mem = sys.maxsize
    strategy.measures_distance = settings.ext.log.distance
    strategy.optimizer_steps_per_train_step = rows // args.train.batch_size * args.train.max_epochs
    return strategy


@dataclass(frozen=True, slots=True)
class Models:
    """The model actors of a run; None where the settings do not need one."""

    actor: ActorGroup
    reference: ActorGroup | None
    critic: ActorGroup | None
    shared: PlacementGroup | None
    """GPUs that the engines share with the models (``--train.colocate_all``)."""

    def load(self, strategy, engines: list, engines_ready: list, max_steps: int) -> None:
        """Load all weights and plan the learning rate for ``max_steps`` train steps.

        Blocks until the engines are ready too; raises the first error of any process, however long the others would
        still wait for it.
        """
        args = strategy.args
        name = args.actor.model_name_or_path
        total = max_steps * strategy.optimizer_steps_per_train_step
        refs = self.actor.async_init_model_from_pretrained(strategy, name, total, engines)
        if self.reference is not None:
            refs += self.reference.async_init_model_from_pretrained(strategy, name)
        _gather(refs + engines_ready)
        if self.critic is not None:
            _gather(self.critic.async_init_model_from_pretrained(strategy, args.critic.model_name_or_path, total))

    def save(self) -> None:
        """Write the trained policy as a Hugging Face folder to ``--ckpt.output_dir``."""
        ray.get(self.actor.async_save_model())
        if self.critic is not None:
            ray.get(self.critic.async_save_model())


def _gather(refs: list) -> None:
    """Wait for all; raise the first error at once. ``ray.get`` would first wait for those before it in the list."""
    while refs:
        ready, refs = ray.wait(refs)
        ray.get(ready)


def _reserve(bundles: list[dict[str, float]], strategy: str = "PACK") -> PlacementGroup:
    """A placement group whose GPUs are the run's; upstream would wait for them without end."""
    group = placement_group(bundles, strategy=strategy)
    if not group.wait(_RESERVE_S):
        remove_placement_group(group)
        raise RuntimeError(
            f"the Ray cluster did not give {len(bundles)} GPUs with a CPU each within {_RESERVE_S:g} s, although it "
            "had them: another run has taken them, or a node was lost; start again when they are free"
        )
    return group


def create_models(args, policy: type = PolicyActor) -> Models:
    """Start the model actors (without weights) where the colocation flags put them; the actor is a ``policy``."""
    wanted = {need.what: need for need in needs(args)}
    actor_gpus = _reserve([_BUNDLE] * wanted["actor"].gpus)

    def group(name: str, actor_class: type) -> ActorGroup | None:
        need = wanted.get(name)
        if need is None:
            return None
        on_actors = name == "actor" or need.shared
        return ActorGroup(
            need.blocks,
            need.size,
            ray.remote(num_gpus=1)(actor_class),
            pg=actor_gpus if on_actors else _reserve([_BUNDLE] * need.gpus),
            num_gpus_per_actor=_SHARED_FRACTION,
            duplicate_actors=args.ds.ring_attn_size * args.ds.tensor_parallel_size,
        )

    actor, reference, critic = group("actor", policy), group("ref", ReferenceActor), group("critic", CriticActor)
    return Models(actor, reference, critic, actor_gpus if wanted["vllm"].shared else None)


def create_engines(args, ext: ExtConfig, shared: PlacementGroup | None) -> list:
    """Start the vLLM engines. Returns at once; the engines load in the background."""
    # create_vllm_engines looks these up by name.
    vllm_engine.placement_group = _reserve
    # All groups of a step wait in the engine, not in Ray's queue, where their deadline would not have started.
    engine = Float32EngineActor if ext.fp32 else EngineActor
    vllm_engine.RolloutRayActor = ray.remote(max_concurrency=_MAX_GROUPS_IN_ENGINE)(engine)
    wants_log_probs = ext.rollout.log_probs or args.algo.advantage.is_correction_level != "off"
    return vllm_engine.create_vllm_engines(
        args.vllm.num_engines,
        args.vllm.tensor_parallel_size,
        args.actor.model_name_or_path,
        args.train.seed,
        args.train.full_determinism_enable,
        args.vllm.enable_prefix_caching,
        args.vllm.enforce_eager,
        args.data.max_len,
        shared,
        args.vllm.gpu_memory_utilization,
        args.vllm.enable_sleep,
        "processed_logprobs" if wants_log_probs else None,
        agent_func_path=args.train.agent_func_path,
        remote_rm_url=args.reward.remote_url,
        max_images_per_prompt=args.data.max_images_per_prompt,
    )
