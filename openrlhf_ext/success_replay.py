"""Success replay (ARPO, arXiv 2505.16282), a baseline: a failed group gets a stored success of its prompt.

Each prompt has a short queue of its successes. In a train step, a group without any success trades its first rollout
for one of them, drawn at random; then the successes of the step are stored. The mixed group is trained like any other:
its advantages are computed anew, and the old success counts as on-policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np

from openrlhf_ext.checkpoint.group_codec import rollouts_from_state, rollouts_to_state
from openrlhf_ext.config import SuccessReplayConfig
from openrlhf_ext.stored_row import StoredRow, num_bytes
from openrlhf_ext.types import P, Prompt, Rollout, RolloutGroup

Restore = Callable[[Prompt, Rollout[StoredRow]], Rollout[P]]
"""Makes of a stored success what the groups of a step are made of."""


@dataclass(frozen=True, slots=True)
class _Success:
    prompt_id: str
    policy_version: int
    rollout: Rollout[StoredRow]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MixedGroups(Generic[P]):
    """The groups of a step, some of them with an old success."""

    groups: list[RolloutGroup[P]]
    births: dict[str, int]
    """Policy version of the success that was put in, by id of the group whose first rollout it replaces."""


class SuccessReplay(Generic[P]):
    """Queues of successes by prompt.

    Args:
        correct_at: a rollout is a success iff its accuracy is at least this.
        rng: draws among a prompt's successes.
    """

    def __init__(
        self, config: SuccessReplayConfig, restore: Restore, rng: np.random.Generator, *, correct_at: float = 1.0
    ) -> None:
        self._config, self._restore, self._rng, self._correct_at = config, restore, rng, correct_at
        self._stored: dict[int, _Success] = {}
        self._by_prompt: dict[str, deque[int]] = {}
        self._num_pushed = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def mix(self, groups: Sequence[RolloutGroup[P]]) -> MixedGroups[P]:
        """Replace the first rollout of each group without a success whose prompt has a stored one."""
        mixed: MixedGroups[P] = MixedGroups([], {})
        for group in groups:
            numbers = self._by_prompt.get(group.prompt.prompt_id)
            if numbers and not self._successes(group):
                success = self._stored[numbers[self._rng.integers(len(numbers))]]
                first = self._restore(group.prompt, success.rollout)
                group = replace(group, rollouts=(first, *group.rollouts[1:]))
                mixed.births[group.group_id] = success.policy_version
            mixed.groups.append(group)
        return mixed

    def store(self, groups: Sequence[RolloutGroup[StoredRow]]) -> None:
        """Store the successes among copies of the step's groups *as generated*; to be called after `mix`.

        Beyond ``capacity`` of a prompt its oldest go, beyond ``max_gib`` the oldest of all.
        """
        for group in groups:
            for rollout in self._successes(group):
                self._push(group.prompt.prompt_id, group.policy_version, rollout)
        self._drop_beyond_max_gib()

    def has_success(self, group: RolloutGroup[P]) -> bool:
        """Whether `store` takes anything of a group."""
        return bool(self._successes(group))

    def _successes(self, group: RolloutGroup) -> list[Rollout]:
        return [rollout for rollout in group.rollouts if rollout.accuracy >= self._correct_at]

    def _push(self, prompt_id: str, policy_version: int, rollout: Rollout[StoredRow]) -> None:
        success = _Success(prompt_id, policy_version, rollout, num_bytes([rollout.payload]))
        numbers = self._by_prompt.setdefault(success.prompt_id, deque())
        numbers.append(self._num_pushed)
        self._stored[self._num_pushed] = success
        self._num_pushed += 1
        self._num_bytes += success.num_bytes
        if len(numbers) > self._config.capacity:
            self._drop_oldest(success.prompt_id)

    def _drop_beyond_max_gib(self) -> None:
        while self._num_bytes > self._config.max_gib * 2**30:
            self._drop_oldest(self._stored[next(iter(self._stored))].prompt_id)

    def _drop_oldest(self, prompt_id: str) -> None:
        numbers = self._by_prompt[prompt_id]
        self._num_bytes -= self._stored.pop(numbers.popleft()).num_bytes
        if not numbers:
            del self._by_prompt[prompt_id]

    def metrics(self) -> dict[str, float]:
        """What is stored."""
        return {
            "success_replay/num_rollouts": len(self._stored),
            "success_replay/num_prompts": len(self._by_prompt),
            "success_replay/num_bytes": self._num_bytes,
        }

    def state_dict(self) -> dict[str, object]:
        """Copies of the successes, the oldest first, and the generator's state."""
        stored = self._stored.values()
        return {
            "prompt_ids": [success.prompt_id for success in stored],
            "policy_versions": [success.policy_version for success in stored],
            "rollouts": rollouts_to_state([success.rollout for success in stored]),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved queues were; beyond this one's capacity and bytes the oldest go."""
        self._stored, self._by_prompt, self._num_bytes = {}, {}, 0
        columns = (state["prompt_ids"], state["policy_versions"], rollouts_from_state(state["rollouts"]))
        for prompt_id, policy_version, rollout in zip(*columns, strict=True):
            self._push(prompt_id, policy_version, rollout)
        self._drop_beyond_max_gib()
        self._rng.bit_generator.state = state["rng"]
