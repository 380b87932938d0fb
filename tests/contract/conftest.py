"""Environment of the contract tests: what every process of a run gets, before anything imports openrlhf."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = [name for name in ("openrlhf", "ray", "vllm", "deepspeed") if importlib.util.find_spec(name) is None]

if MISSING:

    class NotInstalled(pytest.Module):
        """A test module that is not even imported, and says so in the summary."""

        def collect(self) -> list[pytest.Item]:
            reason = f"{', '.join(MISSING)} not installed: the adapters are NOT checked against upstream"
            pytest.skip(reason, allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return NotInstalled.from_parent(parent, path=module_path)

else:
    from openrlhf_ext.adapters import cpu_platform

    os.environ.update(cpu_platform.process_env())
    cpu_platform.install()


@pytest.fixture(scope="session")
def one_rank_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo process group of this process alone; upstream's trainers take their collectives for granted."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any call of Ray raises; it would otherwise start a cluster by itself."""
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch, one_rank_world: None) -> None:
    """Upstream's experience maker and actor groups take values for references."""
    import openrlhf.trainer.ppo_utils.experience_maker
    import openrlhf.trainer.ray.launcher
    from fakes import LocalRay

    for module in (openrlhf.trainer.ppo_utils.experience_maker, openrlhf.trainer.ray.launcher):
        monkeypatch.setattr(module, "ray", LocalRay)
