"""Environment of the contract tests: what every process of a run gets, before anything imports openrlhf."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf_ext.adapters import cpu_platform

os.environ.update(cpu_platform.process_env())
if importlib.util.find_spec("torch") is not None:
    cpu_platform.install()


@pytest.fixture(scope="session")
def one_rank_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo process group of this process alone; upstream's trainers take their collectives for granted."""
    import torch
    import torch.distributed as dist

    store: Path = tmp_path_factory.mktemp("world") / "store"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
