"""The DeepSpeed actors: OpenRLHF's, trained window by window on batches planned by the controller.

Upstream's ``training_step`` (forward, loss, backward) is used as it is. The loop around it is ours: the controller
hands over the micro-batches of every optimizer step, so no row is dropped, ranks run in step, the accumulation window
always ends inside the train step, and metrics are reduced once a step in a fixed key order.
"""

from __future__ import annotations

import gc
import random
import socket
from types import SimpleNamespace

import deepspeed
import openrlhf.trainer.ray.launcher as upstream_launcher
import openrlhf.trainer.ray.ppo_actor as upstream_actor
import openrlhf.trainer.ray.ppo_critic as upstream_critic
import ray
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import Init
from openrlhf.utils import get_tokenizer

import openrlhf_ext.adapters.precision  # noqa: F401 (models look a type up by its name when they are made)
from openrlhf_ext.adapters import cpu_platform
from openrlhf_ext.adapters.lora import WholeModel, WholeWeight, save_whole_models, whole_parameters
from openrlhf_ext.adapters.measured_loss import MeasuredLoss
from openrlhf_ext.adapters.replayed_rows import ORIGIN
from openrlhf_ext.adapters.upstream import first_line, plain

# Linux hands out ports from 32768 by itself; Ray's workers take 10002 to 19999.
_OWN_PORTS = range(20000, 32000)


class TrainStepSchedule:
    """An LR schedule that follows planned train steps, not optimizer steps that happened.

    DeepSpeed steps it once for each optimizer step. A train step with fewer optimizer steps than planned (filtered
    groups) or more (replay) would bend the schedule; here train step t always ends at position
    ``t * steps_per_train_step``, and never beyond.
    """

    def __init__(self, inner, steps_per_train_step: int) -> None:
        self._inner = inner
        self._per_train_step = steps_per_train_step
        self._end = inner.last_epoch + steps_per_train_step

    def step(self) -> None:
        if self._inner.last_epoch < self._end:
            self._inner.step()

    def finish_train_step(self) -> None:
        while self._inner.last_epoch < self._end:
            self._inner.step()
        self._end += self._per_train_step

    def get_last_lr(self) -> list[float]:
        return self._inner.get_last_lr()

    def state_dict(self) -> dict:
        return self._inner.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._inner.load_state_dict(state)
        self._end = self._inner.last_epoch + self._per_train_step


class SafePort:
    """Mixin for model actors: a rendezvous port that no other run on the machine is likely to be given.

    Upstream asks the system for a free port and binds it seconds later; a run that starts at the same time may have
    taken it by then. Ports below the range that systems hand out are taken only by those who name them.
    """

    @staticmethod
    def _get_free_port() -> int:
        for port in random.SystemRandom().sample(_OWN_PORTS, len(_OWN_PORTS)):
            with socket.socket() as sock:
                try:
                    sock.bind(("", port))
                except OSError:
                    continue
                return port
        raise RuntimeError(f"no free port from {_OWN_PORTS.start} to {_OWN_PORTS.stop - 1} for torch.distributed")


_MODEL_PARTS = {"_engine", "_schedule", "_start", "trainer", "ema_model"} | {
    role + part for role in ("actor", "critic") for part in ("", "_optim", "_scheduler")
}


def gather_one_by_one() -> None:
    """Under ZeRO-3, have DeepSpeed wait for every weight that it gathers.

    Of several at once it waits for the last one only; a GPU's stream puts the others in order, gloo's threads do not,
    and weights that are written into the gathered ones, such as those of a model file, were overwritten now and then.
    """
    several = Init._allgather_params_coalesced

    def one_by_one(self, param_list, *args, **kwargs) -> None:
        for param in param_list:
            several(self, [param], *args, **kwargs)

    Init._allgather_params_coalesced = one_by_one


if cpu_platform.active():
    gather_one_by_one()


class WindowedTraining:
    """Mixin for model actors: ``set_windows`` then ``fit``.

    A subclass sets ``_engine`` (the DeepSpeed engine), ``_schedule`` and ``_train_micro_batch``.
    """

    def _forget_model(self) -> None:
        """Free the model of an earlier run of this process, whose hooks on its own weights keep it alive.

        Before the next one is loaded, so that there is never memory for two.
        """
        if getattr(self, "_engine", None) is not None:
            self._engine.destroy()
            for name in _MODEL_PARTS & vars(self).keys():
                setattr(self, name, None)
            gc.collect()

    def skip_train_step(self) -> None:
        """A train step without rows: only the learning rate moves on."""
        self._schedule.finish_train_step()

    def set_windows(self, windows: list[list]) -> None:
        """Take this rank's micro-batches of the next train step: ``windows[optimizer_step][micro_batch]``."""
        self._windows = windows

    def _fit_windows(self, epochs: int) -> dict[str, float]:
        totals: dict[str, float] = {}
        last: dict[str, float] = {}
        trainer = self.trainer
        for _ in range(epochs):
            self._plan_dynamic(trainer)
            step = 0
            for window in self._windows:
                info = self._loss_norm(window)
                # Upstream's EMA counts micro-batches to find the optimizer steps.
                self.strategy.accumulated_gradient, self.strategy.time_steps["ema"] = len(window), 0
                for i, micro_batch in enumerate(window):
                    self._engine.set_gradient_accumulation_boundary(i == len(window) - 1)
                    micro_batch.to_device(torch.cuda.current_device())
                    status = self._train_micro_batch(micro_batch, step, info)
                    _add_metrics(totals, last, status)
                    step += 1
        self._windows = []
        self._schedule.finish_train_step()
        return {**_reduce(totals), **last}

    def _plan_dynamic(self, trainer) -> None:
        """Upstream's training_step reads the optimizer boundary from its replay buffer when batching is dynamic."""
        buffer = trainer.replay_buffer
        buffer.dynamic_optimizer_step = [int(i == len(w) - 1) for w in self._windows for i in range(len(w))]
        buffer.dynamic_sample_loss_scale = [1.0 / len(w) for w in self._windows for _ in w]

    def _loss_norm(self, window: list) -> dict:
        """Token and sample counts of one optimizer step over all ranks, as upstream's losses take them.

        DeepSpeed divides every loss by its configured accumulation steps, whatever the window's real length; the
        counts are divided by the same number, which cancels it.
        """
        masks = [micro_batch.action_mask for micro_batch in window]
        counts = torch.tensor(
            [sum(int(m.sum()) for m in masks), sum(int((m.sum(-1) > 0).sum()) for m in masks)], dtype=torch.float32
        )
        group = self.strategy.ds_device_mesh["dp"].get_group()
        counts = counts.to(torch.cuda.current_device())
        dist.all_reduce(counts, group=group)
        gas = self._engine.gradient_accumulation_steps()
        return {
            "dp_size": dist.get_world_size(group=group),
            "batch_num_tokens": counts[0] / gas,
            "global_batch_size": counts[1] / gas,
        }


def _add_metrics(totals: dict[str, float], last: dict[str, float], status: dict) -> None:
    """Add one micro-batch to the weighted sums; metrics without a weight (lr, gradient norm) keep the last value."""
    tokens = status["num_action_tokens"]
    weights = {"token": tokens, "sample": status["num_samples"] if tokens else 0.0}
    for kind, amount in weights.items():
        totals[f"_{kind}"] = totals.get(f"_{kind}", 0.0) + amount
    for key, value in status["metrics"].items():
        kind = status["weights"][key]
        value = value.float().mean().item() if isinstance(value, torch.Tensor) else float(value)
        if kind is None:
            last[key] = value
            continue
        name = f"{kind}:{key}"
        totals.setdefault(name, 0.0)
        if weights[kind] > 0:  # a padding micro-batch has no tokens and its means are 0/0
            totals[name] += value * weights[kind]


def _reduce(totals: dict[str, float]) -> dict[str, float]:
    """Means over all ranks, in one collective over sorted keys."""
    keys = sorted(totals)
    sums = torch.tensor([totals[key] for key in keys], dtype=torch.float64).to(torch.cuda.current_device())
    dist.all_reduce(sums)
    sums = dict(zip(keys, sums.tolist(), strict=True))
    means = {}
    for key in keys:
        if not key.startswith("_"):
            kind, name = key.split(":", 1)
            means[name] = sums[key] / sums[f"_{kind}"] if sums[f"_{kind}"] else 0.0
    return means


class PolicyTrainer(upstream_actor.ActorPPOTrainer):
    """Upstream's actor trainer; weights that go to the engines are whole, and on CPU they go in one broadcast."""

    def _init_vllm_sync_group(self, backend: str) -> None:
        if not cpu_platform.active():
            return super()._init_vllm_sync_group(backend)
        args = self.strategy.args.vllm
        workers = args.num_engines * args.tensor_parallel_size
        host = ray.util.get_node_ip_address()
        self._weight_group = cpu_platform.WeightGroup(host, 0, rank=0, world_size=workers + 1)
        refs = [
            engine.init_process_group.remote(
                host,
                self._weight_group.port,
                1 + i * args.tensor_parallel_size,
                workers + 1,
                "openrlhf_ext",
                backend=backend,
                use_ray=args.sync_with_ray,
            )
            for i, engine in enumerate(self.vllm_engines)
        ]
        self._weight_group.connect()
        ray.get(refs)

    def broadcast_to_vllm(self) -> None:
        if not cpu_platform.active():
            actor = self.actor
            if self.strategy.args.ds.lora.rank > 0:
                model = SimpleNamespace(module=WholeModel(actor.model.module))
                self.actor = SimpleNamespace(model=model, is_vlm=actor.is_vlm)
            try:
                return super().broadcast_to_vllm()
            finally:
                self.actor = actor
        model = self.actor.model.module
        rank_zero = dist.get_rank() == 0
        stage_three = self.strategy.args.ds.zero_stage == 3
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage_three):
            named = list(whole_parameters(model))
            flat = torch.cat([param.data.flatten() for _, param in named]) if rank_zero else None
            shapes = [tuple(param.shape) for _, param in named]
        if rank_zero:
            refs = [
                engine.receive_weights.remote([name for name, _ in named], shapes, flat.dtype)
                for engine in self.vllm_engines
            ]
            try:
                self._weight_group.broadcast(flat)
            except RuntimeError as error:
                raise RuntimeError(
                    f"the weights did not reach every vLLM engine; most likely one has died ({error})"
                ) from None
            ray.get(refs)
        dist.barrier()


# PolicyModelActor creates its trainer by this name, in this process.
upstream_actor.ActorPPOTrainer = PolicyTrainer


class PolicyActor(SafePort, WindowedTraining, plain(upstream_actor.PolicyModelActor)):
    """OpenRLHF's policy actor, trained on planned windows."""

    def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None) -> None:
        self._forget_model()
        self._start = None
        load = strategy.load_ckpt

        def load_ckpt(*args, **kwargs):
            if strategy.measures_distance:
                self._start = self._weights()  # before a checkpoint takes their place
            try:
                return load(*args, **kwargs)
            except RuntimeError as error:
                raise ValueError(
                    f"the checkpoint under --ckpt.path {strategy.args.ckpt.path} does not fit the model "
                    f"({first_line(error).rstrip(':')}); go on with the --actor.model_name_or_path and --ds.lora.* "
                    "that it was made with, or start in a new --ext.run_dir"
                ) from None

        strategy.load_ckpt = load_ckpt
        save_whole_models(strategy)
        super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)
        if self.actor.is_vlm:  # upstream has the tokenizer alone here, and saved models would have no processor
            self.tokenizer = get_tokenizer(pretrain, None, "left", strategy)
        self._engine = self.actor.model
        self._schedule = TrainStepSchedule(self.actor_scheduler, strategy.optimizer_steps_per_train_step)
        self._engine.lr_scheduler = self.actor_scheduler = self.trainer.actor_scheduler = self._schedule
        if strategy.measures_distance and self._start is None:
            self._start = self._weights()

    def distance_from_start(self) -> dict[str, float]:
        """L2 distance of the weights from those at the start, alone and relative to the norm of those."""
        moved = sum(
            float((now - start).square().sum()) for now, start in zip(self._weights(), self._start, strict=True)
        )
        norm = sum(float(start.square().sum()) for start in self._start)
        sums = torch.tensor([moved, norm], dtype=torch.float64).to(torch.cuda.current_device())
        if self.strategy.args.ds.zero_stage == 3:
            dist.all_reduce(sums)  # each rank holds a part of every weight
        moved, norm = sums.sqrt().tolist()
        return {"policy/distance": moved, "policy/distance_relative": moved / norm}

    def _weights(self) -> list[torch.Tensor]:
        """This rank's weights, or its parts of them under ZeRO-3, as float32 copies on the CPU.

        With LoRA those of the whole model: adapters alone move in a space of their own, from a random start.
        """
        parameters = (parameter for _, parameter in whole_parameters(self.actor.model.module))
        return [
            (p.exact() if isinstance(p, WholeWeight) else getattr(p, "ds_tensor", p.data).detach()).to(
                "cpu", torch.float32, copy=True
            )
            for p in parameters
        ]

    def random_state(self) -> dict[str, torch.Tensor]:
        """This rank's generators."""
        state = {"cpu": torch.get_rng_state()}
        return state if cpu_platform.active() else state | {"gpu": torch.cuda.get_rng_state()}

    def set_random_state(self, states: list[dict[str, torch.Tensor]]) -> None:
        """Take this rank's of the states of all ranks; a rank that was not there then keeps its own."""
        rank = dist.get_rank()
        if rank < len(states):
            torch.set_rng_state(states[rank]["cpu"])
            if not cpu_platform.active() and "gpu" in states[rank]:
                torch.cuda.set_rng_state(states[rank]["gpu"])

    def use_engines(self, engines: list) -> None:
        """Send weights to these engines only from now on (one of the others has died)."""
        self.vllm_engines = self.trainer.vllm_engines = engines
        self.strategy.args.vllm.num_engines = len(engines)
        if dist.get_rank() == 0 and not self.trainer.use_cuda_ipc:
            self.trainer._init_vllm_sync_group(self.strategy.args.vllm.sync_backend)

    def fit(self, kl_ctl: float = 0) -> dict[str, float]:
        self._kl_ctl = kl_ctl
        self.actor.train()
        return self._fit_windows(self.trainer.max_epochs)

    def _train_micro_batch(self, micro_batch, step: int, info: dict) -> dict:
        if ORIGIN not in micro_batch.info:
            return self.trainer.training_step(micro_batch, self._kl_ctl, step, info)
        if not isinstance(self.trainer.actor_loss_fn, MeasuredLoss):
            self.trainer.actor_loss_fn = MeasuredLoss(self.trainer.actor_loss_fn)
        loss = self.trainer.actor_loss_fn
        loss.watch(micro_batch.info[ORIGIN])
        status = self.trainer.training_step(micro_batch, self._kl_ctl, step, info)
        shares = loss.take()
        status["metrics"] = {key: value for key, value in status["metrics"].items() if key != ORIGIN} | shares
        status["weights"] |= dict.fromkeys(shares, "token")
        return status


class ReferenceActor(SafePort, plain(upstream_launcher.ReferenceModelActor)):
    """OpenRLHF's reference model actor."""


class CriticActor(SafePort, WindowedTraining, plain(upstream_critic.CriticModelActor)):
    """OpenRLHF's critic actor, trained on planned windows."""

    def init_model_from_pretrained(self, strategy, pretrain, max_steps) -> None:
        self._forget_model()
        save_whole_models(strategy)
        super().init_model_from_pretrained(strategy, pretrain, max_steps)
        self._engine = self.critic
        self._schedule = TrainStepSchedule(self.critic_scheduler, strategy.optimizer_steps_per_train_step)
        self._engine.lr_scheduler = self.critic_scheduler = self.trainer.critic_scheduler = self._schedule

    def fit(self) -> dict[str, float]:
        self.critic.train()
        return self._fit_windows(self.trainer.max_epochs)

    def _train_micro_batch(self, micro_batch, step: int, info: dict) -> dict:
        metrics = self.trainer.training_step(micro_batch, step, info)
        mask = micro_batch.action_mask
        return {
            "metrics": metrics,
            "weights": {key: "token" if key in ("critic_loss", "values") else None for key in metrics},
            "num_samples": float(len(mask)),
            "num_action_tokens": float(mask.sum()),
        }
