"""Images of a prompt: found before anything starts, and part of what the prompt is."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from openrlhf_ext.prompts import PromptFile, check_prompts, read_prompts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "images" / name).write_bytes(b"")
    return tmp_path


def read(folder: Path, *images: object, on_bad_row="refuse") -> PromptFile:
    rows = [{"input": "Find x.", "label": "1", "images": one} for one in images]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(folder / "train.jsonl", "input", "label", on_bad_row)


def test_paths_start_at_the_file_that_names_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    there = str(folder / "images" / "a.png")
    uri, url = "data:image/png;base64,iVBORw0=", "https://host/a.png"
    rows = read(folder, "images/a.png", ["images/a.png"], [there], [uri, url], [], None).rows
    assert [row.images for row in rows] == [[there], [there], [there], [uri, url], None, None]
    monkeypatch.chdir(folder)
    row = {"input": "x", "label": "1", "images": ["images/a.png"]}
    (found,) = check_prompts("organization/data", [(1, row)], "input", "label", "refuse").rows
    assert found.images == [there]


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ("images/none.png", "there is no image {folder}/images/none.png ('images', --data.image_key); paths start at"),
        (["images/a.png", "images"], "there is no image {folder}/images ('images', --data.image_key)"),
        ("x" * 5000, "there is no image {folder}/xxx"),
        ("\0", "there is no image"),
        ({"bytes": "iVBORw0=", "path": None}, "'images' (--data.image_key) must be a path, a data URI or a URL"),
        ([None], "'images' (--data.image_key) must be a path"),
        ([""], "'images' (--data.image_key) must be a path"),
        (5, "'images' (--data.image_key) must be a path"),
    ],
)
def test_an_image_that_is_none_is_refused_with_its_line(folder: Path, images: object, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(folder, "images/a.png", images)
    _, listed = str(caught.value).split("\n", 1)
    assert listed.startswith(f"  {folder}/train.jsonl:2: {problem.format(folder=folder)}")


def test_equal_words_below_another_picture_are_another_prompt_wherever_it_stands(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        a, b = read(folder, "images/a.png", "images/b.png").rows
    assert not caplog.text and a.id != b.id
    assert [row.id for row in read(folder, "images/b.png", "images/a.png").rows] == [b.id, a.id]
    file = read(folder, "images/a.png", "images/a.png")
    assert file.num_repeated == 1 and file.rows[0].id == a.id != file.rows[1].id
