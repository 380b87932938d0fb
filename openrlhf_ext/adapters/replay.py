"""From OpenRLHF's ``Experience`` to the stored rows of a replay buffer and back, and how replayed rows are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_ext.config import FillConfig
from openrlhf_ext.group_buffer import StoredGroup
from openrlhf_ext.off_policy import behavior_kl, clip_center_and_weight, kl_by_age, weight_metrics
from openrlhf_ext.stored_row import StoredRow, copy_multimodal
from openrlhf_ext.types import Rollout, RolloutGroup

REPLAYED = "replayed_row_frac"
"""Key in ``Experience.info``: 1 for a replayed row, 0 for a fresh one. Its mean over rows is what the name says."""


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


def restore_samples(group: StoredGroup, *, log_probs: bool) -> list[Experience]:
    """Samples as the engines return them, so that log-probabilities, values and advantages are computed anew.

    The reward is the verifier's: a length penalty is added by OpenRLHF to each new sample, once.

    Args:
        log_probs: fill ``rollout_log_probs``, which all rows of a batch must have or none.
    """
    return [_sample(group, rollout, log_probs) for rollout in group.rollouts]


def _sample(group: StoredGroup, rollout: Rollout[StoredRow], log_probs: bool) -> Experience:
    row = rollout.payload
    tokens = torch.from_numpy(row.tokens).long()
    actions = row.action_mask.nonzero()[0]
    return Experience(
        sequences=tokens[None],
        attention_mask=torch.ones_like(tokens)[None],
        action_mask=torch.from_numpy(row.action_mask).long()[None],
        rollout_log_probs=row.on_actions(row.behavior_log_probs)[None] if log_probs else None,
        prompts=[group.prompt.text],
        labels=[group.prompt.label],
        images=[group.prompt.images],
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
    stored: Sequence[StoredRow | None],
    ages: Sequence[int],
    config: FillConfig,
    *,
    correct_engine: bool,
) -> dict[str, float]:
    """Turn rows with proximal log-probabilities and plain advantages into what the off-policy objective trains.

    A fresh row's behavior policy is its proximal one, which makes its weight exactly 1. Fields are replaced, never
    written into.

    Args:
        rows: single rows; ``advantages`` and ``action_log_probs`` are replaced, and ``info`` gets `REPLAYED`.
        stored: the stored row that a row was restored from, None for fresh ones.
        ages: train steps since each row was sampled.
        correct_engine: give replayed rows the engine mismatch of their birth, for OpenRLHF's own correction.

    Returns:
        Metrics by origin, ``replay/...`` and ``fresh/...``.
    """
    weights: dict[str, list[torch.Tensor]] = {"fresh": [], "replay": []}
    kls: list[tuple[int, torch.Tensor]] = []
    for row, source, age in zip(rows, stored, ages, strict=True):
        mask = row.action_mask.bool()
        proximal = row.action_log_probs
        behavior = proximal if source is None else torch.where(mask, source.on_actions(source.behavior_log_probs), 0.0)
        center, weight = clip_center_and_weight(
            proximal.float(), behavior.float(), objective=config.objective, weight_cap=config.weight_cap
        )
        row.advantages = row.advantages * torch.where(mask, weight, 1.0)
        row.info[REPLAYED] = torch.tensor(float(source is not None))
        weights["fresh" if source is None else "replay"].append(weight[mask])
        if source is not None:
            row.action_log_probs = torch.where(mask, center, proximal)
            kls.append((age, behavior_kl(proximal[mask], behavior[mask])))
            if correct_engine and source.engine_gap is not None:
                row.rollout_log_probs = torch.where(mask, center - source.on_actions(source.engine_gap), 0.0)
    metrics = {
        f"{origin}/{name}": value
        for origin, parts in weights.items()
        if parts
        for name, value in weight_metrics(torch.cat(parts), weight_cap=config.weight_cap).items()
    }
    return metrics | {f"replay/{name}": value for name, value in kl_by_age(kls).items()}
