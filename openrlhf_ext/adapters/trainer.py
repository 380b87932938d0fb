"""The controller: one loop from prompts to updated weights.

It runs in the driver process, not in a Ray actor of its own as upstream's: one process fewer to start, and the
progress bar, signals and exit code are the driver's. Model placement, forward passes, advantages, loss and checkpoint
format are OpenRLHF's.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import ray
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils import get_tokenizer

from openrlhf_ext.adapters.batch_composer import Batch, BatchComposer
from openrlhf_ext.adapters.data import load_prompts
from openrlhf_ext.adapters.experience_maker import ExperienceMaker, plan_training, rank_windows
from openrlhf_ext.adapters.generation import EnginePool, GroupGenerator
from openrlhf_ext.adapters.measured_loss import ratios
from openrlhf_ext.adapters.step_report import (
    method_name,
    report_failures,
    row_metrics,
    sample_lines,
    step_metrics,
)
from openrlhf_ext.batching import Plan
from openrlhf_ext.evaluation import accuracy_by_prompt, evaluate_groups
from openrlhf_ext.groups import DEFAULT_TOLERANCE
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.pilot_commit import PilotCommitSampler
from openrlhf_ext.prompt_pool import PoolExhausted, PromptPool
from openrlhf_ext.prompts import PromptFile
from openrlhf_ext.reporting import RunReporter, StepClock
from openrlhf_ext.run_dir import RunDirectory
from openrlhf_ext.sampling import GroupSampler, SampledStep
from openrlhf_ext.selection import Mopps, PromptSource
from openrlhf_ext.settings import Settings, dump_settings
from openrlhf_ext.trackers import open_trackers
from openrlhf_ext.types import RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)

# A run that trains nothing for this many steps in a row will not recover by itself.
_MAX_IDLE_STEPS = 20


class Trainer(BasePPOTrainer):
    """Trains for ``--ext.max_steps`` train steps; one step is one batch of groups and one weight sync."""

    def __init__(
        self,
        settings: Settings,
        files: Mapping[str, PromptFile],
        started: float,
        strategy,
        actor_group,
        critic_group,
        reference_group,
        engines,
    ) -> None:
        args, ext = strategy.args, settings.ext
        # Upstream's -1 means never.
        args.eval.steps = math.inf if args.eval.steps == -1 else args.eval.steps
        args.ckpt.save_steps = math.inf if args.ckpt.save_steps == -1 else args.ckpt.save_steps
        tokenizer = get_tokenizer(
            args.actor.model_name_or_path, None, "left", strategy, use_fast=not args.data.disable_fast_tokenizer
        )
        super().__init__(strategy, actor_group, critic_group, None, reference_group, engines, tokenizer)
        self.settings, self.ext = settings, ext
        self.num_ranks = actor_group.num_ranks
        self.experience_maker = ExperienceMaker(
            actor_group,
            critic_group,
            None,  # rewards are verified at generation
            reference_group,
            self.kl_ctl,
            strategy,
            tokenizer,
            groups=ext.groups,
            num_ranks=self.num_ranks,
        )
        self.prompts, self.eval_prompts = load_prompts(strategy, tokenizer, ext.data, files)
        self.max_steps = self._planned_steps()
        if self.best_eval_metric_key == "":
            self.best_eval_metric_key = "eval/accuracy"

        self.run_dir = RunDirectory(ext.run_dir)
        self.reporter = RunReporter(self.run_dir, max_steps=self.max_steps, started=started)
        self.ledger = RolloutLedger()
        self.prompt_pool = PromptPool(len(self.prompts), args.train.seed, ext.pool)
        self.selector = Mopps(len(self.prompts), args.train.seed, ext.mopps) if ext.mopps else None
        self.source = PromptSource(self.prompts, self.prompt_pool, self.selector)
        self.rng = np.random.default_rng(args.train.seed)
        self.pool = EnginePool(engines, sleeps=args.vllm.enable_sleep)
        self.generator = GroupGenerator(
            self.pool, args, ext, temperature=args.rollout.temperature, on_progress=self.reporter.generation
        )
        self.eval_generator = GroupGenerator(
            self.pool,
            args,
            ext,
            temperature=args.eval.temperature,
            stream="eval",
            on_progress=self.reporter.generation,
        )
        self.sampler = self._create_sampler()
        self.composer = BatchComposer(
            args, ext, self.experience_maker, self.ledger, self.run_dir, log_probs=self.generator.collects_log_probs
        )
        self._num_idle_steps = 0

    def _planned_steps(self) -> int:
        args, ext = self.args, self.ext
        if ext.max_steps is not None:
            return ext.max_steps
        if ext.max_rollouts is not None:
            return math.ceil(ext.max_rollouts / (args.rollout.batch_size * args.rollout.n_samples_per_prompt))
        return max(1, len(self.prompts) * args.train.num_episodes // args.rollout.batch_size)

    def _is_done(self, step: int) -> bool:
        """After ``step``: by the budget, or by the number of steps where that is not only a plan for the budget."""
        spent = self.ext.max_rollouts is not None and self.ledger.num_generated >= self.ext.max_rollouts
        if self.ext.max_rollouts is not None and self.ext.max_steps is None:
            return spent
        return spent or step >= self.max_steps

    def _create_sampler(self) -> GroupSampler[Experience] | PilotCommitSampler[Experience]:
        args, ext = self.args, self.ext
        common = {
            "group_size": args.rollout.n_samples_per_prompt,
            "batch_size": args.rollout.batch_size,
            "max_retries": ext.rollout.max_retries,
            # Filling and success replay decide themselves what becomes of zero-variance groups.
            "groups": ext.groups if ext.fill is None and ext.success_replay is None else None,
        }
        if ext.pilot is None:
            return GroupSampler(self.generator, self.source.next_prompts, self.ledger, dapo=ext.dapo, **common)
        return PilotCommitSampler(
            self.generator,
            self.source,
            self.ledger,
            ext.pilot,
            policy_version=lambda: self.generator.policy_version,
            seed=args.train.seed,
            **common,
        )

    # -- the loop --

    def fit(self) -> None:
        """Train to the end. Writes the run directory as it goes."""
        start = self._restore()
        self.run_dir.write_config(dump_settings(self.settings))
        self.reporter.open(self._open_trackers(), start=start)
        try:
            if start == 0 and self.ext.eval.at_start:
                self.evaluate(0)
            steps, ended = self._train_steps(start)
            self.reporter.summary(
                method=method_name(self.settings),
                seed=self.args.train.seed,
                ledger=self.ledger,
                steps=steps,
                ended=ended,
            )
        finally:
            self.reporter.close()

    def _train_steps(self, start: int) -> tuple[int, str | None]:
        """All steps after ``start``. Returns the last one, and why it is not the planned one, if it is not."""
        step, evaluated = start, start
        while not self._is_done(step):
            before = self.ledger.num_generated
            try:
                self._step(step + 1)
            except PoolExhausted as end:
                logger.warning("the run ends after %d of %d steps: %s", step, self.max_steps, end)
                if evaluated < step:
                    self._finish_step(step, evaluate=True, last=True)
                return step, f"{end} ({end.report})"
            step += 1
            last = self._is_done(step)
            evaluate = last or self._is_evaluated(step, before)
            self._finish_step(step, evaluate=evaluate, last=last)
            evaluated = step if evaluate else evaluated
        return step, None

    def _is_evaluated(self, step: int, before: int) -> bool:
        """Whether an evaluation is due after ``step``, which began with ``before`` rollouts generated."""
        every = self.ext.eval.every_rollouts
        if every is None:
            return step % self.args.eval.steps == 0
        return self.ledger.num_generated // every > before // every

    def _finish_step(self, step: int, *, evaluate: bool, last: bool) -> None:
        if evaluate:
            metrics = self.evaluate(step, last=last)
            self.save_best_checkpoint(metrics, step, self._client_states(step))
        self.save_logs_and_checkpoints(step, {}, self._client_states(step))

    def _step(self, step: int) -> None:
        clock = StepClock()
        self.source.start_step()
        sampled = self.sampler.sample_step()
        self.source.observe(sampled.generated)
        clock.lap("generation")
        report_failures(sampled.failed, sampled.num_prompts, f"step {step}")
        batch = self.composer.compose(sampled.kept, version=self.generator.policy_version, step=step)
        clock.lap("make_experience")
        metrics = self._train(batch, step, clock) if batch.rows else self._skip(sampled)
        # A step without training counts, too: ages and steps of birth are in train steps.
        self.generator.policy_version = step
        metrics |= batch.metrics | self.composer.store(batch, version=step)
        tolerance = self.ext.groups.tolerance if self.ext.groups else DEFAULT_TOLERANCE
        metrics |= step_metrics(sampled, [*batch.fresh_groups, *batch.replayed_groups], tolerance=tolerance)
        metrics["step/num_gradient_rollouts"] = sum(bool(row.advantages.any()) for row in batch.rows)
        metrics |= sampled.metrics | self.generator.take_metrics() | self.prompt_pool.metrics()
        metrics["pool/epoch"] = self.prompt_pool.epoch
        # Closed before anything is written, so that every line on disk balances.
        metrics |= self.ledger.close_step()
        metrics |= clock.metrics()
        self.reporter.train_step(step, metrics, self.ledger)

    def _train(self, batch: Batch, step: int, clock: StepClock) -> dict:
        """Optimizer steps and weight sync for the rows of one step."""
        self._num_idle_steps = 0
        self.run_dir.log_samples(
            sample_lines(
                step, batch.fresh_groups, batch.fresh_group_rows, self.tokenizer, limit=self.ext.log.samples_per_step
            )
        )
        rows = batch.rows
        plan = plan_training(rows, self.args, num_ranks=self.num_ranks, rng=self.rng)
        self._hand_out(plan, rows)
        status = self.ppo_train(step)
        clock.lap("ppo_train")
        self.broadcast_to_vllm()
        clock.lap("broadcast")
        if math.isfinite(status.get("kl", math.nan)):
            self.kl_ctl.update(status["kl"], len(rows))
        metrics = ratios(status) | row_metrics(batch.fresh) | batch.shares()
        metrics |= {f"train/{key}": value for key, value in status.items()}
        return metrics | {"train/num_rows": len(rows), "train/num_optimizer_steps": len(plan[0])}

    def _hand_out(self, plan: Plan, rows: list[Experience]) -> None:
        """Give every rank its windows; ranks of one ring or tensor-parallel group get the same."""
        refs = []
        for rank in range(self.num_ranks):
            windows = ray.put(rank_windows(plan, rank, rows))
            refs += [
                actor.set_windows.remote(windows)
                for group in self._trained_groups()
                for actor in group.actors_of_rank(rank)
            ]
        ray.get(refs)

    def _trained_groups(self) -> list:
        return [group for group in (self.actor_model_group, self.critic_model_group) if group is not None]

    def broadcast_to_vllm(self) -> None:
        """Upstream's sync, then a prefix-cache reset: no later request may read keys of the old weights."""
        self.pool.leave_out_the_dead()
        if len(self.pool.engines) < len(self.vllm_engines):
            self.vllm_engines = list(self.pool.engines)
            ray.get(self.actor_model_group.async_run_method("use_engines", self.vllm_engines))
        super().broadcast_to_vllm()
        if self.args.vllm.enable_prefix_caching:
            self.pool.all("reset_prefix_cache")

    def _skip(self, sampled: SampledStep) -> dict:
        """A step without any group to train. Raises RuntimeError when that happens too often in a row."""
        self._num_idle_steps += 1
        if self._num_idle_steps >= _MAX_IDLE_STEPS:
            raise RuntimeError(
                f"no group to train in {_MAX_IDLE_STEPS} steps in a row: of {sampled.num_prompts} prompts in the last "
                f"one, {len(sampled.failed)} requests failed and {len(sampled.generated)} groups had no "
                "spread; see samples.jsonl and the messages above, and use easier or harder prompts "
                "(or --ext.groups.ineffective keep)"
            )
        logger.warning("nothing to train in this step (%d prompts)", sampled.num_prompts)
        ray.get([ref for group in self._trained_groups() for ref in group.async_run_method("skip_train_step")])
        return {"train/num_rows": 0, "train/num_optimizer_steps": 0}

    # -- evaluation --

    def evaluate(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Accuracy by the verifier on the evaluation set. Not part of the rollout budget."""
        if not self.eval_prompts:
            return {}
        started = time.time()
        n = self.args.eval.n_samples_per_prompt
        if last and self.ext.eval.final_samples is not None:
            n = self.ext.eval.final_samples
        self.eval_generator.policy_version = step
        requests = [RolloutRequest(f"e{i:08d}", p, n) for i, p in enumerate(self.eval_prompts)]
        results = self.eval_generator.generate(requests)
        groups = [result for result in results if isinstance(result, RolloutGroup)]
        failed = [result for result in results if not isinstance(result, RolloutGroup)]
        report_failures(failed, len(results), f"evaluation at step {step}")
        metrics = evaluate_groups(groups, pass_at=self.ext.eval.pass_at, correct_at=self.ext.eval.correct_at)
        budget = self.ledger.as_dict()
        metrics |= {
            "eval/num_failed_prompts": len(failed),
            "eval/num_reward_timeouts": self.eval_generator.take_metrics()["step/num_reward_timeouts"],
            "budget/rollouts_generated": budget["generated"],
            "budget/tokens_generated": budget["tokens"],
            "timing/eval": time.time() - started,
        }
        if self.ext.log.distance:
            metrics |= ray.get(self.actor_model_group.async_run_method("distance_from_start"))[0]
        self.reporter.evaluation(step, metrics, accuracy_by_prompt(groups, correct_at=self.ext.eval.correct_at))
        return metrics

    # -- trackers and checkpoints --

    def _open_trackers(self) -> list:
        flat = self.settings.flat
        return open_trackers(
            run_dir=self.run_dir.path,
            tensorboard_dir=flat["logger.tensorboard_dir"],
            wandb_mode=self.ext.log.wandb,
            wandb_key=flat["logger.wandb.key"],
            wandb_names={
                "project": flat["logger.wandb.project"],
                "entity": flat["logger.wandb.org"],
                "group": flat["logger.wandb.group"],
                "name": Path(self.ext.run_dir).name,
            },
            config={"config": dump_settings(self.settings)},
        )

    def _client_states(self, step: int) -> dict:
        """What upstream stores beside the model. ``ext`` is small and plain; buffers will not go here."""
        return {
            "episode": self.prompt_pool.epoch,
            "global_step": step,
            "total_consumed_prompts": step * self.args.rollout.batch_size,
            "data_loader_state_dict": {},
            "ext": json.dumps(
                {
                    "pool": self.prompt_pool.state_dict(),
                    "selector": self.selector.state_dict() if self.selector else None,
                    "ledger": self.ledger.state_dict(),
                    "num_requests": self.sampler.num_requests,
                    "rng": self.rng.bit_generator.state,
                    "train_seconds": self.reporter.train_seconds,
                }
            ),
        }

    def _restore(self) -> int:
        """The step to continue after; 0 for a fresh run."""
        if not self.args.ckpt.load_enable:
            return 0
        states = self.init_checkpoint_states()
        if not states.get("global_step"):
            logger.warning("no resumable checkpoint under --ckpt.path %s: starting at step 0", self.args.ckpt.path)
            self.run_dir.forget_after(-1)
            return 0
        if "ext" not in states:
            raise ValueError(
                f"the checkpoint under --ckpt.path {self.args.ckpt.path} was not written by openrlhf_ext: it has no "
                "prompt order or ledger; start from its weights with --actor.model_name_or_path instead"
            )
        self.restore_best_checkpoint_state(states)
        state = json.loads(states["ext"])
        self.prompt_pool.load_state_dict(state["pool"])
        if self.selector is not None and state["selector"] is not None:
            self.selector.load_state_dict(state["selector"])
        self.ledger.load_state_dict(state["ledger"])
        self.ledger.forget_waiting()
        self.sampler.num_requests = state["num_requests"]
        self.rng.bit_generator.state = state["rng"]
        self.reporter.train_seconds = state["train_seconds"]
        step = states["global_step"]
        self.generator.policy_version = step
        if self.composer.holds_anything:
            logger.warning("checkpoints do not hold replay buffers yet: they start empty and fill up again")
        if self.ext.pilot is not None:
            logger.warning("checkpoints do not hold waiting pilots yet: they are counted as pilot_not_restored")
        self.run_dir.forget_after(step)
        self.broadcast_to_vllm()
        return step
