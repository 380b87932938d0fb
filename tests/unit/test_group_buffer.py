"""The group buffer: its order, its bounds, and that no group is lost uncounted."""

from __future__ import annotations

import random

import pytest
import torch
from stored_groups import NUM_BYTES, prompt_ids, stored_group, stored_row

from openrlhf_ext.group_buffer import EVICTIONS, GroupBuffer
from openrlhf_ext.stored_row import copy_multimodal
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

GIB = 2**30


def buffer(capacity: int = 10, max_bytes: int = GIB, **limits: int) -> GroupBuffer:
    return GroupBuffer(capacity=capacity, max_bytes=max_bytes, **limits)


def evictions(metrics: dict[str, float]) -> dict[str, float]:
    """Reasons that occurred, with their counts."""
    counts = {reason: metrics[f"group_buffer/num_evicted_{reason}"] for reason in EVICTIONS}
    return {reason: count for reason, count in counts.items() if count}


def test_the_oldest_groups_leave_a_full_buffer_and_the_last_pushed_is_the_newest() -> None:
    one = buffer(capacity=3)
    one.push([stored_group(p) for p in "ab"])
    one.push([stored_group(p) for p in "cde"])
    assert prompt_ids(one.groups) == "cde" and len(one) == 3
    assert evictions(one.metrics(1)) == {"capacity": 2}


def test_the_same_prompt_of_the_same_version_takes_the_old_ones_place_as_the_newest() -> None:
    one = buffer()
    again = stored_group("a", rewards=(1, 1, 0))
    one.push([stored_group("a"), stored_group("b")])
    one.push([again])
    assert prompt_ids(one.groups) == "ba" and one.groups[1] is again
    assert evictions(one.metrics(1)) == {"same_key": 1}


def test_the_same_prompt_of_another_version_is_another_group() -> None:
    one = buffer()
    one.push([stored_group("a", version=0), stored_group("a", version=1)])
    assert [group.policy_version for group in one.groups] == [0, 1]


def test_the_oldest_groups_leave_when_the_bytes_are_too_many_and_not_before() -> None:
    one = buffer(max_bytes=2 * NUM_BYTES)
    one.push([stored_group("a"), stored_group("b")])
    assert one.metrics(1)["group_buffer/num_bytes"] == 2 * NUM_BYTES and len(one) == 2
    one.push([stored_group("c")])
    assert prompt_ids(one.groups) == "bc"
    metrics = one.metrics(1)
    assert evictions(metrics) == {"bytes": 1} and metrics["group_buffer/num_bytes"] == 2 * NUM_BYTES


def test_an_image_counts_once_for_the_rows_that_share_it() -> None:
    pixels = {"pixel_values": torch.zeros(16, 1176)}
    images = copy_multimodal([pixels, pixels])
    rollouts = tuple(Rollout(float(i), float(i), 3, stored_row(multimodal=one)) for i, one in enumerate(images))
    one = buffer()
    one.push([RolloutGroup("g", Prompt("a", "text", ""), rollouts, 0)])
    assert one.metrics(1)["group_buffer/num_bytes"] == NUM_BYTES + 16 * 1176 * 4


def test_c24_a_group_of_exactly_the_age_limit_is_used_and_an_older_one_is_gone() -> None:
    # Version 10, limit 3: ages 4, 3 and 1.
    one = buffer(max_age=3)
    one.push([stored_group("a", 6), stored_group("b", 7), stored_group("c", 9)])
    one.evict_stale(10)
    assert prompt_ids(one.groups) == "bc"
    metrics = one.metrics(10)
    assert evictions(metrics) == {"age": 1}
    assert (metrics["group_buffer/age_mean"], metrics["group_buffer/age_max"]) == (2.0, 3)


def test_a_group_is_handed_out_as_often_as_allowed_and_then_goes() -> None:
    one = buffer(max_uses=2)
    one.push([stored_group("a"), stored_group("b")])
    for version in (1, 2):
        one.evict_stale(version)
        assert one.use(one.groups[0]) is one.groups[0]
    metrics = one.metrics(2)
    assert prompt_ids(one.groups) == "ab"
    assert (metrics["group_buffer/uses_mean"], metrics["group_buffer/uses_max"]) == (1.0, 2)
    one.evict_stale(3)
    assert prompt_ids(one.groups) == "b" and evictions(one.metrics(3)) == {"uses": 1}


def test_without_limits_a_group_is_used_at_any_age_any_number_of_times() -> None:
    one = buffer()
    one.push([stored_group("a")])
    for version in range(1, 101):
        one.evict_stale(version)
        one.use(one.groups[0])
    assert one.metrics(100)["group_buffer/uses_max"] == 100


def test_whatever_happens_every_pushed_group_is_stored_or_evicted_for_a_counted_reason() -> None:
    rng = random.Random(0)
    one = buffer(capacity=9, max_bytes=8 * NUM_BYTES, max_age=4, max_uses=2)
    pushed, evicted, seen = 0, 0, set()
    for version in range(1, 60):
        one.evict_stale(version)
        for group in one.groups[-2:]:
            one.use(group)
        # Few prompts for many groups: some steps have one twice.
        new = [stored_group(rng.choice("abcdefgh"), version - 1) for _ in range(rng.choice((0, 1, 1, 2, 14)))]
        one.push(new)
        metrics = one.metrics(version)
        pushed, evicted = pushed + len(new), evicted + sum(evictions(metrics).values())
        seen |= evictions(metrics).keys()
        assert pushed == evicted + len(one) == evicted + metrics["group_buffer/num_groups"]
        assert metrics["group_buffer/num_bytes"] == NUM_BYTES * len(one)
        assert metrics["group_buffer/age_max"] <= 5
    assert seen == set(EVICTIONS)


def test_a_lost_group_stops_the_run() -> None:
    one = buffer()
    one.push([stored_group("a")])
    one._entries.clear()
    with pytest.raises(RuntimeError, match="does not balance: 1 pushed, 0 stored"):
        one.metrics(1)


def test_an_empty_buffer_reports_zeros() -> None:
    assert set(buffer().metrics(5).values()) == {0}


def test_a_group_too_large_for_the_buffer_leaves_the_others_alone() -> None:
    one = buffer(max_bytes=2 * NUM_BYTES)
    one.push([stored_group("a", 0), stored_group("b", 0)])
    one.metrics(1)
    one.push([stored_group("c", 1, (0, 1) * 10)])
    assert prompt_ids(one.groups) == "ab" and evictions(one.metrics(2)) == {"bytes": 1}
