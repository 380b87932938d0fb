"""Groups that are born under one policy, stored, and trained again under another, by the trainer's own steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from fakes import TinyPolicy, actor_group
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from recorded import OFF_POLICY, maker, mixed_rewards, recorded_samples, response

from openrlhf_ext.adapters.batch_composer import Batch, BatchComposer
from openrlhf_ext.adapters.replayed_rows import copy_sample, mark_rows, store_group, weigh_rows
from openrlhf_ext.config import ExtConfig, FillConfig, GroupsConfig, ReplayConfig
from openrlhf_ext.group_buffer import StoredGroup
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.run_dir import RunDirectory
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
    """Rows of a train step, as the composer makes them."""
    composer = SimpleNamespace(_maker=maker_of(args, policy), _log_probs=log_probs)
    return BatchComposer._make_rows(composer, fresh, stored)


def weigh(rows: list[Experience], stored: list[StoredGroup], config: FillConfig, *, correct_engine: bool = False):
    """Mark all rows, and weigh the last ones as those of ``stored``, filled in at age 1; the metrics."""
    payloads = [rollout.payload for group in stored for rollout in group.rollouts]
    fresh, replayed = rows[: len(rows) - len(payloads)], rows[len(rows) - len(payloads) :]
    mark_rows(fresh, "fresh")
    mark_rows(replayed, "replay")
    return weigh_rows(
        replayed,
        payloads,
        [1] * len(payloads),
        objective=config.objective,
        weight_cap=config.weight_cap,
        correct_engine=correct_engine,
    )


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


# -- several steps of the composer --

PATTERNS = {"M": (1.0, 0.0, 0.0, 0.0), "R": (1.0,) * 4, "W": (0.0,) * 4}
"""Rewards of a group of 4: mixed, all right, all wrong. Mixed advantages are 0.75 / 0.5 = 1.5 and -0.25 / 0.5."""

SMALL = tuple("--rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 2".split())
SMALL += tuple("--train.batch_size 16 --train.micro_batch_size 2 --algo.kl.init_coef 0".split())
"""Flags of 4 groups of 4, micro-batches of 2, one optimizer step; one advantage for all tokens of a rollout."""


class ComposedRun:
    """Train steps of a composer on recorded rollouts. At version v the policy is ``TinyPolicy(policies[v])``.

    Each step composes, stores, and closes the ledger, which has to balance.
    """

    def __init__(self, args, folder: Path, *, policies: Sequence[int] = range(100), log_probs: bool = True, **parts):
        self.ext = ExtConfig(run_dir=str(folder), **parts)
        self.maker = maker(args, ours=True, groups=self.ext.groups)
        self.ledger, self.run_dir = RolloutLedger(), RunDirectory(str(folder))
        self.composer = BatchComposer(args, self.ext, self.maker, self.ledger, self.run_dir, log_probs=log_probs)
        self.version = 0
        self.metrics: dict[str, float] = {}
        self._policies, self._log_probs = policies, log_probs
        self._use_policy()

    def _use_policy(self) -> None:
        self.maker.actor_model_group = actor_group(TinyPolicy(self._policies[self.version]))

    def groups(
        self, patterns: str, prompts: str = "abcdefgh", feedback: Sequence[int] = ()
    ) -> list[RolloutGroup[Experience]]:
        """A group for each letter of ``patterns``, born now, of prompts of one letter."""
        samples = recorded_samples([PATTERNS[one] for one in patterns], seed=1000 + self.version, feedback=feedback)
        for sample in samples if not self._log_probs else []:
            sample.rollout_log_probs = None
        born = [
            group_of(samples[4 * i : 4 * i + 4], f"{self.version}-{i}", self.version) for i in range(len(patterns))
        ]
        named = zip(born, prompts, strict=False)
        return [replace(group, prompt=Prompt(prompt, "2 3 = 5", "5")) for group, prompt in named]

    def step(self, groups: Sequence[RolloutGroup[Experience]]) -> Batch:
        """One train step; the policy moves after it."""
        self.ledger.generated(sum(len(group.rollouts) for group in groups), tokens=0)
        batch = self.composer.compose(groups, version=self.version, step=self.version + 1)
        self.version += 1
        self.metrics = batch.metrics | self.composer.store(batch, version=self.version) | self.ledger.close_step()
        self._use_policy()
        return batch

    def steps(self, *patterns: str) -> list[Batch]:
        return [self.step(self.groups(one)) for one in patterns]


def rows_of_three_origins(args, folder: Path) -> list[Experience]:
    """8 fresh rows, 8 of groups that fill slots, 4 drawn by themselves; only old ones have an extra log."""
    run = ComposedRun(
        args, folder, groups=GroupsConfig(), fill=FillConfig(capacity=8), replay=ReplayConfig(warmup_steps=0)
    )
    first = run.groups("MMMM")
    for rollout in first[0].rollouts:
        rollout.payload.info["format"] = torch.tensor([1.0])
    run.step(first)
    return run.step(run.groups("MMWR")).rows
