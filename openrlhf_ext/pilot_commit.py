"""Pilot-Commit (arXiv 2605.26606): a few rollouts of many prompts decide which few get a whole group.

A round of train step t:

1. Pilot: ``n_pilot`` rollouts for each of G prompts from the pool. The number of correct ones gives the verdict: too
   hard (deferred), too easy (skipped), solved (excluded, with enough evidence), or commit: the prompt then waits.
2. Commit: the rest of a group for prompts that wait, at most as many as the batch still lacks. The trained group is
   pilots and commits together, with one advantage over all of them.

Rounds go on until the batch has B groups or the cap is reached. Bound, the commits of a round go to the engines in one
call with the pilots of the next, so that no engine idles between the stages, and pilots are older than their commits
by up to ``max_age`` train steps. Unbound, pilots and then their commits are two calls of one policy; what is left over
is stale in the next step. Waiting prompts outlive the end of an epoch, under the same age bound; the new epoch passes
over them, so that none is piloted twice at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from openrlhf_ext.config import GroupsConfig, PilotConfig
from openrlhf_ext.groups import DEFAULT_TOLERANCE, has_spread
from openrlhf_ext.ledger import Fate, RolloutLedger
from openrlhf_ext.prompt_pool import Evidence, PoolExhausted, State
from openrlhf_ext.sampling import Decode, Encode, RolloutEngine, SampledStep, Sampler
from openrlhf_ext.selection import PromptSource, num_correct
from openrlhf_ext.survivors import PilotBounds, Survivor, SurvivorBuffer, Verdict, max_variance_subset
from openrlhf_ext.types import FailedRequest, P, RolloutGroup, RolloutRequest

_STATES: dict[Verdict, State] = {
    "commit": "active",
    "too_hard": "deferred",
    "too_easy": "skipped",
    "solved": "excluded",
}
_FATES: dict[Verdict, Fate] = {
    "too_hard": "pilot_too_hard",
    "too_easy": "pilot_too_easy",
    "solved": "pilot_too_easy",
}

Result = RolloutGroup[P] | FailedRequest


class PilotCommitSampler(Sampler[P]):
    """Collects the groups of a train step in pilot and commit stages.

    ``SampledStep.kept`` are the trained groups, each of ``group_size`` rollouts with the pilots first, under the group
    id of the pilots and the older policy version; ``generated`` are the pilot groups.

    Args:
        source: prompts by index, and the pool that learns the verdicts.
        policy_version: completed train steps now.
        seed: of the random order of commits.
        groups: with ``drop``, trained groups without spread are dropped in the end.
    """

    def __init__(
        self,
        engine: RolloutEngine[P],
        source: PromptSource,
        ledger: RolloutLedger,
        config: PilotConfig,
        *,
        policy_version: Callable[[], int],
        group_size: int,
        batch_size: int,
        max_retries: int,
        seed: int,
        groups: GroupsConfig | None = None,
    ) -> None:
        super().__init__(engine, ledger, group_size=group_size, batch_size=batch_size, max_retries=max_retries)
        self._source = source
        self._config = config
        self._policy_version = policy_version
        self._groups = groups
        self._n_pilot = config.pilots_per_prompt(group_size)
        self._n_trained_pilots = config.pilots_per_group(group_size)
        self._n_commit = group_size - self._n_trained_pilots
        self._bounds = PilotBounds.of(config, self._n_pilot)
        self._per_round = config.prompts_per_round or 3 * batch_size
        self._max_survivors = config.max_survivors or max(self._per_round, batch_size)
        self.survivors: SurvivorBuffer[P] = SurvivorBuffer(config.order, seed)

    def state_dict(self, encode: Encode[P]) -> dict[str, object]:
        return {**super().state_dict(encode), "survivors": self.survivors.state_dict(encode)}

    def load_state_dict(self, state: Mapping[str, Any], decode: Decode[P]) -> None:
        """Raises ValueError; see `SurvivorBuffer.load_state_dict`."""
        super().load_state_dict(state, decode)
        if "survivors" in state:
            self.survivors.load_state_dict(state["survivors"], decode, pilots_per_group=self._n_trained_pilots)

    def sample_step(self) -> SampledStep[P]:
        """Generate the groups of one train step. May keep fewer than ``batch_size`` (or none), never more.

        Raises PoolExhausted when no prompt is left and none waits, before anything of this step was generated.
        """
        step: SampledStep[P] = SampledStep()
        self._source.start_step()
        try:
            max_age = self._config.max_age if self._config.bind else 0
            self._drop_survivors(self.survivors.drop_older_than(self._policy_version() - max_age), "pilot_stale")
            while len(step.kept) < self._batch_size and step.num_rounds < self._config.max_rounds:
                if not self._round(step):
                    break
        finally:
            self._ledger.set_waiting(self.survivors.num_rollouts)
        self._warn_if_short(step, "ext.pilot", self._config.max_rounds)
        step.metrics = self._metrics(step)
        if self._groups is not None and self._groups.ineffective == "drop":
            self._filter(step, self._groups.metric, self._groups.tolerance)
        return step

    def _round(self, step: SampledStep[P]) -> bool:
        """One pilot and one commit stage. False where there was nothing to do."""
        if self._config.bind:
            commits, pilots = self._next_commits(step), self._next_pilots(step)
            # Commits first: they are the long requests, which the engines balance best when they place them first.
            results = self._generate(step, [*self._commit_requests(commits), *self._pilot_requests(pilots)])
            self._complete(step, commits, results[: len(commits)])
            self._judge(step, pilots, results[len(commits) :])
        else:
            pilots = self._next_pilots(step)
            self._judge(step, pilots, self._generate(step, self._pilot_requests(pilots)))
            commits = self._next_commits(step)
            self._complete(step, commits, self._generate(step, self._commit_requests(commits)))
        self._drop_survivors(self.survivors.drop_beyond(self._max_survivors), "pilot_overflow")
        step.num_rounds += bool(commits or pilots)
        return bool(commits or pilots)

    def _next_commits(self, step: SampledStep[P]) -> list[Survivor[P]]:
        survivors = self.survivors.draw(self._batch_size - len(step.kept))
        self._source.seen.update(survivor.index for survivor in survivors)
        return survivors

    def _next_pilots(self, step: SampledStep[P]) -> list[int]:
        try:
            return self._source.take(self._per_round, waiting={s.index for s in self.survivors.waiting})
        except PoolExhausted:
            # What was generated or waits is trained first; the next step raises.
            if self._source.seen or len(self.survivors):
                return []
            raise

    def _pilot_requests(self, indices: Sequence[int]) -> list[RolloutRequest]:
        return [self._request(self._source.prompts[index], self._n_pilot) for index in indices]

    def _commit_requests(self, survivors: Sequence[Survivor[P]]) -> list[RolloutRequest]:
        return [self._request(survivor.pilot.prompt, self._n_commit) for survivor in survivors]

    def _judge(self, step: SampledStep[P], indices: Sequence[int], results: Sequence[Result[P]]) -> None:
        """Report every pilot's verdict to the pool; prompts to commit wait, the rollouts of others get their fate."""
        for index, pilot in zip(indices, results, strict=True):
            if isinstance(pilot, FailedRequest):
                self._source.pool.put_off([index])
                continue
            step.generated.append(pilot)
            correct = num_correct(pilot)
            verdict = self._bounds.verdict(correct)
            self._source.pool.report(
                index, _STATES[verdict], Evidence(pilot.policy_version, correct, len(pilot.rollouts))
            )
            if verdict == "commit":
                self.survivors.waiting.append(Survivor(index, self._trained_part(pilot), correct, len(pilot.rollouts)))
            else:
                self._drop([pilot], _FATES[verdict])

    def _trained_part(self, pilot: RolloutGroup[P]) -> RolloutGroup[P]:
        """The pilots that will be trained; the others get their fate."""
        rollouts = max_variance_subset(pilot.rollouts, self._n_trained_pilots)
        fate: Fate = "pilot_unused_commit_only" if self._config.commit_only else "pilot_unused_subset"
        self._ledger.assign(fate, len(pilot.rollouts) - len(rollouts))
        return replace(pilot, rollouts=rollouts)

    def _complete(self, step: SampledStep[P], survivors: Sequence[Survivor[P]], results: Sequence[Result[P]]) -> None:
        """Join pilots and commits into trained groups. A commit that failed for good takes its pilots along."""
        for survivor, commit in zip(survivors, results, strict=True):
            if isinstance(commit, FailedRequest):
                self._drop_survivors([survivor], "pilot_commit_failed")
                continue
            pilot = survivor.pilot
            versions = [g.policy_version for g in (pilot, commit) if g.rollouts]
            step.kept.append(replace(pilot, rollouts=pilot.rollouts + commit.rollouts, policy_version=min(versions)))

    def _drop_survivors(self, survivors: Sequence[Survivor[P]], fate: Fate) -> None:
        self._drop([survivor.pilot for survivor in survivors], fate)
        self._source.pool.put_off(survivor.index for survivor in survivors)

    def _metrics(self, step: SampledStep[P]) -> dict[str, float]:
        """What the stages did; ages are those of the oldest rollout of a trained group, in train steps."""
        verdicts = Counter(self._bounds.verdict(num_correct(pilot)) for pilot in step.generated)
        tolerance = self._groups.tolerance if self._groups else DEFAULT_TOLERANCE
        rewards = [group.rewards() for group in step.kept]
        ages = [self._policy_version() - group.policy_version for group in step.kept]
        metrics: dict[str, float] = {
            "pilot/num_pilot_rollouts": sum(len(pilot.rollouts) for pilot in step.generated),
            "pilot/num_commit_rollouts": len(step.kept) * self._n_commit,
            "pilot/num_committed_groups": len(step.kept),
            "pilot/num_survivors_waiting": len(self.survivors),
        }
        if step.generated:
            metrics |= {f"pilot/{verdict}_frac": verdicts[verdict] / len(step.generated) for verdict in _STATES}
        if step.kept:
            metrics |= {
                "pilot/precision": float(np.mean([has_spread(row, tolerance) for row in rewards])),
                "pilot/precision_commits_alone": float(
                    np.mean([has_spread(row[self._n_trained_pilots :], tolerance) for row in rewards])
                ),
                "pilot/survivor_age_mean": float(np.mean(ages)),
                "pilot/survivor_age_max": max(ages),
            }
        return metrics
