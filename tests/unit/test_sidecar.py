"""Checkpoints on disk: whole or not there, every change noticed, unchanging parts written once."""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file as save_tensors

import openrlhf_ext
from openrlhf_ext.checkpoint import sidecar
from openrlhf_ext.checkpoint.sidecar import CorruptCheckpoint, collect_garbage, read, remove, tags, write
from openrlhf_ext.checkpoint.state_tree import Immutable

DIGEST = "0" * 64


def part(number: int) -> Immutable:
    return Immutable({"tokens": np.arange(number, dtype=np.int32), "ids": np.array([b"a", b"bc"]), "text": ["\udc80"]})


def state(step: int, *parts: Immutable) -> dict:
    return {"step": step, "rng": 2**100 + step, "weights": np.full(4, step / 3, np.float32), "parts": list(parts)}


def assert_reads(root: Path, tag: str, step: int, numbers: list[int]) -> None:
    found = read(root, tag)
    assert found["step"] == step and found["rng"] == 2**100 + step
    assert found["weights"].tobytes() == np.full(4, step / 3, np.float32).tobytes()
    assert [one.tree["tokens"].tolist() for one in found["parts"]] == [list(range(number)) for number in numbers]
    assert all(one.tree["ids"].tolist() == [b"a", b"bc"] and one.tree["text"] == ["\udc80"] for one in found["parts"])


def segments(root: Path) -> set[str]:
    return {file.name for file in (root / "segments").iterdir()}


def entries(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# -- written and read --


def test_what_is_read_is_what_was_written_and_can_be_written_into(tmp_path: Path) -> None:
    write(
        tmp_path / "new" / "root", "step_1", {"bf16": torch.tensor([1.5], dtype=torch.bfloat16), **state(1, part(3))}
    )
    found = read(tmp_path / "new" / "root", "step_1")
    assert found["bf16"].dtype == torch.bfloat16 and found["bf16"].tolist() == [1.5]
    found["weights"][:] = 0
    assert_reads(tmp_path / "new" / "root", "step_1", 1, [3])


def test_a_state_without_arrays_is_a_checkpoint_too(tmp_path: Path) -> None:
    write(tmp_path, "a", None)
    assert read(tmp_path, "a") is None and tags(tmp_path) == ["a"]


def test_a_tag_is_replaced_by_the_newer_state_of_that_tag(tmp_path: Path) -> None:
    write(tmp_path, "a", state(1, part(3)))
    write(tmp_path, "a", state(2, part(4)))
    assert_reads(tmp_path, "a", 2, [4])
    assert entries(tmp_path) == {"a", "segments"}


@pytest.mark.parametrize("tag", ["", ".", "..", ".a", "a/b", "../a", "segments", "a\n"])
def test_a_tag_that_is_no_name_of_a_folder_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ValueError, match="cannot be a checkpoint's tag"):
        write(tmp_path, tag, None)
    assert not entries(tmp_path)


# -- unchanging parts --


def test_an_unchanged_part_is_written_once_and_named_by_its_content(tmp_path: Path) -> None:
    one = part(1000)
    first = write(tmp_path, "a", state(1, one))
    file = tmp_path / "segments" / f"{one.digest}.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == one.digest
    written_at = file.stat().st_mtime_ns
    assert write(tmp_path, "b", state(2, one)) == first - file.stat().st_size
    restored = read(tmp_path, "b")
    restored["step"] = 3
    assert write(tmp_path, "c", restored) < file.stat().st_size
    assert file.stat().st_mtime_ns == written_at and segments(tmp_path) == {file.name}


def test_a_known_part_is_written_again_where_its_file_is_not(tmp_path: Path) -> None:
    one = part(5)
    write(tmp_path / "old", "a", state(1, one))
    write(tmp_path / "new", "a", state(1, one))
    shutil.rmtree(tmp_path / "old")
    assert_reads(tmp_path / "new", "a", 1, [5])
    file = tmp_path / "new" / "segments" / f"{one.digest}.safetensors"
    file.write_bytes(b"cut off")
    write(tmp_path / "new", "a", state(2, one))
    assert_reads(tmp_path / "new", "a", 2, [5])


def test_a_part_goes_with_the_last_tag_that_refers_to_it(tmp_path: Path) -> None:
    old, new = part(3), part(4)
    write(tmp_path, "a", state(1, old))
    write(tmp_path, "b", state(2, old, new))
    write(tmp_path, "c", state(3, new))
    remove(tmp_path, "a")
    collect_garbage(tmp_path)
    assert_reads(tmp_path, "b", 2, [3, 4])
    remove(tmp_path, "b")
    assert len(segments(tmp_path)) == 2  # removing alone collects nothing
    collect_garbage(tmp_path)
    assert segments(tmp_path) == {f"{new.digest}.safetensors"} and tags(tmp_path) == ["c"]
    remove(tmp_path, "b")  # which is not there
    assert_reads(tmp_path, "c", 3, [4])


def test_nothing_is_collected_while_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, "a", state(1, part(3)))
    write(tmp_path, "b", state(2, part(4)))
    (tmp_path / "a" / "manifest.json").write_text("{}")
    (tmp_path / ".c.tmp").mkdir()
    (tmp_path / ".file.tmp").write_text("not the sidecar's")
    before = entries(tmp_path), segments(tmp_path)
    collect_garbage(tmp_path)
    assert (entries(tmp_path), segments(tmp_path)) == before
    remove(tmp_path, "a")
    collect_garbage(tmp_path)
    assert entries(tmp_path) == {"b", "segments", ".file.tmp"} and len(segments(tmp_path)) == 1


def test_a_part_within_a_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot hold another one"):
        write(tmp_path, "a", Immutable([part(1)]))


# -- killed --


class Killed(BaseException):
    """Not an Exception: no handler may go on after it."""


@pytest.fixture
def kill_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many file operations of the sidecar pass and die in the next one, half done if it can be."""
    left = [0]

    def limited(operation: Callable, half: Callable = lambda *args, **kwargs: None) -> Callable:
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == -1:
                half(*args, **kwargs)
            if left[0] < 0:
                raise Killed
            return operation(*args, **kwargs)

        return call

    for name in ("replace", "fsync", "open", "mkdir"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))

    def half_removed(folder: Path) -> None:
        next(folder.iterdir()).unlink()

    def half_written(arrays: dict, file: Path) -> None:
        file.write_bytes(b"\x08")

    monkeypatch.setattr(sidecar.shutil, "rmtree", limited(shutil.rmtree, half_removed))
    monkeypatch.setattr(sidecar, "open", limited(builtins.open), raising=False)
    monkeypatch.setattr(sidecar, "save_file", limited(sidecar.save_file, half_written))

    def arm(operations: int) -> None:
        left[0] = operations

    arm(10**9)
    return arm


@pytest.mark.parametrize("tag", ["b", "a"])
def test_whenever_a_save_is_killed_older_tags_are_readable_and_its_own_is_whole_or_not_there(
    tmp_path: Path, kill_after: Callable[[int], None], tag: str
) -> None:
    for operations in count():
        kill_after(10**9)
        root = tmp_path / str(operations)
        write(root, "old", state(0, part(3)))
        write(root, "a", state(1, part(3), part(4)))
        kill_after(operations)
        try:
            write(root, tag, state(2, part(4), part(5)))
            was_killed = False
        except Killed:
            was_killed = True
        for _ in range(2):  # the second time after the garbage has gone
            kill_after(10**9)
            assert_reads(root, "old", 0, [3])
            if tag == "b":
                assert_reads(root, "a", 1, [3, 4])
            if tag in tags(root):
                is_new = read(root, tag)["step"] == 2
                assert is_new or tag == "a" and was_killed
                assert_reads(root, tag, *((2, [4, 5]) if is_new else (1, [3, 4])))
            else:
                assert was_killed and not (root / tag).exists()
            collect_garbage(root)
            assert entries(root) - {tag} == {"old", "segments"} | ({"a"} if tag == "b" else set())
        write(root, tag, state(3, part(4), part(6)))
        assert_reads(root, tag, 3, [4, 6])
        if not was_killed:
            break
    assert operations > 20


def test_whenever_a_removal_is_killed_the_tag_is_whole_or_not_there(
    tmp_path: Path, kill_after: Callable[[int], None]
) -> None:
    for operations in range(4):
        kill_after(10**9)
        write(tmp_path, "a", state(1, part(3)))
        kill_after(operations)
        try:
            remove(tmp_path, "a")
        except Killed:
            pass
        kill_after(10**9)
        assert (tags(tmp_path) == ["a"]) is (tmp_path / "a").exists() is (operations == 0)
        collect_garbage(tmp_path)
        assert entries(tmp_path) == ({"a", "segments"} if operations == 0 else {"segments"})


# -- changed --


def test_a_flipped_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, "a", state(1, part(3)))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 4
    for file in files:
        content = file.read_bytes()
        for i, byte in enumerate(content):
            file.write_bytes(content[:i] + bytes([byte ^ 1 << i % 8]) + content[i + 1 :])
            with pytest.raises(CorruptCheckpoint, match="resume from another checkpoint"):
                read(tmp_path, "a")
        file.write_bytes(content)
    assert_reads(tmp_path, "a", 1, [3])


@pytest.mark.parametrize("name", ["state.json", "arrays.safetensors", "manifest.json", "segment"])
def test_a_file_that_is_missing_or_cut_off_is_named_and_its_tag_not_listed(tmp_path: Path, name: str) -> None:
    one = part(3)
    write(tmp_path, "a", state(1, one))
    file = tmp_path / "segments" / f"{one.digest}.safetensors" if name == "segment" else tmp_path / "a" / name
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-2])
    cut_off = "is not JSON" if name == "manifest.json" else f"has {size - 2} bytes instead of {size}"
    for reason in (cut_off, "is missing"):
        with pytest.raises(CorruptCheckpoint, match=f"{file.name} {reason}; "):
            read(tmp_path, "a")
        assert tags(tmp_path) == []
        file.unlink(missing_ok=True)


def seal(root: Path, contents: dict[str, bytes], **changes: object) -> None:
    """A tag "a" of any files, with a manifest that vouches for them."""
    (root / "a").mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (root / "a" / name).write_bytes(content)
    seals = {name: [hashlib.sha256(content).hexdigest(), len(content)] for name, content in contents.items()}
    manifest = {"format_version": 1, "files": seals, "segments": [], **changes}
    (root / "a" / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def good_files(root: Path) -> dict[str, bytes]:
    write(root / "good", "a", {"x": np.arange(3)})
    return {name: (root / "good" / "a" / name).read_bytes() for name in ("state.json", "arrays.safetensors")}


@pytest.mark.parametrize(
    "text",
    [
        *('{"$": ["array", "9"]}', '{"$": ["immutable", 0]}', '{"$": []}', '{"$": 3}', '{"$": ["other", "0"]}'),
        *('{"$": ["tensor", "0", "object"]}', '{"$": ["bytes", "0", 5, [1]]}', '{"$": ["int", "x"]}'),
        *('{"$": ["dict", []]}', "[" * 100_000, "\xff", "", '{"$": ["tensor", "0"]}', '{"$": ["array", ["0"]]}'),
    ],
)
def test_a_tree_that_no_state_has_is_refused(tmp_path: Path, text: str) -> None:
    seal(tmp_path, {**good_files(tmp_path), "state.json": text.encode("latin-1")})
    with pytest.raises(CorruptCheckpoint, match=r"a/state\.json is not"):
        read(tmp_path, "a")


def test_arrays_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    files = good_files(tmp_path)
    save_tensors({"0": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "bf16")
    save_tensors({"0": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "fp8")
    pickled = b"\x80\x04cos\nsystem\n(S'touch /tmp/pwned'\ntR."
    others = ((tmp_path / name).read_bytes() for name in ("bf16", "fp8"))
    for content in (b"", pickled, b"\xff" * 100, *others):
        seal(tmp_path, {**files, "arrays.safetensors": content})
        with pytest.raises(CorruptCheckpoint, match=r"a/arrays\.safetensors is not a safetensors file"):
            read(tmp_path, "a")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format_version": 2}, "has the unknown format version 2, not 1"),
        ({"format_version": None}, "has the unknown format version None"),
        ({"segments": [["../../secret", 3]]}, "is not a manifest"),
        ({"segments": [[DIGEST]]}, "is not a manifest"),
        ({"segments": None}, "is not a manifest"),
        ({"files": {}}, "is not a manifest"),
        ({"files": {"/etc/passwd": [DIGEST, 1]}}, "is not a manifest"),
        ({"more": 1}, "is not a manifest"),
    ],
)
def test_a_manifest_that_was_not_written_here_is_refused(tmp_path: Path, changes: dict, reason: str) -> None:
    files = good_files(tmp_path)
    seal(tmp_path, files)
    assert read(tmp_path, "a")["x"].tolist() == [0, 1, 2]
    seal(tmp_path, files, **changes)
    with pytest.raises(CorruptCheckpoint, match=rf"manifest\.json {reason}"):
        read(tmp_path, "a")
    assert tags(tmp_path) == []


def test_nothing_in_the_package_can_unpickle() -> None:
    package = Path(openrlhf_ext.__file__).parent
    names: set[str] = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
    assert "safetensors.numpy.load_file" in names
    modules = {name.partition(".")[0] for name in names}
    assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    assert not names & {"np.load", "numpy.load", "torch.load", "torch.save", "np.save", "np.savez"}
