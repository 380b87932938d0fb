import numpy as np
import pytest
import torch

from openrlhf_ext.groups import effective_mask, group_metrics, has_spread, is_effective
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup


def make_group(rewards, accuracies=None, prompt_id="p"):
    rollouts = tuple(Rollout(r, a, 4, "x") for r, a in zip(rewards, accuracies or rewards, strict=True))
    return RolloutGroup("g", Prompt(prompt_id, "1 2 3=", "{}"), rollouts, policy_version=0)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_equal_rewards_never_count_as_spread_although_their_float_std_is_positive(reward, size):
    rewards = torch.full((size,), reward, dtype=torch.float32)
    assert not has_spread(rewards.tolist())


def test_the_trap_is_real_float32_std_of_equal_rewards_is_not_zero():
    # 0.1 * 8 in float32: std 8e-9, which OpenRLHF's std + 1e-9 turns into advantages near 0.9.
    assert torch.full((8,), 0.1).std() > 0


def test_c05_identical_non_binary_rewards_are_ineffective_and_mixed_ones_are_kept():
    groups = [[0.5] * 4, [0, 1, 0, 1], [0.3] * 4]
    assert effective_mask(groups) == [False, True, False]


def test_c07_length_shaped_rewards_of_an_all_wrong_group_do_not_make_it_effective_by_accuracy():
    shaped = make_group([0.0, 0.0, -0.5, -1.0], accuracies=[0.0] * 4)
    assert not is_effective(shaped, metric="accuracy")
    assert is_effective(shaped, metric="reward")


def test_the_tolerance_is_exclusive():
    assert not has_spread([0.0, 0.25], tolerance=0.25)
    assert has_spread([0.0, 0.25], tolerance=0.2)


def test_group_metrics_by_hand():
    # variances: 1 of 4 correct -> 1/4 * 3/4 = 0.1875; all correct 0; all format-only 0. Mean 0.0625.
    groups = [make_group([1, 0, 0, 0]), make_group([1] * 4), make_group([0.1] * 4, [0] * 4)]
    metrics = group_metrics(groups, tolerance=1e-6, suffix="generated")
    assert metrics["groups/effective_frac_generated"] == pytest.approx(1 / 3)
    assert metrics["groups/reward_variance_mean_generated"] == pytest.approx(0.0625)
    assert metrics["groups/all_correct_frac_generated"] == pytest.approx(1 / 3)
    assert metrics["groups/all_wrong_frac_generated"] == pytest.approx(1 / 3)
    assert metrics["groups/accuracy_mean_generated"] == pytest.approx(np.mean([0.25, 1, 0]))


def test_no_groups_give_a_count_and_no_nan():
    assert group_metrics([], tolerance=1e-6, suffix="trained") == {"groups/num_trained": 0}
