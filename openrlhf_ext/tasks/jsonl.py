"""Reading and writing files of one JSON object a line."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_jsonl(path: Path, rows: Iterable[Mapping[str, str]]) -> bool:
    """Write one JSON object per line; returns False, leaving the file alone, when it already has exactly this content.

    The file appears whole or not at all: it is written beside its place and renamed.
    """
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.is_file() and path.read_bytes() == text.encode():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(text.encode())
    partial.replace(path)
    return True


class BadLine(ValueError):
    """Why a line, or the object in it, cannot be used."""


def parse_line(line: bytes) -> dict[str, object]:
    """The object in one line. Raises BadLine for anything else."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 at byte {error.start} of the line; re-encode the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadLine(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadLine(f"must be a JSON object, got {type(row).__name__}")
    return row


def has_half_surrogate(text: str) -> bool:
    """Whether text holds half of a surrogate pair, which JSON can say and no tokenizer can read."""
    return text.encode("utf-8", "ignore").decode("utf-8") != text
