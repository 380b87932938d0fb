"""Prompt files made of what others have published: Countdown in words, and mathematics."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf_ext.prompts import read_prompts
from openrlhf_ext.rewards.countdown_words import reward_func
from openrlhf_ext.tasks.countdown import Puzzle
from openrlhf_ext.tasks.countdown_words import prompt_of
from openrlhf_ext.tasks.sources import read_rows

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
needs_math_verify = pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs math-verify")
needs_pyarrow = pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="needs pyarrow")


@pytest.fixture
def prepare() -> Callable[..., int]:
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *arguments: module.main([str(word) for word in arguments])


@pytest.fixture
def refused(prepare, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def message(*arguments: object) -> str:
        with pytest.raises(SystemExit) as stop:
            prepare(*arguments)
        assert stop.value.code == 2
        return capsys.readouterr().err

    return message


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def puzzles(count: int) -> list[dict]:
    return [{"target": 10 + index, "nums": [index, 3, 5, 7][: 3 + index % 2]} for index in range(1, count + 1)]


def problems(count: int) -> list[dict]:
    return [{"problem": f"What is {n} + 1?", "solution": "Count.", "answer": str(n + 1)} for n in range(count)]


# Countdown in words


@pytest.mark.parametrize(
    ("response", "reward", "score"),
    [
        ("<think>9 * 3 = 27</think> <answer>9 * 3 + 5</answer>", 1.0, 1.0),
        ("<answer>9 + 3 + 5</answer> no, <answer>(9*3)+5</answer><|im_end|>", 1.0, 1.0),  # the last one counts
        ("<answer>9 + 3 + 5</answer>", 0.1, 0.0),
        ("<answer>9 * 3 + 5 = 32</answer>", 0.1, 0.0),
        ("<answer>32</answer>", 0.1, 0.0),
        ("<answer>9 / (3 - 3) + 5</answer>", 0.1, 0.0),
        ("<answer></answer>", 0.1, 0.0),
        ("9 * 3 + 5", 0.0, 0.0),
        ("<answer>9 * 3 + 5", 0.0, 0.0),
        ("9 * 3 + 5 <|im_end|><answer>9 * 3 + 5</answer>", 0.0, 0.0),  # after the end
    ],
)
def test_an_answer_in_tags_is_graded(response: str, reward: float, score: float) -> None:
    puzzle = Puzzle((3, 9, 5), 32)
    prompt = prompt_of(puzzle)  # which shows an answer in tags, too
    graded = reward_func([prompt + response], [prompt], [puzzle.label])
    assert (graded["rewards"], graded["scores"]) == (reward, score)
    assert graded["extra_logs"] == {"accuracy": score, "format": float(reward > 0)}


def test_a_prompt_names_the_numbers_and_the_target() -> None:
    assert prompt_of(Puzzle((3, 9, 5), 32)).startswith("Make 32 out of the numbers 3, 9, 5. ")


def test_countdown_in_words_is_split_by_puzzle_and_written_once(prepare, tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "all.jsonl", [*puzzles(100), *puzzles(100)])
    arguments = ("countdown_words", "--source", source, "--out", tmp_path, "--train", 60, "--eval", 10)
    assert prepare(*arguments) == 0
    train, evaluation = (
        read_prompts(tmp_path / f"{split}.jsonl", "input", "label", "refuse").rows for split in ("train", "eval")
    )
    assert (len(train), len(evaluation)) == (60, 10)
    assert len({row.input for row in [*train, *evaluation]}) == 70
    assert {row.datasource for row in train} == {"countdown-3", "countdown-4"}
    label = json.loads(train[0].label)
    assert f"Make {label['target']} out of the numbers {', '.join(map(str, label['numbers']))}." in train[0].input
    prepare(*arguments)
    assert "reused 60 training and 10 evaluation prompts" in capsys.readouterr().out


def test_no_seed_trains_on_a_puzzle_that_another_evaluates_on(prepare, tmp_path: Path) -> None:
    source = write(tmp_path / "all.jsonl", puzzles(100))
    for seed in (1, 2):
        arguments = ("--source", source, "--train", 60, "--eval", 10, "--seed", seed)
        prepare("countdown_words", *arguments, "--out", tmp_path / str(seed))
    first, second = (rows_of(tmp_path / f"{seed}" / "train.jsonl") for seed in (1, 2))
    assert [row["input"] for row in first] != [row["input"] for row in second]
    evaluated = {row["label"] for seed in (1, 2) for row in rows_of(tmp_path / f"{seed}" / "eval.jsonl")}
    assert not evaluated & {row["label"] for row in [*first, *second]}


def test_too_few_puzzles_and_other_columns_write_nothing(refused, tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", puzzles(9))
    other = write(tmp_path / "other.jsonl", problems(1))
    out = tmp_path / "out"
    assert "different puzzles for --train 2000; lower it" in refused("countdown_words", "--source", few, "--out", out)
    message = refused("countdown_words", "--source", other, "--out", out)
    assert f"{other}, row 1 is no puzzle: it needs the columns `nums`" in message
    assert not out.exists()


# Mathematics


@needs_math_verify
def test_problems_become_prompts_whose_labels_are_the_answers(prepare, tmp_path: Path) -> None:
    source = write(tmp_path / "some.jsonl", problems(12))
    assert prepare("deepscaler", "--source", source, "--eval", 2, "--out", tmp_path) == 0
    train = read_prompts(tmp_path / "train.jsonl", "input", "label", "refuse").rows
    assert len(train) == 10 and {row.datasource for row in train} == {"deepscaler"}
    for row in train:
        problem, instruction = row.input.split("\n\n")
        assert problem == f"What is {int(row.label) - 1} + 1?"
        assert instruction == "Please reason step by step, and put your final answer within \\boxed{}."
    assert not {row.label for row in train} & {row["label"] for row in rows_of(tmp_path / "eval.jsonl")}


@needs_math_verify
def test_what_is_evaluated_on_or_cannot_be_graded_is_left_out_and_counted(prepare, tmp_path: Path, capsys) -> None:
    rows = [
        *problems(6),
        {"problem": "  what IS 2 +  1? ", "answer": "3"},  # as row 3 but for case and spaces
        {"problem": "", "answer": "4"},
        {"problem": "Prove it.", "answer": None},
        {"problem": "Prove that.", "answer": "Since " * 200},
    ]
    evaluation = write(tmp_path / "five.jsonl", [{"question": "WHAT is 5 + 1?", "answer": "so\n#### 6"}])
    source = write(tmp_path / "rows.jsonl", rows)
    prepare("math", "--source", source, "--eval-set", f"five={evaluation}", "--out", tmp_path)
    assert sorted(row["label"] for row in rows_of(tmp_path / "train.jsonl")) == ["1", "2", "3", "4", "5"]
    (row,) = rows_of(tmp_path / "eval.jsonl")
    assert (row["label"], row["datasource"]) == ("6", "five")
    printed = capsys.readouterr().out
    for line in (
        "1 rows: repeated",
        "1 rows: in the evaluation",
        "1 rows: without a problem",
        "2 rows: without a short",
    ):
        assert f"left out {line}" in printed


@needs_math_verify
def test_a_system_message_makes_chats(prepare, tmp_path: Path) -> None:
    source = write(tmp_path / "some.jsonl", problems(3))
    prepare("math", "--source", source, "--eval", 1, "--out", tmp_path, "--system", "", "--template", "{input} Go.")
    row = read_prompts(tmp_path / "train.jsonl", "input", "label", "refuse", apply_chat_template=True).rows[0]
    user = {"role": "user", "content": f"What is {int(row.label) - 1} + 1? Go."}
    assert row.input == [{"role": "system", "content": ""}, user]


@needs_math_verify
def test_the_same_seed_gives_the_same_files_and_ids_are_unique(prepare, tmp_path: Path, capsys) -> None:
    sources = [write(tmp_path / "one.jsonl", problems(20)[:10]), write(tmp_path / "two.jsonl", problems(20)[10:])]
    arguments = ("math", "--source", *sources, "--eval", 4, "--train", 12, "--out", tmp_path)
    prepare(*arguments)
    prepare(*arguments)
    assert "reused 12 training and 4 evaluation" in capsys.readouterr().out
    assert len({row["id"] for row in rows_of(tmp_path / "train.jsonl")}) == 12


@needs_math_verify
@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (
            [{"text": "a", "answer": "1"}],
            (),
            "has no column input or problem or question or prompt, where the problem",
        ),
        ([{"problem": "a", "reply": "1"}], (), "where the answer would be"),
        (
            [{"problem": "a", "answer": None}],
            (),
            "none of 1 rows has a problem in 'problem' and an answer in 'answer'",
        ),
        ([], (), "has no rows"),
        (problems(3), ("--eval", 3), "3 usable problems, of which --eval 3 leaves none"),
        (problems(3), ("--eval", 1, "--train", 3), "2 problems to train on, fewer than --train 3"),
        (problems(3), ("--eval-set", "no-name.jsonl"), "--eval-set must be NAME=SOURCE"),
        (problems(3), ("--eval-set", "a=x.jsonl", "--eval-set", "a=y.jsonl"), "with different names"),
        (problems(3), ("--template", "Solve."), "has no {input}"),
    ],
)
def test_what_cannot_work_writes_nothing(refused, tmp_path: Path, rows: list, flags: tuple, message: str) -> None:
    source = write(tmp_path / "rows.jsonl", rows)
    assert message in refused("math", "--source", source, "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_mathematics_without_math_verify_says_what_to_install(refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install math-verify" in refused("gsm8k", "--source", "x.jsonl", "--out", tmp_path / "out")


# Files and the hub


@needs_pyarrow
def test_rows_are_the_same_from_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    rows = [{"nums": [1, 2, 3], "target": 6, "more": "left out"}, {"nums": [4], "target": 4, "more": "too"}]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet"):
        assert read_rows(str(tmp_path / name), ["nums", "target", "absent"]) == [
            {"nums": [1, 2, 3], "target": 6},
            {"nums": [4], "target": 4},
        ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.json", '{"a": 1}\n{"a": 2}\n', r"a\.json is not valid JSON .*; for one object a line call it \.jsonl"),
        ("a.json", '{"a": 1}', r"a\.json must hold one list of objects"),
        ("a.parquet", "PAR1 and no more", r"a\.parquet is no whole parquet file"),
        ("a.csv", "a,b", r"a\.csv is no \.jsonl, \.json, \.parquet file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_rows(str(tmp_path / name), ["a"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.jsonl \(No such file or directory\); it is X; check"):
        read_rows(str(tmp_path / "none.jsonl"), ["a"], "it is X; ")


class NoHub:
    """In place of the datasets package on a machine without a network."""

    @staticmethod
    def load_dataset(name: str, configuration: str | None, split: str) -> None:
        raise ConnectionError(f"no way to {name}, {configuration}, {split}\nand a page of advice")


def test_a_data_set_that_cannot_be_had_says_what_is_needed_and_how_to_get_it(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", NoHub)
    message = refused("countdown_words", "--out", tmp_path / "out")
    assert message == (
        "error: the data set Jiayi-Pan/Countdown-Tasks-3to4 cannot be had (ConnectionError: no way to "
        "Jiayi-Pan/Countdown-Tasks-3to4, None, train); it is TinyZero's 490,000 puzzles; on a machine with a network "
        "run `hf download --repo-type dataset Jiayi-Pan/Countdown-Tasks-3to4 --local-dir FOLDER`, copy FOLDER here, "
        "and give its files (.jsonl, .json, .parquet) with --source\n"
    )
    assert not (tmp_path / "out").exists()


def test_configuration_and_split_are_read_from_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", NoHub)
    with pytest.raises(ValueError, match="no way to openai/gsm8k, main, test"):
        read_rows("openai/gsm8k@main:test", ["a"])


def test_without_the_datasets_package_files_still_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets, or give its files with --source"):
        read_rows("owner/name", ["a"])
    assert read_rows(str(write(tmp_path / "a.jsonl", [{"a": 1}])), ["a"]) == [{"a": 1}]
