"""A run directory as an outcome."""

import json
from pathlib import Path

import pytest
from suite_folders import eval_line, train_line, write_lines

from openrlhf_ext.benchmark.outcomes import Evaluation, accuracy_at_seconds, first_at, read_outcome, smoothed


def curve(*accuracies: float) -> list[Evaluation]:
    """Evaluations every 100 rollouts, 1000 tokens, 2 s of training and 5 s in all."""
    return [
        Evaluation(i, 100 * i, 1000 * i, 2.0 * i, 10.0 + 5.0 * i, accuracy, None)
        for i, accuracy in enumerate(accuracies)
    ]


def test_a_running_mean_is_centered_and_takes_what_exists_at_the_ends() -> None:
    assert smoothed([1.0, 4.0, 1.0, 7.0]) == [2.5, 2.0, 4.0, 4.0]
    assert smoothed([1.0, 4.0, 1.0, 7.0], window=1) == [1.0, 4.0, 1.0, 7.0]
    assert smoothed([0.5]) == [0.5]


def test_a_target_is_reached_at_the_first_smoothed_evaluation_at_or_above_it() -> None:
    points = curve(0.0, 0.75, 0.0, 0.75, 0.75)  # smoothed: 0.375, 0.25, 0.5, 0.5, 0.75
    assert first_at(points, 0.5) == Evaluation(2, 200, 2000, 4.0, 20.0, 0.0, None)
    assert first_at(points, 0.5, window=1) == points[1]  # the single outlier


def test_what_is_learned_after_the_start_is_not_reached_at_the_start() -> None:
    points = curve(0.25, 0.75, 0.75)  # smoothed: 0.5, 0.583, 0.75
    assert first_at(points, 0.5) == points[1]
    assert first_at(points, 0.25) == points[0]


def test_a_target_that_is_not_reached_is_none() -> None:
    assert first_at(curve(0.1, 0.2, 0.3), 0.31, window=1) is None


def test_accuracy_at_equal_time_is_linear_and_never_beyond_the_last_evaluation() -> None:
    points = curve(0.0, 0.4)
    assert accuracy_at_seconds(points, 0.5) == pytest.approx(0.1)
    assert accuracy_at_seconds(points, 2.0) == pytest.approx(0.4)
    assert accuracy_at_seconds(points, 2.1) is None


def test_a_curve_has_what_was_spent_and_the_accuracy_then(tmp_path: Path) -> None:
    write_lines(tmp_path, [eval_line(2, 0.4), train_line(1), train_line(2), eval_line(0, 0.2)])
    assert read_outcome(tmp_path).curve == (
        Evaluation(0, 0, 0, 0.0, 10.0, 0.2, 0.01),
        Evaluation(2, 200, 2000, 4.0, 20.0, 0.4, 0.01),
    )


def test_figures_by_hand(tmp_path: Path) -> None:
    steps = [
        {
            "groups/effective_frac_generated": 0.1,
            "groups/effective_frac_trained": 1.0,
            "groups/reward_variance_mean_trained": 0.2,
            "step/num_gradient_rollouts": 150,
            "timing/generation": 1.5,
            "timing/ppo_train": 0.5,
            "train/actor_grad_norm": 3.0,
            "rollout/entropy_mean": 0.9,
            "rows/share_fresh": 1.0,
            "pool/num_active": 90,
        },
        {
            "groups/effective_frac_generated": 0.3,
            "groups/effective_frac_trained": 0.5,
            "groups/reward_variance_mean_trained": None,
            "step/num_gradient_rollouts": 130,
            "timing/step_total": 6.0,
            "timing/generation": 1.5,
            "timing/ppo_train": 4.5,
            "train/actor_grad_norm": 1.0,
            "rollout/entropy_mean": 0.7,
            "rows/share_fresh": 0.5,
            "rows/share_filled": 0.5,
            "pool/num_active": 60,
            "pool/num_deferred": 15,
            "pool/num_skipped": 5,
            "pool/num_excluded": 20,
        },
    ]
    last = {
        "eval/pass@1": 0.4,
        "eval/pass@32": 0.9,
        "eval/response_length_mean": 8.0,
        "eval/response_length_correct_mean": 7.0,
        "timing/eval": 5.0,
        "policy/distance": 1.5,
    }
    evals = [
        eval_line(0, 0.2, **{"eval/response_length_mean": 10.0, "eval/pass@1": 0.2, "timing/eval": 4.0}),
        eval_line(2, 0.4, **last),
    ]
    write_lines(tmp_path, [*evals, *(train_line(i + 1, **step) for i, step in enumerate(steps))])
    (tmp_path / "summary.json").write_text('{"startup_s": 30.0, "wall_s": 50.0}')
    ledger = {"generated": 200, "waiting": 20, "fates": {"trained_fresh": 150, "surplus": 30, "pilot_stale": 0}}
    (tmp_path / "ledger.json").write_text(json.dumps(ledger))
    prompts = [{"step": 0, "accuracy": {"a": 0.2, "b": 0.2}}, {"step": 2, "accuracy": {"a": 0.3, "b": 0.5}}]
    (tmp_path / "eval_prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))

    assert dict(read_outcome(tmp_path).figures) == pytest.approx(
        {
            "accuracy_gain": 0.2,  # of 0.1 and 0.3
            "accuracy_gain_se": 0.1,
            "pass@1": 0.4,
            "pass@32": 0.9,
            "length": 8.0,
            "length_correct": 7.0,
            "aes_base": 3.2,  # a fifth shorter, and three times an accuracy that doubled
            "effective_generated": 0.2,
            "effective_trained": 0.75,
            "reward_variance_trained": 0.2,
            "gradient_rollouts": 1.4,  # 280 rows of 200 rollouts
            "steps": 2,
            "rollouts": 200,
            "step_s": 4.0,
            "startup_s": 30.0,
            "eval_s": 9.0,
            "wall_s": 50.0,
            "distance": 1.5,
            "grad_norm": 2.0,
            "entropy": 0.7,
            "share_fresh": 0.75,
            "share_filled": 0.25,
            "share_replayed": 0.0,
            "prompts_left": 80,
            "phase/generation": 0.375,  # 3 of 8 s
            "phase/ppo_train": 0.625,
            "fate/trained_fresh": 0.75,
            "fate/surplus": 0.15,
            "fate/waiting": 0.1,
        }
    )


def test_entropy_is_of_the_last_tenth_of_the_steps(tmp_path: Path) -> None:
    steps = [train_line(step, **{"rollout/entropy_mean": float(step)}) for step in range(1, 21)]
    write_lines(tmp_path, [eval_line(0, 0.2), *steps, eval_line(20, 0.4)])
    assert read_outcome(tmp_path).figures["entropy"] == 19.5  # of steps 19 and 20


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    minimal = [
        {"kind": "eval", "step": step, "eval/accuracy": 0.2, "budget/rollouts_generated": 8 * step} for step in (0, 1)
    ]
    write_lines(tmp_path, minimal)
    outcome = read_outcome(tmp_path)
    assert not outcome.figures
    assert outcome.curve[1] == Evaluation(1, 8, None, None, None, 0.2, None)
    assert accuracy_at_seconds(outcome.curve, 1.0) is None


def test_nothing_is_relative_to_a_start_without_a_correct_answer(tmp_path: Path) -> None:
    length = {"eval/response_length_mean": 8.0}
    write_lines(tmp_path, [eval_line(0, 0.0, **length), eval_line(1, 0.4, **length)])
    assert "aes_base" not in read_outcome(tmp_path).figures


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no evaluation before the first rollout"),
        ([eval_line(1, 0.2)], "no evaluation before the first rollout"),
        ([eval_line(0, 0.2)], "no evaluation after the first rollout"),
        ([eval_line(0, 0.2), eval_line(1, 0.3), eval_line(1, 0.4)], "two eval lines for step 1"),
        ([eval_line(0, 0.2), eval_line(1, 0.3), train_line(1), train_line(1)], "two train lines for step 1"),
        ([eval_line(0, 0.2) | {"budget/rollouts_generated": None}], "step 0 has no budget/rollouts_generated"),
    ],
)
def test_a_run_that_cannot_be_compared_says_why(tmp_path: Path, lines: list[dict], message: str) -> None:
    write_lines(tmp_path, lines)
    with pytest.raises(ValueError, match=message):
        read_outcome(tmp_path)
