"""Sets of prompts: every row checked before anything starts, and refused or left out by its place.

A prompt file is JSON Lines: one object per line with the input, usually a label for the verifier, and optionally
``id``, ``datasource`` and ``images`` (one or a list of paths, data URIs or URLs).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from openrlhf_ext.tasks.jsonl import BadLine, has_half_surrogate, parse_line

logger = logging.getLogger(__name__)

_NUM_SHOWN = 10
"""Bad rows listed in one message."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One good row. `input` is text, or a list of chat messages; `label` is any JSON value, "" without a label key."""

    id: str
    line: int
    """Line in the file, or row of the data set, from 1."""
    input: str | list[dict[str, object]]
    label: object
    datasource: str
    images: list[str] | None = None
    """Absolute paths, data URIs or URLs; None for text alone."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and why."""

    line: int
    problem: str


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The good rows in file order, those skipped, and how many good rows repeat the input of an earlier one."""

    name: str
    """Path of the file, or name of the data set."""
    rows: list[PromptRow]
    skipped: list[BadRow]
    num_repeated: int


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
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {path} ({error.strerror}); check the path") from None
    # Of bytes, so that lines end at CR, LF or both, and not at the other line separators of Unicode.
    lines = enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), start=1)
    return check_prompts(
        str(path),
        ((number, line) for number, line in lines if line.strip()),
        input_key,
        label_key,
        on_bad_row,
        image_key=image_key,
        apply_chat_template=apply_chat_template,
        folder=Path(path).absolute().parent,
    )


def check_prompts(
    name: str,
    rows: Iterable[tuple[int, bytes | Mapping[str, object]]],
    input_key: str,
    label_key: str | None,
    on_bad_row: Literal["refuse", "skip"],
    *,
    image_key: str = "images",
    apply_chat_template: bool = False,
    folder: Path | None = None,
) -> PromptFile:
    """As `read_prompts`, of numbered rows: objects, or lines of JSON.

    Args:
        folder: where relative paths of images start; None is the current folder.
    """
    good: list[PromptRow] = []
    bad: list[BadRow] = []
    seen: dict[str, int] = {}
    occurrences: Counter[str] = Counter()
    for number, source in rows:
        try:
            values = parse_line(source) if isinstance(source, bytes) else source
            keys = input_key, label_key, image_key
            row = _read_row(values, number, keys, apply_chat_template, occurrences, folder or Path.cwd())
            if row.id in seen:
                raise BadLine(f"id {row.id!r} was already used in line {seen[row.id]}")
        except BadLine as problem:
            bad.append(BadRow(number, str(problem)))
            continue
        seen[row.id] = number
        good.append(row)
    _report(name, good, bad, on_bad_row)
    repeated = len(good) - len({_canonical([row.input, row.images]) for row in good})
    if repeated:
        logger.warning("%s: %d of %d rows repeat the input of an earlier row", name, repeated, len(good))
    return PromptFile(name, good, bad, repeated)


def leave_out(file: PromptFile, problems: Sequence[str | None], on_bad_row: Literal["refuse", "skip"]) -> PromptFile:
    """The file without the rows that have a problem; ``problems`` has an entry for each of its rows.

    Raises:
        ValueError: as `read_prompts`.
    """
    pairs = list(zip(file.rows, problems, strict=True))
    good = [row for row, problem in pairs if problem is None]
    bad = [BadRow(row.line, problem) for row, problem in pairs if problem is not None]
    _report(file.name, good, bad, on_bad_row)
    return replace(file, rows=good, skipped=[*file.skipped, *bad])


def _report(path: str, rows: list[PromptRow], bad: list[BadRow], on_bad_row: str) -> None:
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
    row: Mapping[str, object],
    number: int,
    keys: tuple[str, str | None, str],
    apply_chat_template: bool,
    occurrences: Counter[str],
    folder: Path,
) -> PromptRow:
    input_key, label_key, image_key = keys
    prompt = _input(row, input_key, apply_chat_template)
    label: object = ""
    if label_key is not None:
        label = row.get(label_key)
        if label is None:
            raise BadLine(f"{label_key!r} (--data.label_key) is {'null' if label_key in row else 'missing'}")
        if isinstance(label, str) and not label.strip():
            raise BadLine(f"{label_key!r} (--data.label_key) is empty; without labels leave the flag out")
    datasource = row.get("datasource", "default")
    if not isinstance(datasource, str):
        raise BadLine(f"'datasource' must be a string, got {datasource!r}")
    images = _images(row, image_key, folder)
    content = [datasource, prompt, label] + ([] if images is None else [row[image_key]])
    return PromptRow(_identity(row, content, occurrences), number, prompt, label, datasource, images)


def _input(row: Mapping[str, object], key: str, apply_chat_template: bool) -> str | list[dict[str, object]]:
    if key not in row:
        raise BadLine(f"{key!r} (--data.input_key) is missing; the row has {', '.join(map(repr, row)) or 'no keys'}")
    value = row[key]
    if isinstance(value, list) and apply_chat_template:
        if not value or not all(map(_is_message, value)):
            raise BadLine(f"{key!r} must be a list of chat messages, each with 'role' and 'content'")
        contents = [message["content"] for message in value]
        if not any(content.strip() if isinstance(content, str) else content for content in contents):
            raise BadLine(f"{key!r} is empty")
    elif isinstance(value, list):
        raise BadLine(f"{key!r} is a list of chat messages, which needs --data.apply_chat_template")
    elif not isinstance(value, str):
        raise BadLine(f"{key!r} must be a string, got {'null' if value is None else type(value).__name__}")
    elif not value.strip():
        raise BadLine(f"{key!r} is empty")
    text = json.dumps(value, ensure_ascii=False)
    if has_half_surrogate(text):
        raise BadLine(f"{key!r} holds half of a surrogate pair, which no tokenizer can read")
    return value


def _is_message(value: object) -> bool:
    """A role, and content that is text or, for images, a list of parts."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content))


def _images(row: Mapping[str, object], key: str, folder: Path) -> list[str] | None:
    value = row.get(key)
    if value is None or value == []:
        return None
    images = value if isinstance(value, list) else [value]
    if not all(isinstance(image, str) and image for image in images):
        raise BadLine(
            f"{key!r} (--data.image_key) must be a path, a data URI or a URL, or a list of them; make files of "
            "pictures that are stored in a data set (scripts/prepare_data.py geometry3k does it for one)"
        )
    return [_image(image, key, folder) for image in images]


def _image(image: str, key: str, folder: Path) -> str:
    if image.startswith(("data:image", "http://", "https://")):
        return image
    path = folder / image
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise BadLine(f"there is no image {str(path)[:200]} ({key!r}, --data.image_key); paths start at {folder}")
    return str(path)


def _identity(row: Mapping[str, object], content: list[object], occurrences: Counter[str]) -> str:
    """The row's own id, or a hash of its content and of how many equal rows came before it."""
    if "id" in row:
        given = row["id"]
        if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
            raise BadLine(f"'id' must be a non-empty string or an integer, got {given!r}")
        return str(given)
    text = _canonical(content)
    occurrences[text] += 1
    return hashlib.sha1(f"{text}#{occurrences[text]}".encode()).hexdigest()[:16]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)
