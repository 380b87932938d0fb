"""Prompt files: every row checked before anything starts, and a seeded order in which prompts are drawn.

A prompt file is JSON Lines: one object per line with the input, usually a label for the verifier, and optionally
``id`` and ``datasource``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

_NUM_SHOWN = 10
"""Bad rows listed in one message."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One good row. `input` is text, or a list of chat messages; `label` is any JSON value, "" without a label key."""

    id: str
    line: int
    """Line in the file, from 1."""
    input: str | list[dict[str, object]]
    label: object
    datasource: str
    images: object = None
    """What the image key holds, untouched."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and why."""

    line: int
    problem: str


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The good rows in file order, those skipped, and how many good rows repeat the input of an earlier one."""

    rows: list[PromptRow]
    skipped: list[BadRow]
    num_repeated: int


class _BadRow(Exception):
    """Why the row being read cannot be used."""


def read_prompts(
    path: str | Path,
    input_key: str,
    label_key: str | None,
    on_bad_row: Literal["refuse", "skip"],
    *,
    image_key: str = "images",
    apply_chat_template: bool = False,
) -> PromptFile:
    """Reads and checks a local ``.jsonl`` file. Blank lines are no rows.

    Args:
        label_key: None if rows have no label.
        on_bad_row: "refuse" raises on any bad row; "skip" leaves bad rows out and says how many.
        apply_chat_template: whether an input may be a list of chat messages.

    Raises:
        ValueError: the first bad rows with file:line and their total, no readable file, or no good row.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {path} ({error.strerror}); check the path") from None
    rows: list[PromptRow] = []
    bad: list[BadRow] = []
    seen: dict[str, int] = {}
    occurrences: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _read_row(line, number, (input_key, label_key, image_key), apply_chat_template, occurrences)
            if row.id in seen:
                raise _BadRow(f"id {row.id!r} was already used in line {seen[row.id]}")
        except _BadRow as problem:
            bad.append(BadRow(number, str(problem)))
            continue
        seen[row.id] = number
        rows.append(row)
    _report(path, rows, bad, on_bad_row)
    repeated = len(rows) - len({_canonical(row.input) for row in rows})
    if repeated:
        logger.warning("%s: %d of %d rows repeat the input of an earlier row", path, repeated, len(rows))
    return PromptFile(rows, bad, repeated)


def _report(path: str | Path, rows: list[PromptRow], bad: list[BadRow], on_bad_row: str) -> None:
    listed = "".join(f"\n  {path}:{row.line}: {row.problem}" for row in bad[:_NUM_SHOWN])
    more = f"\n  and {len(bad) - _NUM_SHOWN} more" if len(bad) > _NUM_SHOWN else ""
    if bad and on_bad_row == "refuse":
        raise ValueError(
            f"{len(bad)} of {len(rows) + len(bad)} rows of {path} cannot be used; correct them, or leave them out "
            f"with --ext.data.on_bad_row skip:{listed}{more}"
        )
    if not rows:
        raise ValueError(f"{path} has no usable row; give a file with one JSON object per line{listed}{more}")
    if bad:
        logger.warning("%s: skipped %d of %d rows:%s%s", path, len(bad), len(rows) + len(bad), listed, more)


def _read_row(
    line: bytes,
    number: int,
    keys: tuple[str, str | None, str],
    apply_chat_template: bool,
    occurrences: Counter[str],
) -> PromptRow:
    input_key, label_key, image_key = keys
    row = _parse(line)
    prompt = _input(row, input_key, apply_chat_template)
    label: object = ""
    if label_key is not None:
        label = row.get(label_key)
        if label is None:
            raise _BadRow(f"{label_key!r} (--data.label_key) is {'null' if label_key in row else 'missing'}")
    datasource = row.get("datasource", "default")
    if not isinstance(datasource, str):
        raise _BadRow(f"'datasource' must be a string, got {datasource!r}")
    identity = _identity(row, prompt, label, datasource, occurrences)
    return PromptRow(identity, number, prompt, label, datasource, row.get(image_key))


def _parse(line: bytes) -> Mapping[str, object]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 at byte {error.start} of the line; re-encode the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise _BadRow(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _BadRow(f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BadRow(f"must be a JSON object, got {type(row).__name__}")
    return row


def _input(row: Mapping[str, object], key: str, apply_chat_template: bool) -> str | list[dict[str, object]]:
    if key not in row:
        raise _BadRow(f"{key!r} (--data.input_key) is missing; the row has {', '.join(map(repr, row)) or 'no keys'}")
    value = row[key]
    if isinstance(value, list) and apply_chat_template:
        if not value or not all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in value):
            raise _BadRow(f"{key!r} must be a list of chat messages, each with 'role' and 'content'")
    elif isinstance(value, list):
        raise _BadRow(f"{key!r} is a list of chat messages, which needs --data.apply_chat_template")
    elif not isinstance(value, str):
        raise _BadRow(f"{key!r} must be a string, got {'null' if value is None else type(value).__name__}")
    elif not value.strip():
        raise _BadRow(f"{key!r} is empty")
    elif value.encode("utf-8", "ignore").decode("utf-8") != value:
        raise _BadRow(f"{key!r} holds half of a surrogate pair, which no tokenizer can read")
    return value


def _identity(
    row: Mapping[str, object], prompt: object, label: object, datasource: str, occurrences: Counter[str]
) -> str:
    """The row's own id, or a hash of its content and of how many equal rows came before it."""
    if "id" in row:
        given = row["id"]
        if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
            raise _BadRow(f"'id' must be a non-empty string or an integer, got {given!r}")
        return str(given)
    content = _canonical([datasource, prompt, label])
    occurrences[content] += 1
    return hashlib.sha1(f"{content}#{occurrences[content]}".encode()).hexdigest()[:16]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)
