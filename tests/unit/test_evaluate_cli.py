"""The evaluation command with a stand-in for the engine; the real one is in tests/e2e."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from openrlhf_ext.cli.evaluate import main
from openrlhf_ext.eval_results import Response
from openrlhf_ext.eval_sets import read_eval_sets, read_template

REWARD = """
import os

def reward_func(queries, prompts, labels):
    response = queries[0][len(prompts[0]):]
    if response == "broken":
        raise RuntimeError("no grade")
    if labels[0] == "unreadable":
        raise ValueError("what is this label")
    return {"rewards": float(response == labels[0])}
"""
PROBLEMS = [{"problem": "1+1=", "answer": "2"}, {"problem": "2+3=", "answer": "5"}]


class Engine:
    """Gives the same responses to every prompt, whatever it is, and keeps the prompts."""

    responses = [Response("2", 10, False), Response("2", 20, False), Response("7", 40, True), Response("8", 50, False)]
    prompts: list[list[str]] = []

    def __init__(self, model: object, **options: object) -> None:
        pass

    def generate(self, prompts: Sequence[str]) -> list[list[Response]]:
        self.prompts.append(list(prompts))
        return [self.responses for _ in prompts]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose context is 256 tokens, a character each."""
    from openrlhf_ext.tasks.tiny_model import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    monkeypatch.setattr("openrlhf_ext.adapters.evaluator.Evaluator", Engine)
    monkeypatch.setattr(Engine, "prompts", [])
    return Engine


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "sums.jsonl", PROBLEMS)


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model: Path, *arguments: object) -> int:
    return main([str(model), *map(str, arguments), "--n", "4", "--workers", "1"])


def shown(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_metrics_of_a_set_worked_by_hand(model, data, reward, tmp_path, capsys) -> None:
    out = tmp_path / "out.json"
    assert run(model, data, "--reward", reward, "--out", out) == 0
    entry = json.loads(out.read_text())["sets"]["sums"]
    # 2 of 4 right on the first problem, none on the second.
    assert entry["accuracy_by_line"] == {"1": 0.5, "2": 0.0}
    metrics = entry["metrics"]
    assert metrics["accuracy"] == metrics["pass@1"] == 0.25
    assert metrics["accuracy_se"] == pytest.approx(0.25)
    assert metrics["pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert metrics["pass@4"] == 0.5
    assert metrics["response_length_mean"] == 30
    assert metrics["response_length_correct_mean"] == 15  # 10 and 20
    assert metrics["response_length_wrong_mean"] == pytest.approx(35)  # 40, 50 and all four
    assert metrics["truncated_frac"] == 0.25
    head, row = shown(capsys)
    assert head == "set prompts accuracy +- pass@1 pass@2 pass@4 tokens correct wrong truncated".split()
    assert row == "sums 2 0.250 0.250 0.250 0.417 0.500 30.0 15.0 35.0 0.250".split()


def test_every_set_counts_the_same_in_the_mean(model, data, reward, tmp_path, capsys) -> None:
    other = write(tmp_path / "other.jsonl", PROBLEMS[:1])
    assert run(model, data, other, "--reward", reward, "--k", "1") == 0
    rows = {row[0]: row[1:4] for row in shown(capsys)}
    assert rows["sums"] == ["2", "0.250", "0.250"]
    assert rows["other"] == ["1", "0.500", "0.000"]
    assert rows["mean"] == ["-", "0.375", "-"]


def test_a_figure_that_does_not_exist_is_a_dash(model, reward, tmp_path, capsys) -> None:
    none_right = write(tmp_path / "hard.jsonl", PROBLEMS[1:])
    assert run(model, none_right, "--reward", reward, "--k", "1") == 0
    _, row = shown(capsys)
    assert row == "hard 1 0.000 0.000 0.000 30.0 - 30.0 0.250".split()


def test_a_rerun_goes_on_after_the_sets_that_are_done(model, data, reward, tmp_path, engine, monkeypatch) -> None:
    other, out = write(tmp_path / "other.jsonl", PROBLEMS[:1]), tmp_path / "out.json"
    generate = Engine.generate

    def stop_in_the_second_set(self: Engine, prompts: Sequence[str]) -> list[list[Response]]:
        if self.prompts:
            raise KeyboardInterrupt
        return generate(self, prompts)

    monkeypatch.setattr(Engine, "generate", stop_in_the_second_set)
    with pytest.raises(KeyboardInterrupt):
        run(model, data, other, "--reward", reward, "--out", out)
    assert list(json.loads(out.read_text())["sets"]) == ["sums"]
    monkeypatch.setattr(Engine, "generate", generate)
    assert run(model, data, other, "--reward", reward, "--out", out) == 0
    assert engine.prompts == [["1+1=", "2+3="], ["1+1="]]
    assert list(json.loads(out.read_text())["sets"]) == ["sums", "other"]
    # Nothing is left to do, and the engine is not even asked.
    assert run(model, data, other, "--reward", reward, "--out", out) == 0
    assert len(engine.prompts) == 2


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--temperature", "0.5"], "holds results with temperature 1.0, not 0.5"),
        (["--limit", "1"], "holds results of another sums"),
    ],
)
def test_results_of_other_settings_are_not_taken_for_these(
    model, data, reward, tmp_path, capsys, flags, problem
) -> None:
    out = tmp_path / "out.json"
    assert run(model, data, "--reward", reward, "--out", out) == 0
    before = out.read_text()
    assert run(model, data, "--reward", reward, "--out", out, *flags) == 2
    assert problem in capsys.readouterr().err
    assert out.read_text() == before


def test_aes_against_the_results_of_a_base(model, data, reward, tmp_path, monkeypatch, capsys) -> None:
    base, out = tmp_path / "base.json", tmp_path / "out.json"
    assert run(model, data, "--reward", reward, "--out", base) == 0
    # Accuracy 0.25 -> 0.375, 0.5 better; length 30 -> 24, 0.2 shorter.
    better = [Response("2", 24, False)] * 3 + [Response("7", 24, False)]
    monkeypatch.setattr(Engine, "responses", better)
    assert run(model, data, "--reward", reward, "--out", out, "--base", base) == 0
    scores = json.loads(out.read_text())["aes"]
    assert scores["sets"]["sums"] == scores["mean"] == pytest.approx(0.2 + 3 * 0.5)
    # Other constants need no new responses.
    assert run(model, data, "--reward", reward, "--out", out, "--base", base, "--alpha", "0", "--beta", "1") == 0
    assert json.loads(out.read_text())["aes"]["mean"] == pytest.approx(0.5)
    assert shown(capsys)[-1][-1] == "+0.500"


def test_a_base_without_a_right_answer_gives_no_aes(model, data, reward, tmp_path, monkeypatch, capsys) -> None:
    base = tmp_path / "base.json"
    monkeypatch.setattr(Engine, "responses", [Response("7", 24, False)] * 4)
    assert run(model, data, "--reward", reward, "--out", base) == 0
    monkeypatch.undo()
    monkeypatch.setattr("openrlhf_ext.adapters.evaluator.Evaluator", Engine)
    assert run(model, data, "--reward", reward, "--base", base) == 0
    assert shown(capsys)[-1][-1] == "-"


def test_a_response_that_cannot_be_graded_counts_as_wrong_and_is_reported(
    model, data, reward, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(Engine, "responses", [Response("2", 1, False)] * 3 + [Response("broken", 1, False)])
    assert run(model, data, "--reward", reward, "--out", out) == 0
    assert "2 of 8 responses could not be graded and count as wrong" in capsys.readouterr().err
    entry = json.loads(out.read_text())["sets"]["sums"]
    assert entry["reward_failures"] == {"exception": 2}
    assert entry["accuracy_by_line"] == {"1": 0.75, "2": 0.0}


def test_samples_are_every_response_with_its_grade(model, data, reward, tmp_path) -> None:
    assert run(model, data, "--reward", reward, "--samples", tmp_path / "samples") == 0
    rows = [json.loads(line) for line in (tmp_path / "samples" / "sums.jsonl").read_text().splitlines()]
    assert [row["accuracy"] for row in rows] == [1, 1, 0, 0, 0, 0, 0, 0]
    expected = {"line": 1, "prompt": "1+1=", "response": "7", "accuracy": 0, "num_tokens": 40, "is_truncated": True}
    assert rows[2] == expected


def test_the_template_surrounds_the_problem_and_braces_in_it_stay(model, data, reward, engine) -> None:
    assert run(model, data, "--reward", reward, "--template", "\\boxed{}: {input} ") == 0
    assert engine.prompts == [["\\boxed{}: 1+1= ", "\\boxed{}: 2+3= "]]


@pytest.mark.parametrize(
    ("row", "input_key", "label_key"),
    [
        ({"input": "1+1=", "label": "2", "answer": "3"}, "input", "label"),
        ({"question": "1+1=", "answer": "so\n#### 2"}, "question", "answer"),
        ({"problem": "1+1=", "solution": "so 2", "answer": "2"}, "problem", "answer"),
        ({"problem": "1+1=", "solution": "\\boxed{2}"}, "problem", "solution"),
    ],
)
def test_columns_are_found_by_their_usual_names(tmp_path, row, input_key, label_key) -> None:
    (found,) = read_eval_sets([write(tmp_path / "set.jsonl", [row])])
    assert (found.input_key, found.label_key) == (input_key, label_key)
    assert (found.rows[0].input, found.rows[0].label) == (row[input_key], row[label_key])


def test_a_limit_takes_rows_from_the_start_and_blank_lines_are_none(tmp_path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text("\n" + "".join(f'{{"input": "{n}", "label": {n}}}\n\n' for n in range(5)))
    (found,) = read_eval_sets([path], limit=2)
    assert [(row.line, row.label) for row in found.rows] == [(2, 0), (4, 1)]


def test_a_template_may_be_a_text_file(tmp_path) -> None:
    path = tmp_path / "template.txt"
    path.write_text("Solve: {input}")
    assert read_template(str(path)) == "Solve: {input}"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read the evaluation set"),
        ("", "has no row"),
        ("{", "set.jsonl:1: not valid JSON"),
        ('{"input": "1", "label": 1}\n[]', "set.jsonl:2: must be a JSON object, got list"),
        ('{"text": "1", "label": 1}', "question, prompt; name one of 'text', 'label' with --input-key"),
        ('{"input": "1", "gold": 1}', "set.jsonl:1: no column is named label"),
        ('{"input": "1", "label": 1}\n{"input": "1"}', "set.jsonl:2: there is no column 'label'"),
        ('{"input": " ", "label": 1}', "set.jsonl:1: 'input' is empty"),
        ('{"input": 7, "label": 1}', "set.jsonl:1: 'input' must be a string, got int"),
        ('{"input": "\\ud800", "label": 1}', "set.jsonl:1: 'input' holds half of a surrogate pair"),
        ('{"input": "1", "label": null}', "set.jsonl:1: 'label' is null"),
        ('{"input": "1", "label": 1, "images": ["a.png"]}', "set.jsonl:1: has images, which this command shows no"),
        ('{"input": "1", "label": "unreadable"}', "set.jsonl:1: cannot be graded:"),
        ('{"input": "%s", "label": "1"}' % ("1" * 256), "set.jsonl:1: the prompt has 256 tokens"),
    ],
)  # fmt: skip
def test_bad_data_is_one_line_with_its_place(model, reward, tmp_path, capsys, engine, content, problem) -> None:
    path = tmp_path / "set.jsonl"
    if content is not None:
        path.write_text(content)
    assert run(model, path, "--reward", reward) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert problem in error
    assert not engine.prompts


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--k", "1,5"], "--k must be numbers from 1 to --n 4"),
        (["--k", "0"], "--k must be"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--top-p", "0"], "--top-p in (0, 1]"),
        (["--temperature", "0"], "--temperature 0 gives 4 times the same response"),
        (["--template", "no place"], "has no {input}"),
        (["--input-key", "text"], "there is no column 'text'; name one of 'problem', 'answer' with --input-key"),
        (["--reward", "missing.py"], "Cannot load reward file"),
        (["--base", "missing.json"], "cannot read the results missing.json"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(model, data, reward, capsys, engine, flags, problem) -> None:
    assert run(model, data, "--reward", reward, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert problem in error
    assert not engine.prompts


@pytest.mark.parametrize("missing", ["", "config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_folder_is_one_line(model, data, reward, tmp_path, capsys, missing) -> None:
    folder = tmp_path / "model"
    if missing:
        folder.mkdir()
        for file in model.iterdir():
            if file.name != missing:
                (folder / file.name).symlink_to(file)
    assert run(folder, data, "--reward", reward) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert (missing or "is no folder") in error or "weights" in error


def test_two_sets_of_one_name_are_refused(model, data, reward, tmp_path, capsys) -> None:
    (tmp_path / "b").mkdir()
    assert run(model, data, write(tmp_path / "b" / "sums.jsonl", PROBLEMS), "--reward", reward) == 2
    assert "2 files are named sums" in capsys.readouterr().err


def test_a_base_of_other_data_is_refused(model, data, reward, tmp_path, capsys) -> None:
    base = tmp_path / "base.json"
    assert run(model, data, "--reward", reward, "--out", base) == 0
    write(data, PROBLEMS[::-1])
    assert run(model, data, "--reward", reward, "--base", base) == 2
    assert "holds results of another sums" in capsys.readouterr().err


def test_a_chat_template_that_is_asked_for_must_exist(model, data, reward, tmp_path, capsys) -> None:
    from openrlhf_ext.tasks.tiny_model import make_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model / name)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    assert run(folder, data, "--reward", reward, "--chat", "on") == 2
    assert "has no chat template; use --chat off" in capsys.readouterr().err


def test_chat_wraps_the_problem_unless_it_is_off(model, data, reward, tmp_path, engine) -> None:
    from openrlhf_ext.tasks.tiny_model import make_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model / name)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}U: {{ message['content'] }}{% endfor %}{{ ' A: ' }}"
    tokenizer.save_pretrained(folder)
    assert run(folder, data, "--reward", reward) == 0
    assert run(folder, data, "--reward", reward, "--chat", "off") == 0
    assert engine.prompts == [["U: 1+1= A: ", "U: 2+3= A: "], ["1+1=", "2+3="]]
