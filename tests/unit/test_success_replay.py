"""Success replay (ARPO): failed groups get one old success of their own prompt, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from stored_groups import stored_group

from openrlhf_ext.config import SuccessReplayConfig
from openrlhf_ext.stored_row import StoredRow, num_bytes
from openrlhf_ext.success_replay import SuccessReplay
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup


def restore(prompt: Prompt, rollout: Rollout[StoredRow]) -> Rollout[str]:
    return Rollout(rollout.reward, rollout.accuracy, rollout.num_tokens, f"{prompt.prompt_id}: old success")


def success_replay(seed: int = 0, **options: object) -> SuccessReplay[str]:
    return SuccessReplay(SuccessReplayConfig(**options), restore, np.random.default_rng(seed))


def fresh(prompt_id: str, rewards: Sequence[float] = (0, 0, 0), accuracies: Sequence[float] | None = None):
    rollouts = [Rollout(r, a, 3, "new") for r, a in zip(rewards, accuracies or rewards, strict=True)]
    return RolloutGroup(f"g-{prompt_id}", Prompt(prompt_id, "text", ""), tuple(rollouts), 5)


def test_a_failed_group_gets_an_old_success_in_its_first_place() -> None:
    one = success_replay()
    one.store([stored_group("a", 3, (0, 1, 0))])
    failed = fresh("a")
    mixed = one.mix([fresh("b"), failed])
    assert mixed.groups[0].rewards() == [0, 0, 0]  # nothing is stored of b
    assert mixed.groups[1].rewards() == [1, 0, 0] and mixed.births == {"g-a": 3}
    assert [r.payload for r in mixed.groups[1].rollouts] == ["a: old success", "new", "new"]
    assert (mixed.groups[1].group_id, mixed.groups[1].policy_version) == ("g-a", 5)
    assert failed.rewards() == [0, 0, 0]


def test_a_group_with_a_success_is_left_alone() -> None:
    one = success_replay()
    one.store([stored_group("a", 3, (1, 1))])
    groups = [fresh("a", (0, 0, 1)), fresh("a", (1, 1, 1))]
    assert one.mix(groups).groups == groups


def test_failure_is_judged_by_accuracy_not_by_a_reward_for_the_format() -> None:
    one = success_replay()
    one.store([stored_group("a", 3, (1, 0))])
    shaped = fresh("a", (0.1, 0.0, 0.1), accuracies=(0, 0, 0))
    assert one.mix([shaped]).groups[0].rewards() == [1, 0, 0.1]
    assert not one.has_success(shaped) and one.has_success(fresh("a", (0.1, 1.0), accuracies=(0, 1)))


def test_the_successes_of_a_step_help_from_the_next_step_on() -> None:
    # The prompt is twice in one step, once failed: mix comes before store.
    one = success_replay()
    assert one.mix([fresh("a"), fresh("a", (0, 1))]).births == {}
    one.store([stored_group("a", 5, (0, 1))])
    assert one.mix([fresh("a")]).births == {"g-a": 5}


def test_only_successes_are_stored_and_of_each_prompt_the_newest() -> None:
    one = success_replay(capacity=2)
    for version in range(3):
        one.store([stored_group("a", version, (0, 1))])
    one.store([stored_group("b", 7, (1, 0, 0)), stored_group("c", 7, (0, 0))])
    assert len(one) == 3 and one.metrics()["success_replay/num_prompts"] == 2
    assert {one.mix([fresh("a")]).births["g-a"] for _ in range(50)} == {1, 2}
    assert one.mix([fresh("c")]).births == {}


def test_any_of_the_stored_successes_is_drawn_alike() -> None:
    one = success_replay()
    one.store([stored_group("a", version, (0, 1)) for version in range(8)])
    number = 4000
    found = Counter(one.mix([fresh("a")]).births["g-a"] for _ in range(number))
    # Chi-square of 8 classes: mean 7, variance 14; 7 + 5 sqrt(14) = 25.7 is exceeded by chance once in 1700 seeds.
    assert len(found) == 8 and sum((count - 500) ** 2 / 500 for count in found.values()) < 25.7


def test_beyond_the_memory_limit_the_oldest_of_all_go() -> None:
    size = num_bytes([stored_group("a").rollouts[0].payload])
    one = success_replay(max_gib=3 * size / 2**30)
    for version, prompt_id in enumerate("abacd"):
        one.store([stored_group(prompt_id, version, (0, 1))])
    # In order a0 b1 a2 c3 d4; the last three stay.
    assert one.metrics() == {
        "success_replay/num_rollouts": 3,
        "success_replay/num_prompts": 3,
        "success_replay/num_bytes": 3 * size,
    }
    assert one.mix([fresh(prompt_id) for prompt_id in "abcd"]).births == {"g-a": 2, "g-c": 3, "g-d": 4}
