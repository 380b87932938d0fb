"""From OpenRLHF's ``Experience`` to the stored rows of a replay buffer and back, and how replayed rows are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_ext.config import Objective
from openrlhf_ext.group_buffer import StoredGroup
from openrlhf_ext.off_policy import ReplayMeter, behavior_kl, clip_center_and_weight
from openrlhf_ext.stored_row import StoredRow, copy_multimodal
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

ORIGINS = ("fresh", "replay", "rollout_replay")
"""A row is fresh, of a group that fills a slot (POPO), or drawn by itself (APER)."""

ORIGIN = "origin"
"""Key in ``Experience.info``: the row's origin, as its place in `ORIGINS`. All rows of a batch have it, or none."""


def store_group(group: RolloutGroup[Experience], rows: Sequence[Experience], *, engine_gap: bool) -> StoredGroup:
    """A copy of a fresh group as the buffers keep it.

    Args:
        rows: the group's rows with the log-probabilities of this step's proximal policy, which sampled them.
        engine_gap: keep the rollout engine's log-probabilities too, for mismatch correction.
    """
    images = copy_multimodal([row.mm_train_inputs[0] if row.mm_train_inputs else None for row in rows])
    stored = []
    for rollout, row, multimodal in zip(group.rollouts, rows, images, strict=True):
        payload = StoredRow.copy_of(
            row.sequences,
            row.action_mask,
            row.action_log_probs,
            engine_log_probs=row.rollout_log_probs if engine_gap else None,
            truncated=bool(row.truncated),
            # From the engine's response: what was added for training since then will be added again.
            info={key: float(value) for key, value in rollout.payload.info.items()},
            multimodal=multimodal,
        )
        stored.append(Rollout(rollout.reward, rollout.accuracy, rollout.num_tokens, payload))
    return RolloutGroup(group.group_id, group.prompt, tuple(stored), group.policy_version)


def store_sampled(groups: Sequence[RolloutGroup[Experience]]) -> list[StoredGroup]:
    """Copies of groups as the engines returned them, before any forward pass, for a checkpoint."""
    stored = []
    for group in groups:
        rows = [rollout.payload for rollout in group.rollouts]
        images = copy_multimodal([row.mm_train_inputs[0] if row.mm_train_inputs else None for row in rows])
        payloads = []
        for row, multimodal in zip(rows, images, strict=True):
            log_probs = row.rollout_log_probs
            payloads.append(
                StoredRow.copy_of(
                    row.sequences[0],
                    row.action_mask[0],
                    torch.zeros(row.action_mask.shape[1]) if log_probs is None else log_probs[0],
                    engine_log_probs=None,
                    truncated=bool(row.truncated),
                    info={key: float(value) for key, value in row.info.items()},
                    multimodal=multimodal,
                )
            )
        rollouts = [replace(old, payload=new) for old, new in zip(group.rollouts, payloads, strict=True)]
        stored.append(replace(group, rollouts=tuple(rollouts)))
    return stored


def restore_sampled(groups: Sequence[StoredGroup], *, log_probs: bool) -> list[RolloutGroup[Experience]]:
    """The groups of `store_sampled`."""
    return [
        replace(
            group,
            rollouts=tuple(
                replace(rollout, payload=restore_sample(group.prompt, rollout, log_probs=log_probs))
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


def restore_samples(group: StoredGroup, *, log_probs: bool) -> list[Experience]:
    """Samples as the engines return them, so that log-probabilities, values and advantages are computed anew.

    The reward is the verifier's: a length penalty is added by OpenRLHF to each new sample, once.

    Args:
        log_probs: fill ``rollout_log_probs``, which all rows of a batch must have or none.
    """
    return [restore_sample(group.prompt, rollout, log_probs=log_probs) for rollout in group.rollouts]


def restore_sample(prompt: Prompt, rollout: Rollout[StoredRow], *, log_probs: bool) -> Experience:
    """`restore_samples` of a single rollout."""
    row = rollout.payload
    tokens = torch.from_numpy(row.tokens).long()
    actions = row.action_mask.nonzero()[0]
    return Experience(
        sequences=tokens[None],
        attention_mask=torch.ones_like(tokens)[None],
        action_mask=torch.from_numpy(row.action_mask).long()[None],
        rollout_log_probs=row.on_actions(row.behavior_log_probs)[None] if log_probs else None,
        prompts=[prompt.text],
        labels=[prompt.label],
        images=[prompt.images],
        mm_train_inputs=[None if row.multimodal is None else dict(row.multimodal)],
        rewards=torch.tensor([rollout.reward]),
        scores=torch.tensor([rollout.accuracy]),
        response_length=torch.tensor([int(actions[-1] - actions[0]) + 1]),
        truncated=torch.tensor([row.truncated]),
        total_length=torch.tensor([float(len(tokens))]),
        info={key: torch.tensor([value]) for key, value in row.info.items()},
    )


def copy_sample(rollout: Rollout[Experience]) -> Experience:
    """A fresh sample whose fields OpenRLHF may overwrite."""
    return replace(rollout.payload, info=dict(rollout.payload.info))


def weigh_rows(
    rows: Sequence[Experience],
    stored: Sequence[StoredRow],
    ages: Sequence[int],
    *,
    objective: Objective,
    weight_cap: float,
    correct_engine: bool,
) -> dict[str, float]:
    """Turn replayed rows with plain advantages into what the off-policy objective trains.

    Fresh rows need nothing: their behavior policy is the proximal one, and their weight 1. Tensors are replaced, never
    written into.

    Args:
        rows: single rows; ``advantages``, and where the objective says so ``action_log_probs``, are replaced.
        stored: what each row was restored from.
        ages: train steps since each row was sampled.
        objective, weight_cap: see `off_policy.clip_center_and_weight`.
        correct_engine: give the rows the engine mismatch of their birth, for OpenRLHF's own correction.

    Returns:
        The metrics of `off_policy.ReplayMeter`.
    """
    meter = ReplayMeter(weight_cap=weight_cap)
    for row, source, age in zip(rows, stored, ages, strict=True):
        mask = source.action_mask  # in NumPy: PyTorch takes five times as long to index by a mask
        proximal = torch.from_numpy(row.action_log_probs.float().numpy()[mask])
        behavior = torch.from_numpy(source.behavior_log_probs)
        center, weight = clip_center_and_weight(proximal, behavior, objective=objective, weight_cap=weight_cap)
        advantages = row.advantages.clone()
        advantages.numpy()[mask] *= weight.numpy()
        row.advantages = advantages
        if objective == "behavior_clip":
            row.action_log_probs = source.on_actions(center.numpy())
        if correct_engine and source.engine_gap is not None:
            row.rollout_log_probs = source.on_actions(center.numpy() - source.engine_gap)
        meter.add(weight, behavior_kl(proximal, behavior), age=age)
    return meter.metrics()


def mark_rows(rows: Sequence[Experience], origin: str) -> None:
    """Tell the actors where rows come from."""
    for row in rows:
        row.info[ORIGIN] = torch.tensor(float(ORIGINS.index(origin)))
