"""What upstream hard-codes to CUDA runs on a CPU; nothing is patched where a GPU is visible."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from openrlhf_ext.adapters.cpu_platform import CpuWorkerExtension, WeightGroup, process_env

pytestmark = pytest.mark.contract

CUDA_CALLS = """
import sys
from openrlhf_ext.adapters import cpu_platform

cpu_platform.install()
import torch
import torch.distributed as dist

device = torch.cuda.current_device()
cpu_platform.install()
assert torch.cuda.current_device() is device, "a second call patched again"
assert torch.ones(1).to(device).device == torch.device("cpu")
assert torch.device(f"cuda:{device}") == torch.device("cuda", 0)
assert torch.tensor([1.0], device=device).device.type == "cpu"
assert [torch.cuda.synchronize(), torch.cuda.empty_cache(), torch.cuda.set_device(0), torch.cuda.current_stream()] == (
    [None] * 4
)

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
from torch.distributed.device_mesh import init_device_mesh  # as upstream imports it, after the patch

mesh = init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
assert mesh.device_type == "cpu" and mesh["dp"].get_group().size() == 1
value = torch.ones(2)
dist.all_reduce(value, group=mesh["dp"].get_group())
dist.destroy_process_group()

from flash_attn.bert_padding import pad_input

try:
    pad_input()
except RuntimeError as error:
    assert "--ds.packing_samples" in str(error)
else:
    raise AssertionError("packing looks as if it worked")
"""

WITH_A_GPU = """
import sys
import torch
import torch.distributed.device_mesh as device_mesh

torch.cuda.is_available = lambda: True
names = ("current_device", "synchronize", "empty_cache", "set_device", "current_stream")
before = [getattr(torch.cuda, name) for name in names] + [device_mesh.init_device_mesh]
from openrlhf_ext.adapters import cpu_platform

cpu_platform.install()
after = [getattr(torch.cuda, name) for name in names] + [device_mesh.init_device_mesh]
assert all(a is b for a, b in zip(after, before)), "patched"
assert "flash_attn" not in sys.modules, "stubbed"
"""


def run(code: str, *arguments: str) -> None:
    """Run ``code`` in a process that sees no GPU."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_upstreams_calls_of_cuda_work_on_a_cpu(tmp_path: Path) -> None:
    run(CUDA_CALLS, str(tmp_path / "store"))


def test_nothing_is_patched_where_a_gpu_is_visible() -> None:
    run(WITH_A_GPU)


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("3", "3")])
def test_a_users_own_settings_win(given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert process_env()["OMP_NUM_THREADS"] == expected


class Model(torch.nn.Module):
    """A model with an output layer that is tied to its embedding; says when that is packed again."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Module()
        self.head.quant_method = object.__new__(TiedHead)
        self.head.packed_after: list[dict] = []


class TiedHead(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed_after.append(layer.loaded)


class ModelRunner:
    def __init__(self) -> None:
        self.model = Model()

    def get_model(self) -> Model:
        return self.model

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model.head.loaded = dict(weights_iterator)


def test_weights_arrive_by_name_and_shape_and_the_tied_output_layer_is_packed_after_them(one_rank_world: None) -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7.0])}
    sender = WeightGroup("127.0.0.1", 0, rank=0, world_size=2)
    worker = CpuWorkerExtension()
    worker.model_runner = ModelRunner()

    def receive() -> None:
        worker.init_process_group("127.0.0.1", sender.port, 1, 2, "group")
        worker.receive_weights(list(weights), [tuple(weight.shape) for weight in weights.values()], torch.float32)

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        sender.connect()
        sender.broadcast(torch.cat([weight.flatten() for weight in weights.values()]))
        received.result()
    (loaded,) = worker.model_runner.model.head.packed_after
    assert list(loaded) == ["a", "b"] and all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_weights_through_ray_are_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="--vllm.sync_with_ray"):
        CpuWorkerExtension().init_process_group("127.0.0.1", 1, 1, 2, "group", use_ray=True)
