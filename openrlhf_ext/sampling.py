"""From prompts to the groups of one train step.

A sampler owns the loop over an abstract engine, so budget, order and termination are tested without Ray. ``Sampler``
is what all have in common: requests, retries and the ledger. ``GroupSampler`` has three ways to spend rollouts:

* plain: one group for each of ``batch_size`` prompts, all of them trained (GRPO);
* ``drop``: the same, but zero-variance groups are dropped and the batch shrinks (GRPO-filter);
* DAPO (arXiv 2503.14476, dynamic sampling): rounds of ``prompts_per_round`` prompts, zero-variance groups dropped,
  until ``batch_size`` groups are kept or ``max_rounds`` are spent; the surplus of the last round is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from openrlhf_ext.config import DapoConfig, GroupsConfig
from openrlhf_ext.groups import Metric, is_effective
from openrlhf_ext.ledger import Fate, RolloutLedger
from openrlhf_ext.types import FailedRequest, P, Prompt, RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)


Encode = Callable[[Sequence[RolloutGroup[P]]], object]
Decode = Callable[[Any], Sequence[RolloutGroup[P]]]
"""From groups to the state of a checkpoint, and back."""


class RolloutEngine(Protocol[P]):
    """Generates groups. Results come in the order of the requests, one for each."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup[P] | FailedRequest]: ...


@dataclass(slots=True)
class SampledStep(Generic[P]):
    """What one train step gets.

    ``kept`` groups are trained, in a fixed order; ``generated`` are all complete groups, for the metrics.
    """

    kept: list[RolloutGroup[P]] = field(default_factory=list)
    generated: list[RolloutGroup[P]] = field(default_factory=list)
    num_prompts: int = 0
    """Requests without retries: a prompt that is piloted and committed in one step counts twice."""
    num_rounds: int = 0
    num_retries: int = 0
    failed: list[FailedRequest] = field(default_factory=list)
    """Requests that gave no group even after retries."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the method has to say besides."""


class Sampler(Generic[P]):
    """Sends requests, sends failed ones again, and counts every response in the ledger.

    Args:
        engine: where rollouts come from.
        ledger: every generated rollout is counted here. Rollouts that are not kept get their fate here too; those of
            kept groups (``trained_fresh``) from the caller, once they were trained.
        group_size: rollouts of a trained group.
        batch_size: groups per train step.
        max_retries: times that a failed request is generated again before it is given up.
    """

    def __init__(
        self, engine: RolloutEngine[P], ledger: RolloutLedger, *, group_size: int, batch_size: int, max_retries: int
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._group_size = group_size
        self._batch_size = batch_size
        self._max_retries = max_retries
        self.num_requests = 0

    def state_dict(self, encode: Encode[P]) -> dict[str, object]:
        """What the next step depends on; ``encode`` makes a state of groups that wait."""
        return {"num_requests": self.num_requests}

    def load_state_dict(self, state: Mapping[str, Any], decode: Decode[P]) -> None:
        self.num_requests = state["num_requests"]

    def _request(self, prompt: Prompt, num_rollouts: int) -> RolloutRequest:
        self.num_requests += 1
        return RolloutRequest(group_id=f"g{self.num_requests:08d}", prompt=prompt, num_rollouts=num_rollouts)

    def _generate(
        self, step: SampledStep[P], requests: Sequence[RolloutRequest]
    ) -> list[RolloutGroup[P] | FailedRequest]:
        """A group for each request, in order, or its last failure; all requests go to the engine in one call."""
        results: list[RolloutGroup[P] | FailedRequest | None] = [None] * len(requests)
        waiting = dict(enumerate(requests))
        for attempt in range(self._max_retries + 1):
            if not waiting:
                break
            retry: dict[int, RolloutRequest] = {}
            answers = self._engine.generate(list(waiting.values()))
            for (slot, request), answer in zip(waiting.items(), answers, strict=True):
                results[slot] = answer
                if isinstance(answer, RolloutGroup):
                    _check_group(answer, request)
                    self._ledger.generated(len(answer.rollouts), tokens=_num_tokens(answer))
                    continue
                self._ledger.generated(answer.num_generated, tokens=answer.num_tokens)
                self._ledger.assign(f"failed_{answer.reason}", answer.num_generated)  # type: ignore[arg-type]
                if answer.retryable and attempt < self._max_retries:
                    retry[slot] = self._request(request.prompt, request.num_rollouts)
            step.num_retries += len(retry)
            waiting = retry
        step.num_prompts += len(requests)
        step.failed += [result for result in results if isinstance(result, FailedRequest)]
        return results  # type: ignore[return-value]

    def _warn_if_short(self, step: SampledStep[P], part: str, max_rounds: int) -> None:
        if len(step.kept) >= self._batch_size:
            return
        capped = f"the cap of {max_rounds} rounds (--{part}.max_rounds raises it)"
        logger.warning(
            "%d of %d informative groups after %s, %d requests; training on those",
            len(step.kept),
            self._batch_size,
            capped if step.num_rounds == max_rounds else f"{step.num_rounds} rounds, with no other prompt left",
            step.num_prompts,
        )

    def _filter(self, step: SampledStep[P], metric: Metric, tolerance: float) -> None:
        """Drop the zero-variance groups of ``step.kept``."""
        keep = [is_effective(g, metric=metric, tolerance=tolerance) for g in step.kept]
        self._drop([g for g, ok in zip(step.kept, keep, strict=True) if not ok], "filtered_zero_variance")
        step.kept[:] = [g for g, ok in zip(step.kept, keep, strict=True) if ok]

    def _drop(self, groups: Sequence[RolloutGroup[P]], fate: Fate) -> None:
        self._ledger.assign(fate, sum(len(g.rollouts) for g in groups))


class GroupSampler(Sampler[P]):
    """Collects the groups of a train step and gives every rollout that is not kept its fate in the ledger.

    Args:
        next_prompts: called with a count, returns that many prompts in training order, fewer where there are no more
            for this step.
    """

    def __init__(
        self,
        engine: RolloutEngine[P],
        next_prompts: Callable[[int], list[Prompt]],
        ledger: RolloutLedger,
        *,
        group_size: int,
        batch_size: int,
        max_retries: int,
        groups: GroupsConfig | None = None,
        dapo: DapoConfig | None = None,
    ) -> None:
        super().__init__(engine, ledger, group_size=group_size, batch_size=batch_size, max_retries=max_retries)
        self._next_prompts = next_prompts
        self._groups = groups
        self._dapo = dapo

    def sample_step(self) -> SampledStep[P]:
        """Generate the groups of one train step. May keep fewer than ``batch_size`` (or none), never more."""
        step: SampledStep[P] = SampledStep()
        if self._dapo is None:
            self._generate_round(step, self._batch_size)
            if self._groups is not None and self._groups.ineffective == "drop":
                self._filter(step, self._groups.metric, self._groups.tolerance)
            return step

        per_round = self._dapo.prompts_per_round or 3 * self._batch_size
        while len(step.kept) < self._batch_size and step.num_rounds < self._dapo.max_rounds:
            if not self._generate_round(step, per_round):
                break
            self._filter(step, self._dapo.metric, self._dapo.tolerance)
        self._warn_if_short(step, "ext.dapo", self._dapo.max_rounds)
        self._drop(step.kept[self._batch_size :], "surplus")
        del step.kept[self._batch_size :]
        return step

    def _generate_round(self, step: SampledStep[P], num_prompts: int) -> bool:
        """Generate a group for each of the next prompts; the complete ones go to ``step``. False without a prompt."""
        requests = [self._request(prompt, self._group_size) for prompt in self._next_prompts(num_prompts)]
        if not requests:
            return False
        complete = [result for result in self._generate(step, requests) if isinstance(result, RolloutGroup)]
        step.num_rounds += 1
        step.generated += complete
        step.kept += complete
        return True


def _check_group(group: RolloutGroup[P], request: RolloutRequest) -> None:
    if group.group_id != request.group_id or len(group.rollouts) != request.num_rollouts:
        raise RuntimeError(
            f"engine answered request {request.group_id} ({request.num_rollouts} rollouts) with group "
            f"{group.group_id} of {len(group.rollouts)} rollouts"
        )


def _num_tokens(group: RolloutGroup[P]) -> int:
    return sum(rollout.num_tokens for rollout in group.rollouts)
