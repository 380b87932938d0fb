"""OpenRLHF as it is, as a method to compare with: its own trainer and policy actor, observed.

Upstream's loop, data loader, sample generator (with ``--algo.dynamic_filtering_enable``), experience maker, replay
buffer and fit are used unchanged. Around them: every generated response is counted, steps are timed, evaluation is
this package's, and the run ends at a budget of rollouts. What upstream throws away:

* ``filtered_zero_variance``: groups whose mean score is outside ``--algo.dynamic_filtering_range``. Each is replaced
  by one more prompt until the pass over the prompts ends, so that there is never a surplus of informative groups;
* ``surplus``: rows that ``fit`` leaves out. The last batch of a pass is short, and its rows are trained in whole
  micro-batches only. Micro-batches that do not fill an optimizer step wait in the gradient for the next train step
  (``train/num_optimizer_steps`` is 0 then); their rows count as trained.

Prompts come in an order set by ``--train.seed``. Training requests bring no seeds of their own, whatever
``--ext.rollout.seed_requests`` says, so that a run on engines that another run has used cannot be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import openrlhf.trainer.ppo_trainer as upstream_trainer
import openrlhf.trainer.ppo_utils.samples_generator as upstream_generator
import openrlhf.trainer.ray.ppo_actor as upstream_actor
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from tqdm import tqdm

from openrlhf_ext.adapters.actors import PolicyActor, SafePort
from openrlhf_ext.adapters.data import load_prompts
from openrlhf_ext.adapters.generation import EnginePool, GroupGenerator
from openrlhf_ext.adapters.trainer import Trainer
from openrlhf_ext.adapters.upstream import plain
from openrlhf_ext.groups import DEFAULT_TOLERANCE, group_metrics
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.prompts import PromptFile
from openrlhf_ext.reporting import RunReporter
from openrlhf_ext.run_dir import RunDirectory
from openrlhf_ext.settings import Settings, dump_settings
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

# The run has a progress bar of its own.
upstream_trainer.tqdm = upstream_generator.tqdm = partial(tqdm, disable=True)


class _Done(Exception):
    """Ends upstream's loop, which has no end but that of its prompts."""


class StockActor(SafePort, plain(upstream_actor.PolicyModelActor)):
    """OpenRLHF's policy actor with its own replay buffer and fit; it says how many rows those trained."""

    distance_from_start, _weights = PolicyActor.distance_from_start, PolicyActor._weights

    def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None) -> None:
        super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)
        self._start = self._weights() if strategy.measures_distance else None

    def fit(self, kl_ctl: float = 0) -> dict[str, float]:
        buffer, engine = self.trainer.replay_buffer, self.actor.model
        rows, steps = len(buffer.items), engine.global_steps
        status = super().fit(kl_ctl)
        if buffer.dynamic_batch:
            trained = sum(len(indices) for indices in buffer.dynamic_indices)
        else:
            trained = rows - rows % buffer.sample_batch_size
        self._counts = trained, rows - trained, engine.global_steps - steps
        return status

    def fit_counts(self) -> tuple[int, int, int]:
        """Rows that the last ``fit`` trained (in each epoch), rows it left out, optimizer steps it took."""
        return self._counts


class CountingGenerator(upstream_generator.SamplesGenerator):
    """Upstream's sample generator; counts every response, and gives those of filtered groups their fate.

    Args:
        before_batch: called before every batch; what it raises ends the run.
    """

    def __init__(
        self, strategy, prompts_dataloader, tokenizer, engines, *, ledger: RolloutLedger, before_batch: Callable
    ) -> None:
        super().__init__(strategy, prompts_dataloader, None, tokenizer, engines)
        self._ledger, self._before_batch = ledger, before_batch
        self._generated: list[Experience] = []

    def take_generated(self) -> list[Experience]:
        """Every response since the last call, whole groups in a row."""
        generated, self._generated = self._generated, []
        return generated

    def generate_samples(self, **generate_kwargs):
        self._before_batch()
        return super().generate_samples(**generate_kwargs)

    def _generate_vllm(self, *args, **kwargs):
        first = len(self._generated)
        kept, num_prompts, exhausted = super()._generate_vllm(*args, **kwargs)
        new = self._generated[first:]
        self._ledger.generated(len(new), tokens=sum(int(one.action_mask.sum()) for one in new))
        self._ledger.assign("filtered_zero_variance", len(new) - len(kept))
        return kept, num_prompts, exhausted

    def _process_response_into_experience(self, response, **generate_kwargs) -> Experience:
        if response["reward"] is None:
            raise RuntimeError(
                f"the verifier gave no reward for the prompt {response['prompt']!r}, which OpenRLHF cannot train on; "
                "correct the verifier, then start again"
            )
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        self._generated.append(experience)
        return experience


class StockTrainer(plain(upstream_trainer.PPOTrainer)):
    """Upstream's trainer in this process, on models of ``create_models(args, StockActor)``.

    Raises ValueError for settings that upstream has nothing for.
    """

    # When a run ends and how it is evaluated is the same for all methods.
    _planned_steps, _is_done = Trainer._planned_steps, Trainer._is_done
    evaluate, _is_evaluated = Trainer.evaluate, Trainer._is_evaluated

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
        _refuse_extensions(settings)
        args, ext = strategy.args, settings.ext
        # The loader draws the seed of its order here, from a generator that upstream's controller does not seed.
        torch.manual_seed(args.train.seed)
        super().__init__(
            args.actor.model_name_or_path,
            strategy,
            actor_group,
            critic_group,
            None,  # rewards are verified at generation
            reference_group,
            engines,
            do_sample=True,
            max_len=args.data.max_len,
            max_new_tokens=args.rollout.max_new_tokens,
            temperature=args.rollout.temperature,
            top_p=args.rollout.top_p,
        )
        self.eval_dataloader = None  # upstream's evaluation is off
        self.settings, self.ext = settings, ext
        self.prompts, self.eval_prompts = load_prompts(strategy, self.tokenizer, ext.data, files)
        self.max_steps = self._planned_steps()
        # As many passes as it takes: each is at least one rollout and, where anything can be trained, one step.
        args.train.num_episodes = ext.max_rollouts or ext.max_steps or args.train.num_episodes

        self.run_dir = RunDirectory(ext.run_dir)
        self.reporter = RunReporter(self.run_dir, max_steps=self.max_steps, started=started)
        self.ledger = RolloutLedger()
        self.samples_generator = CountingGenerator(
            strategy,
            self.prompts_dataloader,
            self.tokenizer,
            engines,
            ledger=self.ledger,
            before_batch=self._end_if_done,
        )
        self.pool = EnginePool(engines, sleeps=args.vllm.enable_sleep)
        self.eval_generator = GroupGenerator(
            self.pool,
            args,
            ext,
            temperature=args.eval.temperature,
            stream="eval",
            on_progress=self.reporter.generation,
        )
        self._step = self._evaluated = 0

    def fit(self, save_model: Callable[[], None]) -> None:
        """Train to the end. Writes the run directory as it goes, and the model by ``save_model``."""
        self.run_dir.write_config(dump_settings(self.settings))
        self.reporter.open((), start=0)
        try:
            if self.ext.eval.at_start:
                self.evaluate(0)
            self._step_start = time.perf_counter()
            try:
                super().fit()
            except _Done:
                pass
            if self._evaluated < self._step:
                self.evaluate(self._step, last=True)
            self.run_dir.write_json("ledger.json", self.ledger.as_dict())
            save_model()
            self.reporter.summary(
                method="openrlhf_dapo" if self.args.algo.dynamic_filtering_enable else "openrlhf",
                seed=self.args.train.seed,
                ledger=self.ledger,
                steps=self._step,
                ended=None
                if self._is_done(self._step)
                else f"no prompt is left after --train.num_episodes {self.args.train.num_episodes}",
            )
        finally:
            self.reporter.close()

    def _end_if_done(self) -> None:
        if self._is_done(self._step):
            raise _Done

    # -- what upstream's loop calls --

    def train_step(self, rollout_samples: list[Experience], global_step: int):
        self._batch = self._groups(rollout_samples)
        return super().train_step(rollout_samples, global_step)

    def broadcast_to_vllm(self) -> None:
        """Upstream's sync, then a reset of caches; that of the prefix cache is upstream's own on a GPU."""
        super().broadcast_to_vllm()
        if self.args.vllm.enable_prefix_caching or self.args.data.max_images_per_prompt:
            self.pool.all("reset_prefix_cache")

    def _compute_rollout_stats(self, experiences: list[Experience]) -> dict[str, float]:
        """Upstream's, the entropy as in ``step_report.row_metrics``, and the rows that carry gradient."""
        tokens = sum(float(batch.action_mask.sum()) for batch in experiences)
        surprise = -sum(float((batch.action_log_probs * batch.action_mask).sum()) for batch in experiences)
        return {
            **super()._compute_rollout_stats(experiences),
            "rollout/entropy_mean": surprise / tokens,
            "step/num_gradient_rollouts": sum(int(batch.advantages.any(-1).sum()) for batch in experiences),
        }

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        """Ends a train step: its line of figures, and the evaluation where one is due. There are no checkpoints."""
        self._step = global_step
        metrics = self._step_metrics(logs_dict)
        self.reporter.train_step(global_step, metrics, self.ledger)
        last = self._is_done(global_step)
        before = self.ledger.num_generated - metrics["step/rollouts_generated"]
        if last or self._is_evaluated(global_step, before):
            self.evaluate(global_step, last=last)
            self._evaluated = global_step
        self._step_start = time.perf_counter()

    def _step_metrics(self, status: dict) -> dict[str, float]:
        counts = ray.get(self.actor_model_group.async_run_method("fit_counts"))
        trained, left_out, steps = zip(*counts[:: self.actor_model_group.duplicate_actors], strict=True)
        self.ledger.assign("trained_fresh", sum(trained))
        self.ledger.assign("surplus", sum(left_out))
        generated = self._groups(self.samples_generator.take_generated())
        tolerance = self.ext.groups.tolerance if self.ext.groups else DEFAULT_TOLERANCE
        metrics = group_metrics(generated, tolerance=tolerance, suffix="generated")
        metrics |= group_metrics(self._batch, tolerance=tolerance, suffix="trained")
        metrics |= {
            "step/num_prompts": len(generated),
            "train/num_rows": sum(trained),
            "train/num_optimizer_steps": steps[0],
        }
        if sum(trained):
            metrics["rows/share_fresh"] = 1.0
        metrics |= self.ledger.close_step()
        own = {key: value for key, value in status.items() if key.startswith(("rollout/", "step/", "timing/"))}
        # A text, and upstream's samples per prompt in percent.
        left = own.keys() | {"generated_samples", "dynamic_filtering_pass_rate"}
        metrics |= {f"train/{key}": value for key, value in status.items() if key not in left}
        # Upstream's total leaves out what is between its phases.
        del own["timing/step_total"]
        total = time.perf_counter() - self._step_start
        phases = sum(value for key, value in own.items() if key.startswith("timing/"))
        return metrics | own | {"timing/other": total - phases, "timing/step_total": total}

    def _groups(self, samples: Sequence[Experience]) -> list[RolloutGroup[None]]:
        """Samples, whole groups in a row, as groups for the metrics."""
        size = self.args.rollout.n_samples_per_prompt
        groups = []
        for i in range(0, len(samples), size):
            own = samples[i : i + size]
            rollouts = tuple(
                Rollout(one.rewards.item(), one.scores.item(), int(one.action_mask.sum()), None) for one in own
            )
            prompt = Prompt("", own[0].prompts[0], own[0].labels[0])
            groups.append(RolloutGroup("", prompt, rollouts, self._step))
        return groups


def _refuse_extensions(settings: Settings) -> None:
    ext, args = settings.ext, settings.upstream
    parts = ("dapo", "fill", "pilot", "mopps", "replay", "success_replay", "throttle")
    on = {f"--ext.{name}": getattr(ext, name) is not None for name in parts}
    on["--ext.groups.ineffective drop"] = ext.groups is not None and ext.groups.ineffective == "drop"
    on["--ckpt.load_enable"] = args.ckpt.load_enable
    on[f"--ckpt.save_steps {args.ckpt.save_steps}"] = args.ckpt.save_steps != -1
    for flag, is_set in on.items():
        if is_set:
            raise ValueError(f"{flag} does not go with stock OpenRLHF, which is trained as it is; remove it")
