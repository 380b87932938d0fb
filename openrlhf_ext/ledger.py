"""The rollout ledger: every generated training response is in exactly one place.

A rollout is counted when the engine returns it and gets one fate. ``close_step`` asserts
``generated == sum of fates`` and returns the step's figures; a mismatch is a bug in this package, so it raises.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

Fate = Literal[
    "trained_fresh",
    "filtered_zero_variance",
    "surplus",
    "failed_deadline",
    "failed_engine_error",
    "failed_invalid_reward",
    "failed_empty_response",
]
FATES: tuple[str, ...] = get_args(Fate)


class RolloutLedger:
    """Counts generated rollouts and their fates, per step and since the start of the run.

    Example:
        >>> ledger = RolloutLedger()
        >>> ledger.generated(8, tokens=64); ledger.assign("trained_fresh", 8)
        >>> ledger.close_step()["budget/rollouts_generated"]
        8
    """

    def __init__(self) -> None:
        self._generated = 0
        self._tokens = 0
        self._fates: Counter[str] = Counter()
        self._step_start = self._snapshot()

    def _snapshot(self) -> tuple[int, int, Counter[str]]:
        return self._generated, self._tokens, Counter(self._fates)

    def generated(self, rollouts: int, *, tokens: int) -> None:
        """Count responses (and their tokens) that an engine produced for training."""
        self._generated += rollouts
        self._tokens += tokens

    def assign(self, fate: Fate, rollouts: int) -> None:
        """Give ``rollouts`` generated rollouts their one fate."""
        if fate not in FATES:
            raise ValueError(f"unknown fate {fate!r}; known: {', '.join(FATES)}")
        self._fates[fate] += rollouts

    def check(self) -> None:
        """Raise RuntimeError unless every generated rollout has exactly one fate."""
        total = sum(self._fates.values())
        if total != self._generated:
            raise RuntimeError(
                f"rollout ledger does not balance: {self._generated} generated, {total} accounted for "
                f"({dict(self._fates)}); this is a bug in openrlhf_ext, please report it with this line"
            )

    def close_step(self) -> dict[str, int]:
        """Check the identity and return this step's counts and the cumulative budget, by metric name."""
        self.check()
        generated, tokens, fates = self._step_start
        metrics = {
            "budget/rollouts_generated": self._generated,
            "budget/tokens_generated": self._tokens,
            "step/rollouts_generated": self._generated - generated,
            "step/tokens_generated": self._tokens - tokens,
        }
        metrics.update({f"step/num_{fate}": self._fates[fate] - fates[fate] for fate in FATES})
        self._step_start = self._snapshot()
        return metrics

    def as_dict(self) -> dict[str, object]:
        """Content of ``ledger.json``: ``generated``, ``tokens`` and ``fates``, whose values sum to ``generated``."""
        return {"generated": self._generated, "tokens": self._tokens, "fates": {f: self._fates[f] for f in FATES}}

    def state_dict(self) -> dict[str, object]:
        return self.as_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from a saved ledger. Raises RuntimeError when the saved one does not balance."""
        self._generated = int(state["generated"])  # type: ignore[call-overload]
        self._tokens = int(state["tokens"])  # type: ignore[call-overload]
        self._fates = Counter(state["fates"])  # type: ignore[call-overload]
        self._step_start = self._snapshot()
        self.check()
