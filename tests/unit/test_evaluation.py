import pytest
from test_groups import make_group

from openrlhf_ext.evaluation import evaluate_groups, pass_at_k


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
