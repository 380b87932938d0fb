"""Group filling (POPO, arXiv 2606.01281): zero-variance slots of a batch are trained on stored groups instead.

One train step at policy version t:

1. B prompts are generated, k rollouts each; nothing is ever generated again.
2. The groups whose rewards differ stay. Each other slot takes the newest stored group that is eligible: those of the
   last step first. A prompt without any group (its request failed) leaves a slot, too.
3. What the buffer cannot fill stays in the batch with zero advantage, or is dropped.
4. After the update the fresh informative groups are stored. Replayed ones are not stored again.

So the batch has B groups and the optimizer takes as many steps as GRPO's. How a replayed group enters the loss is in
``off_policy.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from openrlhf_ext.config import FillConfig, GroupsConfig
from openrlhf_ext.group_buffer import GroupBuffer, StoredGroup
from openrlhf_ext.groups import is_effective
from openrlhf_ext.types import P, RolloutGroup

Divergence = Callable[[Sequence[StoredGroup]], Sequence[float]]
"""KL(behavior || current policy) of stored groups, estimated on their own tokens."""


def choose_groups(
    versions: Sequence[int],
    num_slots: int,
    *,
    version: int,
    min_age: int = 1,
    divergence: Sequence[float] | None = None,
) -> list[int]:
    """Which stored groups fill ``num_slots`` slots.

    Args:
        versions: policy version at birth of every stored group, in order of storage, oldest first.
        num_slots: slots to fill.
        version: policy version now.
        min_age: train steps that a group must have been stored for; above 1 this is POPO-stale.
        divergence: a number for each stored group; the smallest are taken (POPO-KL). None: the newest are taken.

    Returns:
        Indices into ``versions``, at most ``num_slots``, best first. Groups of one step are equally new and go by
        order of storage, which is the random order of their prompts; equal divergences go newest first.
    """
    newest_first = [i for i in reversed(range(len(versions))) if version - versions[i] >= min_age]
    if divergence is not None:
        newest_first.sort(key=lambda i: divergence[i])
    return newest_first[:num_slots]


@dataclass(slots=True)
class FilledStep(Generic[P]):
    """The groups of one train step. ``fresh`` and ``replayed`` are trained."""

    fresh: list[RolloutGroup[P]]
    replayed: list[StoredGroup] = field(default_factory=list)
    replaced: list[RolloutGroup[P]] = field(default_factory=list)
    """Zero-variance groups whose slot was given to a stored group."""
    dropped: list[RolloutGroup[P]] = field(default_factory=list)
    """Zero-variance groups that nothing could replace and that are not kept."""


class GroupFilling(Generic[P]):
    """Steps 2 to 4 above, over a group buffer.

    Args:
        num_groups: groups in a full batch.
        divergence: estimates what ``choose: kl`` sorts by; called at most once a step.
    """

    def __init__(
        self, config: FillConfig, groups: GroupsConfig, buffer: GroupBuffer, *, num_groups: int, divergence: Divergence
    ) -> None:
        self._config, self._groups, self.buffer = config, groups, buffer
        self._num_groups = num_groups
        self._divergence = divergence

    def fill(self, groups: Sequence[RolloutGroup[P]], version: int, *, share: float = 1.0) -> FilledStep[P]:
        """Give every slot without an informative group a stored one, as far as the buffer reaches.

        Args:
            share: of the slots that may be filled, how many are; the throttle's.
        """
        effective = [group for group in groups if self._is_effective(group)]
        others = [group for group in groups if not self._is_effective(group)]
        self.buffer.evict_stale(version)
        stored = self.buffer.groups
        versions = [group.policy_version for group in stored]
        num_slots = min(self._num_groups - len(effective), math.floor(self._config.max_frac * self._num_groups + 1e-9))
        num_slots = round(share * num_slots)
        # With room for all of them there is nothing to choose, and no forward pass to pay for.
        num_eligible = sum(version - born >= self._config.min_age for born in versions)
        by_divergence = self._config.choose == "kl" and num_eligible > num_slots > 0
        chosen = choose_groups(
            versions,
            num_slots,
            version=version,
            min_age=self._config.min_age,
            divergence=self._divergence(stored) if by_divergence else None,
        )
        step: FilledStep[P] = FilledStep(fresh=effective)
        step.replayed = [self.buffer.use(stored[i]) for i in chosen]
        step.replaced, unfilled = others[: len(chosen)], others[len(chosen) :]
        if self._groups.ineffective == "keep":
            step.fresh += unfilled
        else:
            step.dropped = unfilled
        return step

    def store(self, copies: Sequence[StoredGroup]) -> None:
        """Push the copies of this step's stored groups, in the order of their requests.

        Trained groups first would make the others the newest, and so the first choice, with ``store: all``.
        """
        self.buffer.push(sorted(copies, key=lambda group: group.group_id))

    def is_stored(self, group: RolloutGroup[P]) -> bool:
        """Whether a fresh group, trained or not, goes into the buffer after the update."""
        return self._config.store == "all" or self._is_effective(group)

    def _is_effective(self, group: RolloutGroup[P]) -> bool:
        return is_effective(group, metric=self._groups.metric, tolerance=self._groups.tolerance)
