"""Which groups carry gradient, and how much.

A group whose rewards are all equal has zero advantage everywhere. The test is ``max - min > tolerance``, never
``std > 0``: eight rewards of 0.1 have a float32 standard deviation of 8e-9, and divided by OpenRLHF's ``std + 1e-9``
give advantages of 0.83 out of nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from openrlhf_ext.types import P, RolloutGroup

Metric = Literal["reward", "accuracy"]

# float32 rewards of equal value differ by less than this after a round trip through float64.
DEFAULT_TOLERANCE = 1e-6


def has_spread(values: Sequence[float], tolerance: float = DEFAULT_TOLERANCE) -> bool:
    """True when the values differ by more than ``tolerance``."""
    return bool(max(values) - min(values) > tolerance)


def is_effective(group: RolloutGroup[P], *, metric: Metric, tolerance: float = DEFAULT_TOLERANCE) -> bool:
    """True when the group's rewards (or accuracies) differ, so that it carries gradient."""
    return has_spread(group.rewards() if metric == "reward" else group.accuracies(), tolerance)


def effective_mask(rewards: Sequence[Sequence[float]], tolerance: float = DEFAULT_TOLERANCE) -> list[bool]:
    """``is_effective`` for a list of reward lists."""
    return [has_spread(row, tolerance) for row in rewards]


def group_metrics(groups: Iterable[RolloutGroup[P]], *, tolerance: float, suffix: str) -> dict[str, float]:
    """Shares and variances over groups, keyed ``groups/..._<suffix>``.

    ``reward_variance`` is the population variance (ddof 0) of rewards, averaged over groups; for binary rewards
    that is the mean of p(1-p).
    """
    groups = list(groups)
    if not groups:
        return {f"groups/num_{suffix}": 0}
    rewards = [group.rewards() for group in groups]
    accuracies = [float(np.mean(group.accuracies())) for group in groups]
    return {
        f"groups/num_{suffix}": len(groups),
        f"groups/effective_frac_{suffix}": float(np.mean(effective_mask(rewards, tolerance))),
        f"groups/all_correct_frac_{suffix}": float(np.mean([a >= 1.0 for a in accuracies])),
        f"groups/all_wrong_frac_{suffix}": float(np.mean([a <= 0.0 for a in accuracies])),
        f"groups/reward_variance_mean_{suffix}": float(np.mean([np.var(row) for row in rewards])),
        f"groups/reward_mean_{suffix}": float(np.mean([np.mean(row) for row in rewards])),
        f"groups/accuracy_mean_{suffix}": float(np.mean(accuracies)),
    }
