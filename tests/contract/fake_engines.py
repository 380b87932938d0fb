"""Engine actors as plain objects, and a ``ray`` that completes their calls in a seeded random order."""

from __future__ import annotations

import random
from collections.abc import Callable

import ray
from fakes import Remote
from ray.exceptions import GetTimeoutError
from recorded import response

NEVER = object()


class Ref:
    """A reference to an outcome: a value, an exception to raise, or ``NEVER``."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome


class SeededRay:
    """``ray`` with completion in a seeded random order."""

    exceptions = ray.exceptions

    def __init__(self, seed: int = 0) -> None:
        self.cancelled: list[Ref] = []
        self._rng = random.Random(seed)

    def wait(self, refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        done = [ref for ref in refs if ref.outcome is not NEVER]
        if not done:
            return [], refs
        pick = self._rng.choice(done)
        return [pick], [ref for ref in refs if ref is not pick]

    def get(self, ref, timeout: float | None = None):
        if isinstance(ref, list):
            return [self.get(one) for one in ref]
        if ref.outcome is NEVER:
            assert timeout is not None, "this would wait for ever"
            raise GetTimeoutError
        if isinstance(ref.outcome, Exception):
            raise ref.outcome
        return ref.outcome

    def cancel(self, ref: Ref, force: bool) -> None:
        self.cancelled.append(ref)


def good(call: dict) -> tuple[list[dict], None]:
    """Rollouts whose reward names the prompt they were asked for."""
    return [response(reward=float(call["label"])) for _ in range(call["num_rollouts"])], None


class Engine:
    """Keeps its calls; ``answer`` maps the arguments of one to its outcome, ``health`` is that of asking for it."""

    def __init__(self, answer: Callable[[dict], object] = good, *, health: object = None) -> None:
        self.calls: list[dict] = []
        self.events: list[str] = []
        self._answer = answer
        self.generate_group = Remote(self._generate)
        self.check_health = Remote(lambda: Ref(health))
        self.wake_up = Remote(lambda: Ref(self.events.append("wake_up")))
        self.sleep = Remote(lambda: Ref(self.events.append("sleep")))

    def _generate(self, **call) -> Ref:
        self.calls.append(call)
        self.events.append("generate")
        return Ref(self._answer(call))
