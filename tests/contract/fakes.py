"""Stand-ins for what needs a cluster: Ray, the DeepSpeed engine, the model actors. The rest is upstream's own code."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from openrlhf.trainer.ray.launcher import BaseModelActor, RayActorGroup
from openrlhf.utils.deepspeed import DeepspeedStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from openrlhf_ext.adapters.actors import PolicyActor, PolicyTrainer, TrainStepSchedule

VOCABULARY = 11


class Remote:
    """An actor's method: ``.remote(...)`` runs at once and returns the value itself as its reference."""

    def __init__(self, function: Callable) -> None:
        self.remote = function


class LocalRay:
    """``ray`` for code whose references are the values themselves."""

    @staticmethod
    def get(refs):
        return refs

    @staticmethod
    def put(value):
        return value


# -- models and their Ray groups --


class TinyPolicy(nn.Module):
    """Log-probability of each token given the one before it: (B, T) to (B, T - 1), zero where masked."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))

    def forward(self, sequences, action_mask, attention_mask):
        log_probs = torch.log_softmax(self.logits[sequences[:, :-1]], -1)
        return log_probs.gather(-1, sequences[:, 1:, None]).squeeze(-1) * action_mask


class TinyCritic(nn.Module):
    """A value for each token: (B, T) to (B, T - 1)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)))

    def forward(self, sequences, action_mask, attention_mask):
        return self.values[sequences[:, :-1]] * action_mask


class ModelHandle(BaseModelActor):
    """A model actor whose handle is itself; ``execute_batch`` is upstream's."""

    def __init__(self, model: nn.Module) -> None:
        self.strategy = SimpleNamespace(is_rank_0=lambda: False)  # rank 0 shows a progress bar
        self._model = model
        self.execute_batch = Remote(super().execute_batch)

    @torch.no_grad()
    def forward(self, sequences, action_mask, attention_mask, mm_train_inputs_list=None):
        return self._model(sequences, action_mask, attention_mask)


def actor_group(model: nn.Module, num_ranks: int = 1) -> RayActorGroup:
    """Upstream's group, with its own chunking, over ``num_ranks`` handles of the same model."""
    group = object.__new__(RayActorGroup)
    group.duplicate_actors = 1
    group._actor_handlers = [ModelHandle(model) for _ in range(num_ranks)]
    return group


# -- training --


class FakeEngine:
    """DeepSpeed's accumulation rule around plain gradients and plain SGD.

    A step is taken at every ``gas``-th call unless a boundary was set; the counter runs on from one train step to the
    next; every loss is divided by ``gas``; gradients are averaged over the ranks. ``gradients`` keeps that of every
    step.
    """

    def __init__(self, module: nn.Module, gas: int, lr: float) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.gradients: list[torch.Tensor] = []
        self._gas = gas
        self._boundary: bool | None = None
        self._micro_steps = 0

    def gradient_accumulation_steps(self) -> int:
        return self._gas

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._micro_steps + 1) % self._gas == 0 if self._boundary is None else self._boundary

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._gas).backward()

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            gradient = self.module.logits.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
            self.gradients.append(gradient.clone())
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.lr_scheduler.step()
        self._micro_steps += 1

    def get_global_grad_norm(self) -> float:
        return self.gradients[-1].norm().item() if self.gradients else 0.0


class FakeActor(nn.Module):
    """Upstream's ``Actor`` around the engine, as its ``training_step`` calls it."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self.model = engine

    def forward(self, sequences, action_mask, attention_mask, **options):
        return self.model.module(sequences, action_mask, attention_mask), SimpleNamespace()


class FakeStrategy:
    """The part of ``DeepspeedStrategy`` that training reads; a ring group makes upstream keep the order of rows."""

    all_reduce = DeepspeedStrategy.all_reduce
    ring_attn_group = "upstream does not shuffle rows with a ring"

    def __init__(self, args) -> None:
        self.args = args
        self.world_size = dist.get_world_size()
        self.accumulated_gradient = args.train.batch_size // args.train.micro_batch_size // self.world_size
        self.time_steps = {"ema": 0}
        self.ds_device_mesh = init_device_mesh("cpu", (self.world_size, 1, 1), mesh_dim_names=("dp", "sp", "tp"))

    def is_rank_0(self) -> bool:
        return False  # rank 0 shows a progress bar

    def backward(self, loss, model, optimizer) -> None:
        model.model.backward(loss)

    def optimizer_step(self, optimizer, model, scheduler, name) -> None:
        model.model.step()

    def get_grad_norm(self, model) -> float:
        return model.model.get_global_grad_norm()


def policy_actor(args, *, lr: float = 0.0) -> PolicyActor:
    """This package's policy actor with upstream's trainer, loss and ``training_step``, around a fake engine."""
    strategy = FakeStrategy(args)
    gas = 1 if args.train.dynamic_batch_enable else strategy.accumulated_gradient
    engine = FakeEngine(TinyPolicy(), gas, lr)
    actor = object.__new__(PolicyActor)
    actor.strategy, actor.actor, actor._engine = strategy, FakeActor(engine), engine
    rows = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    steps = rows // args.train.batch_size * args.train.max_epochs
    actor._schedule = engine.lr_scheduler = TrainStepSchedule(engine.lr_scheduler, steps)
    actor.trainer = PolicyTrainer(
        strategy,
        actor.actor,
        ema_model=None,
        actor_optim=engine.optimizer,
        actor_scheduler=actor._schedule,
        micro_train_batch_size=args.train.micro_batch_size,
        dataloader_pin_memory=False,
    )
    return actor
