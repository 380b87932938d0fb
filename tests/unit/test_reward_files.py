"""Every reward file can be loaded where OpenRLHF loads it: in a thread of the engine's process."""

from __future__ import annotations

import runpy
from pathlib import Path
from threading import Thread

import pytest

import openrlhf_ext.rewards
from openrlhf_ext.rewards.response import extract_response

FILES = [
    path
    for path in sorted(Path(openrlhf_ext.rewards.__file__).parent.glob("*.py"))
    if "\ndef reward_func(" in path.read_text(encoding="utf-8")
]


def test_the_reward_files_are_found() -> None:
    assert {"countdown", "countdown_words", "math"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_loads_in_a_thread(path: Path) -> None:
    result: list[object] = []

    def load() -> None:
        try:
            result.append(runpy.run_path(str(path))["reward_func"])
        except Exception as error:
            result.append(error)

    thread = Thread(target=load)
    thread.start()
    thread.join()
    (loaded,) = result
    if isinstance(loaded, ModuleNotFoundError):
        pytest.skip(f"{path.stem} needs the package {loaded.name}")
    assert callable(loaded), loaded


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
)
def test_a_response_ends_at_the_first_end_of_text_of_any_model(end: str) -> None:
    """Of Qwen, Llama and DeepSeek."""
    assert extract_response(f"Say 42: #### 42{end}<pad>", "Say 42: ") == "#### 42"
