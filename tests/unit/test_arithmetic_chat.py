import importlib.util
import json
import random
from pathlib import Path

import pytest

from openrlhf_ext.rewards.arithmetic_chat import reward_func
from openrlhf_ext.tasks.arithmetic_chat import (
    COUNTDOWN,
    SUMS,
    TASKS,
    draw_problem,
    generate_problems,
    grade_response,
    write_dataset,
)
from openrlhf_ext.tasks.countdown import Puzzle

ROOT = Path(__file__).parents[2]
SUM = '{"sum": -7}'
PUZZLE = '{"numbers": [3, 9, 5], "target": 32}'


@pytest.mark.parametrize(
    ("response", "label", "accuracy", "format"),
    [
        ("-7", SUM, 1, 1),
        (" -7\n", SUM, 1, 1),
        ("7", SUM, 0, 1),
        ("-7.0", SUM, 0, 0),
        ("5 - 12", SUM, 0, 0),
        ("--7", SUM, 0, 0),
        ("- 7", SUM, 0, 0),
        ("-", SUM, 0, 0),
        ("", SUM, 0, 0),
        ("-7 because", SUM, 0, 0),
        ("-٧", SUM, 0, 0),  # a digit, but not an ASCII one
        ("9" * 10_000, SUM, 0, 0),
        ("9*3+5", PUZZLE, 1, 1),
        ("9*3-5", PUZZLE, 0, 1),
        ("32", PUZZLE, 0, 0),
    ],
)
def test_grades(response: str, label: str, accuracy: float, format: float) -> None:
    grade = grade_response(response, label)
    assert (grade.accuracy, grade.format) == (accuracy, format)


@pytest.mark.parametrize("label", ["", "7", "[1]", '{"sum": "7"}', '{"sum": 7.5}', "{}"])
def test_a_label_of_another_task_is_named(label: str) -> None:
    with pytest.raises(ValueError, match="label"):
        grade_response("7", label)


def test_the_reward_ends_at_the_end_of_the_turn() -> None:
    prompt = "<|im_start|>user\n5 - 12<|im_end|>\n<|im_start|>assistant\n"
    result = reward_func([f"{prompt}-7<|im_end|>\n"], [prompt], [SUM])
    assert result == {"rewards": 1.0, "scores": 1.0, "extra_logs": {"accuracy": 1.0, "format": 1.0}}


@pytest.mark.parametrize("datasource", TASKS)
def test_the_answer_that_is_trained_on_is_right_and_short(datasource: str) -> None:
    rng = random.Random(0)
    for held_out in (False, True):
        for _ in range(100):
            problem = draw_problem(rng, datasource, held_out)
            assert grade_response(problem.answer, problem.label).accuracy == 1.0
            assert problem.is_held_out == held_out
            assert len(problem.answer) <= 5
            assert [message["role"] for message in problem.messages] == ["system", "user"]


def test_countdown_puzzles_are_held_out_as_in_the_countdown_task() -> None:
    rng = random.Random(1)
    for held_out in (False, True):
        for _ in range(50):
            fields = json.loads(draw_problem(rng, COUNTDOWN, held_out).label)
            assert Puzzle(tuple(fields["numbers"]), fields["target"]).is_held_out == held_out


def test_training_and_evaluation_are_disjoint_for_all_seeds_and_halved_between_the_tasks() -> None:
    training = [problem for seed in range(3) for problem in generate_problems(301, seed, held_out=False)]
    evaluation = generate_problems(100, 5, held_out=True)
    assert not {problem.key for problem in training} & {problem.key for problem in evaluation}
    assert len({problem.key for problem in evaluation}) == 100
    assert sum(problem.datasource == SUMS for problem in evaluation) == 50
    assert sum(problem.datasource == COUNTDOWN for problem in generate_problems(301, 0, held_out=False)) == 150


def test_the_seed_decides_and_too_many_are_refused() -> None:
    assert generate_problems(20, 1, held_out=True) == generate_problems(20, 1, held_out=True)
    assert generate_problems(20, 1, held_out=True) != generate_problems(20, 2, held_out=True)
    with pytest.raises(ValueError, match="too few countdown-3 problems"):
        generate_problems(20_000, 0, held_out=True)


def test_files_are_written_once(tmp_path) -> None:
    assert write_dataset(tmp_path, train=6, eval=4, seed=0)
    assert not write_dataset(tmp_path, train=6, eval=4, seed=0)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and len({row["id"] for row in rows}) == 6
    assert {row["datasource"] for row in rows} == set(TASKS)
    assert rows[0]["input"][1]["role"] == "user"


def test_the_script_writes_the_tasks_that_are_asked_for(tmp_path, capsys) -> None:
    spec = importlib.util.spec_from_file_location("prepare_data", ROOT / "scripts" / "prepare_data.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    arguments = ["arithmetic_chat", "--tasks", SUMS, "--train", "8", "--eval", "4", "--out", str(tmp_path)]
    assert script.main(arguments) == 0
    assert "wrote 8 training and 4 evaluation prompts" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [row["datasource"] for row in rows] == [SUMS] * 4
