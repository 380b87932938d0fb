"""From prompts to the groups of one train step.

``GroupSampler`` owns the loop over an abstract engine, so budget, order and termination are tested without Ray.
Three ways to spend rollouts:

* plain: one group for each of ``batch_size`` prompts, all of them trained (GRPO);
* ``drop``: the same, but zero-variance groups are dropped and the batch shrinks (GRPO-filter);
* DAPO (arXiv 2503.14476, dynamic sampling): rounds of ``prompts_per_round`` prompts, zero-variance groups dropped,
  until ``batch_size`` groups are kept or ``max_rounds`` are spent; the surplus of the last round is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol

from openrlhf_ext.config import DapoConfig, GroupsConfig
from openrlhf_ext.groups import is_effective
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.types import FailedRequest, P, Prompt, RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)


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
    num_rounds: int = 0
    num_retries: int = 0
    failed: list[FailedRequest] = field(default_factory=list)
    """Requests that gave no group even after retries."""


class GroupSampler(Generic[P]):
    """Collects the groups of a train step and gives every rollout that is not kept its fate in the ledger.

    Args:
        engine: where rollouts come from.
        next_prompts: called with a count, returns that many prompts in training order.
        ledger: every generated rollout is counted here; fates of dropped ones are assigned here, those of kept
            groups (``trained_fresh``) by the caller once they were trained.
        group_size: rollouts per prompt.
        batch_size: groups per train step.
        max_retries: times that a failed request is generated again before its group is dropped.
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
        self._engine = engine
        self._next_prompts = next_prompts
        self._ledger = ledger
        self._group_size = group_size
        self._batch_size = batch_size
        self._max_retries = max_retries
        self._groups = groups
        self._dapo = dapo
        self.num_requests = 0

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
            self._generate_round(step, per_round)
            self._filter(step, self._dapo.metric, self._dapo.tolerance)
        if len(step.kept) < self._batch_size:
            logger.warning(
                "DAPO: %d of %d informative groups after the cap of %d rounds (%d prompts); training on those "
                "(--ext.dapo.max_rounds raises the cap)",
                len(step.kept),
                self._batch_size,
                step.num_rounds,
                step.num_prompts,
            )
        self._drop(step.kept[self._batch_size :], "surplus")
        del step.kept[self._batch_size :]
        return step

    def _generate_round(self, step: SampledStep[P], num_prompts: int) -> None:
        """Generate one group for each of the next prompts; append the complete ones to ``step``."""
        requests = [self._request(prompt) for prompt in self._next_prompts(num_prompts)]
        done: dict[int, RolloutGroup[P]] = {}
        waiting = dict(enumerate(requests))
        for attempt in range(self._max_retries + 1):
            results = self._engine.generate(list(waiting.values()))
            retry: dict[int, RolloutRequest] = {}
            for (slot, request), result in zip(list(waiting.items()), results, strict=True):
                if isinstance(result, RolloutGroup):
                    self._check_group(result, request)
                    self._ledger.generated(len(result.rollouts), tokens=_num_tokens(result))
                    done[slot] = result
                    continue
                self._ledger.generated(result.num_generated, tokens=result.num_tokens)
                self._ledger.assign(f"failed_{result.reason}", result.num_generated)  # type: ignore[arg-type]
                if result.retryable and attempt < self._max_retries:
                    retry[slot] = self._request(request.prompt)
                else:
                    step.failed.append(result)
            step.num_retries += len(retry)
            waiting = retry
            if not waiting:
                break
        step.num_prompts += num_prompts
        step.num_rounds += 1
        complete = [done[slot] for slot in sorted(done)]
        step.generated.extend(complete)
        step.kept.extend(complete)

    def _request(self, prompt: Prompt) -> RolloutRequest:
        self.num_requests += 1
        return RolloutRequest(group_id=f"g{self.num_requests:08d}", prompt=prompt, num_rollouts=self._group_size)

    def _check_group(self, group: RolloutGroup[P], request: RolloutRequest) -> None:
        if group.group_id != request.group_id or len(group.rollouts) != request.num_rollouts:
            raise RuntimeError(
                f"engine answered request {request.group_id} ({request.num_rollouts} rollouts) with group "
                f"{group.group_id} of {len(group.rollouts)} rollouts"
            )

    def _filter(self, step: SampledStep[P], metric: str, tolerance: float) -> None:
        """Drop the zero-variance groups of ``step.kept``."""
        keep = [is_effective(g, metric=metric, tolerance=tolerance) for g in step.kept]  # type: ignore[arg-type]
        self._drop([g for g, ok in zip(step.kept, keep, strict=True) if not ok], "filtered_zero_variance")
        step.kept[:] = [g for g, ok in zip(step.kept, keep, strict=True) if ok]

    def _drop(self, groups: Sequence[RolloutGroup[P]], fate: str) -> None:
        self._ledger.assign(fate, sum(len(g.rollouts) for g in groups))  # type: ignore[arg-type]


def _num_tokens(group: RolloutGroup[P]) -> int:
    return sum(rollout.num_tokens for rollout in group.rollouts)
