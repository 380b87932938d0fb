"""Evaluation sets as they are published: JSON Lines with a problem and its answer, under one of a few names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ext.tasks.jsonl import has_half_surrogate, parse_line

INPUT_KEYS = ("input", "problem", "question", "prompt")
LABEL_KEYS = ("label", "answer", "final_answer", "solution")
"""Columns that are looked for, in this order, where none is named."""

PLACEHOLDER = "{input}"
MATH_TEMPLATE = PLACEHOLDER + "\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class EvalRow:
    line: int
    """Line in the file, from 1; identifies the row."""
    input: str
    label: object


@dataclass(frozen=True, slots=True)
class EvalSet:
    """The rows of one file. `name` is the file's name without its ending."""

    name: str
    path: Path
    sha256: str
    """Of the whole file."""
    input_key: str
    label_key: str
    rows: Sequence[EvalRow]


def read_eval_sets(
    paths: Sequence[Path], input_key: str | None = None, label_key: str | None = None, limit: int | None = None
) -> list[EvalSet]:
    """Read and check evaluation sets.

    Args:
        paths: `.jsonl` files whose names differ.
        input_key: column of the problem; None looks for one of `INPUT_KEYS` in the first row.
        label_key: column of the answer; None looks for one of `LABEL_KEYS`.
        limit: only this many rows from the start of each file.

    Raises:
        ValueError: a file that cannot be read, is empty or has a bad row (with file:line), or two of one name.
    """
    sets = [_read(path, input_key, label_key, limit) for path in paths]
    names = [eval_set.name for eval_set in sets]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} files are named {name}, by which results are kept; rename one")
    return sets


def read_template(value: str) -> str:
    """The template that `value` is, or that the file of that name holds.

    Raises:
        ValueError: it has no `{input}`.
    """
    template = Path(value).read_text(encoding="utf-8") if value.endswith(".txt") and Path(value).is_file() else value
    if PLACEHOLDER not in template:
        raise ValueError(
            f"the template {template[:100]!r} has no {PLACEHOLDER}, where the problem goes; add it, or give a .txt "
            "file that exists"
        )
    return template


def _read(path: Path, input_key: str | None, label_key: str | None, limit: int | None) -> EvalSet:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the evaluation set {path} ({error.strerror}); check the path") from None
    rows = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if len(rows) == limit:
            break
        if line.strip():
            try:
                row = parse_line(line)
                if row.get("images"):
                    raise ValueError("has images, which this command shows no model; use --eval.dataset in training")
                input_key = input_key or _first_of(INPUT_KEYS, row, "input")
                label_key = label_key or _first_of(LABEL_KEYS, row, "label")
                rows.append(EvalRow(number, _input(row, input_key), _column(row, label_key, "label")))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not rows or input_key is None or label_key is None:
        raise ValueError(f"{path} has no row; give a file with one JSON object per line")
    return EvalSet(path.stem, path, hashlib.sha256(content).hexdigest(), input_key, label_key, rows)


def _first_of(keys: Sequence[str], row: Mapping[str, object], kind: str) -> str:
    for key in keys:
        if key in row:
            return key
    raise ValueError(f"no column is named {', '.join(keys)}; name one of {_listed(row)} with --{kind}-key")


def _column(row: Mapping[str, object], key: str, kind: str) -> object:
    if key not in row:
        raise ValueError(f"there is no column {key!r}; name one of {_listed(row)} with --{kind}-key")
    if row[key] is None:
        raise ValueError(f"{key!r} is null")
    return row[key]


def _input(row: Mapping[str, object], key: str) -> str:
    value = _column(row, key, "input")
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be a string, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{key!r} is empty")
    if has_half_surrogate(value):
        raise ValueError(f"{key!r} holds half of a surrogate pair, which no tokenizer can read")
    return value


def _listed(row: Mapping[str, object]) -> str:
    return ", ".join(map(repr, row)) or "no columns"
