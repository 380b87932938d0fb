"""OpenRLHF's experience maker for any number of rows.

Upstream's forward passes, advantages and returns are used as they are. What changes: rows are spread so that every
rank gets the same number of forward calls, and groups without reward spread get an advantage of exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

from openrlhf_ext.batching import PAD, Plan, check_plan, plan_batches
from openrlhf_ext.config import GroupsConfig
from openrlhf_ext.groups import effective_mask
from openrlhf_ext.rollout_segment import DrawnRollout


class ExperienceMaker(RemoteExperienceMaker):
    """Makes experiences for whole groups in order; see ``make_rows``."""

    def __init__(self, *args, groups: GroupsConfig | None, num_ranks: int, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._groups = groups
        self._num_ranks = num_ranks

    def make_rows(self, samples: list[Experience]) -> list[Experience]:
        """Samples of whole groups, in order, to single-row experiences with advantages, in the same order."""
        return _single_rows(self.make_experience_batch(samples))

    @torch.no_grad()
    def make_frozen_rows(self, samples: list[Experience], drawn: Sequence[DrawnRollout]) -> list[Experience]:
        """Single rows whose advantages were computed long ago, with log-probabilities under the current policy.

        Upstream's advantages need whole groups, so these rows go past them; their rewards are logged with the length
        penalties that the advantages have in them.
        """
        batches = self.make_experience(self.split_rollout_samples(samples))
        apply_length_penalties(batches, self.args)
        for batch in batches:
            own = [drawn[i] for i in batch.index]
            frozen = torch.tensor([one.advantage * one.weight for one in own])
            batch.advantages = frozen[:, None] * batch.action_mask
            batch.returns = batch.advantages.clone()
            batch.info |= {"return": frozen, "group_reward_std": torch.tensor([one.sigma for one in own])}
            batch.kl = None
        return _single_rows(batches)

    @torch.no_grad()
    def log_probs(self, samples: list[Experience]) -> list[torch.Tensor]:
        """Log-probabilities (T - 1,) of each sample under the current policy: one forward pass and nothing else."""
        chunks = self.split_rollout_samples(samples)
        kwargs = {name: [getattr(c, name) for c in chunks] for name in ("sequences", "action_mask", "attention_mask")}
        if any(c.mm_train_inputs for c in chunks):
            kwargs["mm_train_inputs_list"] = [c.mm_train_inputs for c in chunks]
        refs = self._dispatch_forward(self.actor_model_group, self.args.train.colocate_all, **kwargs)
        results = self._flatten_results(refs, self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size)
        found: list[torch.Tensor | None] = [None] * len(samples)
        for chunk, batch, padding in zip(chunks, results, self._is_padding, strict=True):
            for i, row in zip(chunk.index, [] if padding else batch, strict=not padding):
                found[i] = row[: int(samples[i].total_length.item()) - 1]
        return found  # type: ignore[return-value]

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Micro-batches for the forward passes: equally many for each rank, rank by rank.

        Where a rank has too few rows, a repeated row (dropped again in ``make_experience``) fills in.
        """
        for i, sample in enumerate(rollout_samples):
            sample.index = [i]
        plan = plan_batches(
            [int(sample.total_length.item()) for sample in rollout_samples],
            num_ranks=self._num_ranks,
            rows_per_window=len(rollout_samples),
            micro_batch_size=self.args.rollout.micro_batch_size,
            max_tokens=self.args.rollout.max_tokens_per_gpu if self.args.train.dynamic_batch_enable else None,
        )
        chunks = [chunk for rank in plan for window in rank for chunk in window]
        self._is_padding = [chunk == [PAD] for chunk in chunks]
        return [
            Experience.concat_experiences(
                [rollout_samples[0 if i == PAD else i] for i in chunk], self.tokenizer.pad_token_id
            )
            for chunk in chunks
        ]

    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        experiences = super().make_experience(samples_list)
        return [e for e, padding in zip(experiences, self._is_padding, strict=True) if not padding]

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Upstream's, then exactly zero for groups whose raw rewards do not differ.

        Upstream divides by ``std + 1e-9``, which turns rounding noise of equal rewards into advantages near one. The
        test reads the rewards before length penalties are added to them. A KL penalty in the reward goes with it
        (``--algo.kl.use_loss`` keeps it in the loss).
        """
        group_size = self.args.rollout.n_samples_per_prompt
        effective = None
        if self._groups is not None and group_size > 1 and self.advantage_estimator != "gae":
            by_index = sorted(
                (i, reward) for e in experiences for i, reward in zip(e.index, e.rewards.tolist(), strict=True)
            )
            rewards = np.array([reward for _, reward in by_index]).reshape(-1, group_size)
            effective = np.repeat(effective_mask(rewards.tolist(), self._groups.tolerance), group_size)
        experiences = super().compute_advantages_and_returns(experiences)
        if effective is not None:
            for experience in experiences:
                keep = torch.from_numpy(effective[experience.index])
                experience.advantages = torch.where(keep[:, None], experience.advantages, 0.0)
        return experiences


def _single_rows(batches: Sequence[Experience]) -> list[Experience]:
    """The rows of some batches, without padding, in the order of their indices."""
    rows: dict[int, Experience] = {}
    for batch in batches:
        index = batch.index  # splitting drops it
        rows |= zip(index, remove_padding_in_sequences(split_experience_batch(batch)), strict=True)
    return [rows[i] for i in range(len(rows))]


def plan_training(rows: list[Experience], args, *, num_ranks: int, rng: np.random.Generator) -> Plan:
    """The optimizer steps of one train step over ``rows``; checked to train each row exactly once per epoch."""
    plan = plan_batches(
        [int(row.total_length.item()) for row in rows],
        num_ranks=num_ranks,
        rows_per_window=args.train.batch_size,
        # Replay makes the optimizer's batches larger, not more.
        max_windows=args.rollout.batch_size * args.rollout.n_samples_per_prompt // args.train.batch_size,
        micro_batch_size=args.train.micro_batch_size,
        max_tokens=args.train.max_tokens_per_gpu if args.train.dynamic_batch_enable else None,
        rng=rng,
    )
    check_plan(plan, len(rows))
    return plan


def rank_windows(plan: Plan, rank: int, rows: list[Experience]) -> list[list[Experience]]:
    """The micro-batches that one rank trains, window by window. Padding rows get a zero action mask."""
    return [[_collate(batch, rows) for batch in window] for window in plan[rank]]


def _collate(batch: list[int], rows: list[Experience]) -> Experience:
    if batch == [PAD]:
        items = [replace(rows[0], action_mask=torch.zeros_like(rows[0].action_mask))]
    else:
        items = [rows[i] for i in batch]
    experience = make_experience_batch(items)
    # One tensor a metric, as training_step makes of it: pickling a thousand single numbers takes a tenth of a second.
    for key, values in experience.info.items():
        if isinstance(values, list):
            experience.info[key] = torch.stack(values).float().flatten()
    return experience
