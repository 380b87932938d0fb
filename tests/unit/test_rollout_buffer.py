"""The rollout buffer: what is drawn how often, what leaves when, and that nothing stored changes or is lost."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from scored_groups import FOUR_OF_8, ONE_OF_8, ids, scored

from openrlhf_ext.config import ReplayConfig
from openrlhf_ext.rollout_buffer import EVICTIONS, RolloutBuffer, draw_indices, unit_weights
from openrlhf_ext.rollout_segment import ScoredGroup
from openrlhf_ext.stored_row import StoredRow
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup


def buffer(**options: object) -> RolloutBuffer:
    return RolloutBuffer(ReplayConfig(**options))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def stored(one: RolloutBuffer) -> list:
    """Everything stored, by drawing all of it."""
    return one.draw(len(one), rng())


def evictions(metrics: dict[str, float]) -> dict[str, float]:
    counts = {reason: metrics[f"rollout_buffer/num_evicted_{reason}"] for reason in EVICTIONS}
    return {reason: count for reason, count in counts.items() if count}


# -- chances --


def test_the_only_success_of_its_group_is_drawn_most_often() -> None:
    # Of a 1/8 group A is 2.474867 and -0.353552, of a 4/8 group +-0.935413; with alpha 1/2 the weights are 1.573171,
    # 0.594602 and 0.967168, and 1.573171 + 7 * 0.594602 + 8 * 0.967168 = 13.472734.
    weights = unit_weights([scored("a", 0, ONE_OF_8), scored("b", 0, FOUR_OF_8)], ReplayConfig())
    chances = weights / weights.sum()
    assert chances[[0, 1, 8]] == pytest.approx([0.116767, 0.044134, 0.071787], abs=1e-6)
    assert chances[0] + 7 * chances[1] + 8 * chances[8] == pytest.approx(1)
    assert weights[0] / weights[1] == pytest.approx(2.645748, abs=1e-5)  # sqrt(2.474867 / 0.353552)


def test_reward_deviation_ranks_the_other_way() -> None:
    # Unbiased: sqrt((7/8)^2 + 7 (1/8)^2) / 7) = sqrt(1/8) for 1 of 8, sqrt(8 * 0.25 / 7) for 4 of 8.
    one, four = scored("a", 0, ONE_OF_8), scored("b", 0, FOUR_OF_8)
    assert (one.sigma, four.sigma) == pytest.approx((0.353553, 0.534522), abs=1e-6)
    weights = unit_weights([one, four], ReplayConfig(priority="sigma", alpha=1.0))
    assert weights == pytest.approx([0.353554] * 8 + [0.534523] * 8, abs=1e-6)
    assert len(set(unit_weights([one, four], ReplayConfig(priority="uniform")).tolist())) == 1


def test_a_group_has_the_mean_priority_of_its_rollouts() -> None:
    groups = [scored("a", 0, (1, 0, 0), (2.0, -1.0, 0.0)), scored("b", 0, (1, 0), (4.0, -4.0))]
    weights = unit_weights(groups, ReplayConfig(granularity="group", alpha=1.0))
    assert weights == pytest.approx([1.0, 4.0], abs=1e-5)  # (2 + 1 + 0) / 3 and (4 + 4) / 2


@pytest.mark.parametrize("alpha", [0.0, 0.5, 10.0])
def test_a_rollout_of_advantage_zero_can_still_be_drawn(alpha: float) -> None:
    one = buffer(alpha=alpha)
    one.push([scored("a", 0, (0, 1), (0.0, 0.0))])
    assert len(stored(one)) == 2
    assert one.metrics(1)["rollout_buffer/draw_ess_frac"] == pytest.approx(1)


def test_draws_follow_the_priorities() -> None:
    one = buffer()
    one.push([scored("a", 0, ONE_OF_8), scored("b", 0, FOUR_OF_8)])
    expected = Counter({("a", 2.474867): 0.116767, ("a", -0.353552): 7 * 0.044134, ("b", 0.935413): 4 * 0.071787})
    expected["b", -0.935413] = 4 * 0.071787
    number, source = 10_000, rng()
    found = Counter(
        (drawn.group_id, round(drawn.advantage, 6)) for _ in range(number) for drawn in one.draw(1, source)
    )
    assert found.keys() == expected.keys()
    # Chi-square of 4 classes: mean 3, variance 6; 3 + 5 sqrt(6) = 15.2 is exceeded by chance once in 600 seeds.
    statistic = sum((found[key] - number * p) ** 2 / (number * p) for key, p in expected.items())
    assert statistic < 15.2


def test_drawing_several_is_successive_sampling_without_replacement() -> None:
    # Weights 1, 2, 3. {0, 1}: 1/6 2/5 + 2/6 1/4 = 0.15; {0, 2}: 1/6 3/5 + 3/6 1/3 = 0.266667; {1, 2}: 0.583333.
    number, source = 20_000, rng()
    weights = np.array([1, 2, 3], np.float32)
    found = Counter(tuple(draw_indices(weights, 2, source).tolist()) for _ in range(number))
    for pair, chance in (((0, 1), 0.15), ((0, 2), 0.266667), ((1, 2), 0.583333)):
        # Five standard deviations: at most 5 sqrt(0.25 / 20000) = 0.018.
        assert abs(found[pair] / number - chance) < 5 * (chance * (1 - chance) / number) ** 0.5


def test_no_rollout_is_drawn_twice_and_a_draw_beyond_the_content_takes_it_all() -> None:
    one = buffer(eviction="none")
    one.push([scored(str(i)) for i in range(10)])
    for count, expected in ((7, 7), (20, 20), (100, 20), (0, 0)):
        drawn = one.draw(count, rng(count))
        assert len({(rollout.group_id, rollout.rollout.reward) for rollout in drawn}) == len(drawn) == expected
    assert len(one) == 20  # a draw does not consume
    assert RolloutBuffer(ReplayConfig()).draw(3, rng()) == []


def test_the_same_generator_state_draws_the_same() -> None:
    one = buffer()
    one.push([scored(str(i), 0, ONE_OF_8) for i in range(20)])
    draws = [[(d.group_id, d.advantage) for d in one.draw(30, rng(seed))] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_groups_to_leave_out_are_never_drawn_and_stay() -> None:
    one = buffer()
    one.push([scored("a"), scored("b")])
    one.push([scored("c")])
    assert ids(one.draw(9, rng(), exclude={"a", "c", "nowhere"})) == ["b", "b"]
    assert len(one) == 6


def test_whole_groups_are_drawn_in_order() -> None:
    one = buffer(granularity="group")
    one.push([scored("a", 0, ONE_OF_8), scored("b", 0, FOUR_OF_8)])
    one.push([scored("c", 0, (0, 1, 1))])
    rewards = {"a": ONE_OF_8, "b": FOUR_OF_8, "c": [0, 1, 1]}
    for seed in range(5):
        drawn = one.draw(2, rng(seed))
        chosen = list(dict.fromkeys(d.group_id for d in drawn))
        assert len(chosen) == 2
        assert [d.rollout.reward for d in drawn] == [r for group_id in chosen for r in rewards[group_id]]


def test_draws_from_outsiders_and_stored_rollouts_together_follow_the_weights() -> None:
    # Stored: weights 1 (twice); outsiders: 2 and 4. Chances of a single draw: 1/8, 1/8, 2/8, 4/8.
    one = buffer(alpha=1.0)
    one.push([scored("a", 0, (0, 1), (-1.0, 1.0))])
    number, source = 8000, rng()
    outsiders: Counter[int] = Counter()
    for _ in range(number):
        chosen, drawn = one.draw_against(np.array([2, 4], np.float32), 1, source)
        assert len(chosen) + len(drawn) == 1
        outsiders.update(chosen.tolist())
    # Five standard deviations: 5 sqrt(p (1 - p) / 8000) = 0.024 and 0.028.
    assert outsiders[0] / number == pytest.approx(0.25, abs=0.024)
    assert outsiders[1] / number == pytest.approx(0.5, abs=0.028)


def test_correction_weights_are_those_of_per_over_their_largest() -> None:
    # Priorities 4 and 1, alpha 1/2: P = 2/3, 1/3. (2 P)^-1 = 0.75, 1.5; over 1.5: 0.5, 1. With beta 1/2: sqrt.
    for beta, expected in ((0.0, [1, 1]), (1.0, [0.5, 1]), (0.5, [0.5**0.5, 1])):
        one = buffer(beta=beta)
        one.push([scored("a", 0, (1, 0), (4.0, -1.0))])
        assert [d.weight for d in stored(one)] == pytest.approx(expected, abs=1e-5)


# -- what is stored --


def row(length: int, actions: list[int], *, gap: bool = False, info: dict[str, float], **fields) -> StoredRow:
    mask = torch.zeros(length - 1)
    mask[actions] = 1
    log_probs = -torch.rand(length - 1)
    engine = log_probs - 0.125 if gap else None
    defaults = {"truncated": False, "multimodal": None}
    return StoredRow.copy_of(
        torch.randint(99, (length,)), mask, log_probs, engine_log_probs=engine, info=info, **{**defaults, **fields}
    )


def group_of(rows: list[StoredRow], group_id: str = "g", version: int = 3) -> ScoredGroup:
    rollouts = tuple(Rollout(0.1 * i, float(i), 7 + i, one) for i, one in enumerate(rows))
    group = RolloutGroup(group_id, Prompt(f"prompt of {group_id}", "text", "label"), rollouts, version)
    return ScoredGroup.of(group, [0.1 * (i + 1) for i in range(len(rows))])


def content(one: StoredRow) -> tuple:
    gap = None if one.engine_gap is None else one.engine_gap.tolist()
    arrays = (one.tokens, one.action_mask, one.behavior_log_probs)
    return (*(array.tolist() for array in arrays), *(array.dtype for array in arrays), gap, one.truncated)


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("granularity", ["rollout", "group"])
def test_a_drawn_rollout_is_the_one_that_was_pushed_whatever_became_of_the_source(granularity: str, gap: bool) -> None:
    torch.manual_seed(0)
    rows = [
        row(6, [2, 3, 4], gap=gap, info={"reward": 0.5}),
        row(3, [1], gap=gap, info={}, truncated=True),
        row(9, [2, 3, 6, 7], gap=gap, info={"length": 4.0, "reward": 1.0}),  # two turns
    ]
    groups = [group_of(rows[:2], "a"), group_of(rows[2:], "b", version=2)]
    expected = [content(one) for one in rows]
    one = buffer(granularity=granularity)
    one.push(groups)
    for source in rows:
        for array in (source.tokens, source.action_mask, source.behavior_log_probs):
            array.fill(0)
    for group in groups:
        group.advantages[0] = 99.0
    for version in (4, 5):
        one.evict_stale(version)
        drawn = stored(one)
        assert [content(d.rollout.payload) for d in drawn] == expected
        assert [d.rollout.payload.info for d in drawn] == [{"reward": 0.5}, {}, {"length": 4.0, "reward": 1.0}]
        assert [(d.group_id, d.prompt.prompt_id, d.policy_version) for d in drawn] == [
            ("a", "prompt of a", 3),
            ("a", "prompt of a", 3),
            ("b", "prompt of b", 2),
        ]
        assert [d.advantage for d in drawn] == pytest.approx([0.1, 0.2, 0.1])
        assert [d.rollout.reward for d in drawn] == pytest.approx([0.0, 0.1, 0.0])
        assert [(d.rollout.accuracy, d.rollout.num_tokens) for d in drawn] == [(0, 7), (1, 8), (0, 7)]
        assert [d.weight for d in drawn] == [1.0] * 3


def test_images_come_back_and_count_once_for_the_rows_that_share_them() -> None:
    image = {"pixel_values": torch.ones(16, 1176)}
    plain, pictured = buffer(), buffer()
    for one, multimodal in ((plain, None), (pictured, image)):
        one.push([group_of([row(4, [2], info={}, multimodal=multimodal) for _ in range(2)] + [row(4, [2], info={})])])
    assert [d.rollout.payload.multimodal is image for d in stored(pictured)] == [True, True, False]
    # Besides the pixels, a number for each row says which image is its own.
    assert pictured.num_bytes == plain.num_bytes + 16 * 1176 * 4 + 3 * 4


def test_memory_goes_with_the_last_rollout_of_a_push() -> None:
    one = buffer(max_age=2)
    one.push([scored("old", 0), scored("young", 1)])
    tokens = weakref.ref(stored(one)[0].rollout.payload.tokens.base)
    one.evict_stale(3)
    gc.collect()
    assert ids(stored(one)) == ["young", "young"] and tokens() is not None and one.num_bytes > 0
    one.evict_stale(4)
    gc.collect()
    assert len(one) == 0 and tokens() is None and one.num_bytes == 0


def test_bookkeeping_takes_at_most_64_bytes_a_rollout_beside_its_tokens() -> None:
    groups = [scored(f"g{i:08d}", 0, ONE_OF_8) for i in range(64)]
    one = buffer(eviction="none")
    one.push(groups)  # NumPy's own caches
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(20):
            one.push(groups)
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    rollouts = 20 * 64 * 8
    per_rollout = allocated / rollouts - (6 * 4 + 5 + 3 * 4)  # tokens, mask, log-probabilities
    assert 30 < per_rollout <= 64
    assert one.bookkeeping_bytes / len(one) == pytest.approx(per_rollout, abs=12)  # array objects, 512 rows a push


@pytest.mark.parametrize("advantages", [(1.0,), (1.0, float("nan")), (1.0, -1.0, 0.0), (float("inf"), 0.0)])
def test_a_group_without_a_finite_advantage_for_each_rollout_is_refused(advantages: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"group a of 2 rollouts has advantages \[.*; replay needs a finite one"):
        scored("a", advantages=advantages)


# -- what leaves --


def test_a_rollout_of_exactly_the_age_limit_is_used_and_an_older_one_is_gone() -> None:
    one = buffer(max_age=10)
    one.push([scored("a", 5)])
    one.evict_stale(15)
    assert ids(stored(one)) == ["a", "a"]
    one.evict_stale(16)
    assert stored(one) == [] and evictions(one.metrics(16)) == {"age": 2}


def test_age_counts_from_generation_not_from_storage() -> None:
    # Pilot rollouts may be some steps old when they are stored.
    one = buffer(max_age=3)
    one.push([scored("new", 5), scored("pilot", 3)])
    one.evict_stale(7)
    assert ids(stored(one)) == ["new", "new"]


def test_the_oldest_leave_a_full_buffer_one_by_one() -> None:
    one = buffer(capacity=5)
    one.push([scored("a", 0), scored("b", 0)])
    one.push([scored("c", 1), scored("d", 1)])
    assert ids(stored(one)) == ["b", "c", "c", "d", "d"]
    assert evictions(one.metrics(1)) == {"capacity": 3}


def test_whole_groups_leave_a_full_buffer_of_groups() -> None:
    one = buffer(capacity=5, granularity="group")
    one.push([scored("a"), scored("b"), scored("c")])
    assert ids(stored(one)) == ["b", "b", "c", "c"]


@pytest.mark.parametrize(
    ("eviction", "left"), [("age", ["c", "c"]), ("capacity", ["b", "b", "c", "c"]), ("none", [*"aabbcc"])]
)
def test_eviction_is_by_age_or_by_capacity_or_not_at_all(eviction: str, left: list[str]) -> None:
    one = buffer(eviction=eviction, max_age=2, capacity=4)
    for version, group_id in enumerate("abc"):
        one.push([scored(group_id, version)])
    one.evict_stale(4)
    assert ids(stored(one)) == left


def test_beyond_the_memory_limit_the_oldest_push_goes() -> None:
    one = buffer(eviction="none")
    one.push([scored("a")])
    limited = buffer(eviction="none", max_gib=2 * one.num_bytes / 2**30)
    for group_id in "abc":
        limited.push([scored(group_id)])
    assert ids(stored(limited)) == ["b", "b", "c", "c"] and limited.num_bytes == 2 * one.num_bytes
    assert evictions(limited.metrics(0)) == {"bytes": 2}


def test_a_rollout_is_drawn_as_often_as_allowed_and_then_goes() -> None:
    one = buffer(max_uses=2)
    one.push([scored("a")])
    for version in (1, 2):
        one.evict_stale(version)
        assert len(stored(one)) == 2
    metrics = one.metrics(2)
    assert (metrics["rollout_buffer/uses_mean"], metrics["rollout_buffer/uses_max"]) == (2, 2)
    one.evict_stale(3)
    assert len(one) == 0 and evictions(one.metrics(3)) == {"uses": 2}


def test_rare_successes_stay_longer_and_hold_no_memory_of_others() -> None:
    # 1 of 8 is rare at a limit of 0.25, 4 of 8 is not.
    one = buffer(max_age=2, rare_max_age=5)
    groups = [scored("a", 0, ONE_OF_8), scored("b", 0, FOUR_OF_8)]
    one.push(groups)
    assert sorted(d.advantage for d in stored(one)) == pytest.approx(sorted(a for g in groups for a in g.advantages))
    before = one.num_bytes
    one.evict_stale(3)
    (left,) = stored(one)
    assert (left.group_id, left.rollout.reward) == ("a", 1.0)
    assert left.advantage == pytest.approx(2.474867, abs=1e-5)
    assert left.sigma == pytest.approx(0.353553, abs=1e-6)  # of the whole group
    assert one.num_bytes < before / 8
    one.evict_stale(5)
    assert len(one) == 1
    one.evict_stale(6)
    assert len(one) == 0 and evictions(one.metrics(6)) == {"age": 16}


# -- figures --


def test_metrics_tell_sizes_ages_uses_and_the_effective_sample_size_of_a_draw() -> None:
    one = buffer()
    one.push([scored("a", 1, (1, 0), (4.0, -1.0))])
    one.draw(1, rng())
    metrics = one.metrics(4)
    # Weights 2 and 1: (2 + 1)^2 / (2 (4 + 1)) = 0.9.
    assert metrics["rollout_buffer/draw_ess_frac"] == pytest.approx(0.9, abs=1e-5)
    assert metrics["rollout_buffer/num_rollouts"] == 2 and metrics["rollout_buffer/num_bytes"] == one.num_bytes
    assert [metrics[f"rollout_buffer/age_{name}"] for name in ("mean", "p50", "p90", "max")] == [3, 3, 3, 3]
    assert [metrics[f"rollout_buffer/uses_{name}"] for name in ("mean", "p50", "max")] == [0.5, 0.5, 1]
    assert one.metrics(4)["rollout_buffer/draw_ess_frac"] == 0


def test_an_empty_buffer_reports_zeros() -> None:
    one = buffer()
    one.push([])
    one.evict_stale(3)
    assert set(one.metrics(3).values()) == {0}


@pytest.mark.parametrize("granularity", ["rollout", "group"])
def test_whatever_happens_every_rollout_is_stored_or_evicted_for_a_counted_reason(granularity: str) -> None:
    choose, source = random.Random(0), rng()
    probe = buffer(granularity=granularity)
    probe.push([scored("x", 0, ONE_OF_8)])
    one = buffer(granularity=granularity, capacity=40, max_age=4, max_uses=2, max_gib=5.6 * probe.num_bytes / 2**30)
    pushed, evicted, seen = 0, 0, set()
    for version in range(1, 80):
        one.evict_stale(version)
        assert all(version - drawn.policy_version <= 4 for drawn in one.draw(choose.choice((0, 3, 9)), source))
        # Small groups first, which need more bytes a rollout and reach that limit before the other.
        sizes = [2 if version < 40 else 8] * choose.choice((0, 1, 1, 2, 20))
        groups = [scored(f"{version}-{i}", version, ONE_OF_8[:size]) for i, size in enumerate(sizes)]
        for group in groups:
            one.push([group])
        metrics = one.metrics(version)
        pushed, evicted = pushed + sum(sizes), evicted + sum(evictions(metrics).values())
        seen |= evictions(metrics).keys()
        assert pushed == evicted + len(one) and len(one) <= 40
    assert seen == set(EVICTIONS)


def test_a_lost_rollout_stops_the_run() -> None:
    one = buffer()
    one.push([scored("a")])
    one._segments.clear()
    with pytest.raises(RuntimeError, match="does not balance: 2 pushed, 0 stored"):
        one.metrics(1)


def test_advantages_are_stored_and_not_computed_from_rewards() -> None:
    # A length penalty, for one, is in the advantage and not in the verifier's reward.
    one = buffer()
    one.push([scored("a", advantages=(0.25, -0.75))])
    assert [d.advantage for d in stored(one)] == [0.25, -0.75]
