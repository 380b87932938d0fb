"""The controller: one loop from prompts to updated weights.

It runs in the driver process, not in a Ray actor of its own as upstream's: one process fewer to start, and the
progress bar, signals and exit code are the driver's. Model placement, forward passes, advantages, loss and checkpoint
format are OpenRLHF's.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import ray
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils import get_tokenizer

from openrlhf_ext.adapters.batch_composer import Batch, BatchComposer
from openrlhf_ext.adapters.checkpoints import Checkpoints
from openrlhf_ext.adapters.data import load_prompts
from openrlhf_ext.adapters.experience_maker import ExperienceMaker, plan_training, rank_windows
from openrlhf_ext.adapters.generation import EnginePool, GroupGenerator
from openrlhf_ext.adapters.measured_loss import ratios
from openrlhf_ext.adapters.replayed_rows import restore_sampled, store_sampled
from openrlhf_ext.adapters.step_report import (
    method_name,
    report_failures,
    row_metrics,
    sample_lines,
    step_metrics,
)
from openrlhf_ext.batching import Plan
from openrlhf_ext.checkpoint.group_codec import groups_from_state, groups_to_state
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
from openrlhf_ext.stopping import StopRequest
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
        models = {"_actor": actor_group} | ({"_critic": critic_group} if critic_group is not None else {})
        self.checkpoints = Checkpoints(args.ckpt.path, models, max_num=settings.flat["ckpt.max_num"])
        # Decided before the models load: they read whether to load a checkpoint from the same arguments.
        resumes = args.ckpt.load_enable or ext.resume == "auto"
        self._restored = self.checkpoints.newest() if resumes else None
        self._asked_to_resume = resumes
        args.ckpt.load_enable = resumes and (self._restored is not None or self.checkpoints.are_upstreams)

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
        self._evaluated = self._saved = 0
        """The last steps that were evaluated, and saved."""
        self._evaluation_due = False
        """Whether the last step has an evaluation to come, because the run was asked to stop before it."""
        self._unsaved: int | None = None
        """The last step, where its state is whole and not in a checkpoint."""

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

    def fit(self, save_model: Callable[[], None]) -> None:
        """Train to the end, writing the run directory as it goes; ``save_model`` writes the trained policy.

        A request to stop ends the process at once before the first step and in the midst of an evaluation before it;
        from there on nothing that is done gets lost: a step is finished and saved, a model is written.
        """
        self._save_model: Callable[[], None] | None = save_model
        start = self._restore()
        self.run_dir.write_config(dump_settings(self.settings))
        self.reporter.open(self._open_trackers(), start=start)
        try:
            if self._evaluation_due:
                best = self._best(self.evaluate(start, last=self._is_done(start)))
                if best is not None:
                    self.checkpoints.mark_best(start, best)
            elif start == 0 and self.ext.eval.at_start:
                self.evaluate(start, last=self._is_done(start))
            with StopRequest(self.ext.stop_deadline_s) as self._stop:
                steps, ended = self._train_steps(start)
                self._write_model()
                self.reporter.summary(
                    method=method_name(self.settings),
                    seed=self.args.train.seed,
                    ledger=self.ledger,
                    steps=steps,
                    ended=ended,
                )
        except Exception:
            self._save_after_failure()
            raise
        except SystemExit:
            # Where the deadline of a stop came during an evaluation, there is a step to save.
            if self._save_after_failure():
                sys.exit(self._stop.exit_code(saved=True))
            raise
        finally:
            self.reporter.close()

    def _train_steps(self, start: int) -> tuple[int, str | None]:
        """All steps after ``start``. Returns the last one, and why it is not the planned one, if it is not."""
        step = start
        while not self._is_done(step):
            before = self.ledger.num_generated
            try:
                self._step(step + 1)
            except PoolExhausted as end:
                logger.warning("the run ends after %d of %d steps: %s", step, self.max_steps, end)
                if self._evaluated < step or (self._saves and self._saved < step):
                    self._finish_step(step, evaluate=self._evaluated < step, last=True)
                return step, f"{end} ({end.report})"
            step += 1
            last = self._is_done(step)
            evaluate = last or self._is_evaluated(step, before)
            self._finish_step(step, evaluate=evaluate, last=last)
        return step, None

    def _is_evaluated(self, step: int, before: int) -> bool:
        """Whether an evaluation is due after ``step``, which began with ``before`` rollouts generated."""
        every = self.ext.eval.every_rollouts
        if every is None:
            return step % self.args.eval.steps == 0
        return self.ledger.num_generated // every > before // every

    def _finish_step(self, step: int, *, evaluate: bool, last: bool) -> None:
        """What comes after the update. Raises SystemExit where the run was asked to stop."""
        self._evaluation_due, self._unsaved = evaluate and bool(self.eval_prompts), step
        best = None
        if last and not self._saves:
            self._write_model()  # all that a stop during the evaluation would leave
        if evaluate and not self._stop.requested:
            best = self._best(self.evaluate(step, last=last))
        # From here on a request is for the next step. After the last one only the model and the summary are to come.
        stops = self._stop.requested and not (last and not self._evaluation_due)
        saves = best is not None or step % self.args.ckpt.save_steps == 0 or (self._saves and (last or stops))
        self._unsaved = None
        if saves:
            self.checkpoints.save(step, self._state(step), best=best)
            self._saved = step
        if stops:
            logger.warning("stopped after step %d, %s", step, "which is saved" if saves else "without a checkpoint")
            sys.exit(self._stop.exit_code(saved=saves))

    @property
    def _saves(self) -> bool:
        """Whether checkpoints are wanted at all, and so at the end, too."""
        return self.args.ckpt.save_steps != math.inf or self.ext.resume == "auto"

    def _write_model(self) -> None:
        """Once."""
        if self._save_model is not None:
            self._save_model()
            self._save_model = None

    def _save_after_failure(self) -> bool:
        """Keep the last step where what failed came after it; in the midst of a step there is no whole state."""
        step, self._unsaved = self._unsaved, None
        if step is None or not self._saves:
            return False
        try:
            self.checkpoints.save(step, self._state(step))
            logger.warning("step %d is saved", step)
            return True
        except Exception as error:  # the failure itself is what has to be reported
            logger.warning("step %d could not be saved: %s", step, error)
            return False

    def _best(self, metrics: Mapping[str, float]) -> dict[str, object] | None:
        """Key and value of the metric that names the best checkpoint, when it is better than ever before."""
        key, value = self.best_eval_metric_key, metrics.get(self.best_eval_metric_key)
        if value is None or value <= self.best_eval_metric_value:
            return None
        self.best_eval_metric_value = value
        return {"key": key, "value": value}

    def _step(self, step: int) -> None:
        self._unsaved = None
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
        """Upstream's sync, then a reset of caches: no later request may read what the old weights have made."""
        self.pool.leave_out_the_dead()
        if len(self.pool.engines) < len(self.vllm_engines):
            self.vllm_engines = list(self.pool.engines)
            ray.get(self.actor_model_group.async_run_method("use_engines", self.vllm_engines))
        super().broadcast_to_vllm()
        if self.args.vllm.enable_prefix_caching or self.args.data.max_images_per_prompt:
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
        self._evaluated, self._evaluation_due = step, False
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

    def _state(self, step: int) -> dict[str, object]:
        """Everything besides the models that the next step depends on, or that the run reports in the end."""
        return {
            "step": step,
            "prompts": self._prompts_digest(),
            "pool": self.prompt_pool.state_dict(),
            "selector": self.selector.state_dict() if self.selector else None,
            "ledger": self.ledger.state_dict(),
            "sampler": self.sampler.state_dict(lambda groups: groups_to_state(store_sampled(groups))),
            "composer": self.composer.state_dict(),
            "rng": self.rng.bit_generator.state,
            "kl_coef": self.kl_ctl.value,
            "num_idle_steps": self._num_idle_steps,
            "evaluated": self._evaluated,
            "evaluation_due": self._evaluation_due,
            "reporter": self.reporter.state_dict(),
            "actors": ray.get(self.actor_model_group.async_run_method("random_state")),
        }

    def _prompts_digest(self) -> str:
        """Of all training prompts: the pool and the buffers know them by position."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(repr((prompt.prompt_id, prompt.text, prompt.label)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _restore(self) -> int:
        """The step to continue after; 0 for a fresh run."""
        if not self._asked_to_resume:
            return 0
        if self._restored is None:
            return self._restore_without_state()
        state, step = self._restored.state, self._restored.step
        if state["prompts"] != self._prompts_digest():
            raise ValueError(
                f"the checkpoint {self._restored.tag} under --ckpt.path {self.args.ckpt.path} was made with other "
                "prompts than --data.prompt_dataset has now; resume with the same file, or start in a new "
                "--ext.run_dir"
            )
        self.prompt_pool.load_state_dict(state["pool"])
        if self.selector is not None and state["selector"] is not None:
            self.selector.load_state_dict(state["selector"])
        self.ledger.load_state_dict(state["ledger"])
        log_probs = self.generator.collects_log_probs
        self.sampler.load_state_dict(
            state["sampler"], lambda pilots: restore_sampled(groups_from_state(pilots), log_probs=log_probs)
        )
        if self.ext.pilot is None:
            self.ledger.forget_waiting()
        self.composer.load_state_dict(state["composer"])
        self.rng.bit_generator.state = state["rng"]
        self.kl_ctl.value = state["kl_coef"]
        self._num_idle_steps = state["num_idle_steps"]
        self._evaluated, self._saved = state["evaluated"], step
        self._evaluation_due = state["evaluation_due"]
        self.reporter.load_state_dict(state["reporter"])
        ray.get(self.actor_model_group.async_run_method("set_random_state", states=state["actors"]))
        best = self.checkpoints.best
        if best is not None and best["key"] == self.best_eval_metric_key:
            self.best_eval_metric_value = best["value"]
        self.generator.policy_version = step
        self.run_dir.forget_after(step, evaluated=self._evaluated)
        self.checkpoints.forget_after(step)
        self.broadcast_to_vllm()
        self._restored = None  # or its arrays would stay in memory beside the buffers made of them
        logger.info("going on after step %d", step)
        return step

    def _restore_without_state(self) -> int:
        """Resume was asked for, and there is no complete checkpoint of ours: OpenRLHF's own, or none."""
        states = self.init_checkpoint_states()
        step = states.get("global_step", 0)
        if not step:
            logger.warning("no resumable checkpoint under --ckpt.path %s: starting at step 0", self.args.ckpt.path)
            self.run_dir.forget_after(-1)
            return 0
        logger.warning(
            "the checkpoint under --ckpt.path %s has models only, of step %d: prompts start a new epoch and all "
            "counts are from here on",
            self.args.ckpt.path,
            step,
        )
        self._evaluated = step
        self.generator.policy_version = step
        self.run_dir.forget_after(step)
        self.broadcast_to_vllm()
        return step
