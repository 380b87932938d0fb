"""The rollout buffer of APER (arXiv 2606.04560): single rollouts, drawn by size of advantage, evicted by age.

Advantage and behavior log-probabilities stay as they were when the rollout was fresh. A draw does not consume.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from openrlhf_ext.config import ReplayConfig
from openrlhf_ext.evictions import EvictionCounter
from openrlhf_ext.rollout_segment import DrawnRollout, ScoredGroup, Segment
from openrlhf_ext.stored_row import StoredRow
from openrlhf_ext.types import P

Eviction = Literal["age", "uses", "capacity", "bytes"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)

# Above zero, which means gone, and far from overflow when an exponential variate is divided by it.
_MIN_WEIGHT = 1e-30

_KEPT = ("granularity", "priority", "alpha", "eps", "eviction", "max_age", "rare_max_age")
"""Settings whose effect a rollout keeps from its push on."""


def unit_weights(scored: Sequence[ScoredGroup[P]], config: ReplayConfig) -> np.ndarray:
    """(priority + eps)^alpha of each unit of some groups, float32: what its chance of a draw is proportional to.

    A unit is a rollout, or with granularity ``group`` a whole group, whose priority is the mean over its rollouts.
    """
    sizes = np.array([len(one.advantages) for one in scored], int)
    if config.priority == "abs_advantage":
        priorities = np.abs(np.array([advantage for one in scored for advantage in one.advantages], float))
    elif config.priority == "sigma":
        priorities = np.repeat([one.sigma for one in scored], sizes)
    else:
        priorities = np.ones(sizes.sum())
    if config.granularity == "group" and len(scored):
        priorities = np.add.reduceat(priorities, np.cumsum(sizes) - sizes) / sizes
    return np.maximum((priorities + config.eps) ** config.alpha, _MIN_WEIGHT).astype(np.float32)


def draw_indices(weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw without replacement, with chances proportional to ``weights`` (N,); those of weight 0 never.

    Exactly successive sampling: the first index is drawn with P(i) = w_i / sum w, each further one with the same
    chances among those that are left. So an index's chance to be among ``count`` is not ``count * P(i)``: large
    weights saturate. In one pass: give each index an exponential variate of rate w_i, and keep the smallest
    (Efraimidis and Spirakis, 2006; the same as the largest of log w_i + Gumbel noise).

    Returns:
        ``count`` indices, increasing; all of them where fewer have a weight.
    """
    count = min(count, np.count_nonzero(weights))
    if count == 0:
        return np.empty(0, int)
    with np.errstate(divide="ignore"):
        arrivals = rng.standard_exponential(len(weights)) / weights
    return np.sort(np.argpartition(arrivals, count - 1)[:count])


class RolloutBuffer:
    """Rollouts (or whole groups) of earlier steps, the oldest first.

    Every rollout that is pushed is stored until it is evicted for one counted reason: ``age``, ``uses`` (drawn as
    often as allowed), ``capacity`` or ``bytes``. The memory of a push is given back with its last rollout.

    Args:
        config: eviction, its limits, priorities and granularity.
        correct_at: a rollout is correct iff its accuracy is at least this.
    """

    def __init__(self, config: ReplayConfig, *, correct_at: float = 1.0) -> None:
        self._config, self._correct_at = config, correct_at
        self._by_group = config.granularity == "group"
        self._segments: list[Segment] = []
        self._counter = EvictionCounter("rollout buffer")
        self._draw_ess_frac = 0.0

    def __len__(self) -> int:
        """Rollouts stored."""
        return sum(int(segment.sizes.sum()) for segment in self._segments)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, with what evicted rollouts of a segment still hold; shared image tensors once."""
        return sum(segment.num_bytes for segment in self._segments)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes beside tokens, masks, log-probabilities and images."""
        return sum(segment.bookkeeping_bytes for segment in self._segments)

    # -- in and out --

    def push(self, scored: Sequence[ScoredGroup[StoredRow]]) -> None:
        """Copy groups into the buffer, then evict the oldest beyond capacity and bytes.

        Rare successes go into a segment of their own: one of them must not keep the others' memory.
        """
        config = self._config
        max_age = config.max_age if config.eviction == "age" else None
        others, rare = self._split(scored) if config.rare_max_age is not None else (scored, [])
        for part, age in ((rare, config.rare_max_age), (others, max_age)):
            if part:
                weights = unit_weights(part, config)
                self._segments.append(Segment(part, weights, by_group=self._by_group, max_age=age))
                self._counter.pushed(len(self._segments[-1].rewards))
        self._evict_beyond_limits()

    def evict_stale(self, version: int) -> None:
        """Evict what is too old or used up at policy version ``version``; to be called before every draw.

        A rollout of exactly the age limit is still used.
        """
        for segment in self._segments:
            if segment.max_age is not None:
                self._evict(segment, version - segment.unit_births > segment.max_age, "age")
            if self._config.max_uses is not None:
                self._evict(segment, segment.uses >= self._config.max_uses, "uses")
        self._segments = [segment for segment in self._segments if segment.weights.any()]

    def draw(self, count: int, rng: np.random.Generator, *, exclude: Collection[str] = ()) -> list[DrawnRollout]:
        """At most ``count`` units, without replacement, none of the groups ``exclude`` (ids); see `draw_indices`."""
        return self.draw_against(np.empty(0, np.float32), count, rng, exclude=exclude)[1]

    def draw_against(
        self, rivals: np.ndarray, count: int, rng: np.random.Generator, *, exclude: Collection[str] = ()
    ) -> tuple[np.ndarray, list[DrawnRollout]]:
        """Draw ``count`` units from what is stored and from outsiders of the given weights together.

        Returns:
            Indices of the outsiders that were drawn, and the stored rollouts.
        """
        weights = np.concatenate([rivals, *self._weights(exclude)])
        chosen = draw_indices(weights, count, rng)
        if not len(chosen):
            return chosen, []
        squares = np.square(weights, dtype=float).sum() * np.count_nonzero(weights)
        self._draw_ess_frac = float(weights.sum(dtype=float) ** 2 / squares)
        # PER's (N P(i))^-beta over its maximum: N and the sum of weights cancel.
        smallest = np.min(weights, where=weights > 0, initial=np.inf)
        corrections = (smallest / weights[chosen]) ** self._config.beta
        bounds = np.cumsum([len(rivals), *(len(segment.weights) for segment in self._segments)])
        cuts = np.searchsorted(chosen, bounds)
        drawn: list[DrawnRollout] = []
        for i, segment in enumerate(self._segments):
            units = slice(cuts[i], cuts[i + 1])
            drawn += segment.take(chosen[units] - bounds[i], corrections[units])
        return chosen[: cuts[0]], drawn

    def _weights(self, exclude: Collection[str]) -> list[np.ndarray]:
        if not exclude:
            return [segment.weights for segment in self._segments]
        ids = np.array([group_id.encode() for group_id in exclude])
        return [np.where(segment.unit_in_groups(ids), 0, segment.weights) for segment in self._segments]

    # -- eviction --

    def _evict(self, segment: Segment, units: np.ndarray | bool, reason: Eviction) -> None:
        """Take out those of ``units`` (a mask) that are still there."""
        self._counter.evicted(reason, int(segment.sizes[units].sum()))
        segment.weights[units] = 0

    def _evict_beyond_limits(self) -> None:
        if self._config.eviction != "none":
            self._evict_oldest(len(self) - self._config.capacity)
        while self.num_bytes > self._config.max_gib * 2**30:
            self._evict(self._segments.pop(0), True, "bytes")

    def _evict_oldest(self, num_rollouts: int) -> None:
        for segment in self._segments:
            if num_rollouts <= 0:
                break
            sizes = segment.sizes
            # The first units that together hold as many; what has gone before has size 0.
            last = int(np.searchsorted(np.cumsum(sizes), min(num_rollouts, sizes.sum())))
            units = np.arange(len(sizes)) <= last
            num_rollouts -= int(sizes[units].sum())
            self._evict(segment, units, "capacity")
        self._segments = [segment for segment in self._segments if segment.weights.any()]

    def _split(self, scored: Sequence[ScoredGroup[StoredRow]]) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Rare successes apart: correct rollouts of groups that are nearly all wrong."""
        others, rare = [], []
        for one in scored:
            correct = [accuracy >= self._correct_at for accuracy in one.group.accuracies()]
            if not 0 < sum(correct) <= self._config.rare_accuracy * len(correct):
                others.append(one)
                continue
            rare.append(one.subset([i for i, is_correct in enumerate(correct) if is_correct]))
            others.append(one.subset([i for i, is_correct in enumerate(correct) if not is_correct]))
        return others, rare

    # -- figures --

    def metrics(self, version: int) -> dict[str, float]:
        """Size; distribution of ages (train steps) and uses; evictions since the last call, by reason.

        ``draw_ess_frac`` is Kish's effective sample size of the chances in the last draw, as a share of what was
        drawable: 1 where all were alike, 0 where nothing was drawn.

        Raises RuntimeError unless every rollout ever pushed is stored or was evicted for a counted reason.
        """
        stored = len(self)
        evicted = self._counter.take(stored)
        ages = [version - segment.unit_births[segment.weights > 0] for segment in self._segments]
        uses = [segment.uses[segment.weights > 0] for segment in self._segments]
        ess, self._draw_ess_frac = self._draw_ess_frac, 0.0
        return {
            "rollout_buffer/num_rollouts": stored,
            "rollout_buffer/num_bytes": self.num_bytes,
            "rollout_buffer/draw_ess_frac": ess,
            **_distribution("rollout_buffer/age", ages),
            **_distribution("rollout_buffer/uses", uses),
            **{f"rollout_buffer/num_evicted_{reason}": evicted[reason] for reason in EVICTIONS},
        }

    # -- checkpoints --

    def state_dict(self) -> dict[str, object]:
        """Everything stored, the segments' unchanging parts without a copy, and what is counted."""
        return {
            "settings": {name: getattr(self._config, name) for name in _KEPT},
            "segments": [segment.state_dict() for segment in self._segments],
            "counter": self._counter.state_dict(),
            "draw_ess_frac": self._draw_ess_frac,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved buffer was; beyond this buffer's capacity and bytes the oldest are evicted.

        Raises ValueError where the stored rollouts were weighed, or limited in age, by other settings.
        """
        for name, saved in state["settings"].items():
            if saved != getattr(self._config, name):
                raise ValueError(
                    f"the checkpoint was made with --ext.replay.{name} {saved}, this run has "
                    f"{getattr(self._config, name)}; resume with the same value, or start in a new --ext.run_dir"
                )
        self._segments = [Segment.from_state_dict(segment) for segment in state["segments"]]
        self._counter.load_state_dict(state["counter"])
        self._draw_ess_frac = state["draw_ess_frac"]
        self._evict_beyond_limits()


def _distribution(name: str, parts: list[np.ndarray]) -> dict[str, float]:
    values = np.concatenate(parts) if parts else np.zeros(1)
    median, p90 = np.quantile(values, [0.5, 0.9])
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_p50": float(median),
        f"{name}_p90": float(p90),
        f"{name}_max": float(values.max()),
    }
