"""The prompt pool: which prompts may be drawn, and in which order.

Every epoch is a permutation of the prompts that depends on (seed, epoch) only, drawn without replacement. What was
learned about a prompt takes it out for a while: *deferred* to the next epoch (too hard for now, or put off unspent),
*skipped* for the rest of this one (too easy), or *excluded* (solved) for a number of epochs or for good. Everything
else is *active*. Pilot-Commit (arXiv 2605.26606) excludes on one solved pilot; here that takes more evidence, because
a prompt of accuracy 0.9 passes a pilot of 4 in 66 % of all cases, and the pool never shrinks below a floor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from openrlhf_ext.config import PoolConfig

State = Literal["active", "deferred", "skipped", "excluded"]
STATES: tuple[State, ...] = get_args(State)
_EXCLUDED = STATES.index("excluded")
_NEVER = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a state was decided on; all zero where nothing was reported yet."""

    policy_version: int
    num_correct: int
    num_rollouts: int


class PoolExhausted(RuntimeError):
    """No prompt can ever be drawn again. `report` has the number of prompts by state."""

    def __init__(self, message: str, report: Mapping[str, int]) -> None:
        super().__init__(message)
        self.report = report


class PromptPool:
    """Prompts by index, drawn in seeded epochs.

    Example:
        pool = PromptPool(num_prompts=3, seed=0, config=PoolConfig())
        pool.take(2)  # two prompts of epoch 0
        pool.take(2)  # the third, and the first of epoch 1
    """

    def __init__(self, num_prompts: int, seed: int, config: PoolConfig) -> None:
        if num_prompts < 1:
            raise ValueError(f"a pool needs at least one prompt, got {num_prompts}")
        if seed < 0:
            raise ValueError(f"--train.seed must not be negative, got {seed}")
        self._num_prompts, self._seed, self._config = num_prompts, seed, config
        # A state holds in the epochs before _back, the first one in which the prompt may be drawn (again).
        self._state = np.zeros(num_prompts, np.int8)
        self._back = np.zeros(num_prompts, np.int32)
        self._evidence = np.zeros((num_prompts, 3), np.int32)
        # Solved without interruption: rollouts, visits, epoch of the last visit.
        self._solved = np.tile(np.array([0, 0, -1], np.int32), (num_prompts, 1))
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        """Completed passes over the pool."""
        return self._epoch

    def take(self, k: int, *, pass_over: Collection[int] = ()) -> list[int]:
        """The next prompts, `k` or fewer, none of them twice.

        Goes over the end of an epoch if need be, but at most of one, and ends before the first prompt that it has
        already taken; that one comes first the next time.

        Args:
            pass_over: prompts that are in use, in this train step or waiting for their commit; they are deferred.

        Raises:
            PoolExhausted: every prompt is excluded for good.
        """
        soonest = int(self._back.min())
        if soonest == _NEVER:
            raise PoolExhausted(self._why_exhausted(), self._counts())
        if soonest > self._epoch + 1:
            self._start_epoch(soonest)  # All are excluded: epochs without a prompt pass at once.
        taken: dict[int, None] = {}
        for _ in range(2):
            if self._take_from_epoch(taken, k, pass_over):
                break
        return list(taken)

    def _take_from_epoch(self, taken: dict[int, None], k: int, pass_over: Collection[int]) -> bool:
        """Take from the rest of this epoch, and start the next one at its end. False where more can be taken."""
        rest = self._order[self._position :]
        drawable = np.flatnonzero(self._back[rest] <= self._epoch)[: k - len(taken) + len(pass_over)]
        start, complete = self._position, False
        for offset in drawable.tolist():
            index = int(rest[offset])
            complete = len(taken) == k or index in taken
            if complete:
                break
            self._position = start + offset + 1
            if index in pass_over:
                self.put_off([index])
            else:
                taken[index] = None
        complete = complete or len(taken) == k
        if not complete or self._position == self._num_prompts:
            self._start_epoch(self._epoch + 1)
        return complete

    def put_off(self, indices: Iterable[int]) -> None:
        """Defer prompts that were drawn but not used; their evidence stays what it was."""
        for index in indices:
            self._set(index, "deferred", self._visit(index) + 1)

    def report(self, index: int, state: State, evidence: Evidence) -> State:
        """Change the state of a drawn prompt.

        ``excluded`` is granted only after `exclude_min_rollouts` solved rollouts in `exclude_min_visits` epochs, with
        no other report in between, and while the pool is above its floor; else the prompt is skipped. After an
        exclusion has expired, one more solved visit is enough.

        Returns:
            The state that was granted.
        """
        self._evidence[index] = evidence.policy_version, evidence.num_correct, evidence.num_rollouts
        visit = self._visit(index)
        if state != "excluded":
            self._solved[index] = 0, 0, -1
            self._set(index, state, visit if state == "active" else visit + 1)
            return state
        rollouts, visits, last_visit = self._solved[index].tolist()
        self._solved[index] = rollouts + evidence.num_rollouts, visits + (visit != last_visit), visit
        if not self._may_exclude(index):
            self._set(index, "skipped", visit + 1)
            return "skipped"
        epochs = self._config.exclude_epochs
        self._set(index, "excluded", _NEVER if epochs is None else visit + 1 + epochs)
        return "excluded"

    def _may_exclude(self, index: int) -> bool:
        rollouts, visits, _ = self._solved[index].tolist()
        remaining = self._num_prompts - self._num_excluded - (not self._is_excluded(index))
        return (
            rollouts >= self._config.exclude_min_rollouts
            and visits >= self._config.exclude_min_visits
            and remaining >= math.ceil(self._config.floor * self._num_prompts)
        )

    def _is_excluded(self, index: int) -> bool:
        return bool(self._state[index] == _EXCLUDED and self._back[index] > self._epoch)

    def _set(self, index: int, state: State, back: int) -> None:
        self._num_excluded -= self._is_excluded(index)
        self._state[index], self._back[index] = STATES.index(state), back
        self._num_excluded += self._is_excluded(index)

    def _visit(self, index: int) -> int:
        """The epoch in which the prompt was drawn last; a verdict may come after the end of that epoch."""
        return self._epoch - (self._rank[index] >= self._position)

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self._epoch, self._position = epoch, position
        self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)
        self._rank = np.empty_like(self._order)
        self._rank[self._order] = np.arange(self._num_prompts)
        self._num_excluded = self._counts()["excluded"]

    def status(self, index: int) -> tuple[State, Evidence]:
        """The prompt's state in this epoch, and the last evidence about it."""
        state = STATES[self._state[index]] if self._back[index] > self._epoch else "active"
        return state, Evidence(*self._evidence[index].tolist())

    def metrics(self) -> dict[str, int]:
        """Number of prompts by state."""
        return {f"pool/num_{state}": count for state, count in self._counts().items()}

    def _counts(self) -> dict[str, int]:
        away = np.bincount(self._state[self._back > self._epoch], minlength=len(STATES)).tolist()
        counts = dict(zip(STATES, away, strict=True))
        return counts | {"active": self._num_prompts - sum(away[1:])}

    def _why_exhausted(self) -> str:
        config = self._config
        return (
            f"no prompt is left: all {self._num_prompts} are excluded for good, each solved in "
            f"{config.exclude_min_rollouts} or more rollouts over {config.exclude_min_visits} or more epochs; use "
            "harder prompts, let exclusions expire (--ext.pool.exclude_epochs), or keep a share of the pool "
            "(--ext.pool.floor)"
        )

    def state_dict(self) -> dict[str, object]:
        """JSON-able; after `load_state_dict` the pool goes on exactly where this one is."""
        known = np.flatnonzero((self._back > 0) | self._evidence.any(axis=1))
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "index": known.tolist(),
            **{name: values[known].tolist() for name, values in self._columns().items()},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises ValueError if the state belongs to other data or another seed."""
        for name, mine, flag in (
            ("num_prompts", self._num_prompts, "--data.prompt_dataset"),
            ("seed", self._seed, "--train.seed"),
        ):
            if state[name] != mine:
                raise ValueError(
                    f"the checkpoint was made with {name} {state[name]}, this run has {mine}; resume with the same "
                    f"{flag}, or start in a new --ext.run_dir"
                )
        index = np.array(state["index"], np.int64)
        for name, values in self._columns().items():
            values[:] = [0, 0, -1] if name == "solved" else 0
            if len(index):
                values[index] = state[name]
        self._start_epoch(int(state["epoch"]), int(state["position"]))  # type: ignore[call-overload]

    def _columns(self) -> dict[str, np.ndarray]:
        return {"state": self._state, "back": self._back, "evidence": self._evidence, "solved": self._solved}
