"""Stored groups as the state of a checkpoint: long arrays, and JSON for what is of no fixed type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from openrlhf_ext.stored_row import StoredRow
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

State = Mapping[str, Any]


def groups_to_state(groups: Sequence[RolloutGroup[StoredRow]]) -> dict[str, object]:
    """Copies of some groups, as a state; see `rollouts_to_state`."""
    return {
        "group_ids": [group.group_id for group in groups],
        "prompts": prompts_to_state([group.prompt for group in groups]),
        "policy_versions": [group.policy_version for group in groups],
        "sizes": [len(group.rollouts) for group in groups],
        "rollouts": rollouts_to_state([rollout for group in groups for rollout in group.rollouts]),
    }


def groups_from_state(state: State) -> list[RolloutGroup[StoredRow]]:
    """The groups of `groups_to_state`."""
    rollouts = iter(rollouts_from_state(state["rollouts"]))
    columns = (state["group_ids"], prompts_from_state(state["prompts"]), state["sizes"], state["policy_versions"])
    return [
        RolloutGroup(group_id, prompt, tuple(next(rollouts) for _ in range(size)), version)
        for group_id, prompt, size, version in zip(*columns, strict=True)
    ]


def prompts_to_state(prompts: Sequence[Prompt]) -> dict[str, object]:
    """Prompts field by field. Labels and images must be JSON values."""
    return {field.name: [getattr(prompt, field.name) for prompt in prompts] for field in fields(Prompt)}


def prompts_from_state(state: State) -> list[Prompt]:
    """The prompts of `prompts_to_state`."""
    return [Prompt(*values) for values in zip(*(state[field.name] for field in fields(Prompt)), strict=True)]


def rollouts_to_state(rollouts: Sequence[Rollout[StoredRow]]) -> dict[str, object]:
    """Copies of N rollouts: numbers as (N,) arrays, token arrays end to end, image tensors that rows share once."""
    rows = [rollout.payload for rollout in rollouts]
    images = {id(row.multimodal): row.multimodal for row in rows if row.multimodal is not None}
    index = {key: i for i, key in enumerate(images)}
    return {
        "rewards": np.array([rollout.reward for rollout in rollouts], np.float64),
        "accuracies": np.array([rollout.accuracy for rollout in rollouts], np.float64),
        "num_tokens": np.array([rollout.num_tokens for rollout in rollouts], np.int64),
        "tokens": _join([row.tokens for row in rows]),
        "action_masks": _join([row.action_mask for row in rows]),
        "log_probs": _join([row.behavior_log_probs for row in rows]),
        "gaps": _join([row.engine_gap for row in rows]),
        "truncated": [row.truncated for row in rows],
        "info": [row.info for row in rows],
        "images": list(images.values()),
        "image": [index.get(id(row.multimodal)) for row in rows],
    }


def rollouts_from_state(state: State) -> list[Rollout[StoredRow]]:
    """The rollouts of `rollouts_to_state`, each with arrays of its own: one that leaves a buffer frees its memory."""
    images = [None if i is None else state["images"][i] for i in state["image"]]
    tokens = (_cut(state[name]) for name in ("tokens", "action_masks", "log_probs", "gaps"))
    rows = [StoredRow(*values) for values in zip(*tokens, state["truncated"], state["info"], images, strict=True)]
    numbers = (state[name].tolist() for name in ("rewards", "accuracies", "num_tokens"))
    return [Rollout(*values) for values in zip(*numbers, rows, strict=True)]


def _join(parts: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    """Arrays end to end, and the length of each; -1 where there is none."""
    present = [part for part in parts if part is not None]
    return {
        "values": np.concatenate(present) if present else np.empty(0),
        "lengths": np.array([-1 if part is None else len(part) for part in parts], np.int64),
    }


def _cut(joined: Mapping[str, np.ndarray]) -> list[np.ndarray | None]:
    ends = np.cumsum(np.maximum(joined["lengths"], 0)).tolist()
    lengths = joined["lengths"].tolist()
    return [
        None if length < 0 else joined["values"][end - length : end].copy()
        for end, length in zip(ends, lengths, strict=True)
    ]
