"""The group buffer of POPO (arXiv 2606.01281): recent whole groups, newest first out, oldest first evicted.

A group is stored with the policy version that generated it and comes out unchanged: its rewards, and so its
advantages, all belong to one historical policy. Reading does not consume; a group may be used again while it is among
the newest, as long as the optional limits on age and on uses allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from openrlhf_ext.checkpoint.group_codec import groups_from_state, groups_to_state
from openrlhf_ext.evictions import EvictionCounter
from openrlhf_ext.stored_row import StoredRow, num_bytes
from openrlhf_ext.types import RolloutGroup

StoredGroup = RolloutGroup[StoredRow]

Eviction = Literal["capacity", "bytes", "age", "uses", "same_key"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)


@dataclass(slots=True)
class _Entry:
    group: StoredGroup
    num_bytes: int
    num_uses: int = 0


class GroupBuffer:
    """Groups by (prompt id, policy version), oldest first.

    Args:
        capacity: most groups.
        max_bytes: most bytes of tokens, masks, log-probabilities and image tensors together.
        max_age: train steps after which a group is evicted; one of exactly this age is still used. None: no limit.
        max_uses: times a group is handed out before it is evicted. None: no limit.
    """

    def __init__(self, *, capacity: int, max_bytes: int, max_age: int | None = None, max_uses: int | None = None):
        self._capacity, self._max_bytes = capacity, max_bytes
        self._max_age, self._max_uses = max_age, max_uses
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._num_bytes = 0
        self._counter = EvictionCounter("group buffer")

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def groups(self) -> list[StoredGroup]:
        """Everything stored, oldest first."""
        return [entry.group for entry in self._entries.values()]

    def push(self, groups: Sequence[StoredGroup]) -> None:
        """Store groups, the last one as the newest, and evict the oldest beyond the limits.

        A group whose prompt already has one of the same policy version takes its place: two of them would give that
        prompt a double share of every step that they fill.
        """
        for group in groups:
            key = (group.prompt.prompt_id, group.policy_version)
            self._counter.pushed(1)
            size = num_bytes(rollout.payload for rollout in group.rollouts)
            if size > self._max_bytes:  # it would push out everything else, and then itself
                self._counter.evicted("bytes", 1)
                continue
            if key in self._entries:
                self._evict(key, "same_key")
            self._entries[key] = _Entry(group, size)
            self._num_bytes += size
        self._evict_beyond_limits()

    def _evict_beyond_limits(self) -> None:
        while len(self._entries) > self._capacity:
            self._evict(next(iter(self._entries)), "capacity")
        while self._num_bytes > self._max_bytes:
            self._evict(next(iter(self._entries)), "bytes")

    def evict_stale(self, version: int) -> None:
        """Evict what is too old or used up at policy version ``version``; to be called before every use."""
        for key, entry in list(self._entries.items()):
            if self._max_age is not None and version - entry.group.policy_version > self._max_age:
                self._evict(key, "age")
            elif self._max_uses is not None and entry.num_uses >= self._max_uses:
                self._evict(key, "uses")

    def use(self, group: StoredGroup) -> StoredGroup:
        """Count one use of a stored group."""
        self._entries[group.prompt.prompt_id, group.policy_version].num_uses += 1
        return group

    def _evict(self, key: tuple[str, int], reason: Eviction) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
        self._counter.evicted(reason, 1)

    def metrics(self, version: int) -> dict[str, float]:
        """Size, age (train steps) and uses of what is stored; evictions since the last call, by reason.

        Raises RuntimeError unless every group ever pushed is stored or was evicted for a counted reason.
        """
        evicted = self._counter.take(len(self._entries))
        ages = [version - entry.group.policy_version for entry in self._entries.values()] or [0]
        uses = [entry.num_uses for entry in self._entries.values()] or [0]
        return {
            "group_buffer/num_groups": len(self._entries),
            "group_buffer/num_bytes": self._num_bytes,
            "group_buffer/age_mean": float(np.mean(ages)),
            "group_buffer/age_max": max(ages),
            "group_buffer/uses_mean": float(np.mean(uses)),
            "group_buffer/uses_max": max(uses),
            **{f"group_buffer/num_evicted_{reason}": evicted[reason] for reason in EVICTIONS},
        }

    def state_dict(self) -> dict[str, object]:
        """Copies of everything stored, and what is counted."""
        return {
            "groups": groups_to_state(self.groups),
            "num_uses": [entry.num_uses for entry in self._entries.values()],
            "counter": self._counter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved buffer was; beyond this buffer's capacity and bytes the oldest are evicted."""
        self._entries, self._num_bytes = {}, 0
        for group, num_uses in zip(groups_from_state(state["groups"]), state["num_uses"], strict=True):
            size = num_bytes(rollout.payload for rollout in group.rollouts)
            self._entries[group.prompt.prompt_id, group.policy_version] = _Entry(group, size, num_uses)
            self._num_bytes += size
        self._counter.load_state_dict(state["counter"])
        self._evict_beyond_limits()
