"""Rollout replay (APER, arXiv 2606.04560): earlier rollouts with large advantages are trained beside the fresh batch.

The one correct answer among seven wrong ones is the most informative rollout of its step, and GRPO uses it once. Here
it comes back for some steps. One train step at policy version t:

1. Fresh groups are generated; those whose rewards do not vary are dropped. |F| informative rollouts are left.
2. Evict: what was generated more than ``max_age`` steps ago leaves the buffer, in every step.
3. Draw K = round(ratio * |F|) stored rollouts without replacement, with chances ~ (|A| + eps)^alpha. Nothing in the
   first ``warmup_steps`` steps, which only fill the buffer.
4. Update once on all of F and the draw. Replay never displaces a fresh rollout: the batch is *fresh-anchored*, and
   without a fresh informative rollout nothing is drawn. A drawn rollout keeps the advantage of its birth, and its
   ratio is taken against the policy that sampled it (``objective``; see ``off_policy.py`` for the others).
5. Insert F, with its advantages and log-probabilities as they are now. So no rollout is drawn in its own step.

`RolloutReplay.compose` does 2 and 3, `RolloutReplay.store` does 5; the update lies between them.

The naive baselines switch one axis each. *Pool* composition draws round((1 + ratio) * |F|) from fresh and stored
rollouts together: as many rollouts in the update, no guarantee for fresh ones. *Group* granularity counts and draws
whole groups instead of rollouts. Priority may be the group's reward deviation, which prefers groups of half-correct
answers, or uniform. Eviction may be by capacity only, or never.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from openrlhf_ext.config import ReplayConfig
from openrlhf_ext.rollout_buffer import RolloutBuffer, unit_weights
from openrlhf_ext.rollout_segment import DrawnRollout, ScoredGroup
from openrlhf_ext.stored_row import StoredRow
from openrlhf_ext.throttle import ReplayThrottle
from openrlhf_ext.types import P


@dataclass(frozen=True, slots=True)
class ComposedStep:
    """What one train step trains."""

    fresh: list[int]
    """Which fresh informative rollouts, by position in the groups' order. All of them unless ``composition: pool``."""
    replayed: list[DrawnRollout]
    metrics: dict[str, float]


class RolloutReplay:
    """Steps 2, 3 and 5 above, over a rollout buffer.

    Args:
        rng: makes the draws.
        throttle: scales what is drawn. None: off.
        correct_at: a rollout is correct iff its accuracy is at least this; read for rare successes only.
    """

    def __init__(
        self,
        config: ReplayConfig,
        rng: np.random.Generator,
        *,
        throttle: ReplayThrottle | None = None,
        correct_at: float = 1.0,
    ) -> None:
        self._config, self._rng, self._throttle = config, rng, throttle
        self.buffer = RolloutBuffer(config, correct_at=correct_at)
        self.num_steps = 0
        """Steps composed since the buffer was empty: what the warm-up counts. Restored together with a buffer only."""
        self._version = -1

    def compose(self, fresh: Sequence[ScoredGroup[P]], version: int, *, exclude: Collection[str] = ()) -> ComposedStep:
        """Evict, then draw; to be called in every train step, before the update, also in those without groups.

        Args:
            fresh: the step's informative groups.
            version: policy version now.
            exclude: ids of groups that the step trains already (filling may have taken them from its own buffer).

        Raises RuntimeError when called twice for one version: the step's own rollouts could be drawn.
        """
        if version <= self._version:
            raise RuntimeError(
                f"version {version} is composed after version {self._version}; this is a bug in openrlhf_ext, please "
                "report it with this line"
            )
        self._version = version
        self.buffer.evict_stale(version)
        is_warm = self.num_steps >= self._config.warmup_steps
        self.num_steps += 1
        sizes = [len(one.advantages) for one in fresh]
        trained, drawn = list(range(sum(sizes))), []
        if is_warm and fresh:
            num_units = len(fresh) if self._config.granularity == "group" else sum(sizes)
            if self._config.composition == "pool":
                trained, drawn = self._draw_pool(fresh, num_units, exclude)
            else:
                share = self._throttle.share if self._throttle else 1.0
                drawn = self.buffer.draw(round(share * self._config.ratio * num_units), self._rng, exclude=exclude)
        return ComposedStep(trained, drawn, self._metrics(drawn, is_warm=is_warm, has_anchor=bool(fresh)))

    def _draw_pool(
        self, fresh: Sequence[ScoredGroup[P]], num_units: int, exclude: Collection[str]
    ) -> tuple[list[int], list[DrawnRollout]]:
        count = round((1 + self._config.ratio) * num_units)
        units, drawn = self.buffer.draw_against(unit_weights(fresh, self._config), count, self._rng, exclude=exclude)
        if self._config.granularity == "rollout":
            return units.tolist(), drawn
        ends = np.cumsum([len(one.advantages) for one in fresh]).tolist()
        return [row for unit in units for row in range(ends[unit] - len(fresh[unit].advantages), ends[unit])], drawn

    def store(self, groups: Sequence[ScoredGroup[StoredRow]]) -> None:
        """Insert copies of the step's fresh informative groups, trained or not; to be called after the update.

        Raises RuntimeError when their step has not been composed yet: they could be drawn in it.
        """
        newest = max((one.group.policy_version for one in groups), default=self._version)
        if newest > self._version:
            raise RuntimeError(
                f"rollouts of version {newest} are stored before it is composed; this is a bug in openrlhf_ext, "
                "please report it with this line"
            )
        self.buffer.push(groups)

    def _metrics(self, drawn: list[DrawnRollout], *, is_warm: bool, has_anchor: bool) -> dict[str, float]:
        ages = [self._version - rollout.policy_version for rollout in drawn]
        metrics = {
            "rollout_replay/num_drawn": len(drawn),
            "rollout_replay/warming_up": float(not is_warm),
            "rollout_replay/no_anchor": float(is_warm and not has_anchor),
        }
        if ages:
            advantages = np.array([rollout.advantage for rollout in drawn])
            metrics |= {
                "rollout_replay/age_mean": float(np.mean(ages)),
                "rollout_replay/age_max": max(ages),
                "rollout_replay/abs_advantage_mean": float(np.abs(advantages).mean()),
                "rollout_replay/positive_frac": float((advantages > 0).mean()),
            }
        return metrics

    def state_dict(self) -> dict[str, object]:
        """With the generator's state, and without the throttle's."""
        return {
            "buffer": self.buffer.state_dict(),
            "num_steps": self.num_steps,
            "version": self._version,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError; see `RolloutBuffer.load_state_dict`."""
        self.buffer.load_state_dict(state["buffer"])
        self.num_steps, self._version = state["num_steps"], state["version"]
        self._rng.bit_generator.state = state["rng"]
