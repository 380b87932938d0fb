"""Geometry3k from its published files to prompt files, and its reward."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
from PIL import Image

if not importlib.util.find_spec("math_verify"):
    pytest.skip("NOT TESTED, no math-verify: pip install math-verify==0.9.0", allow_module_level=True)

from openrlhf_ext.prompts import read_prompts
from openrlhf_ext.rewards.geometry3k import reward_func
from openrlhf_ext.tasks.geometry3k import INSTRUCTION, write_dataset


def picture(width: int = 30, kind: str = "PNG") -> dict[str, object]:
    """As the hub's parquet files have it."""
    content = io.BytesIO()
    Image.new("RGB", (width, 20), "white").save(content, kind)
    return {"bytes": content.getvalue(), "path": None}


GOOD = {"images": [picture()], "problem": "<image>Find x.", "answer": "2 \\sqrt { 21 }"}


def parquet(path: Path, rows: list[dict[str, object]]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_rows_become_prompts_with_pictures_beside_them_once(tmp_path: Path) -> None:
    train = [GOOD, {"images": [picture(40, "JPEG")], "problem": "What is y?", "answer": "32.5"}]
    sources = [parquet(tmp_path / "train.parquet", train), parquet(tmp_path / "test.parquet", [GOOD])]
    out = tmp_path / "out"
    assert write_dataset(out, sources) == ([2, 1], {}, True)
    assert write_dataset(out, sources) == ([2, 1], {}, False)
    rows = read_prompts(out / "train.jsonl", "input", "label", "refuse").rows
    assert [row.input for row in rows] == [f"<image>Find x.\n\n{INSTRUCTION}", f"<image>What is y?\n\n{INSTRUCTION}"]
    assert [row.label for row in rows] == ["2 \\sqrt { 21 }", "32.5"]
    assert [Image.open(row.images[0]).size for row in rows] == [(30, 20), (40, 20)]
    assert [Path(row.images[0]).name for row in rows] == ["train-00000-0.png", "train-00001-0.jpeg"]
    # A folder that is moved keeps its pictures.
    assert json.loads((out / "eval.jsonl").read_text())["images"] == ["images/eval-00000-0.png"]

    broken = out / "images" / "train-00000-0.png"
    broken.write_bytes(b"cut off")
    assert write_dataset(out, sources) == ([2, 1], {}, True)
    assert Image.open(broken).size == (30, 20)


def test_rows_that_cannot_be_used_are_counted_by_reason(tmp_path: Path) -> None:
    bad = {
        "without a problem": {"problem": " "},
        "without a picture that can be read": {"images": [{"bytes": b"no picture", "path": None}]},
        "with other numbers of pictures and places for them": {"problem": "<image><image>Find x."},
        "without a short answer": {"answer": None},
        "whose own answer math-verify does not accept": {"answer": "\\frac{"},
    }
    train = parquet(tmp_path / "train.parquet", [GOOD, *(GOOD | change for change in bad.values())])
    test = parquet(tmp_path / "test.parquet", [GOOD])
    assert write_dataset(tmp_path / "out", [train, test]) == ([1, 1], dict.fromkeys(bad, 1), True)


def test_a_source_without_a_usable_problem_leaves_no_prompt_file(tmp_path: Path) -> None:
    train = parquet(tmp_path / "train.parquet", [GOOD])
    test = parquet(tmp_path / "test.parquet", [{"question": "Find x.", "images": [picture()]}])
    with pytest.raises(ValueError, match="test.parquet has no usable problem .*1 without a problem"):
        write_dataset(tmp_path / "out", [train, test])
    assert not (tmp_path / "out" / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("response", "reward", "accuracy", "form"),
    [
        ("<think>so</think> \\boxed{2\\sqrt{21}}", 1.0, 1.0, 1.0),
        ("\\boxed{\\sqrt{84}}", 1.0, 1.0, 0.0),
        ("<think>so</think> \\boxed{7}", 0.1, 0.0, 1.0),
        ("\\boxed{7}", 0.0, 0.0, 0.0),
        ("<think>so \\boxed{7}", 0.0, 0.0, 0.0),
        ("no", 0.0, 0.0, 0.0),
    ],
)
def test_a_wrong_answer_in_the_form_that_was_asked_for_is_worth_a_tenth(
    response: str, reward: float, accuracy: float, form: float
) -> None:
    values = reward_func([f"Find x.{response}<|im_end|>"], ["Find x."], ["2 \\sqrt { 21 }"])
    assert values == {"rewards": reward, "scores": accuracy, "extra_logs": {"accuracy": accuracy, "format": form}}


def test_the_script_writes_it_and_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location(
        "prepare_data", Path(__file__).parents[2] / "scripts" / "prepare_data.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    train = parquet(tmp_path / "train.parquet", [GOOD, GOOD | {"answer": " "}])
    test = parquet(tmp_path / "test.parquet", [GOOD])
    out = str(tmp_path / "out")
    assert script.main(["geometry3k", "--out", out, "--source", train, test]) == 0
    written = f"{out}: wrote 1 training and 1 evaluation prompts\nleft out 1 rows: without a short answer\n"
    assert capsys.readouterr().out == written
    with pytest.raises(SystemExit):
        script.main(["geometry3k", "--out", out, "--source", str(tmp_path / "none.parquet"), test])
    assert "none.parquet (" in (error := capsys.readouterr().err) and "it is Geometry3k, 60 MB" in error
