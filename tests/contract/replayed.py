"""Groups that are born under one policy, stored, and trained again under another, by the trainer's own steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

from fakes import TinyPolicy, actor_group
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from recorded import OFF_POLICY, maker, mixed_rewards, recorded_samples, response

from openrlhf_ext.adapters.replayed_rows import copy_sample, mark_rows, store_group, weigh_rows
from openrlhf_ext.adapters.trainer import Trainer
from openrlhf_ext.config import FillConfig
from openrlhf_ext.group_buffer import StoredGroup
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

BEHAVIOR = 8
"""Seed of the policy that stored groups were sampled by; that of the train step, the proximal one, is OFF_POLICY."""


def maker_of(args, policy: int, num_ranks: int = 1):
    made = maker(args, ours=True, num_ranks=num_ranks)
    made.actor_model_group = actor_group(TinyPolicy(policy), num_ranks)
    return made


def samples_of(
    prompt_tokens: int, response_tokens: int, *, seed: int = 0, size: int = 8, **options
) -> list[Experience]:
    """A group of rollouts of one length, with rewards 0 and 1 in turn."""
    rng = random.Random(seed)
    responses = [
        response(reward=float(i % 2), prompt_tokens=prompt_tokens, response_tokens=response_tokens, rng=rng, **options)
        for i in range(size)
    ]
    return [SamplesGenerator._process_response_into_experience(None, one, max_len=100) for one in responses]


def group_of(samples: Sequence[Experience], name: str = "a", version: int = 0) -> RolloutGroup[Experience]:
    rollouts = tuple(
        Rollout(float(one.rewards), float(one.scores), int(one.action_mask.sum()), one) for one in samples
    )
    return RolloutGroup(f"g-{name}", Prompt(name, "2 3 = 5", "5"), rollouts, version)


def groups_of(samples: Sequence[Experience], size: int = 8) -> list[RolloutGroup[Experience]]:
    return [group_of(samples[i : i + size], str(i)) for i in range(0, len(samples), size)]


def birth(args, group: RolloutGroup, *, policy: int = BEHAVIOR, engine_gap: bool = False):
    """The stored group, and the rows that it had when it was fresh."""
    rows = maker_of(args, policy).make_rows([copy_sample(rollout) for rollout in group.rollouts])
    return store_group(group, rows, engine_gap=engine_gap), rows


def step_rows(args, fresh: list, stored: list[StoredGroup], *, policy: int = OFF_POLICY, log_probs: bool = True):
    """Rows of a train step, as the trainer makes them."""
    controller = SimpleNamespace(
        generator=SimpleNamespace(collects_log_probs=log_probs), experience_maker=maker_of(args, policy)
    )
    return Trainer._make_rows(controller, fresh, stored)


def weigh(rows: list[Experience], stored: list[StoredGroup], config: FillConfig, *, correct_engine: bool = False):
    """Mark all rows, and weigh the last ones as those of ``stored``, all of age 1; the metrics."""
    payloads = [rollout.payload for group in stored for rollout in group.rollouts]
    fresh, replayed = rows[: len(rows) - len(payloads)], rows[len(rows) - len(payloads) :]
    mark_rows(fresh, replayed)
    return weigh_rows(replayed, payloads, [1] * len(payloads), config, correct_engine=correct_engine)


def mixed_rows(args, num_fresh: int = 7) -> list[Experience]:
    """Fresh rows, then the 8 rows of a replayed group, weighed; only replayed ones have an extra log."""
    fresh = groups_of(recorded_samples(mixed_rewards(1)))
    samples = recorded_samples(mixed_rewards(1, seed=5), seed=5)
    for sample in samples:
        sample.info["format"] = sample.rewards.clone()
    stored = [birth(args, group_of(samples))[0]]
    rows = step_rows(args, fresh, stored)
    rows = rows[:num_fresh] + rows[8:]
    weigh(rows, stored, FillConfig())
    return rows
