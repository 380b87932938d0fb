"""Checkpoints of the controller's state, beside the model's.

=================================  ==========================================================================
<root>/<tag>/state.json            the tree, with arrays by name and immutable parts by number
<root>/<tag>/arrays.safetensors    its arrays
<root>/<tag>/manifest.json         format version; bytes and SHA-256 of both files; SHA-256 and bytes of the
                                   immutable parts
<root>/segments/<SHA-256>.safetensors
                                   an immutable part, for all tags that refer to it; its own tree is the array
                                   ``tree``, JSON as bytes
=================================  ==========================================================================

Everything is written and flushed under a temporary name, which begins with a dot, and then renamed: whenever the
process is killed, a tag is complete or it is not there. One process writes to a root at a time. Files hold JSON and
arrays only, so that reading one runs no code of its.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from openrlhf_ext.checkpoint.state_tree import Immutable, flatten, unflatten

FORMAT_VERSION = 1

_STATE, _ARRAYS, _MANIFEST, _SEGMENTS = "state.json", "arrays.safetensors", "manifest.json", "segments"
_TREE = "tree"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class CorruptCheckpoint(ValueError):
    """A file of a checkpoint that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class _Seal:
    """What a file must be like."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Manifest:
    files: dict[str, _Seal]
    segments: list[_Seal]

    def dump(self) -> str:
        content = {
            "format_version": FORMAT_VERSION,
            "files": {name: [seal.sha256, seal.num_bytes] for name, seal in self.files.items()},
            "segments": [[seal.sha256, seal.num_bytes] for seal in self.segments],
        }
        return json.dumps(content, indent=1) + "\n"


def write(root: str | Path, tag: str, tree: object) -> int:
    """Write a state as ``tag``, in place of an older one of that tag.

    Args:
        root: folder of the checkpoints; made where it is not there.
        tag: letters, digits, ``_``, ``-`` and ``.``.
        tree: see `state_tree`. Immutable parts that lie in ``root`` already are not written again.

    Returns:
        Bytes written.

    Raises:
        TypeError: something in the tree is no state.
        ValueError: the tag cannot be the name of a folder.
    """
    root = Path(root)
    if not _TAG.fullmatch(tag) or tag == _SEGMENTS:
        raise ValueError(f"{tag!r} cannot be a checkpoint's tag; use letters, digits, '_', '-' and '.'")
    flat = flatten(tree)
    (root / _SEGMENTS).mkdir(parents=True, exist_ok=True)
    written = sum(_write_segment(root, part) for part in flat.immutables)
    _flush(root / _SEGMENTS)
    folder = root / f".{tag}.tmp"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    _write_text(folder / _STATE, json.dumps(flat.tree, allow_nan=False))
    save_file(flat.arrays, folder / _ARRAYS)
    manifest = _Manifest(
        {name: _seal(folder / name) for name in (_STATE, _ARRAYS)},
        [_Seal(part.digest, part.num_bytes) for part in flat.immutables],
    )
    _write_text(folder / _MANIFEST, manifest.dump())
    written += sum(file.stat().st_size for file in folder.iterdir())
    for path in (*folder.iterdir(), folder):
        _flush(path)
    remove(root, tag)
    os.replace(folder, root / tag)
    _flush(root)
    return written


def read(root: str | Path, tag: str) -> object:
    """The state of a tag, every file of it checked.

    Its immutable parts are `Immutable`, and know their file, so that the next `write` to ``root`` leaves them alone.

    Raises CorruptCheckpoint, with file and reason, for what is missing, changed, of another format, or no state.
    """
    root = Path(root)
    folder = root / tag
    manifest = _read_manifest(folder)
    for name, seal in manifest.files.items():
        _verify(folder / name, seal)
    parts = [_read_segment(_segment_file(root, seal.sha256), seal) for seal in manifest.segments]
    return _decode((folder / _STATE).read_bytes(), _load(folder / _ARRAYS), parts, folder / _STATE)


def tags(root: str | Path) -> list[str]:
    """The tags of which every file is there with the right size, by name. Their content is not read."""
    return [folder.name for folder in _folders(Path(root)) if _looks_complete(folder)]


def remove(root: str | Path, tag: str) -> None:
    """Delete a tag, if it is there. Its immutable parts stay until `collect_garbage`."""
    root = Path(root)
    if (root / tag).exists():
        doomed = root / f".{tag}.removed"
        if doomed.exists():
            shutil.rmtree(doomed)
        os.replace(root / tag, doomed)
        _flush(root)
        shutil.rmtree(doomed)


def collect_garbage(root: str | Path) -> None:
    """Delete what kills have left behind, and the immutable parts that no tag refers to.

    Deletes nothing as long as a tag's manifest cannot be read: no one knows what that tag refers to.
    """
    root = Path(root)
    try:
        manifests = [_read_manifest(folder) for folder in _folders(root)]
    except CorruptCheckpoint:
        return
    kept = {_segment_file(root, seal.sha256) for manifest in manifests for seal in manifest.segments}
    for path in (*root.glob(".*.tmp"), *root.glob(".*.removed")):
        if path.is_dir():  # what others keep beside the tags is theirs
            shutil.rmtree(path)
    for file in (root / _SEGMENTS).glob("*"):
        if file not in kept:
            file.unlink()


# -- files --


def _write_segment(root: Path, part: Immutable) -> int:
    """Write an immutable part unless its file is there; the bytes written."""
    if part.digest and _has_size(_segment_file(root, part.digest), part.num_bytes):
        return 0
    flat = flatten(part.tree)
    if flat.immutables:
        raise TypeError("an immutable part of a checkpoint cannot hold another one")
    text = json.dumps(flat.tree, allow_nan=False)
    temporary = root / _SEGMENTS / ".tmp"
    save_file({**flat.arrays, _TREE: np.frombuffer(text.encode(), np.uint8)}, temporary)
    _flush(temporary)
    seal = _seal(temporary)
    os.replace(temporary, _segment_file(root, seal.sha256))
    part.digest, part.num_bytes = seal.sha256, seal.num_bytes
    return seal.num_bytes


def _read_segment(file: Path, seal: _Seal) -> Immutable:
    _verify(file, seal)
    arrays = _load(file)
    text = arrays.pop(_TREE, np.empty(0, np.uint8)).tobytes()
    return Immutable(_decode(text, arrays, [], file), seal.sha256, seal.num_bytes)


def _segment_file(root: Path, digest: str) -> Path:
    return root / _SEGMENTS / f"{digest}.safetensors"


def _folders(root: Path) -> list[Path]:
    """Of the tags, complete or not."""
    found = root.iterdir() if root.exists() else []
    return sorted(path for path in found if path.is_dir() and path.name != _SEGMENTS and path.name[0] != ".")


def _looks_complete(folder: Path) -> bool:
    try:
        manifest = _read_manifest(folder)
    except CorruptCheckpoint:
        return False
    files = [(folder / name, seal) for name, seal in manifest.files.items()]
    files += [(_segment_file(folder.parent, seal.sha256), seal) for seal in manifest.segments]
    return all(_has_size(file, seal.num_bytes) for file, seal in files)


def _has_size(file: Path, num_bytes: int) -> bool:
    return file.exists() and file.stat().st_size == num_bytes


def _read_manifest(folder: Path) -> _Manifest:
    file = folder / _MANIFEST
    if not file.exists():
        raise _corrupt(file, "is missing")
    text = file.read_bytes()
    content = _parse(text, file)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise _corrupt(file, f"has the unknown format version {version}, not {FORMAT_VERSION}")
    try:
        manifest = _Manifest(
            {name: _Seal(*content["files"][name]) for name in (_STATE, _ARRAYS)},
            [_Seal(*seal) for seal in content["segments"]],
        )
        intact = manifest.dump().encode() == text
    except (KeyError, TypeError):
        intact = False
    # A digest becomes part of a path.
    if not intact or not all(re.fullmatch("[0-9a-f]{64}", str(seal.sha256)) for seal in manifest.segments):
        raise _corrupt(file, "is not a manifest as it was written")
    return manifest


def _decode(text: bytes, arrays: dict[str, np.ndarray], parts: list[Immutable], file: Path) -> object:
    tree = _parse(text, file)
    try:
        return unflatten(tree, arrays, parts)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise _corrupt(file, f"is not a state ({error!r})") from None


def _parse(text: bytes, file: Path) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _corrupt(file, "is not JSON") from None


def _load(file: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(file)
    except (SafetensorError, TypeError, AttributeError) as error:  # the last two: a type that NumPy does not have
        raise _corrupt(file, f"is not a safetensors file of NumPy arrays ({error})") from None


def _verify(file: Path, seal: _Seal) -> None:
    if not file.exists():
        raise _corrupt(file, "is missing")
    size = file.stat().st_size
    if size != seal.num_bytes:
        raise _corrupt(file, f"has {size} bytes instead of {seal.num_bytes}")
    if _seal(file).sha256 != seal.sha256:
        raise _corrupt(file, "has another checksum than when it was written")


def _corrupt(file: Path, reason: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{file} {reason}; resume from another checkpoint, or remove this one and start in a new --ext.run_dir"
    )


def _write_text(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)


def _seal(file: Path) -> _Seal:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
        return _Seal(digest.hexdigest(), stream.tell())


def _flush(path: Path) -> None:
    """Make the content of a file, or the names in a folder, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
