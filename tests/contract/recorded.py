"""Recorded rollouts, and one train step on them: upstream's code and ours, side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import openrlhf.trainer.ray.ppo_actor as upstream_actor
import torch
import torch.distributed as dist
from fakes import VOCABULARY, TinyCritic, TinyPolicy, actor_group
from openrlhf.models import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from openrlhf_ext.adapters.experience_maker import ExperienceMaker, plan_training, rank_windows
from openrlhf_ext.adapters.upstream import plain
from openrlhf_ext.adapters.upstream_cli import build_parser, nest, validate
from openrlhf_ext.config import GroupsConfig

MAX_LENGTH = 24
OFF_POLICY = 3  # seed of the policy that the old log-probabilities come from


def upstream_args(estimator: str = "group_norm", *flags: str) -> SimpleNamespace:
    """OpenRLHF's own arguments for 16 groups of 8, micro-batches of 8, one optimizer step; ``flags`` win."""
    defaults = {
        "--actor.model_name_or_path": "organization/model",
        "--data.prompt_dataset": "organization/data",
        "--data.max_len": str(MAX_LENGTH),
        "--rollout.max_new_tokens": "16",
        "--reward.remote_url": "http://localhost:5000",
        "--vllm.num_engines": "1",
        "--algo.advantage.estimator": estimator,
        "--rollout.batch_size": "16",
        "--rollout.n_samples_per_prompt": "8",
        "--rollout.micro_batch_size": "8",
        "--train.batch_size": "128",
        "--train.micro_batch_size": "8",
    }
    args = nest(vars(build_parser().parse_args([word for pair in defaults.items() for word in pair] + list(flags))))
    validate(args)
    return args


def response(
    *,
    reward: object = 1.0,
    prompt_tokens: int = 4,
    response_tokens: int = 3,
    scores: object = None,
    extra_logs: dict | None = None,
    log_probs: bool = True,
    rng: random.Random | None = None,
    feedback: Sequence[int] = (),
    truncated: bool = False,
) -> dict:
    """One rollout as upstream's engine actor returns it. With ``feedback``, tokens of an environment, in two turns."""
    rng = rng or random.Random(0)
    length, cut = prompt_tokens + response_tokens, prompt_tokens + (response_tokens + 1) // 2
    tokens = [rng.randrange(1, VOCABULARY) for _ in range(length)]
    values = [0.0] * prompt_tokens + [-rng.random() for _ in range(response_tokens)] if log_probs else None
    ranges = [(prompt_tokens, length)]
    if feedback:
        tokens[cut:cut] = feedback
        if values:
            values[cut:cut] = [0.0] * len(feedback)
        turns = (prompt_tokens, cut), (cut + len(feedback), length + len(feedback))
        ranges = [(start, end) for start, end in turns if start < end]
    return {
        "prompt": "2 3 = 5",
        "label": "5",
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": tokens,
        "action_ranges": ranges,
        "rollout_log_probs": values,
        "truncated": truncated,
        "reward": reward,
        "scores": reward if scores is None else scores,
        "extra_logs": extra_logs or {},
    }


def recorded_samples(
    rewards: Sequence[Sequence[float]], seed: int = 0, feedback: Sequence[int] = ()
) -> list[Experience]:
    """Rollouts of whole groups, in order, with uneven prompt and response lengths; the same for the same seed."""
    rng = random.Random(seed)
    samples = []
    for group in rewards:
        prompt_tokens = rng.randint(2, 7)
        for reward in group:
            lengths = {"prompt_tokens": prompt_tokens, "response_tokens": rng.randint(1, 12)}
            one = response(reward=reward, rng=rng, feedback=feedback, **lengths)
            samples.append(SamplesGenerator._process_response_into_experience(None, one, max_len=MAX_LENGTH))
    return samples


def mixed_rewards(num_groups: int, group_size: int = 8, seed: int = 1) -> list[list[float]]:
    """Groups that all have spread, of dyadic (0, 0.5, 1) and non-dyadic (0.1, 0.7) rewards."""
    rng = random.Random(seed)
    return [
        [0.1, 1.0] + [rng.choice((0, 0.1, 0.5, 0.7, 1.0)) for _ in range(group_size - 2)] for _ in range(num_groups)
    ]


def maker(args, *, ours: bool, groups: GroupsConfig | None = None, num_ranks: int = 1):
    """Upstream's experience maker or ours over the same models; the actor's old weights differ from the trained."""
    more = {"groups": groups, "num_ranks": num_ranks} if ours else {}
    return (ExperienceMaker if ours else RemoteExperienceMaker)(
        actor_group(TinyPolicy(seed=OFF_POLICY), num_ranks),
        actor_group(TinyCritic(seed=1), num_ranks) if args.algo.advantage.estimator == "gae" else None,
        None,
        actor_group(TinyPolicy(seed=2), num_ranks),
        FixedKLController(args.algo.kl.init_coef),
        SimpleNamespace(args=args),
        SimpleNamespace(pad_token_id=0),
        **more,
    )


def rows_for(args, num_groups: int = 16) -> list[Experience]:
    return maker(args, ours=True).make_rows(recorded_samples(mixed_rewards(num_groups)))


def copies(rows: list[Experience]) -> list[Experience]:
    return [replace(row, info=dict(row.info)) for row in rows]


def train(actor, rows: list[Experience], args, rng: np.random.Generator | None = None) -> dict[str, float]:
    """One train step of ours on this process' rank."""
    plan = plan_training(rows, args, num_ranks=dist.get_world_size(), rng=rng)
    actor.set_windows(rank_windows(plan, dist.get_rank(), copies(rows)))
    return actor.fit(0.01)


def train_upstream(actor, rows: list[Experience]) -> dict[str, float]:
    """One train step of upstream's own loop on this rank: its replay buffer, its data loader, its normalizers."""
    share = len(rows) // dist.get_world_size()
    actor.trainer.replay_buffer.items.extend(copies(rows)[dist.get_rank() * share :][:share])
    return plain(upstream_actor.PolicyModelActor).fit(actor, 0.01)


def token_mean_gradient(actor, rows: list[Experience], args) -> torch.Tensor:
    """Gradient at the current weights of one mean over all rows at once."""
    batch, model = make_experience_batch(copies(rows)), actor._engine.module
    loss_fn = PolicyLoss(token_level_loss=args.actor.loss_agg_mode == "token-mean")
    log_probs = model(batch.sequences, batch.action_mask, batch.attention_mask)
    loss = loss_fn(log_probs, batch.action_log_probs, batch.advantages, action_mask=batch.action_mask)[0]
    return torch.autograd.grad(loss, model.logits)[0]
