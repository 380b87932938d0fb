"""Stored groups with advantages, for tests of the rollout buffer and of replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from stored_groups import stored_group

from openrlhf_ext.rollout_segment import DrawnRollout, ScoredGroup

ONE_OF_8 = [1.0] + [0.0] * 7
FOUR_OF_8 = [1.0] * 4 + [0.0] * 4


def scored(
    group_id: str, version: int = 0, rewards: Sequence[float] = (0, 1), advantages: Sequence[float] | None = None
) -> ScoredGroup:
    """A stored group of prompt and id ``group_id``; advantages as GRPO's: (R - mean) / (unbiased std + 1e-6)."""
    if advantages is None:
        values = np.array(rewards, float)
        advantages = ((values - values.mean()) / (values.std(ddof=1) + 1e-6)).tolist()
    return ScoredGroup.of(stored_group(group_id, version, rewards, group_id), advantages)


def ids(drawn: Sequence[DrawnRollout]) -> list[str]:
    """Group ids of some drawn rollouts, sorted."""
    return sorted(rollout.group_id for rollout in drawn)
