"""Writing prompt files."""

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
