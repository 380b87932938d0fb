"""Geometry3k as prompt files with pictures beside them: geometry problems, each with a diagram and a short answer.

From the data set `hiyouga/geometry3k` of the Hugging Face hub (MIT; 2,101 training and 601 test problems, 60 MB in
parquet files), a conversion of Inter-GPS's Geometry3K. Its columns: `images`, `problem` with an `<image>` where the
diagram goes, and `answer`.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from openrlhf_ext.tasks.jsonl import write_jsonl
from openrlhf_ext.tasks.math_answers import MAX_ANSWER_CHARS, grade
from openrlhf_ext.tasks.sources import read_rows

COLUMNS = ("images", "problem", "answer")
MARKER = "<image>"
INSTRUCTION = (
    "Think first, inside <think> and </think>. After that give the final answer, and only that, inside \\boxed{}."
)
_NEED = "it is Geometry3k, 60 MB of parquet files with diagrams; "


def write_dataset(out_dir: Path, sources: Sequence[str]) -> tuple[list[int], Counter[str], bool]:
    """Write `train.jsonl`, `eval.jsonl` and the folder `images`; the two files last, when all pictures are there.

    Args:
        sources: of training and evaluation, as `sources.read_rows` takes them.

    Returns:
        Training and evaluation rows, rows left out by reason, and False when everything was there already.

    Raises:
        ValueError: a source that cannot be had, or without a usable problem.
    """
    left_out: Counter[str] = Counter()
    is_new, files = False, {}
    for split, source in zip(("train", "eval"), sources, strict=True):
        rows = []
        for index, row in enumerate(read_rows(source, COLUMNS, _NEED)):
            name = f"{split}-{index:05d}"
            pictures = _pictures(row)
            problem = _problem(row, pictures)
            if problem is not None:
                left_out[problem] += 1
                continue
            paths = [f"images/{name}-{i}.{ending}" for i, (ending, _) in enumerate(pictures)]
            for path, (_, content) in zip(paths, pictures, strict=True):
                is_new |= _write(out_dir / path, content)
            text = str(row["problem"]).strip()
            text = text if MARKER in text else MARKER + text
            rows.append(
                {
                    "id": f"geometry3k-{name}",
                    "input": f"{text}\n\n{INSTRUCTION}",
                    "label": str(row["answer"]).strip(),
                    "images": paths,
                    "datasource": "geometry3k",
                }
            )
        if not rows:
            raise ValueError(
                f"{source} has no usable problem with the columns {', '.join(COLUMNS)} "
                f"({', '.join(f'{count} {reason}' for reason, count in left_out.items()) or 'no rows'}); give the "
                "files of hiyouga/geometry3k"
            )
        files[split] = rows
    for split, rows in files.items():
        is_new |= write_jsonl(out_dir / f"{split}.jsonl", rows)
    return [len(rows) for rows in files.values()], left_out, is_new


def _problem(row: Mapping[str, object], pictures: Sequence[object]) -> str | None:
    """Why a row cannot be used."""
    text, answer = row.get("problem"), row.get("answer")
    if not isinstance(text, str) or not text.strip():
        return "without a problem"
    if not pictures:
        return "without a picture that can be read"
    if text.count(MARKER) not in (0, len(pictures)) or (MARKER not in text and len(pictures) > 1):
        return "with other numbers of pictures and places for them"
    if not isinstance(answer, str) or not 0 < len(answer.strip()) <= MAX_ANSWER_CHARS:
        return "without a short answer"
    if grade(f"\\boxed{{{answer}}}", answer).accuracy != 1.0:
        return "whose own answer math-verify does not accept"
    return None


def _pictures(row: Mapping[str, object]) -> list[tuple[str, bytes]]:
    """File ending and content of each picture; none where one cannot be read."""
    pictures = []
    for cell in row.get("images") or []:  # type: ignore[attr-defined]
        content = cell.get("bytes") if isinstance(cell, dict) else None
        try:
            with Image.open(io.BytesIO(content or b"")) as picture:
                picture.load()
                pictures.append((str(picture.format).lower(), content))
        except OSError:
            return []
    return pictures


def _write(path: Path, content: bytes) -> bool:
    """Whole or not at all; returns False when it is there already."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
    return True
