"""Rollout replay: what a step is composed of, in which order, and how the throttle holds it back."""

from __future__ import annotations

from collections import Counter
from math import nan

import numpy as np
import pytest
from scored_groups import FOUR_OF_8, ONE_OF_8, ids, scored

from openrlhf_ext.config import ConfigError, ReplayConfig, SuccessReplayConfig, ThrottleConfig
from openrlhf_ext.replay import RolloutReplay
from openrlhf_ext.rollout_segment import ScoredGroup
from openrlhf_ext.throttle import ReplayThrottle


def replay(*, throttle: ReplayThrottle | None = None, seed: int = 0, **options: object) -> RolloutReplay:
    config = ReplayConfig(**{"warmup_steps": 0, **options})
    return RolloutReplay(config, np.random.default_rng(seed), throttle=throttle)


def batch(version: int, count: int = 4, rewards: list[float] = FOUR_OF_8) -> list[ScoredGroup]:
    return [scored(f"{version}-{i}", version, rewards) for i in range(count)]


def filled(count: int = 4, **options: object) -> RolloutReplay:
    """With ``count`` groups of 8 rollouts that were generated at version 0."""
    one = replay(**options)
    one.compose([], 0)
    one.store(batch(0, count))
    return one


# -- fresh-anchored --


@pytest.mark.parametrize(
    ("ratio", "num_fresh", "stored", "drawn"),
    [
        (0.5, 4, 4, 16),  # round(0.5 * 32)
        (0.3, 2, 4, 5),  # round(0.3 * 16 = 4.8)
        (1.0, 8, 4, 32),  # 64 wanted, 32 stored
        (0.5, 4, 0, 0),
    ],
)
def test_the_whole_fresh_batch_is_trained_and_a_share_of_it_is_drawn_beside(ratio, num_fresh, stored, drawn) -> None:
    step = filled(stored, ratio=ratio).compose(batch(1, num_fresh), 1)
    assert step.fresh == list(range(8 * num_fresh))
    assert len(step.replayed) == step.metrics["rollout_replay/num_drawn"] == drawn
    assert {d.policy_version for d in step.replayed} <= {0}


def test_a_step_without_informative_groups_draws_nothing_and_is_counted() -> None:
    one = filled()
    step = one.compose([], 1)
    assert (step.fresh, step.replayed, step.metrics["rollout_replay/no_anchor"]) == ([], [], 1)
    assert one.compose(batch(2), 2).metrics["rollout_replay/no_anchor"] == 0


def test_what_the_step_trains_already_is_not_drawn() -> None:
    step = filled(2, ratio=1.0).compose(batch(1), 1, exclude=["0-0"])
    assert ids(step.replayed) == ["0-1"] * 8


def test_with_groups_a_share_of_the_groups_is_drawn() -> None:
    step = filled(8, granularity="group").compose(batch(1, 4), 1)
    assert sorted(Counter(ids(step.replayed)).values()) == [8, 8]  # round(0.5 * 4) groups


# -- order and time --


def test_a_rollout_of_the_age_limit_is_drawn_and_a_step_later_it_is_gone() -> None:
    # Generated at 5, limit 10: drawn at 15, gone at 16.
    for version, drawn in ((6, 16), (15, 16), (16, 0)):
        one = replay(max_age=10)
        one.compose([], 5)
        one.store(batch(5))
        step = one.compose(batch(version), version)
        assert len(step.replayed) == drawn
        assert step.metrics.get("rollout_replay/age_max", version - 5) == version - 5


def test_rollouts_are_evicted_in_every_step_also_in_the_warm_up_and_without_a_draw() -> None:
    one = filled(max_age=2, warmup_steps=10)
    for version, left in ((1, 32), (2, 32), (3, 0)):
        one.compose([], version)
        assert len(one.buffer) == left


def test_a_rollout_is_drawn_from_the_step_after_its_own_on() -> None:
    one = replay(ratio=1.0)
    for version in range(4):
        step = one.compose(batch(version), version)
        assert all(d.policy_version < version for d in step.replayed)
        assert len(step.replayed) == (32 if version else 0)
        one.store(batch(version))


def test_storing_before_composing_and_composing_twice_are_bugs() -> None:
    one = filled()
    with pytest.raises(RuntimeError, match="rollouts of version 1 are stored before it is composed"):
        one.store(batch(1))
    one.compose(batch(1), 1)
    with pytest.raises(RuntimeError, match="version 1 is composed after version 1"):
        one.compose(batch(1), 1)


def test_the_warm_up_fills_and_does_not_draw_and_starts_anew_with_an_empty_buffer() -> None:
    for first in (0, 100):  # 100: a run that is continued without its buffer
        one = replay(warmup_steps=3)
        for version in range(first, first + 5):
            step = one.compose(batch(version), version)
            assert step.metrics["rollout_replay/warming_up"] == (version < first + 3)
            assert len(step.replayed) == (0 if version < first + 3 else 16)
            one.store(batch(version))


def test_what_is_drawn_keeps_the_advantage_of_its_birth() -> None:
    one = replay(ratio=1.0)
    one.compose([], 0)
    one.store([scored("a", 0, ONE_OF_8)])
    for version in range(1, 11):
        step = one.compose(batch(version, 1), version)
        assert sorted(d.advantage for d in step.replayed) == pytest.approx([-0.353552] * 7 + [2.474867], abs=1e-6)
        one.store([])


# -- pool --


def test_a_pool_gives_as_many_rollouts_as_fresh_anchored_and_guarantees_none() -> None:
    # 32 fresh and 64 stored rollouts of equal weight; 48 are drawn, of them 48 * 32/96 = 16 fresh ones expected, with
    # a hypergeometric variance of 48 (1/3) (2/3) (48/95) = 5.4; the mean of 200 is within 5 sqrt(5.4/200) = 0.82.
    fresh = []
    for seed in range(200):
        step = filled(8, composition="pool", seed=seed).compose(batch(1, 4), 1)
        assert len(step.fresh) + len(step.replayed) == 48
        assert step.fresh == sorted(set(step.fresh)) and set(step.fresh) < set(range(32))
        fresh.append(len(step.fresh))
    assert np.mean(fresh) == pytest.approx(16, abs=0.82)


def test_a_pool_of_groups_draws_whole_fresh_and_whole_stored_groups() -> None:
    kinds = set()
    for seed in range(20):
        step = filled(4, composition="pool", granularity="group", seed=seed).compose(batch(1, 4), 1)
        assert len(step.fresh) + len(step.replayed) == 48  # round(1.5 * 4) groups of 8
        assert step.fresh == [row for row in range(32) if row // 8 in {row // 8 for row in step.fresh}]
        assert set(Counter(ids(step.replayed)).values()) <= {8}
        kinds.add(len(step.fresh))
    assert len(kinds) > 1


def test_a_pool_that_nothing_is_stored_in_trains_the_fresh_batch() -> None:
    for options in ({}, {"warmup_steps": 5}):
        step = replay(composition="pool", **options).compose(batch(0), 0)
        assert step.fresh == list(range(32)) and step.replayed == []


@pytest.mark.parametrize("composition", ["fresh_anchored", "pool"])
@pytest.mark.parametrize("granularity", ["rollout", "group"])
@pytest.mark.parametrize("priority", ["abs_advantage", "sigma", "uniform"])
@pytest.mark.parametrize("eviction", ["age", "capacity", "none"])
def test_every_axis_switches_alone_and_the_size_of_the_update_stays(
    composition: str, granularity: str, priority: str, eviction: str
) -> None:
    one = replay(
        composition=composition, granularity=granularity, priority=priority, eviction=eviction, max_age=3, capacity=96
    )
    for version in range(8):
        fresh = batch(version, 2, ONE_OF_8) + [scored(f"{version}-{i}", version, FOUR_OF_8) for i in (2, 3)]
        step = one.compose(fresh, version)
        assert len(step.fresh) + len(step.replayed) == (48 if version else 32)
        assert composition == "pool" or len(step.fresh) == 32
        one.store(fresh)
        one.buffer.metrics(version)
    # 32 rollouts a step and 8 steps; the capacity of 96 is the back-stop of age, too.
    assert len(one.buffer) == {"age": 96, "capacity": 96, "none": 256}[eviction]


# -- throttle --


def throttle(**options: object) -> ReplayThrottle:
    return ReplayThrottle(ThrottleConfig(**options))


def test_the_share_halves_beyond_a_limit_recovers_slowly_and_stays_in_its_bounds() -> None:
    one = throttle(max_row_frac=0.5, shrink=0.5, recover=0.1, min_share=0.2)
    shares = []
    for row_frac in (0.5, 0.6, 0.6, 0.6, 0.5, 0.0, *[0.0] * 7):
        one.observe(row_frac=row_frac)
        shares.append(one.share)
    # 0.5 is not beyond 0.5; 0.25 / 2 is below the least share.
    expected = [1, 0.5, 0.25, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1]
    assert shares == pytest.approx(expected)


@pytest.mark.parametrize(
    ("observed", "exceeded"),
    [
        ({"row_frac": 0.5, "effective_sample_frac": 0.5, "behavior_kl": 0.1}, []),
        ({"row_frac": 0.51}, ["row_frac"]),
        ({"row_frac": 0.2, "effective_sample_frac": 0.49}, ["effective_sample_frac"]),
        ({"row_frac": 0.2, "behavior_kl": 0.11}, ["behavior_kl"]),
        (
            {"row_frac": 0.2, "behavior_kl": nan, "effective_sample_frac": nan},
            ["effective_sample_frac", "behavior_kl"],
        ),
    ],
)
def test_each_limit_acts_and_is_told(observed: dict[str, float], exceeded: list[str]) -> None:
    one = throttle()
    one.observe(**observed)
    metrics = one.metrics()
    assert [name for name in metrics if metrics[name] and "exceeded" in name] == [
        f"throttle/exceeded_{name}" for name in exceeded
    ]
    assert metrics["throttle/share"] == one.share == (0.5 if exceeded else 1.0)


def test_limits_that_are_null_are_not_looked_at() -> None:
    one = throttle(max_row_frac=None, min_effective_sample_frac=None, max_behavior_kl=None)
    one.observe(row_frac=1.0, effective_sample_frac=0.0, behavior_kl=nan)
    assert one.metrics() == {"throttle/share": 1.0}


def test_a_throttled_step_draws_less_and_trains_the_whole_fresh_batch() -> None:
    brake = throttle()
    brake.observe(row_frac=0.9)
    step = filled(throttle=brake).compose(batch(1), 1)
    assert len(step.replayed) == 8 and len(step.fresh) == 32  # half of round(0.5 * 32)


# -- configuration --


@pytest.mark.parametrize(
    ("part", "values", "key"),
    [
        (ReplayConfig, {"ratio": 0.0}, "ext.replay.ratio"),
        (ReplayConfig, {"eps": 0.0}, "ext.replay.eps"),
        (ReplayConfig, {"alpha": -0.1}, "ext.replay.alpha"),
        (ReplayConfig, {"alpha": nan}, "ext.replay.alpha"),
        (ReplayConfig, {"max_age": 0}, "ext.replay.max_age"),
        (ReplayConfig, {"beta": 0.4, "composition": "pool"}, "ext.replay.beta"),
        (ReplayConfig, {"rare_max_age": 9}, "ext.replay.rare_max_age"),
        (ReplayConfig, {"rare_max_age": 50, "granularity": "group"}, "ext.replay.rare_max_age"),
        (ReplayConfig, {"rare_max_age": 50, "eviction": "capacity"}, "ext.replay.rare_max_age"),
        (ThrottleConfig, {"shrink": 0.0}, "ext.throttle.shrink"),
        (ThrottleConfig, {"max_row_frac": 1.1}, "ext.throttle.max_row_frac"),
        (SuccessReplayConfig, {"capacity": 0}, "ext.success_replay.capacity"),
        (SuccessReplayConfig, {"max_gib": nan}, "ext.success_replay.max_gib"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_flag(part: type, values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        part(**values)
    assert caught.value.key == key


def test_the_defaults_are_those_of_the_paper() -> None:
    config = ReplayConfig()
    assert (config.max_age, config.ratio, config.alpha, config.eps) == (10, 0.5, 0.5, 1e-6)
    assert (config.warmup_steps, config.capacity, config.objective) == (20, 30_000, "behavior_clip")
    assert (config.beta, config.max_uses, config.rare_max_age) == (0, None, None)
