"""Train with TRL as configs/cpu/grpo.yaml trains with OpenRLHF, and write an ordinary run directory.

    PYTHONPATH=. python scripts/peers_trl.py --trainer grpo|replay --model DIR --train FILE --eval FILE
        --lr 1e-4 --seed 1 --rollouts 12800 --out RUN_DIR

Needs TRL, which scripts/benchmark_peers.sh installs in an environment of its own. ``grpo`` is ``GRPOTrainer``,
``replay`` is ``GRPOWithReplayBufferTrainer`` (trl.experimental, removed after TRL 1.13). Both are used as they are,
but for one mended line (below), with the same model, data, reward, batch, sampling, optimizer, clip range, dual clip
(TRL's ``delta``) and loss (mean over the tokens of the batch; TRL's ``dapo``). What differs from
configs/cpu/grpo.yaml:

* Everything is float32. OpenRLHF's model and engine are bfloat16, with float32 weights in the optimizer.
* Responses come from ``generate`` of transformers in the training process, not from vLLM.
* Advantages are divided by the group's standard deviation + 1e-4, not + 1e-9.
* Prompts are shuffled by TRL's sampler: the same passes over the data, in another order.
* ``rollout/entropy_mean`` is the mean entropy of the next token instead of the mean of ``-log p`` of sampled tokens;
  both estimate the same quantity.

``replay`` is meant to put a stored group in the place of each group without spread. In TRL 1.13 it looks at the batch
as a whole instead: it stores the first group of every batch in which any rewards differ, and replays only when none
do (``rows/share_replayed``), with a probability ratio of 1. Until then it trains as ``grpo`` does. As it is, it also
stops with an error when two stored groups that its heap compares have the same score, which 0/1 rewards soon bring
about (TRL issue 6804); scores are therefore told apart here by order of storage, in the twelfth decimal.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import numpy as np
import yaml

from openrlhf_ext.evaluation import accuracy_by_prompt, evaluate_groups, paired_gain
from openrlhf_ext.groups import DEFAULT_TOLERANCE, group_metrics, is_effective
from openrlhf_ext.prompts import read_prompts
from openrlhf_ext.rewards.countdown import reward_func
from openrlhf_ext.rewards.response import extract_response
from openrlhf_ext.run_dir import RunDirectory, read_eval_prompts, read_metrics
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

NUM_PROMPTS = 16
GROUP_SIZE = 8
ROLLOUTS_A_STEP = NUM_PROMPTS * GROUP_SIZE
EVAL_EVERY_ROLLOUTS = 1280
EVAL_SAMPLES = 4
FINAL_EVAL_SAMPLES = 32
PASS_AT = (1, 2, 4, 8, 16, 32)
SAMPLES_A_STEP = 4
LOGGED_BY_TRL = {
    "train/actor_grad_norm": "grad_norm",
    "train/actor_lr": "learning_rate",
    "rollout/entropy_mean": "entropy",
    "rollout/response_length_mean": "completions/mean_length",
    "rollout/truncated_frac": "completions/clipped_ratio",
}


def trl_settings(*, lr: float, rollouts: int) -> dict[str, object]:
    """What configs/cpu/grpo.yaml says, as arguments of TRL's GRPOConfig."""
    return {
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": ROLLOUTS_A_STEP,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP_SIZE,
        "max_steps": rollouts // ROLLOUTS_A_STEP,
        "max_completion_length": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": 10.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def evaluation_steps(rollouts: int) -> set[int]:
    """The steps evaluated in a run of ``rollouts``: the suite's points, 0, and the last step."""
    return {at // ROLLOUTS_A_STEP for at in (*range(0, rollouts, EVAL_EVERY_ROLLOUTS), rollouts)}


def load_prompts(path: Path) -> list[Prompt]:
    """Raises ValueError for a file that cannot be read or holds a bad row."""
    rows = read_prompts(path, "input", "label", "refuse").rows
    return [Prompt(row.id, row.input, row.label, row.datasource) for row in rows]


def until_end(tokens: Sequence[int], end: int) -> list[int]:
    """The tokens up to and including the first ``end``; all of them without one."""
    return list(tokens[: tokens.index(end) + 1]) if end in tokens else list(tokens)


def verified_groups(
    prompts: Sequence[Prompt], responses: Sequence[Sequence[int]], tokenizer, *, version: int
) -> list[RolloutGroup[str]]:
    """Responses, each with its reward, by prompt.

    Args:
        responses: token ids, as many for each prompt, in the order of the prompts.
        version: train steps completed when they were generated.
    """
    size = len(responses) // len(prompts)
    texts = tokenizer.batch_decode(responses)  # with special tokens, as OpenRLHF gives them to the reward function
    groups = []
    for g, prompt in enumerate(prompts):
        rollouts = []
        for i in range(g * size, (g + 1) * size):
            query = prompt.text + texts[i]
            verdict = reward_func([query], [prompt.text], [prompt.label])
            response = extract_response(query, prompt.text)
            rollouts.append(Rollout(verdict["rewards"], verdict["scores"], len(responses[i]), response))
        groups.append(RolloutGroup(f"g{version:06d}-{g:04d}", prompt, tuple(rollouts), version))
    return groups


class Recorder:
    """Writes the run directory. ``train_wall_s`` has neither start-up nor evaluations in it."""

    def __init__(self, run_dir: RunDirectory, *, method: str, seed: int, started: float) -> None:
        self._run_dir, self._method, self._seed, self._started = run_dir, method, seed, started
        self._train_seconds = self._startup_seconds = 0.0
        self._rollouts = self._tokens = 0
        self._generated: list[RolloutGroup[str]] = []
        self._resumed = started

    def started_up(self) -> None:
        self._startup_seconds = time.time() - self._started

    def generated(self, groups: list[RolloutGroup[str]]) -> None:
        """The rollouts of the step that is being made."""
        self._generated = groups
        self._rollouts += sum(len(group.rollouts) for group in groups)
        self._tokens += sum(rollout.num_tokens for group in groups for rollout in group.rollouts)

    def trained(self, step: int, metrics: Mapping[str, float], *, num_replayed: int) -> None:
        """One finished train step, in which ``num_replayed`` stored groups took the place of fresh ones."""
        seconds = time.time() - self._resumed
        self._train_seconds += seconds
        groups, share = self._generated, num_replayed / len(self._generated)
        own = {
            "step/num_prompts": len(groups),
            "timing/step_total": seconds,
            "rows/share_fresh": 1 - share,
            "rows/share_replayed": share,
            **group_metrics(groups, tolerance=DEFAULT_TOLERANCE, suffix="generated"),
        }
        if not num_replayed:  # else TRL trained others than were generated, and does not say which
            own |= group_metrics(groups, tolerance=DEFAULT_TOLERANCE, suffix="trained")
            effective = [group for group in groups if is_effective(group, metric="reward")]
            own["step/num_gradient_rollouts"] = sum(len(group.rollouts) for group in effective)
        self._log("train", step, {**own, **metrics})
        self._run_dir.log_samples(
            {
                "step": step,
                "prompt_id": group.prompt.prompt_id,
                "group_id": group.group_id,
                "prompt": group.prompt.text,
                "response": group.rollouts[0].payload,
                "reward": group.rollouts[0].reward,
                "accuracy": group.rollouts[0].accuracy,
                "policy_version": group.policy_version,
            }
            for group in groups[:SAMPLES_A_STEP]
        )
        self._resumed = time.time()

    def evaluated(self, step: int, groups: list[RolloutGroup[str]], metrics: Mapping[str, float]) -> float:
        """One evaluation; returns its accuracy. The next train step begins here."""
        figures = evaluate_groups(groups, pass_at=PASS_AT, correct_at=1.0)
        self._run_dir.log_eval_prompts(step, accuracy_by_prompt(groups, correct_at=1.0))
        self._log("eval", step, {**figures, **metrics})
        self._resumed = time.time()
        return figures["eval/accuracy"]

    def finish(self, steps: int) -> None:
        """Write summary.json."""
        by_prompt = read_eval_prompts(self._run_dir.path)
        gain, gain_se = paired_gain(by_prompt[0], by_prompt[steps])
        evaluations = {row["step"]: row for row in read_metrics(self._run_dir.path, "eval")}
        seconds = [row["timing/step_total"] for row in read_metrics(self._run_dir.path, "train")]
        self._run_dir.write_json(
            "summary.json",
            {
                "method": self._method,
                "steps": steps,
                "ended": None,
                "seed": self._seed,
                "rollouts_generated": self._rollouts,
                "tokens_generated": self._tokens,
                "startup_s": self._startup_seconds,
                "wall_s": time.time() - self._started,
                "train_wall_s": self._train_seconds,
                "step_seconds_median": {"step_total": float(np.median(seconds))},
                "accuracy_before": evaluations[0]["eval/accuracy"],
                "accuracy_se_before": evaluations[0]["eval/accuracy_se"],
                "accuracy_after": evaluations[steps]["eval/accuracy"],
                "accuracy_se_after": evaluations[steps]["eval/accuracy_se"],
                "eval_samples": evaluations[steps]["eval/num_samples"],
                "accuracy_gain": gain,
                "accuracy_gain_se": gain_se,
            },
        )

    def _log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        spent = {
            "wall_s": time.time() - self._started,
            "train_wall_s": self._train_seconds,
            "budget/rollouts_generated": self._rollouts,
            "budget/tokens_generated": self._tokens,
        }
        self._run_dir.log(kind, step, {**spent, **metrics})


def load_trl(trainer: str) -> tuple[type, type]:
    """The trainer and its configuration."""
    if trainer == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        return GRPOTrainer, GRPOConfig
    from trl.experimental.grpo_with_replay_buffer import GRPOWithReplayBufferConfig, GRPOWithReplayBufferTrainer

    class CountingTrainer(GRPOWithReplayBufferTrainer):
        """TRL's, with a count of the groups it replays, and without equal scores in its heap."""

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            add, order = self.replay_buffer.add, itertools.count()
            self.replay_buffer.add = lambda scores, data: add([score + 1e-12 * next(order) for score in scores], data)

        def sample_from_replay_buffer(self, num_samples: int, **kwargs):
            self.num_replayed = num_samples
            return super().sample_from_replay_buffer(num_samples, **kwargs)

    return CountingTrainer, GRPOWithReplayBufferConfig


def train(args: argparse.Namespace, prompts: list[Prompt], eval_prompts: list[Prompt], run_dir: RunDirectory) -> None:
    """One run, from the model to summary.json."""
    started = time.time()
    import torch
    import trl
    from datasets import Dataset
    from torch.nn.utils import parameters_to_vector
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

    method = f"trl_{args.trainer}"
    settings = trl_settings(lr=args.lr, rollouts=args.rollouts)
    config = {
        "method": method,
        "trl.version": trl.__version__,
        "actor.model_name_or_path": str(args.model),
        "data.prompt_dataset": str(args.train),
        "eval.dataset": str(args.eval),
        "actor.adam.lr": args.lr,
        "train.seed": args.seed,
        **{f"trl.{name}": value for name, value in settings.items()},
    }
    run_dir.write_config(yaml.safe_dump(config, sort_keys=False))
    recorder = Recorder(run_dir, method=method, seed=args.seed, started=started)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    due = evaluation_steps(args.rollouts)

    def verify(index, completion_ids, trainer_state, **_) -> list[float]:
        asked = [prompts[i] for i in index[::GROUP_SIZE]]
        groups = verified_groups(asked, completion_ids, tokenizer, version=trainer_state.global_step)
        recorder.generated(groups)
        return [reward for group in groups for reward in group.rewards()]

    def evaluate(step: int) -> None:
        began = time.time()
        sampling = copy(trainer.generation_config)
        sampling.num_return_sequences = FINAL_EVAL_SAMPLES if step == max(due) else EVAL_SAMPLES
        inputs = tokenizer([p.text for p in eval_prompts], padding=True, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            sequences = trainer.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                generation_config=sampling,
            )
            distance = float((parameters_to_vector(trainer.model.parameters()) - at_start).norm())
        rows = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        responses = [until_end(row, tokenizer.eos_token_id) for row in rows]
        groups = verified_groups(eval_prompts, responses, tokenizer, version=step)
        metrics = {
            "policy/distance": distance,
            "policy/distance_relative": distance / float(at_start.norm()),
            "timing/eval": time.time() - began,
        }
        accuracy = recorder.evaluated(step, groups, metrics)
        print(f"{args.out}: {step * ROLLOUTS_A_STEP} rollouts, accuracy {accuracy:.3f}", flush=True)

    class Watch(TrainerCallback):
        """What happens in the trainer, as lines of the run directory."""

        def on_train_begin(self, args, state, control, **kwargs) -> None:
            recorder.started_up()
            evaluate(0)

        def on_log(self, args, state, control, logs, **kwargs) -> None:
            if "grad_norm" not in logs:  # the totals after the last step
                return
            metrics = {name: logs[theirs] for name, theirs in LOGGED_BY_TRL.items()}
            recorder.trained(state.global_step, metrics, num_replayed=getattr(trainer, "num_replayed", 0))
            trainer.num_replayed = 0
            if state.global_step in due:
                evaluate(state.global_step)

    trainer_class, config_class = load_trl(args.trainer)
    trainer = trainer_class(
        model=str(args.model),
        reward_funcs=verify,
        args=config_class(**settings, seed=args.seed, output_dir=str(args.out)),
        train_dataset=Dataset.from_list([{"prompt": p.text, "index": i} for i, p in enumerate(prompts)]),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)
    at_start = parameters_to_vector(trainer.model.parameters()).detach().clone()
    trainer.train()
    recorder.finish(max(due))


def checked(args: argparse.Namespace) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train and to evaluate on. Raises ValueError for bad input."""
    if not 0 < args.lr < 1:
        raise ValueError(f"--lr must be between 0 and 1, got {args.lr:g}; 1e-4 is a start")
    if args.rollouts < ROLLOUTS_A_STEP or args.rollouts % ROLLOUTS_A_STEP:
        raise ValueError(f"--rollouts must be a multiple of {ROLLOUTS_A_STEP}, one step's, got {args.rollouts}")
    if not (args.model / "config.json").is_file():
        raise ValueError(f"--model {args.model} holds no config.json; make it with scripts/prepare_model.py tiny")
    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"--out {args.out} is not empty; remove it or name another folder")
    prompts = load_prompts(args.train), load_prompts(args.eval)
    if importlib.util.find_spec("trl") is None:
        raise ValueError("trl is not installed here; scripts/benchmark_peers.sh makes an environment that has it")
    return prompts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--trainer", choices=("grpo", "replay"), required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--train", type=Path, required=True, help="prompts to train on, .jsonl")
    parser.add_argument("--eval", type=Path, required=True, help="prompts to evaluate on, .jsonl")
    parser.add_argument("--lr", type=float, required=True, help="learning rate, constant")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rollouts", type=int, required=True, help="rollouts generated for training, in all")
    parser.add_argument("--out", type=Path, required=True, help="run directory, new or empty")
    args = parser.parse_args(argv)
    try:
        prompts, eval_prompts = checked(args)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    run_dir = RunDirectory(str(args.out))
    try:
        train(args, prompts, eval_prompts, run_dir)
    except Exception as error:
        run_dir.write_json("failed.json", {"error": f"{type(error).__name__}: {error}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
