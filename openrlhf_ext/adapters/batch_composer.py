"""From the groups of a step to the rows that are trained: filling, success replay and rollout replay in one place.

Each part is pure code elsewhere and may be off; what is on works in this order, whatever the combination:

    sampled groups -> success replay -> filling -> forward pass and advantages -> rollout replay -> weights by origin

========================  ===========================  =========================  ================================
a row's origin            its behavior policy          advantage                  ratio is current policy over
========================  ===========================  =========================  ================================
fresh                     the proximal one             of its group               proximal
group replay (filling)    the one that sampled it      of its stored group, anew  proximal, and weighted; see
                                                                                  ``off_policy.py``, ``ext.fill``
rollout replay            the one that sampled it      as it was at birth         behavior, in the paper's form;
                                                                                  ``ext.replay.objective``
success replay            counts as the proximal one   of the mixed group         proximal
========================  ===========================  =========================  ================================

The proximal policy is always the one at the start of the train step. Nothing here knows how rows are trained.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_ext.adapters.experience_maker import ExperienceMaker
from openrlhf_ext.adapters.generation import unify_info
from openrlhf_ext.adapters.replayed_rows import (
    copy_sample,
    mark_rows,
    restore_sample,
    restore_samples,
    store_group,
    weigh_rows,
)
from openrlhf_ext.config import ExtConfig, GroupsConfig
from openrlhf_ext.filling import FilledStep, GroupFilling
from openrlhf_ext.group_buffer import GroupBuffer, StoredGroup
from openrlhf_ext.groups import is_effective
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.off_policy import behavior_kl
from openrlhf_ext.replay import RolloutReplay
from openrlhf_ext.rollout_segment import DrawnRollout, ScoredGroup
from openrlhf_ext.run_dir import RunDirectory
from openrlhf_ext.stored_row import StoredRow
from openrlhf_ext.success_replay import SuccessReplay
from openrlhf_ext.throttle import ReplayThrottle
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """What one train step trains, and what it stores afterwards."""

    fresh: list[Experience] = field(default_factory=list)
    replayed: list[Experience] = field(default_factory=list)
    fresh_groups: list[RolloutGroup[Experience]] = field(default_factory=list)
    fresh_group_rows: list[Experience] = field(default_factory=list)
    """The rows of these groups, in order: those in ``fresh``, and with pool composition those that were not drawn."""
    replayed_groups: list[StoredGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    copies: list[ScoredGroup[StoredRow]] = field(default_factory=list)
    """Groups of this step for the buffers."""

    @property
    def rows(self) -> list[Experience]:
        return [*self.fresh, *self.replayed]

    def shares(self) -> dict[str, float]:
        """Share of the trained rows by origin: this step, groups that fill slots, single replayed rollouts."""
        total, filled = len(self.rows), _num_rollouts(self.replayed_groups)
        counts = {"fresh": len(self.fresh), "filled": filled, "replayed": len(self.replayed) - filled}
        return {f"rows/share_{origin}": count / total for origin, count in counts.items()}


class BatchComposer:
    """Owns the buffers. ``compose`` once in every train step, then the update, then ``store``.

    Args:
        log_probs: engines return log-probabilities, so that every row must have some.
    """

    def __init__(
        self, args, ext: ExtConfig, maker: ExperienceMaker, ledger: RolloutLedger, run_dir: RunDirectory, *, log_probs
    ) -> None:
        self._args, self._ext, self._maker, self._ledger, self._run_dir = args, ext, maker, ledger, run_dir
        self._log_probs = log_probs
        self._corrects_engine = args.algo.advantage.is_correction_level != "off"
        self._groups = ext.groups or GroupsConfig()
        self._throttle = ReplayThrottle(ext.throttle) if ext.throttle else None
        rng = np.random.default_rng([args.train.seed, 0, 3])  # no stream of the prompt pool or of MoPPS
        self.filling = self._create_filling() if ext.fill else None
        self.replay = (
            RolloutReplay(ext.replay, rng, throttle=self._throttle, correct_at=ext.eval.correct_at)
            if ext.replay
            else None
        )
        self.success = (
            SuccessReplay(ext.success_replay, self._restored_rollout, rng, correct_at=ext.eval.correct_at)
            if ext.success_replay
            else None
        )

    def _create_filling(self) -> GroupFilling[Experience]:
        fill, batch_size = self._ext.fill, self._args.rollout.batch_size
        buffer = GroupBuffer(
            capacity=fill.capacity or fill.min_age * batch_size,
            max_bytes=int(fill.max_gib * 2**30),
            max_age=fill.max_age,
            max_uses=fill.max_uses,
        )
        return GroupFilling(fill, self._groups, buffer, num_groups=batch_size, divergence=self._divergence)

    @property
    def holds_anything(self) -> bool:
        """Whether a buffer is on, whose content a checkpoint would have to keep."""
        return any(part is not None for part in (self.filling, self.replay, self.success))

    # -- checkpoints --

    def state_dict(self) -> dict[str, object]:
        """Of every part that is on."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A part that the checkpoint does not have starts empty, with a warning."""
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state[name])
            else:
                logger.warning("the checkpoint has nothing of %s, which was off: it starts empty", name)

    def _parts(self) -> dict[str, Any]:
        buffer = self.filling.buffer if self.filling is not None else None
        parts = {"fill": buffer, "replay": self.replay, "success_replay": self.success, "throttle": self._throttle}
        return {f"ext.{name}": part for name, part in parts.items() if part is not None}

    # -- a step --

    def compose(self, groups: Sequence[RolloutGroup[Experience]], *, version: int, step: int) -> Batch:
        """The rows of train step ``step`` at policy version ``version``; to be called in every step.

        Every rollout of ``groups`` gets its fate in the ledger here, every old one is counted as replayed.

        Raises RuntimeError when the policy gives no finite log-probabilities any more.
        """
        births: dict[str, int] = {}
        if self.success is not None:
            mixed = self.success.mix(groups)
            groups, births = mixed.groups, mixed.births
        filled = self._fill(groups, version)
        # Groups that are stored without being trained need their log-probabilities all the same.
        only_stored = [group for group in (*filled.replaced, *filled.dropped) if self._is_stored(group)]
        computed = [*filled.fresh, *only_stored]
        rows = self._make_rows(computed, filled.replayed)
        # With all parts off nothing reads them.
        scored = _score(computed, rows) if self.holds_anything else []
        for one, own in scored:
            if one.group.group_id in births:
                # On-policy by definition: mismatch correction must not weigh by how far the policy has moved since.
                own[0].rollout_log_probs = own[0].action_log_probs if self._log_probs else None
        num_fresh, num_computed = _num_rollouts(filled.fresh), _num_rollouts(computed)
        batch = Batch(
            fresh=rows[:num_fresh],
            replayed=rows[num_computed:],
            fresh_groups=filled.fresh,
            fresh_group_rows=rows[:num_fresh],
            replayed_groups=filled.replayed,
        )
        batch.copies = [
            ScoredGroup(store_group(one.group, own, engine_gap=self._corrects_engine), one.advantages, one.sigma)
            for one, own in scored
            if one.group.group_id not in births and self._is_stored(one.group)
        ]
        self._count(filled, births, step)
        drawn = self._replay_rollouts(
            batch, [one for one, _ in scored[: len(filled.fresh)]], version=version, step=step
        )
        if self.filling is not None or self.replay is not None:
            self._weigh(batch, drawn, version)
        return batch

    def store(self, batch: Batch, *, version: int) -> dict[str, float]:
        """Store the step's groups after its update; ``version`` is the new policy version. Metrics of the buffers."""
        metrics: dict[str, float] = {}
        if self.filling is not None:
            self.filling.store([one.group for one in batch.copies if self.filling.is_stored(one.group)])
            metrics |= self.filling.buffer.metrics(version)
        if self.replay is not None:
            self.replay.store([one for one in batch.copies if self._is_informative(one.group)])
            metrics |= self.replay.buffer.metrics(version)
        if self.success is not None:
            self.success.store([one.group for one in batch.copies])
            metrics |= self.success.metrics()
        return metrics

    # -- its parts --

    def _fill(self, groups: Sequence[RolloutGroup[Experience]], version: int) -> FilledStep[Experience]:
        if self.filling is not None:
            return self.filling.fill(groups, version, share=self._throttle.share if self._throttle else 1.0)
        if self._groups.ineffective == "keep" or self._ext.dapo is not None:
            return FilledStep(fresh=list(groups))  # DAPO has dropped groups by a metric of its own
        # Other samplers have dropped these as well, except where success replay may still mix them.
        return FilledStep(
            fresh=[group for group in groups if self._is_informative(group)],
            dropped=[group for group in groups if not self._is_informative(group)],
        )

    def _count(self, filled: FilledStep[Experience], births: dict[str, int], step: int) -> None:
        """Fates of what was generated; every old rollout traced to its birth."""
        for fate, groups in (
            ("trained_fresh", filled.fresh),
            ("replaced_zero_variance", filled.replaced),
            ("filtered_zero_variance", filled.dropped),
        ):
            self._ledger.assign(fate, _num_rollouts(groups) - sum(group.group_id in births for group in groups))
        self._ledger.assign("replaced_by_success", len(births))
        old = [
            (group.group_id, group.prompt.prompt_id, births[group.group_id] + 1, 1)
            for group in filled.fresh
            if group.group_id in births
        ]
        for _, _, born, count in old:
            self._ledger.replayed(count, born=born, step=step)
        self._run_dir.log_replayed(step, "success_replay", old)
        for group in filled.replayed:
            self._ledger.replayed(len(group.rollouts), born=group.policy_version + 1, step=step)
        self._run_dir.log_replayed(
            step,
            "replay",
            [(g.group_id, g.prompt.prompt_id, g.policy_version + 1, len(g.rollouts)) for g in filled.replayed],
        )

    def _make_rows(
        self, groups: Sequence[RolloutGroup[Experience]], replayed: Sequence[StoredGroup]
    ) -> list[Experience]:
        """Single rows with log-probabilities and advantages, those of replayed groups last."""
        samples = [copy_sample(rollout) for group in groups for rollout in group.rollouts]
        samples += [sample for g in replayed for sample in restore_samples(g, log_probs=self._log_probs)]
        if not samples:
            return []
        unify_info(samples)
        return _checked(self._maker.make_rows(samples))

    def _is_informative(self, group: RolloutGroup) -> bool:
        return is_effective(group, metric=self._groups.metric, tolerance=self._groups.tolerance)

    def _is_stored(self, group: RolloutGroup) -> bool:
        return (
            (self.filling is not None and self.filling.is_stored(group))
            or (self.replay is not None and self._is_informative(group))
            or (self.success is not None and self.success.has_success(group))
        )

    def _replay_rollouts(
        self, batch: Batch, fresh: Sequence[ScoredGroup[Experience]], *, version: int, step: int
    ) -> list[DrawnRollout]:
        """Draw stored rollouts into the batch; with pool composition, fresh rollouts that were not drawn leave it."""
        if self.replay is None:
            return []
        informative = [one for one in fresh if self._is_informative(one.group)]
        filled = {group.group_id for group in batch.replayed_groups}
        composed = self.replay.compose(informative, version, exclude=filled)
        batch.metrics |= composed.metrics
        if len(composed.fresh) < sum(len(one.advantages) for one in informative):
            # Pool composition, where checks.py makes sure that all fresh groups are informative.
            self._ledger.reassign("trained_fresh", "pool_not_drawn", len(batch.fresh) - len(composed.fresh))
            batch.fresh = [batch.fresh[i] for i in composed.fresh]
        if not composed.replayed:
            return []
        drawn = composed.replayed
        samples = [restore_sample(one.prompt, one.rollout, log_probs=self._log_probs) for one in drawn]
        unify_info(samples)
        rows = _checked(self._maker.make_frozen_rows(samples, drawn))
        batch.replayed = [*batch.replayed, *rows]
        unify_info(batch.rows)
        births = Counter((one.group_id, one.prompt.prompt_id, one.policy_version + 1) for one in drawn)
        for (_, _, born), count in births.items():
            self._ledger.replayed(count, born=born, step=step)
        self._run_dir.log_replayed(step, "rollout_replay", [(*key, count) for key, count in births.items()])
        return drawn

    def _weigh(self, batch: Batch, drawn: list[DrawnRollout], version: int) -> None:
        """Give replayed rows the weights of their origin, tell the actors, and tell the throttle."""
        num_filled = len(batch.replayed) - len(drawn)
        filled, replayed = batch.replayed[:num_filled], batch.replayed[num_filled:]
        by_origin = {
            "replay": (
                filled,
                [rollout.payload for group in batch.replayed_groups for rollout in group.rollouts],
                [version - group.policy_version for group in batch.replayed_groups for _ in group.rollouts],
                self._ext.fill,
            ),
            "rollout_replay": (
                replayed,
                [one.rollout.payload for one in drawn],
                [version - one.policy_version for one in drawn],
                self._ext.replay,
            ),
        }
        mark_rows(batch.fresh, "fresh")
        drift: list[dict[str, float]] = []
        for origin, (rows, stored, ages, config) in by_origin.items():
            if config is None:
                continue
            mark_rows(rows, origin)
            metrics = weigh_rows(
                rows,
                stored,
                ages,
                objective=config.objective,
                weight_cap=config.weight_cap,
                correct_engine=self._corrects_engine,
            )
            drift += [metrics] if metrics else []
            metrics |= {"num_rows": len(rows), "row_frac": len(rows) / max(1, len(batch.rows))}
            metrics |= {"age_mean": float(np.mean(ages)), "age_max": max(ages)} if ages else {}
            batch.metrics |= {f"{origin}/{name}": value for name, value in metrics.items()}
        if self.filling is not None:
            batch.metrics["replay/num_groups"] = len(batch.replayed_groups)
        if self._throttle is not None:
            self._throttle.observe(
                row_frac=len(batch.replayed) / max(1, len(batch.rows)),
                effective_sample_frac=min((one["effective_sample_frac"] for one in drift), default=1.0),
                behavior_kl=max((one["behavior_kl"] for one in drift), default=0.0),
            )
            batch.metrics |= self._throttle.metrics()

    def _divergence(self, groups: Sequence[StoredGroup]) -> list[float]:
        """KL(behavior || current policy) of stored groups, a mean over their own tokens (POPO-KL)."""
        samples = [sample for group in groups for sample in restore_samples(group, log_probs=False)]
        current = iter(self._maker.log_probs(samples))
        found = []
        for group in groups:
            kls = [
                behavior_kl(next(current)[row.action_mask], torch.from_numpy(row.behavior_log_probs))
                for row in (rollout.payload for rollout in group.rollouts)
            ]
            found.append(float(torch.cat(kls).mean()))
        return found

    def _restored_rollout(self, prompt: Prompt, rollout: Rollout[StoredRow]) -> Rollout[Experience]:
        sample = restore_sample(prompt, rollout, log_probs=self._log_probs)
        return Rollout(rollout.reward, rollout.accuracy, rollout.num_tokens, sample)


def _score(
    groups: Sequence[RolloutGroup[Experience]], rows: Sequence[Experience]
) -> list[tuple[ScoredGroup[Experience], Sequence[Experience]]]:
    """Groups with their advantages and rows; of a critic's advantages, which differ by token, the first token's."""
    scored, start = [], 0
    for group in groups:
        own = rows[start : start + len(group.rollouts)]
        advantages = [float(row.advantages[int(row.action_mask.argmax())]) for row in own]
        scored.append((ScoredGroup.of(group, advantages), own))
        start += len(own)
    return scored


def _checked(rows: list[Experience]) -> list[Experience]:
    broken = 0
    for row in rows:
        mask = row.action_mask.numpy().astype(bool)  # PyTorch takes five times as long to index by a mask
        broken += not np.isfinite(row.action_log_probs.float().numpy()[mask]).all()
    if broken:
        raise RuntimeError(
            f"the policy's log-probabilities are not finite in {broken} of {len(rows)} rollouts: training has "
            "diverged; lower --actor.adam.lr, or continue from an earlier checkpoint"
        )
    return rows


def _num_rollouts(groups: Sequence[RolloutGroup]) -> int:
    return sum(len(group.rollouts) for group in groups)
