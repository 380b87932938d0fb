"""Pilot verdicts, and the prompts that passed and wait for their commit (Pilot-Commit, arXiv 2605.26606).

Thresholds are compared as exact fractions of integer counts, once: 0.3 of 10 pilots is 3 correct ones, whatever
floating point says. Waiting prompts are bounded in age and number, and every one that leaves does so for a reason that
the caller counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, Literal

import numpy as np

from openrlhf_ext.config import PilotConfig
from openrlhf_ext.types import P, Rollout, RolloutGroup

Verdict = Literal["commit", "too_hard", "too_easy", "solved"]


@dataclass(frozen=True, slots=True)
class PilotBounds:
    """Numbers of correct pilots, both inclusive, between which a prompt is committed, and from which it is solved."""

    lower: int
    upper: int
    solved: int

    @classmethod
    def of(cls, config: PilotConfig, n_pilot: int) -> PilotBounds:
        lower, upper, solved = (Fraction(str(p)) * n_pilot for p in (config.p_lower, config.p_upper, config.p_solve))
        return cls(math.ceil(lower), math.floor(upper), math.ceil(solved))

    def verdict(self, num_correct: int) -> Verdict:
        if num_correct < self.lower:
            return "too_hard"
        if num_correct <= self.upper:
            return "commit"
        return "solved" if num_correct >= self.solved else "too_easy"


@dataclass(frozen=True, slots=True)
class Survivor(Generic[P]):
    """A prompt whose pilots passed."""

    index: int
    pilot: RolloutGroup[P]
    """With the rollouts that will be trained, which may be a subset or none."""
    num_correct: int
    """Of all pilots."""
    num_pilots: int


def max_variance_subset(rollouts: Sequence[Rollout[P]], size: int) -> tuple[Rollout[P], ...]:
    """``size`` rollouts, in order: half of them correct, the larger half wrong, as far as there are enough of each."""
    correct = [i for i, rollout in enumerate(rollouts) if rollout.accuracy >= 1.0]
    wrong = [i for i, rollout in enumerate(rollouts) if rollout.accuracy < 1.0]
    num_correct = min(len(correct), max(size // 2, size - len(wrong)))
    return tuple(rollouts[i] for i in sorted(correct[:num_correct] + wrong[: size - num_correct]))


class SurvivorBuffer(Generic[P]):
    """Prompts that wait for their commit, oldest first."""

    def __init__(self, order: Literal["random", "max_variance", "oldest"], seed: int) -> None:
        self._order = order
        # Three numbers, the last not zero: no stream of the prompt pool's, which are of (seed, epoch).
        self.rng = np.random.default_rng([seed, 0, 2])
        self.waiting: list[Survivor[P]] = []

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def num_rollouts(self) -> int:
        return sum(len(survivor.pilot.rollouts) for survivor in self.waiting)

    def draw(self, k: int) -> list[Survivor[P]]:
        """Remove and return ``k`` survivors, or all where there are fewer, oldest first."""
        slots = range(len(self.waiting))
        k = min(k, len(slots))
        if self._order == "random":
            chosen = set(self.rng.choice(len(slots), size=k, replace=False).tolist())
        elif self._order == "max_variance":
            chosen = set(sorted(slots, key=self._distance_from_half)[:k])
        else:
            chosen = set(slots[:k])
        return self._remove(chosen)

    def drop_older_than(self, policy_version: int) -> list[Survivor[P]]:
        """Remove and return the survivors whose pilots are of an earlier version than this."""
        waiting = enumerate(self.waiting)
        return self._remove({slot for slot, s in waiting if s.pilot.policy_version < policy_version})

    def drop_beyond(self, size: int) -> list[Survivor[P]]:
        """Remove and return the oldest survivors, so that ``size`` are left."""
        return self._remove(set(range(len(self.waiting) - size)))

    def _distance_from_half(self, slot: int) -> Fraction:
        """Of the pilot accuracy p; smallest where the variance p (1 - p) is largest."""
        survivor = self.waiting[slot]
        return abs(Fraction(survivor.num_correct, survivor.num_pilots) - Fraction(1, 2))

    def _remove(self, slots: set[int]) -> list[Survivor[P]]:
        removed = [survivor for slot, survivor in enumerate(self.waiting) if slot in slots]
        self.waiting = [survivor for slot, survivor in enumerate(self.waiting) if slot not in slots]
        return removed

    def state_dict(self, encode: Callable[[Sequence[RolloutGroup[P]]], object]) -> dict[str, object]:
        """Everything that waits, the pilots as ``encode`` makes a state of them, and the generator's state."""
        return {
            "pilots": encode([survivor.pilot for survivor in self.waiting]),
            "index": [survivor.index for survivor in self.waiting],
            "num_correct": [survivor.num_correct for survivor in self.waiting],
            "num_pilots": [survivor.num_pilots for survivor in self.waiting],
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        decode: Callable[[Any], Sequence[RolloutGroup[P]]],
        *,
        pilots_per_group: int,
    ) -> None:
        """Go on where the saved buffer was.

        Raises ValueError if a prompt waits with another number of pilots than ``pilots_per_group``: its trained group
        would have another size than the others.
        """
        columns = (state["index"], decode(state["pilots"]), state["num_correct"], state["num_pilots"])
        waiting = [Survivor(*values) for values in zip(*columns, strict=True)]
        for survivor in waiting:
            if len(survivor.pilot.rollouts) != pilots_per_group:
                raise ValueError(
                    f"in the checkpoint prompt {survivor.pilot.prompt.prompt_id} waits with "
                    f"{len(survivor.pilot.rollouts)} pilots to train, this run trains {pilots_per_group}; resume with "
                    "the same --ext.pilot.n_pilot (and n_effective, commit_only), or start in a new --ext.run_dir"
                )
        self.waiting = waiting
        self.rng.bit_generator.state = state["rng"]
