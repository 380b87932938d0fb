"""The throttle: less is replayed after a step in which replay went too far. An extension beyond the papers.

Its ``share`` multiplies what replay may put into a batch: the slots that filling fills, and the rollouts drawn beside
the fresh ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf_ext.config import ThrottleConfig


class ReplayThrottle:
    """``share``, in [min_share, 1]: times ``shrink`` after a step beyond a limit, plus ``recover`` after any other."""

    def __init__(self, config: ThrottleConfig) -> None:
        self._config = config
        self.share = 1.0
        self._exceeded = dict.fromkeys(self._limits(0.0, 1.0, 0.0), False)

    def observe(self, *, row_frac: float, effective_sample_frac: float = 1.0, behavior_kl: float = 0.0) -> None:
        """Take in a train step, once in each; one without replay is ``row_frac=0``, after which the share recovers.

        Args:
            row_frac: replayed rows as a share of all trained ones.
            effective_sample_frac: of the replayed tokens' weights, see `off_policy.ReplayMeter`.
            behavior_kl: mean of `off_policy.behavior_kl` over replayed tokens. One that is not a number exceeds.
        """
        self._exceeded = self._limits(row_frac, effective_sample_frac, behavior_kl)
        config = self._config
        if any(self._exceeded.values()):
            self.share = max(config.min_share, self.share * config.shrink)
        else:
            self.share = min(1.0, self.share + config.recover)

    def _limits(self, row_frac: float, effective_sample_frac: float, behavior_kl: float) -> dict[str, bool]:
        """Whether each limit that is set is exceeded."""
        config, exceeded = self._config, {}
        if config.max_row_frac is not None:
            exceeded["row_frac"] = not row_frac <= config.max_row_frac
        if config.min_effective_sample_frac is not None:
            exceeded["effective_sample_frac"] = not effective_sample_frac >= config.min_effective_sample_frac
        if config.max_behavior_kl is not None:
            exceeded["behavior_kl"] = not behavior_kl <= config.max_behavior_kl
        return exceeded

    def metrics(self) -> dict[str, float]:
        """The share for the next step, and which limits the last one exceeded (1 or 0)."""
        return {
            "throttle/share": self.share,
            **{f"throttle/exceeded_{name}": float(exceeded) for name, exceeded in self._exceeded.items()},
        }

    def state_dict(self) -> dict[str, object]:
        return {"share": self.share, "exceeded": self._exceeded.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Limits that were not set are not exceeded, and the share is at least this configuration's smallest."""
        self.share = max(self._config.min_share, state["share"])
        self._exceeded = {name: state["exceeded"].get(name, False) for name in self._exceeded}
