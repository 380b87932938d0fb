"""What a call of a reward function can come to: usable numbers, or a failure with its reason."""

import math
from dataclasses import dataclass
from typing import Literal

from openrlhf_ext.rewards.worker import PlainValue, plain


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A call that gave no reward.

    `deadline`: took too long, and was killed. `died`: took its process down (or the pool was closed). `exception`: the
    reward file raised, in the call or while it was loaded. `invalid`: it returned something that is no reward.
    """

    kind: Literal["deadline", "died", "exception", "invalid"]
    detail: str


@dataclass(frozen=True, slots=True)
class RewardValues:
    """What one call is worth: the reward to train on, the score (accuracy), further numbers to log."""

    reward: float
    score: float
    extra: dict[str, float]
    dropped: tuple[str, ...] = ()
    """Names in the function's `extra_logs` whose values were not finite numbers."""


def check_reward(result: object, source: str) -> RewardValues | RewardFailure:
    """The reward, score and logs in what a reward function returned for one rollout.

    A number may come as bool, int, float, or a tensor, array or list of one. `scores` defaults to `rewards`,
    `extra_logs` to nothing. A failed call passes through.

    Args:
        result: what `RewardPool` or the reward function itself returned.
        source: the reward file, for messages.
    """
    if isinstance(result, RewardFailure):
        return result
    values = plain(result)
    if not isinstance(values, dict) or "rewards" not in values:
        found = f"the keys {sorted(values)}" if isinstance(values, dict) else _shown(values)
        return _invalid(source, f'must return a dict with the key "rewards", got {found}')
    scores = values["rewards"] if values.get("scores") is None else values["scores"]
    reward, score = _number(values["rewards"]), _number(scores)
    for name, value, number in (("rewards", values["rewards"], reward), ("scores", scores, score)):
        if number is None:
            return _invalid(source, f'must give one finite number as "{name}" for one query, got {_shown(value)}')
    logs = {} if values.get("extra_logs") is None else values["extra_logs"]
    if not isinstance(logs, dict):
        return _invalid(source, f'must give a dict of numbers as "extra_logs", got {_shown(logs)}')
    numbers = {name: _number(value) for name, value in logs.items()}
    extra = {name: number for name, number in numbers.items() if number is not None}
    return RewardValues(reward, score, extra, dropped=tuple(name for name in numbers if name not in extra))


def _number(value: PlainValue) -> float | None:
    """The finite number in a scalar or in nested lists of one scalar, else None."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: PlainValue) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _invalid(source: str, problem: str) -> RewardFailure:
    return RewardFailure("invalid", f"reward_func in {source} {problem}")
