"""What one step adds to the rollout buffer, as a few long arrays.

A rollout costs 9 bytes a token (5 where the policy did not sample it) and some 50 bytes beside them. Only ``weights``
and ``uses`` ever change, so that a checkpoint can write a segment once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np

from openrlhf_ext.checkpoint.group_codec import prompts_from_state, prompts_to_state
from openrlhf_ext.checkpoint.state_tree import Immutable
from openrlhf_ext.stored_row import StoredRow
from openrlhf_ext.types import P, Prompt, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class ScoredGroup(Generic[P]):
    """A group, or some rollouts of one, with what was computed from the whole of it."""

    group: RolloutGroup[P]
    advantages: Sequence[float]
    """Of each rollout, one for all of its tokens."""
    sigma: float
    """Unbiased standard deviation of the group's rewards."""

    @classmethod
    def of(cls, group: RolloutGroup[P], advantages: Sequence[float]) -> ScoredGroup[P]:
        """Raises ValueError unless there is a finite advantage for each rollout."""
        if len(advantages) != len(group.rollouts) or not all(map(math.isfinite, advantages)):
            raise ValueError(
                f"group {group.group_id} of {len(group.rollouts)} rollouts has advantages {list(advantages)}; replay "
                "needs a finite one for each"
            )
        rewards = group.rewards()
        mean = sum(rewards) / len(rewards)
        variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
        return cls(group, advantages, math.sqrt(variance))

    def subset(self, chosen: Sequence[int]) -> ScoredGroup[P]:
        rollouts = tuple(self.group.rollouts[i] for i in chosen)
        return ScoredGroup(replace(self.group, rollouts=rollouts), [self.advantages[i] for i in chosen], self.sigma)


@dataclass(frozen=True, slots=True)
class DrawnRollout:
    """A stored rollout that is trained again. Its arrays are the buffer's own: read, never written."""

    group_id: str
    prompt: Prompt
    policy_version: int
    """Completed train steps when its tokens were generated."""
    rollout: Rollout[StoredRow]
    advantage: float
    """As it was when the rollout was fresh."""
    sigma: float
    weight: float
    """Factor of the advantage that corrects for the draw's priorities (PER); 1 where that is off."""


_FIXED = (
    *("max_age", "first_row", "group_ids", "births", "sigmas", "group", "advantages", "rewards", "accuracies"),
    *("num_tokens", "truncated", "info", "images", "image", "first_token", "first_action", "tokens", "masks"),
    *("log_probs", "gaps"),
)
"""Fields of a segment that never change, beside its prompts."""


class Segment:
    """Some rollouts, whole groups in order, in units of what is drawn and evicted.

    Args:
        scored: their groups.
        weights: what a unit's chance of being drawn is proportional to; kept, and set to 0 when the unit goes.
        by_group: a unit is a group; otherwise a rollout.
        max_age: train steps after which a unit is too old. None: never.
    """

    def __init__(
        self, scored: Sequence[ScoredGroup[StoredRow]], weights: np.ndarray, *, by_group: bool, max_age: int | None
    ) -> None:
        groups = [one.group for one in scored]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rows = [rollout.payload for rollout in rollouts]
        sizes = np.array([len(group.rollouts) for group in groups])
        self.weights, self.max_age = weights, max_age
        self.uses = np.zeros(len(weights), np.int32)
        self.first_row = _offsets(sizes if by_group else np.ones(len(rows), int))
        # of groups
        self.group_ids = np.array([group.group_id.encode() for group in groups])
        self.prompts = [group.prompt for group in groups]
        self.births = np.array([group.policy_version for group in groups], np.int32)
        self.sigmas = np.array([one.sigma for one in scored], np.float32)
        # of rollouts
        self.group = _compact(np.repeat(np.arange(len(groups)), sizes))
        self.advantages = np.array([a for one in scored for a in one.advantages], np.float32)
        self.rewards = np.array([rollout.reward for rollout in rollouts], np.float32)
        self.accuracies = np.array([rollout.accuracy for rollout in rollouts], np.float32)
        self.num_tokens = np.array([rollout.num_tokens for rollout in rollouts], np.int32)
        self.truncated = np.array([row.truncated for row in rows])
        # Not every row has every number: nan says that it is not there.
        names = dict.fromkeys(name for row in rows for name in row.info)
        self.info = {name: np.array([row.info.get(name, np.nan) for row in rows], np.float32) for name in names}
        images = {id(row.multimodal): row.multimodal for row in rows if row.multimodal is not None}
        index = {key: i for i, key in enumerate(images)}
        self.images = list(images.values())
        self.image = np.array([index.get(id(row.multimodal), -1) for row in rows], np.int32) if images else None
        # of tokens; a row's mask is one entry shorter than its tokens
        self.first_token = _offsets([len(row.tokens) for row in rows])
        self.first_action = _offsets([len(row.behavior_log_probs) for row in rows])
        self.tokens = np.concatenate([row.tokens for row in rows])
        self.masks = np.concatenate([row.action_mask for row in rows])
        self.log_probs = np.concatenate([row.behavior_log_probs for row in rows])
        gaps = [row.engine_gap for row in rows if row.engine_gap is not None]
        self.gaps = np.concatenate(gaps) if len(gaps) == len(rows) else None
        self._fixed: Immutable | None = None
        self._count_bytes()

    def _count_bytes(self) -> None:
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        self.num_bytes = sum(array.nbytes for array in (*arrays, *self.info.values())) + 8 * len(self.prompts)
        tokens = (self.tokens, self.masks, self.log_probs, self.gaps)
        self.bookkeeping_bytes = self.num_bytes - sum(array.nbytes for array in tokens if array is not None)
        self.num_bytes += sum(tensor.nbytes for image in self.images for tensor in image.values())

    def state_dict(self) -> dict[str, object]:
        """What never changes, as the same `Immutable` each time, and copies of the rest."""
        if self._fixed is None:
            fixed = {name: getattr(self, name) for name in _FIXED}
            self._fixed = Immutable({**fixed, "prompts": prompts_to_state(self.prompts)})
        return {"fixed": self._fixed, "weights": self.weights.copy(), "uses": self.uses.copy()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Segment:
        """The segment that was saved. It takes over the state's arrays."""
        segment = cls.__new__(cls)
        segment.weights, segment.uses, segment._fixed = state["weights"], state["uses"], state["fixed"]
        fixed = state["fixed"].tree
        for name in _FIXED:
            setattr(segment, name, fixed[name])
        segment.prompts = prompts_from_state(fixed["prompts"])
        segment._count_bytes()
        return segment

    @property
    def sizes(self) -> np.ndarray:
        """Rollouts of each unit, 0 for those that have gone."""
        return np.diff(self.first_row.astype(np.int64)) * (self.weights > 0)

    @property
    def unit_births(self) -> np.ndarray:
        """Policy version of each unit."""
        return self.births[self.group[self.first_row[:-1]]]

    def unit_in_groups(self, group_ids: np.ndarray) -> np.ndarray:
        """Which units belong to groups of these encoded ids."""
        return np.isin(self.group_ids, group_ids)[self.group[self.first_row[:-1]]]

    def take(self, units: np.ndarray, corrections: np.ndarray) -> list[DrawnRollout]:
        """The rollouts of some units, each with the correction weight of its unit; a use of the unit is counted."""
        self.uses[units] += 1
        starts, ends = (self.first_row[at].astype(int) for at in (units, units + 1))
        sizes = ends - starts
        rows = np.arange(sizes.sum()) + np.repeat(ends - np.cumsum(sizes), sizes)
        columns = (self.group, self.rewards, self.accuracies, self.num_tokens, self.advantages)
        values = [column[rows].tolist() for column in columns]
        return [
            DrawnRollout(
                group_id=self.group_ids[group].decode(),
                prompt=self.prompts[group],
                policy_version=int(self.births[group]),
                rollout=Rollout(reward, accuracy, num_tokens, payload),
                advantage=advantage,
                sigma=float(self.sigmas[group]),
                weight=weight,
            )
            for payload, weight, group, reward, accuracy, num_tokens, advantage in zip(
                self._rows(rows), np.repeat(corrections, sizes).tolist(), *values, strict=True
            )
        ]

    def _rows(self, rows: np.ndarray) -> Iterator[StoredRow]:
        info = [column[rows].tolist() for column in self.info.values()]
        images = [-1] * len(rows) if self.image is None else self.image[rows].tolist()
        bounds = [offsets[at].tolist() for offsets in (self.first_token, self.first_action) for at in (rows, rows + 1)]
        for i, (row, start, end, first, last) in enumerate(zip(rows.tolist(), *bounds, strict=True)):
            numbers = zip(self.info, (column[i] for column in info), strict=True)
            yield StoredRow(
                tokens=self.tokens[start:end],
                action_mask=self.masks[start - row : end - row - 1],
                behavior_log_probs=self.log_probs[first:last],
                engine_gap=None if self.gaps is None else self.gaps[first:last],
                truncated=bool(self.truncated[row]),
                info={name: number for name, number in numbers if number == number},
                multimodal=None if images[i] < 0 else self.images[images[i]],
            )


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """(N + 1,) where each of N consecutive parts starts, and where the last one ends."""
    return _compact(np.concatenate([[0], np.cumsum(lengths)]))


def _compact(values: np.ndarray) -> np.ndarray:
    """In the smallest unsigned type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
