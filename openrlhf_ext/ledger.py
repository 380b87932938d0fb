"""The rollout ledger: every generated training response is in exactly one place.

A rollout is counted when the engine returns it and gets one fate. ``close_step`` asserts
``generated == sum of fates + waiting`` and returns the step's figures; a mismatch is a bug in this package, so it
raises. Waiting are only the pilot rollouts of prompts that have not been committed yet.

Fates of pilot rollouts that are not trained:

* ``pilot_too_easy``, ``pilot_too_hard``: the verdict on their prompt; solved ones are too easy;
* ``pilot_stale``: waited beyond the age bound; ``pilot_overflow``: beyond the number that may wait;
* ``pilot_unused_subset``: outside the subset of ``n_effective``; ``pilot_unused_commit_only``: ``commit_only`` is on;
* ``pilot_commit_failed``: the commit of their prompt gave no group, even after retries;
* ``pilot_not_restored``: waited at a checkpoint from which a run without pilots goes on.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

Fate = Literal[
    "trained_fresh",
    "filtered_zero_variance",
    "replaced_zero_variance",
    "replaced_by_success",
    "pool_not_drawn",
    "surplus",
    "failed_deadline",
    "failed_engine_error",
    "failed_invalid_reward",
    "failed_empty_response",
    "pilot_too_easy",
    "pilot_too_hard",
    "pilot_stale",
    "pilot_overflow",
    "pilot_unused_subset",
    "pilot_unused_commit_only",
    "pilot_commit_failed",
    "pilot_not_restored",
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
        self._replayed = 0
        self._waiting = 0
        self._fates: Counter[str] = Counter()
        self._step_start = self._snapshot()

    def _snapshot(self) -> tuple[int, int, int, Counter[str]]:
        return self._generated, self._tokens, self._replayed, Counter(self._fates)

    @property
    def num_generated(self) -> int:
        """Rollouts generated so far."""
        return self._generated

    def generated(self, rollouts: int, *, tokens: int) -> None:
        """Count responses (and their tokens) that an engine produced for training."""
        self._generated += rollouts
        self._tokens += tokens

    def assign(self, fate: Fate, rollouts: int) -> None:
        """Give ``rollouts`` generated rollouts their one fate."""
        if fate not in FATES:
            raise ValueError(f"unknown fate {fate!r}; known: {', '.join(FATES)}")
        self._fates[fate] += rollouts

    def reassign(self, old: Fate, new: Fate, rollouts: int) -> None:
        """Change the fate of rollouts of this step."""
        self.assign(old, -rollouts)
        self.assign(new, rollouts)

    def replayed(self, rollouts: int, *, born: int, step: int) -> None:
        """Count rollouts that train step ``step`` trains again. They were generated, and got their fate, before.

        Raises RuntimeError when they were not generated in an earlier step: ``born`` is the train step of birth.
        """
        if not 1 <= born < step:
            raise RuntimeError(
                f"step {step} replays rollouts of step {born}, which does not lie before it; this is a bug in "
                "openrlhf_ext, please report it with this line"
            )
        self._replayed += rollouts

    def set_waiting(self, rollouts: int) -> None:
        """Say how many generated rollouts wait for their fate: the real content of what holds them, counted anew."""
        self._waiting = rollouts

    def forget_waiting(self) -> None:
        """Give the waiting rollouts of a restored ledger their fate, where what held them was not restored."""
        self.assign("pilot_not_restored", self._waiting)
        self._waiting = 0

    def check(self) -> None:
        """Raise RuntimeError unless every generated rollout has exactly one fate or is waiting for it."""
        total = sum(self._fates.values()) + self._waiting
        if total != self._generated:
            raise RuntimeError(
                f"rollout ledger does not balance: {self._generated} generated, {total} accounted for "
                f"({dict(self._fates)}, {self._waiting} waiting); this is a bug in openrlhf_ext, please report it "
                "with this line"
            )

    def close_step(self) -> dict[str, int]:
        """Check the identity and return this step's counts and the cumulative budget, by metric name."""
        self.check()
        generated, tokens, replayed, fates = self._step_start
        metrics = {
            "budget/rollouts_generated": self._generated,
            "budget/tokens_generated": self._tokens,
            "budget/rollouts_waiting": self._waiting,
            "step/rollouts_generated": self._generated - generated,
            "step/tokens_generated": self._tokens - tokens,
            "step/num_replayed": self._replayed - replayed,
        }
        metrics.update({f"step/num_{fate}": self._fates[fate] - fates[fate] for fate in FATES})
        self._step_start = self._snapshot()
        return metrics

    def as_dict(self) -> dict[str, object]:
        """Content of ``ledger.json``; ``fates`` and ``waiting`` sum to ``generated``.

        ``replayed`` counts rollouts that were trained again; it is no fate.
        """
        return {
            "generated": self._generated,
            "tokens": self._tokens,
            "replayed": self._replayed,
            "waiting": self._waiting,
            "fates": {f: self._fates[f] for f in FATES},
        }

    def state_dict(self) -> dict[str, object]:
        return self.as_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from a saved ledger. Raises RuntimeError when the saved one does not balance."""
        self._generated = int(state["generated"])  # type: ignore[call-overload]
        self._tokens = int(state["tokens"])  # type: ignore[call-overload]
        self._replayed = int(state.get("replayed", 0))  # type: ignore[call-overload]
        self._waiting = int(state["waiting"])  # type: ignore[call-overload]
        self._fates = Counter(state["fates"])  # type: ignore[call-overload]
        self._step_start = self._snapshot()
        self.check()
