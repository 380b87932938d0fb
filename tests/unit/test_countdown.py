import json
import random

import pytest

from openrlhf_ext.rewards.countdown import reward_func
from openrlhf_ext.tasks.countdown import MAX_RESPONSE_CHARS, Grade, grade, parse_label
from openrlhf_ext.tasks.countdown_data import (
    EVAL_MIX,
    TRAIN_MIXES,
    UNREACHABLE,
    draw_puzzle,
    generate_puzzles,
    is_solvable,
    write_dataset,
)

RIGHT = Grade(accuracy=1.0, format=1.0)
WRONG = Grade(accuracy=0.0, format=1.0)
MALFORMED = Grade(accuracy=0.0, format=0.0)


@pytest.mark.parametrize(
    ("response", "numbers", "target"),
    [
        ("9*3+5", (3, 9, 5), 32),
        ("5+3*9", (3, 9, 5), 32),  # precedence: not (5+3)*9 = 72
        ("(5+3)*9", (3, 9, 5), 72),
        ("((9)*3)+5", (3, 9, 5), 32),
        (" 9 * 3 + 5 ", (3, 9, 5), 32),
        ("3-9-5", (3, 9, 5), -11),  # left to right
        ("8/(3-8/3)", (8, 3, 8, 3), 24),  # 3 - 8/3 = 1/3 exactly; with floats 23.999...
        ("1/3*3", (1, 3, 3), 1),
        ("(1000-1)*1", (1000, 1, 1), 999),
    ],
)
def test_an_expression_that_hits_the_target_is_right(response, numbers, target):
    assert grade(response, numbers, target) == RIGHT


@pytest.mark.parametrize("response", ["9*3-5", "9/(3-3)", "3/5/9"])
def test_a_well_formed_expression_that_misses_has_format_only(response):
    numbers = (9, 3, 3) if "(3-3)" in response else (3, 9, 5)
    assert grade(response, numbers, 32) == WRONG


@pytest.mark.parametrize("response", ["9*3", "9*3+5+5", "9+9+5", "27+5", "93+5", "32", "9*3+5*1"])
def test_each_number_must_be_used_exactly_once(response):
    assert grade(response, (3, 9, 5), 32) == MALFORMED


def test_a_repeated_number_must_be_used_as_often_as_it_is_given():
    assert grade("3+3", (3, 3), 6) == RIGHT
    assert grade("3*2", (3, 3), 6) == MALFORMED


@pytest.mark.parametrize(
    "response",
    [
        "",
        " ",
        "9*3+5=32",
        "9*3+5 so 32",
        "9*3+5\n",
        "9*3+\t5",
        "9*3+5#",
        "9**3+5",
        "9//3+5",
        "9%3+5",
        "-5+9*3",
        "9*3+-5",
        "+9*3+5",
        "9*3+5.0",
        "9*3+05",
        "9*0x3+5",
        "9*3+5e0",
        "9*3+5j",
        "9_*3+5",
        "9*3+5_0",
        "9 3+5",
        "9(3)+5",
        "(9,3,5)",
        "()",
        "(9*3+5",
        "9*3+5)",
        "9*3+",
        "9*3+５",  # full-width digit five
        "9×3+5",
        "٩*3+5",  # Arabic-Indic digit nine
        "__import__('os')",
        "9*3+5 if 1 else 0",
        "True+9*3+5",
        "9 and 3*5",
        "9<3<5",
    ],
)
def test_anything_but_a_plain_expression_is_malformed(response):
    assert grade(response, (3, 9, 5), 32) == MALFORMED


@pytest.mark.parametrize("count", [50, 90, 99, 150, 199])
def test_deep_nesting_is_graded_or_refused_but_never_crashes(count):
    assert grade("(" * count + "5", (5,), 5) == MALFORMED
    assert grade("(" * (count // 2) + "5" + ")" * (count // 2), (5,), 5) in (RIGHT, MALFORMED)


def test_length_is_capped_before_parsing():
    filler = "+0" * 98
    assert grade("5" + filler, (5, *[0] * 98), 5) == RIGHT  # 197 characters
    assert grade("5" + " " * MAX_RESPONSE_CHARS, (5,), 5) == MALFORMED
    assert grade("(" * 1_000_000, (5,), 5) == MALFORMED


def test_huge_integers_stay_cheap():
    assert grade("9" * 200, (9,), 9) == MALFORMED
    huge = int("9" * 99)
    assert grade(f"{huge}*{huge}", (huge, huge), huge * huge) == RIGHT


def test_division_can_make_a_target_reachable():
    assert is_solvable((8, 3, 8, 3), 24)  # only 8/(3-8/3)
    assert is_solvable((2, 3), 6) and not is_solvable((2, 3), 7)
    assert is_solvable((1, 1, 1), 3) and not is_solvable((1, 1, 1), 4)
    assert not is_solvable((3, 9, 3), 27)


def test_every_generated_solution_is_graded_right():
    puzzles = generate_puzzles(200, 0, EVAL_MIX, held_out=True)
    assert len(puzzles) == 200
    assert [grade(p.solution, p.numbers, p.target) for p in puzzles] == [RIGHT] * 200


def test_evaluation_has_no_unreachable_puzzle_and_unreachable_ones_are_so():
    evaluation = generate_puzzles(200, 0, EVAL_MIX, held_out=True)
    assert all(is_solvable(p.numbers, p.target) for p in evaluation)
    training = generate_puzzles(2000, 0, TRAIN_MIXES["even"])
    unreachable = [p for p in training if p.datasource == UNREACHABLE]
    assert len(unreachable) == 200  # a tenth
    assert not any(is_solvable(p.numbers, p.target) for p in unreachable)


def test_puzzles_are_distinct_up_to_order_and_disjoint_for_any_two_seeds():
    training = {p.key for p in generate_puzzles(2000, 0, TRAIN_MIXES["even"])}
    evaluation = {p.key for p in generate_puzzles(200, 17, EVAL_MIX, held_out=True)}
    assert (len(training), len(evaluation)) == (2000, 200)
    assert not training & evaluation


def test_the_seed_decides_the_puzzles():
    assert generate_puzzles(100, 3, TRAIN_MIXES["even"]) == generate_puzzles(100, 3, TRAIN_MIXES["even"])
    assert generate_puzzles(100, 3, TRAIN_MIXES["even"]) != generate_puzzles(100, 4, TRAIN_MIXES["even"])


def test_drawn_targets_stay_in_range():
    rng = random.Random(0)
    puzzles = [draw_puzzle(rng, datasource) for datasource in TRAIN_MIXES["even"] for _ in range(300)]
    assert all(1 <= p.target <= 99 for p in puzzles)
    assert max(len(p.solution) for p in puzzles) <= 16


def test_more_puzzles_than_exist_is_an_error_that_says_how_many_there_are():
    with pytest.raises(
        ValueError, match=r"fewer than 1800 distinct countdown-2 puzzles \(found \d+\). Ask for at most"
    ):
        generate_puzzles(9000, 0, TRAIN_MIXES["even"])


def test_shares_must_sum_to_one():
    with pytest.raises(ValueError, match="sum to 1"):
        generate_puzzles(10, 0, {"countdown-2": 0.5})


def test_files_hold_rows_that_grade_and_are_left_alone_when_unchanged(tmp_path):
    assert write_dataset(tmp_path, train=50, eval=20, seed=0)
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows[:2]] == ["countdown-eval-00000", "countdown-eval-00001"]
    assert len(rows) == 20 and {row["datasource"] for row in rows} == set(EVAL_MIX)
    for row in rows:
        puzzle = parse_label(row["label"])
        assert row["input"] == puzzle.prompt
    before = (tmp_path / "train.jsonl").stat().st_mtime_ns
    assert not write_dataset(tmp_path, train=50, eval=20, seed=0)
    assert (tmp_path / "train.jsonl").stat().st_mtime_ns == before
    assert write_dataset(tmp_path, train=50, eval=20, seed=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "train.jsonl"]


LABEL = '{"numbers": [3, 9, 5], "target": 32}'
PROMPT = "3 9 5 32="


@pytest.mark.parametrize(
    ("response", "reward", "accuracy", "format_"),
    [
        ("9*3+5<eos>", 1.0, 1.0, 1.0),
        ("9*3+5", 1.0, 1.0, 1.0),  # cut by the length limit
        ("9*3+5<eos><pad><pad>", 1.0, 1.0, 1.0),
        ("9*3+5<eos>junk", 1.0, 1.0, 1.0),
        ("9*3-5<eos>", 0.0, 0.0, 1.0),
        ("9*3+5<unk><eos>", 0.0, 0.0, 0.0),
        ("<eos>9*3+5", 0.0, 0.0, 0.0),
    ],
)
def test_the_reward_file_grades_the_response_up_to_the_end_token(response, reward, accuracy, format_):
    assert reward_func([PROMPT + response], [PROMPT], [LABEL]) == {
        "rewards": reward,
        "scores": accuracy,
        "extra_logs": {"accuracy": accuracy, "format": format_},
    }


@pytest.mark.parametrize(
    "label",
    [
        "",
        "32",
        "null",
        "[3]",
        '{"numbers": [3]}',
        '{"numbers": [], "target": 1}',
        '{"numbers": [true], "target": 1}',
        None,
    ],
)
def test_a_malformed_label_is_named(label):
    with pytest.raises(ValueError, match="Countdown label .* is not a JSON string") as error:
        reward_func([PROMPT], [PROMPT], [label])
    assert repr(label) in str(error.value)


def test_a_query_without_its_prompt_is_refused():
    with pytest.raises(ValueError, match="does not start with its prompt"):
        reward_func(["9 5 32=9*3+5"], [PROMPT], [LABEL])


def test_the_reward_file_takes_one_rollout_at_a_time():
    with pytest.raises(ValueError):
        reward_func([PROMPT, PROMPT], [PROMPT, PROMPT], [LABEL, LABEL])
