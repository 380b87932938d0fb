"""Prompt files are checked row by row."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Literal

import pytest

from openrlhf_ext.prompts import PromptFile, leave_out, read_prompts

GOOD = b'{"input": "1 2 3=", "label": "a"}\n'


def read(
    folder: Path,
    content: bytes,
    on_bad_row: Literal["refuse", "skip"] = "refuse",
    label_key: str | None = "label",
    *,
    chat: bool = False,
) -> PromptFile:
    path = folder / "train.jsonl"
    path.write_bytes(content)
    return read_prompts(path, "input", label_key, on_bad_row, apply_chat_template=chat)


def test_rows_keep_their_line_id_label_and_datasource(tmp_path: Path) -> None:
    content = b'{"id": 7, "input": "x", "label": {"n": [1]}, "datasource": "d"}\n\n'
    content += GOOD
    first, second = read(tmp_path, content).rows
    assert (first.id, first.line, first.input, first.label, first.datasource) == ("7", 1, "x", {"n": [1]}, "d")
    assert first.images is None
    assert (second.line, second.datasource, second.images) == (3, "default", None)


def test_unusual_text_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "\U0001f600 \u4f60\u597d \u05e9\u05dc\u05d5\u05dd \u202e e\u0301\u2028 \u0085 \ufeff \0"
    rows = read(tmp_path, json.dumps({"input": text, "label": text}, ensure_ascii=False).encode()).rows
    assert [(row.input, row.label) for row in rows] == [(text, text)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CR LF", "CR"])
def test_lines_may_end_as_on_any_system_and_begin_with_a_byte_order_mark(tmp_path: Path, end: bytes) -> None:
    row = GOOD.strip()
    content = b"\xef\xbb\xbf" + end.join([row, b"", row, b" ", row])
    assert [row.line for row in read(tmp_path, content).rows] == [1, 3, 5]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"input": "\xff", "label": "a"}', "not UTF-8 at byte 11 of the line; re-encode the file as UTF-8"),
        (b'{"input": "x", ', "not valid JSON: "),
        (b'{"input": "x", "label": "a",}', "not valid JSON: "),
        (b'{"input": "\0", "label": "a"}', "not valid JSON: "),
        (b'"\xff\xfe"', "not UTF-8 at byte 1 of the line; "),
        (b'\xef\xbb\xbf{"input": "x", "label": "a"}', "not valid JSON: "),  # only a file begins with the mark
        (b"[]", "must be a JSON object, got list"),
        (b"null", "must be a JSON object, got NoneType"),
        (b"[" * 100_000, "not valid JSON: "),
        (b'"text"', "must be a JSON object, got str"),
        (b'{"label": "a"}', "'input' (--data.input_key) is missing; the row has 'label'"),
        (b'{"input": null, "label": "a"}', "'input' must be a string, got null"),
        (b'{"input": 5, "label": "a"}', "'input' must be a string, got int"),
        (b'{"input": [[1]], "label": "a"}', "'input' is a list of chat messages, which"),
        (b'{"input": {"text": "x"}, "label": "a"}', "'input' must be a string, got dict"),
        (b'{"input": "", "label": "a"}', "'input' is empty"),
        (b'{"input": " ", "label": "a"}', "'input' is empty"),
        (b'{"input": "x", "label": ""}', "'label' (--data.label_key) is empty; without labels leave the flag out"),
        (b'{"input": "x", "label": " "}', "'label' (--data.label_key) is empty"),
        (b'{"input": "\\ud83d", "label": "a"}', "'input' holds half of a surrogate pair"),
        (b'{"input": [{"role": "user", "content": "x"}], "label": "a"}', "'input' is a list of chat messages, which"),
        (b'{"input": "x"}', "'label' (--data.label_key) is missing"),
        (b'{"input": "x", "label": null}', "'label' (--data.label_key) is null"),
        (b'{"input": "x", "label": "a", "datasource": null}', "'datasource' must be a string, got None"),
        (b'{"input": "x", "label": "a", "id": ""}', "'id' must be a non-empty string or an integer, got ''"),
        (b'{"input": "x", "label": "a", "id": true}', "'id' must be a non-empty string or an integer, got True"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_or_skipped_with_its_problem(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, GOOD + line + b"\n")
    summary, listed = str(caught.value).split("\n")
    assert summary.startswith("1 of 2 rows of ")
    assert listed.startswith(f"  {tmp_path / 'train.jsonl'}:2: {problem}")

    file = read(tmp_path, GOOD + line + b"\n", "skip")
    assert [row.line for row in file.rows] == [1]
    assert [bad.line for bad in file.skipped] == [2]
    assert file.skipped[0].problem.startswith(problem)


def test_the_second_row_with_an_id_is_bad(tmp_path: Path) -> None:
    content = b'{"id": "1", "input": "x", "label": "a"}\n{"id": 1, "input": "y", "label": "b"}\n'
    with pytest.raises(ValueError, match="train.jsonl:2: id '1' was already used in line 1"):
        read(tmp_path, content)


def test_ten_bad_rows_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, b"{}\n" * 12 + GOOD)
    message = str(caught.value)
    # The summary, 10 rows and the line that counts the remaining 2.
    assert message.count("\n") == 11
    assert message.startswith("12 of 13 rows") and message.endswith("and 2 more")


def test_skipped_rows_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(tmp_path, GOOD + b"{}\n", "skip")
    assert "skipped 1 of 2 rows" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{}\n"])
def test_a_file_without_a_usable_row_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match="has no usable row"):
        read(tmp_path, content, "skip")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the prompt file .*none.jsonl"):
        read_prompts(tmp_path / "none.jsonl", "input", None, "refuse")


def test_without_a_label_key_labels_are_empty(tmp_path: Path) -> None:
    assert read(tmp_path, b'{"input": "x"}\n', label_key=None).rows[0].label == ""


def test_chat_messages_are_accepted_with_the_chat_template(tmp_path: Path) -> None:
    content = b'{"input": [{"role": "user", "content": "x"}], "label": "a"}\n'
    assert read(tmp_path, content, chat=True).rows[0].input == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "must be a list of chat messages, each with 'role' and 'content'"),
        ([{"role": "user"}], "must be a list of chat messages, each with"),
        ([{"role": 1, "content": "x"}], "must be a list of chat messages, each with"),
        ([{"role": "user", "content": None}], "must be a list of chat messages, each with"),
        ([{"role": "user", "content": ["x"]}], "must be a list of chat messages, each with"),
        (["x"], "must be a list of chat messages, each with"),
        ([{"role": "user", "content": " "}], "is empty"),
        ([{"role": "user", "content": "\ud83d"}], "holds half of a surrogate pair"),
    ],
)
def test_chat_messages_are_checked_as_text_is(tmp_path: Path, messages: object, problem: str) -> None:
    row = json.dumps({"input": messages, "label": "a"}).encode()
    with pytest.raises(ValueError, match=f"train.jsonl:1: 'input' {problem}"):
        read(tmp_path, row, chat=True)


def test_rows_that_turn_out_bad_later_are_refused_or_skipped_like_any_other(tmp_path: Path) -> None:
    file = read(tmp_path, b"{}\n" + GOOD + b'{"input": "y", "label": "b"}\n', "skip")
    with pytest.raises(ValueError, match="1 of 2 rows .*\n.*train.jsonl:3: too long"):
        leave_out(file, [None, "too long"], "refuse")
    left = leave_out(file, [None, "too long"], "skip")
    assert [row.line for row in left.rows] == [2]
    assert [(row.line, row.problem) for row in left.skipped][1:] == [(3, "too long")]
    with pytest.raises(ValueError, match="has no usable row"):
        leave_out(file, ["too long"] * 2, "skip")


def test_c46_rows_without_a_usable_input_or_label_are_named_by_line_and_skipped_by_flag(tmp_path: Path) -> None:
    unusual = json.dumps(
        {"input": "\u05e9\u05dc\u05d5\u05dd \U0001f600 \u4f60", "label": "c"}, ensure_ascii=False
    ).encode()
    lines = [
        GOOD.strip(),
        b'{"input": "x"}',
        b'{"input": "x", "label": null}',
        b'{"input": ""}',
        GOOD.strip(),
        unusual,
    ]
    with pytest.raises(ValueError) as caught:
        read(tmp_path, b"\n".join(lines))
    assert [line.partition(": ")[0].rpartition(":")[2] for line in str(caught.value).split("\n")[1:]] == [
        "2",
        "3",
        "4",
    ]
    file = read(tmp_path, b"\n".join(lines), "skip")
    assert [row.line for row in file.rows] == [1, 5, 6] and len(file.skipped) == 3 and file.num_repeated == 1


def test_repeated_inputs_are_kept_counted_and_have_different_stable_ids(tmp_path: Path) -> None:
    other_label = b'{"input": "1 2 3=", "label": "b"}\n'
    file = read(tmp_path, GOOD + GOOD + other_label)
    assert file.num_repeated == 2
    assert len({row.id for row in file.rows}) == 3
    # Rows before or between others do not change an id: it depends on the content and the number of equal rows before.
    again = read(tmp_path, other_label + GOOD + b'{"input": "z", "label": "z"}\n' + GOOD)
    assert {row.id for row in file.rows} <= {row.id for row in again.rows}
