import math

import pytest
from test_groups import make_group

from openrlhf_ext.evaluation import (
    accuracy_by_prompt,
    accuracy_over_rollouts,
    aes,
    evaluate_groups,
    paired_gain,
    pass_at_k,
)


def test_pass_at_k_oracle():
    # n=16, c=2: 1 - C(14,k)/C(16,k)
    assert pass_at_k(16, 2, 1) == pytest.approx(0.125)
    assert pass_at_k(16, 2, 4) == pytest.approx(0.45)
    assert pass_at_k(16, 2, 8) == pytest.approx(0.766667, abs=1e-6)
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="at least 8 samples"):
        pass_at_k(4, 1, 8)


def test_accuracy_comes_from_the_verifier_not_from_the_shaped_reward():
    group = make_group([1.0, 0.1, 0.1, 0.0], accuracies=[1.0, 0.0, 0.0, 0.0])
    metrics = evaluate_groups([group], pass_at=(1, 4), correct_at=1.0)
    assert metrics["eval/accuracy"] == 0.25
    assert metrics["eval/pass@4"] == 1.0


def test_standard_error_is_over_prompts():
    # prompt means 0 and 1: sample std sqrt(1/2), over sqrt(2) prompts = 0.5
    metrics = evaluate_groups([make_group([0, 0]), make_group([1, 1])], pass_at=(1,), correct_at=1.0)
    assert metrics["eval/accuracy"] == 0.5
    assert metrics["eval/accuracy_se"] == pytest.approx(0.5)


def test_nothing_to_evaluate_gives_no_accuracy():
    assert evaluate_groups([], pass_at=(1,), correct_at=1.0) == {"eval/num_prompts": 0}


def test_paired_gain_is_over_common_prompts_and_leaves_out_their_difficulty():
    # Differences 0.25 and 0.5: mean 0.375, sample std 0.25 / sqrt(2), over sqrt(2) prompts = 0.125.
    gain, error = paired_gain({"easy": 0.5, "hard": 0.0, "gone": 1.0}, {"easy": 0.75, "hard": 0.5, "new": 0.0})
    assert gain == pytest.approx(0.375)
    assert error == pytest.approx(0.125)
    assert all(math.isnan(value) for value in paired_gain({}, {"new": 0.0}))


def test_accuracy_by_prompt_counts_correct_rollouts():
    groups = [make_group([1, 0, 0, 0], prompt_id="a"), make_group([0.1] * 4, [0] * 4, prompt_id="b")]
    assert accuracy_by_prompt(groups, correct_at=1.0) == {"a": 0.25, "b": 0.0}


def test_runs_are_compared_at_equal_rollouts_up_to_the_shortest() -> None:
    # Grid 0, 50, 100. The second is half way from 0.4 to 0.8 at 50, and at 100 half way from 0.8 (100) to itself.
    first, second = {0: 0.2, 100: 0.4}, {0: 0.4, 100: 0.8, 400: 0.9}
    found = accuracy_over_rollouts([first, second], 3)
    assert found.round(9).tolist() == [[0, 50, 100], [0.2, 0.3, 0.4], [0.4, 0.6, 0.8]]


@pytest.mark.parametrize(
    ("accuracy", "length", "expected"),
    [
        (0.55, 800, 0.5),  # 0.2 shorter + 3 x 0.1
        (0.45, 800, -0.3),  # 0.2 shorter - 5 x 0.1
        (0.5, 1200, -0.2),
        (0.5, 1000, 0.0),
    ],
)
def test_aes_rewards_shorter_and_better_and_punishes_worse_more(
    accuracy: float, length: float, expected: float
) -> None:
    assert aes(accuracy, length, 0.5, 1000) == pytest.approx(expected)


def test_aes_takes_other_constants() -> None:
    assert aes(0.45, 800, 0.5, 1000, alpha=0.1, beta=0.1, gamma=1.0) == pytest.approx(0.02 - 0.1)


@pytest.mark.parametrize("base", [(0.0, 1000), (0.5, 0.0)])
def test_aes_needs_a_base_to_be_relative_to(base: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="base with accuracy and length above 0"):
        aes(0.5, 1000, *base)
