import importlib.util
import json
import sys
from pathlib import Path

import pytest

needs_reasoning_gym = pytest.mark.skipif(
    not importlib.util.find_spec("reasoning_gym"), reason="needs the reasoning-gym package"
)
SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


@pytest.fixture
def prepare():
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_countdown_is_written_once_and_then_reused(prepare, tmp_path, capsys):
    arguments = ["countdown", "--out", str(tmp_path), "--train", "40", "--eval", "10"]
    assert prepare(arguments) == 0
    assert "wrote 40 training and 10 evaluation prompts" in capsys.readouterr().out
    assert prepare(arguments) == 0
    assert "reused" in capsys.readouterr().out
    assert len(rows_of(tmp_path / "train.jsonl")) == 40


def test_a_file_that_was_cut_off_is_written_again(prepare, tmp_path, capsys):
    arguments = ["countdown", "--out", str(tmp_path), "--train", "40", "--eval", "10"]
    prepare(arguments)
    whole = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(whole[:100])
    prepare(arguments)
    assert "wrote" in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "train.jsonl").read_text() == whole


@pytest.mark.parametrize("count", ["0", "-1", "ten", "1.5"])
def test_counts_must_be_whole_and_positive(prepare, tmp_path, capsys, count):
    with pytest.raises(SystemExit) as stop:
        prepare(["countdown", "--out", str(tmp_path), f"--train={count}"])
    assert stop.value.code == 2
    assert f"must be a whole number above 0, got '{count}'" in capsys.readouterr().err


def test_more_puzzles_than_exist_exits_with_one_message_and_writes_nothing(prepare, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        prepare(["countdown", "--out", str(tmp_path / "data"), "--train", "9000"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: There are fewer than 1800 distinct countdown-2 puzzles")
    assert not (tmp_path / "data").exists()


def test_a_missing_reasoning_gym_is_explained(prepare, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit):
        prepare(["reasoning_gym", "--task", "chain_sum", "--out", str(tmp_path)])
    assert "pip install reasoning-gym" in capsys.readouterr().err


@needs_reasoning_gym
def test_rows_are_graded_by_the_task_s_own_scorer(prepare, tmp_path):
    from openrlhf_ext.rewards.reasoning_gym import reward_func

    prepare(["reasoning_gym", "--task", "chain_sum", "--out", str(tmp_path), "--train", "5", "--eval", "3"])
    for row in rows_of(tmp_path / "train.jsonl") + rows_of(tmp_path / "eval.jsonl"):
        answer = json.loads(row["label"])["answer"]
        right = reward_func([f"{row['input']}{answer}<|im_end|>"], [row["input"]], [row["label"]])
        wrong = reward_func([f"{row['input']}{answer}1"], [row["input"]], [row["label"]])
        assert right == {"rewards": 1.0, "scores": 1.0}
        assert wrong["rewards"] < 1.0


@needs_reasoning_gym
def test_settings_of_the_task_are_passed_on(prepare, tmp_path):
    config = '{"min_terms": 2, "max_terms": 2}'
    prepare(
        [
            "reasoning_gym",
            "--task",
            "chain_sum",
            "--config",
            config,
            "--out",
            str(tmp_path),
            "--train",
            "9",
            "--eval",
            "3",
        ]
    )
    labels = [json.loads(row["label"]) for row in rows_of(tmp_path / "train.jsonl")]
    assert {label["metadata"]["num_terms"] for label in labels} == {2}


@needs_reasoning_gym
def test_evaluation_shares_no_prompt_with_training(prepare, tmp_path):
    prepare(["reasoning_gym", "--task", "gcd", "--out", str(tmp_path), "--train", "300", "--eval", "100"])
    training = {row["input"] for row in rows_of(tmp_path / "train.jsonl")}
    evaluation = [row["input"] for row in rows_of(tmp_path / "eval.jsonl")]
    assert len(set(evaluation)) == 100 and not training & set(evaluation)


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "chan_sum"], "no task 'chan_sum'. Nearest names: chain_sum"),
        (["--task", "chain_sum", "--config", '{"max_term": 2}'], "max_term"),
        (["--task", "chain_sum", "--config", "max_terms=2"], "--config 'max_terms=2' does not suit"),
        (["--task", "rearc"], "cannot be graded from a JSON file"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(prepare, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        prepare(["reasoning_gym", *arguments, "--out", str(tmp_path / "data"), "--train", "3", "--eval", "1"])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@needs_reasoning_gym
@pytest.mark.parametrize("label", ["", "{}", '{"metadata": {"source_dataset": "no_such_task"}}'])
def test_a_malformed_label_is_named(label):
    from openrlhf_ext.rewards.reasoning_gym import reward_func

    with pytest.raises(ValueError, match="is not a reasoning-gym entry"):
        reward_func(["q1"], ["q"], [label])
