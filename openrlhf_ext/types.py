"""The nouns: a prompt, a rollout (one sampled response), a group (all rollouts of one prompt from one request).

Pure code reads these small headers and never looks into ``payload``: an OpenRLHF ``Experience`` in production,
a string in tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task input with its label.

    ``prompt_id`` is the identity; texts may repeat (two rows with the same text and different labels are two prompts).
    """

    prompt_id: str
    text: str
    label: object
    datasource: str = "default"
    images: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Rollout(Generic[P]):
    """One sampled response and the few numbers that selection reads."""

    reward: float
    """The verifier's reward before any length penalty; what advantages are computed from."""
    accuracy: float
    """The verifier's score, 1.0 for a correct answer (OpenRLHF's ``scores``; the reward where none is given)."""
    num_tokens: int
    """Response tokens."""
    payload: P


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Ask an engine for ``num_rollouts`` responses to one prompt."""

    group_id: str
    """Generated, unique in a run. Groups are never recognized by their prompt's text."""
    prompt: Prompt
    num_rollouts: int


@dataclass(frozen=True, slots=True)
class RolloutGroup(Generic[P]):
    """The rollouts of one request, in engine order: the unit of the advantage baseline."""

    group_id: str
    prompt: Prompt
    rollouts: tuple[Rollout[P], ...]
    policy_version: int
    """Completed train steps when the tokens were generated."""

    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]

    def accuracies(self) -> list[float]:
        return [rollout.accuracy for rollout in self.rollouts]


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that gave no usable group."""

    request: RolloutRequest
    reason: str
    """``deadline``, ``engine_error``, ``invalid_reward`` or ``empty_response``; its fate is ``failed_<reason>``."""
    detail: str
    num_generated: int
    """Responses that were generated all the same; they are counted and dropped."""
    num_tokens: int
    retryable: bool
    """False where generating again cannot help (a verifier that fails on this prompt)."""
