"""Which stored groups fill which slots: hand-worked, and the laws of a filled batch over many steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from stored_groups import prompt_ids, stored_group

from openrlhf_ext.config import FillConfig, GroupsConfig
from openrlhf_ext.filling import FilledStep, GroupFilling, choose_groups
from openrlhf_ext.group_buffer import GroupBuffer, StoredGroup
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

MIXED, RIGHT, WRONG = (0, 1), (1, 1), (0, 0)


# -- the choice --


@pytest.mark.parametrize(
    ("versions", "num_slots", "options", "chosen"),
    [
        # Newest first; groups of one step by order of storage.
        ([0, 0, 1, 2, 2], 3, {}, [4, 3, 2]),
        ([0, 1], 5, {}, [1, 0]),
        ([0, 1], 0, {}, []),
        ([], 3, {}, []),
        # At version 3, age 3 - 2 = 1 is too young for 2, and of 0, 0, 1 the last is the newest.
        ([0, 0, 1, 2, 2], 2, {"min_age": 2}, [2, 1]),
        ([0, 0, 1, 2, 2], 9, {"min_age": 3}, [1, 0]),
        ([2], 1, {"min_age": 2}, []),
        # The smallest divergence first, whatever the age.
        ([0, 1, 2], 2, {"divergence": [0.1, 0.3, 0.2]}, [0, 2]),
        # 0.2 three times: newest first.
        ([0, 1, 2, 2], 3, {"divergence": [0.2, 0.2, 0.5, 0.2]}, [3, 1, 0]),
        # The closest one, of version 2, is too young.
        ([0, 1, 2], 1, {"divergence": [0.3, 0.2, 0.1], "min_age": 2}, [1]),
    ],
)
def test_stored_groups_are_chosen_as_worked_by_hand(versions, num_slots, options, chosen) -> None:
    assert choose_groups(versions, num_slots, version=3, **options) == chosen


# -- a step --


def filling(
    config: FillConfig | None = None,
    *,
    num_groups: int = 4,
    ineffective: str = "keep",
    capacity: int = 4,
    metric: str = "reward",
    **options,
) -> GroupFilling:
    def never(groups: Sequence[StoredGroup]) -> list[float]:
        raise AssertionError("a divergence was asked for")

    limits = {key: options.pop(key) for key in ("max_age", "max_uses") if key in options}
    buffer = GroupBuffer(capacity=capacity, max_bytes=2**30, **limits)
    groups = GroupsConfig(ineffective=ineffective, metric=metric)
    config = config or FillConfig()
    return GroupFilling(config, groups, buffer, num_groups=num_groups, divergence=options.pop("divergence", never))


def parts(step: FilledStep) -> tuple[str, str, str, str]:
    return tuple(prompt_ids(groups) for groups in (step.fresh, step.replayed, step.replaced, step.dropped))


BATCH = [stored_group("a", 5, RIGHT), stored_group("b", 5), stored_group("c", 5, WRONG), stored_group("d", 5, RIGHT)]


def test_zero_variance_slots_take_the_newest_stored_groups_and_informative_groups_stay() -> None:
    one = filling()
    one.store([stored_group(p, 4, group_id=p) for p in "xyzw"])
    assert parts(one.fill(BATCH, 5)) == ("b", "zyx", "acd", "")


@pytest.mark.parametrize(
    ("ineffective", "expected"), [("keep", ("bcd", "x", "a", "")), ("drop", ("b", "x", "a", "cd"))]
)
def test_what_the_buffer_cannot_fill_is_kept_or_dropped(ineffective: str, expected: tuple[str, ...]) -> None:
    one = filling(ineffective=ineffective)
    one.store([stored_group("x", 4)])
    assert parts(one.fill(BATCH, 5)) == expected


def test_a_prompt_whose_request_failed_leaves_a_slot_too() -> None:
    # Four slots, two groups came back: b stays; a, and the two missing ones, are filled.
    one = filling()
    one.store([stored_group(p, 4, group_id=p) for p in "xyz"])
    assert parts(one.fill(BATCH[:2], 5)) == ("b", "zyx", "a", "")


@pytest.mark.parametrize(
    ("max_frac", "share", "num_filled"),
    # Three of four slots are without an informative group: at most max_frac of the four, then the share of those.
    [(1.0, 1.0, 3), (0.5, 1.0, 2), (0.25, 1.0, 1), (0.2, 1.0, 0), (1.0, 0.34, 1), (1.0, 0.1, 0), (0.5, 0.6, 1)],
)
def test_no_more_slots_are_filled_than_the_cap_and_the_throttle_allow(max_frac, share, num_filled) -> None:
    one = filling(FillConfig(max_frac=max_frac))
    one.store([stored_group(p, 4, group_id=p) for p in "xyzw"])
    assert parts(one.fill(BATCH, 5, share=share)) == (
        "b" + "acd"[num_filled:],
        "zyx"[:num_filled],
        "acd"[:num_filled],
        "",
    )


def test_a_batch_of_informative_groups_is_left_alone() -> None:
    one = filling(FillConfig(choose="kl"))
    one.store([stored_group("x", 4)])
    assert parts(one.fill([stored_group(p, 5) for p in "abcd"], 5)) == ("abcd", "", "", "")
    assert one.buffer.metrics(5)["group_buffer/uses_max"] == 0


def test_a_group_is_used_from_the_next_step_on() -> None:
    one = filling()
    batch = [stored_group("a", 5), stored_group("b", 5, RIGHT)]
    one.store(batch[:1])  # earlier than the trainer does
    assert one.fill(batch, 5).replayed == []
    assert prompt_ids(one.fill(batch, 6).replayed) == "a"


def test_too_old_and_used_up_groups_are_gone_before_the_choice() -> None:
    one = filling(max_age=2, max_uses=1)
    one.store([stored_group("x", 2), stored_group("y", 3)])
    assert prompt_ids(one.fill(BATCH, 5).replayed) == "y"
    assert one.fill(BATCH, 5).replayed == []


def test_what_is_informative_is_judged_by_the_configured_metric() -> None:
    rollouts = tuple(Rollout(reward, 1.0, 3, "text") for reward in (0.9, 1.0))  # rewards differ, accuracies do not
    shaped = RolloutGroup("g", Prompt("a", "text", ""), rollouts, 5)
    for metric, stays in (("reward", True), ("accuracy", False)):
        one = filling(metric=metric, num_groups=1)
        one.store([stored_group("x", 4)])
        assert (one.fill([shaped], 5).replayed == []) is stays
        assert one.is_stored(shaped) is stays


@pytest.mark.parametrize(("store", "stored"), [("effective", "b"), ("all", "abcd")])
def test_informative_groups_are_stored_or_all_of_them(store: str, stored: str) -> None:
    one = filling(FillConfig(store=store))
    assert prompt_ids([group for group in BATCH if one.is_stored(group)]) == stored


def test_groups_are_stored_in_the_order_of_their_requests() -> None:
    # Replaced groups come after the trained ones; the newest has to be a matter of chance, not of variance.
    one = filling(FillConfig(store="all"))
    one.store([stored_group(p, 4, group_id=f"g{i:08d}") for p, i in (("b", 10), ("d", 12), ("a", 9), ("c", 11))])
    assert prompt_ids(one.buffer.groups) == "abcd"


def test_the_divergence_is_asked_for_once_and_only_when_there_is_something_to_choose() -> None:
    asked: list[str] = []

    def divergence(groups: Sequence[StoredGroup]) -> list[float]:
        asked.append(prompt_ids(groups))
        return [0.1, 0.3, 0.2]

    one = filling(FillConfig(choose="kl"), divergence=divergence, num_groups=3)
    assert one.fill(BATCH[:3], 5).replayed == [] and asked == []  # nothing stored
    one.store([stored_group(p, 4, group_id=p) for p in "xyz"])
    assert one.fill([stored_group(p, 5) for p in "abc"], 5).replayed == [] and asked == []  # nothing to fill
    assert prompt_ids(one.fill(BATCH[:3], 5).replayed) == "xz" and asked == ["xyz"]


# -- many steps --


def run(one: GroupFilling, num_groups: int, num_steps: int, share: float) -> list[FilledStep]:
    """Steps in the trainer's order: fill, then store the fresh groups; each group is informative with ``share``."""
    rng = random.Random(0)
    steps = []
    for version in range(num_steps):
        rewards = [MIXED if rng.random() < share else rng.choice((RIGHT, WRONG)) for _ in range(num_groups)]
        groups = [stored_group(f"{i}", version, r, group_id=f"{version:03d}{i}") for i, r in enumerate(rewards)]
        step = one.fill(groups, version)
        one.store([group for group in groups if one.is_stored(group)])
        steps.append(step)
        one.buffer.metrics(version + 1)  # raises if a group is lost
    return steps


def test_once_the_buffer_holds_enough_every_trained_group_is_informative_and_the_batch_is_full() -> None:
    steps = run(filling(num_groups=8, capacity=8), 8, 40, share=0.4)
    for version, step in enumerate(steps):
        assert len(step.fresh) + len(step.replayed) == 8
        # A replayed group is a stored one of an earlier step, and no group comes twice.
        assert all(group.policy_version < version and group.rewards() == [0, 1] for group in step.replayed)
        assert len({group.group_id for group in [*step.fresh, *step.replayed]}) == 8
        if version >= 4:
            assert all(group.rewards() == [0, 1] for group in step.fresh)
    assert sum(len(step.replayed) for step in steps) > 100


def test_replayed_groups_are_not_stored_again() -> None:
    # Informative groups in the first step only: whatever is trained later, the buffer ages.
    one = filling(num_groups=2, capacity=4)
    one.store([stored_group("x", 0), stored_group("y", 0)])
    for version in range(1, 6):
        step = one.fill([stored_group("a", version, RIGHT), stored_group("b", version, WRONG)], version)
        assert prompt_ids(step.replayed) == "yx"
        one.store([group for group in step.fresh if one.is_stored(group)])
    metrics = one.buffer.metrics(6)
    assert (metrics["group_buffer/num_groups"], metrics["group_buffer/age_max"]) == (2, 6)


def test_stale_filling_takes_the_newest_of_those_old_enough() -> None:
    one = filling(FillConfig(min_age=3), num_groups=2, capacity=100)
    for version, step in enumerate(run(one, 2, 12, share=0.5)):
        ages = [version - group.policy_version for group in step.replayed]
        assert ages == sorted(ages) and min(ages, default=math.inf) >= 3
