"""OpenRLHF 0.11.2 on a machine without a GPU.

One adapter for everything upstream hard-codes to CUDA; on a machine with a GPU nothing here runs. ``install`` goes
into every Ray worker through ``worker_process_setup_hook``, before anything imports openrlhf, and patches torch only,
so upstream's own files run as they are:

=====================================================  ====================================================
upstream                                               answer
=====================================================  ====================================================
``flash_attn`` imported by models/ring_attn_utils.py   stub whose functions raise (only packing needs them)
``torch.cuda.current_device()`` used as a device       "cpu", which formats as "0" inside ``f"cuda:{...}"``
``torch.cuda.synchronize``, ``empty_cache``, ...       nothing to do
``init_device_mesh("cuda", ...)``                      a "cpu" mesh
NCCL weight broadcast, one call a parameter            ``WeightGroup``: one gloo broadcast a step
``load_weights`` into repacked CPU weights             ``CpuWorkerExtension``: one ``reload_weights``
GPU placement groups                                   logical GPUs: Ray takes ``num_gpus`` at its word
=====================================================  ====================================================
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from datetime import timedelta

HOOK = f"{__name__}.install"
WORKER_EXTENSION = f"{__name__}.CpuWorkerExtension"

ENGINE_SETTINGS = {"enable_chunked_prefill": False}
"""Of every vLLM engine on CPU. A batch that is full ends in the midst of a prompt; vLLM then undoes the draw of that
request by setting its random generator back, which one on CPU cannot: with seeded requests the engine would die."""

# Generous: the sender may still be compiling DeepSpeed's CPU optimizer when the engines are up.
_WEIGHT_GROUP_TIMEOUT = timedelta(minutes=30)


DECIDED = "OPENRLHF_EXT_ON_CPU"
"""0 or 1 in the workers of a run: what its driver found. Ray hides all GPUs from an actor that takes none itself, as
that of an engine does whose own workers take them."""


def active() -> bool:
    """True on a machine without a visible GPU, and in the workers of a run that was started on one."""
    decided = os.environ.get(DECIDED)
    if decided is not None:
        return decided == "1"
    import torch

    return not torch.cuda.is_available()


def process_env() -> dict[str, str]:
    """Environment of every process of a run on CPU.

    One OpenMP thread each: several processes with spinning thread teams on few cores are slower by 10 to 100 times.
    A user's own settings win.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB for each engine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about GPU features that are not there
        # By environment: a shared cache is rebuilt (a minute) whenever another environment has used it.
        "TORCH_EXTENSIONS_DIR": os.path.join(sys.prefix, "torch_extensions"),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else ray warns of a future change of this default
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
    }
    env = {key: os.environ.get(key, value) for key, value in defaults.items()}
    # torch looks for ninja on PATH, also when the environment was not activated.
    return env | {"PATH": os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)])}


def build_extensions() -> None:
    """Compile what DeepSpeed compiles at first use on CPU, so that the first run does not wait a minute for it."""
    os.environ.update(process_env())
    from deepspeed.accelerator import get_accelerator

    for builder in ("ShareMemCommBuilder", "FusedAdamBuilder"):
        get_accelerator().create_op_builder(builder).load(verbose=False)


class _CpuDevice(str):
    """Goes to ``tensor.to(...)`` as "cpu" and into ``f"cuda:{...}"`` as a number, as upstream uses it."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


def install() -> None:
    """Patch this process. Does nothing where a GPU is visible; safe to call twice."""
    if not active():
        return
    import torch
    import torch.distributed.device_mesh as device_mesh

    _stub_flash_attn()
    _meet_other_nodes()
    if isinstance(getattr(torch.cuda, "_openrlhf_ext_device", None), _CpuDevice):
        return
    device = _CpuDevice("cpu")
    torch.cuda._openrlhf_ext_device = device
    torch.cuda.current_device = lambda: device
    for name in ("synchronize", "empty_cache", "set_device", "current_stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)

    init_device_mesh = device_mesh.init_device_mesh

    def cpu_mesh(device_type, *args, **kwargs):
        return init_device_mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    device_mesh.init_device_mesh = cpu_mesh


def _meet_other_nodes() -> None:
    """In a worker on one of several nodes: have gloo publish the address by which Ray knows the node.

    Its own choice is what the hostname resolves to, which /etc/hosts often maps to the loopback: ranks on other nodes
    would then wait for this one until they time out.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return
    import psutil

    address = ray.util.get_node_ip_address()
    for name, own in psutil.net_if_addrs().items():
        if any(one.address == address for one in own):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _stub_flash_attn() -> None:
    if "flash_attn" in sys.modules or importlib.machinery.PathFinder.find_spec("flash_attn") is not None:
        return

    def unavailable(*args, **kwargs):
        raise RuntimeError("--ds.packing_samples needs flash-attn on a GPU; it is not available on this machine")

    names = {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }
    for name, functions in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for function in functions:
            setattr(module, function, unavailable)
        sys.modules[name] = module
    # transformers compares the version before it decides that flash attention cannot be used.
    sys.modules["flash_attn"].__version__ = "0.0.0"


class WeightGroup:
    """A gloo group of the training rank 0 and all engine workers, apart from ``torch.distributed``'s default group.

    The sender opens the store on a port the system picks, so there is no bind-and-close race.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        import torch.distributed as dist

        self._args = (rank, world_size)
        self._store = dist.TCPStore(
            host, port, world_size, is_master=rank == 0, timeout=_WEIGHT_GROUP_TIMEOUT, wait_for_workers=False
        )
        self._group = None

    @property
    def port(self) -> int:
        return self._store.port

    def connect(self) -> None:
        """Blocks until all members have called it."""
        import torch.distributed as dist

        store = dist.PrefixStore("openrlhf_ext_weights", self._store)
        self._group = dist.ProcessGroupGloo(store, *self._args, _WEIGHT_GROUP_TIMEOUT)

    def broadcast(self, tensor) -> None:
        """Send ``tensor`` from rank 0 into everybody's ``tensor``."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()


class CpuWorkerExtension:
    """vLLM worker extension (``worker_extension_cls``): receives all weights in one call.

    vLLM repacks CPU weights at load, so single ``load_weights`` calls fail; ``reload_weights`` undoes and redoes the
    packing, once for all parameters.
    """

    def init_process_group(
        self, master_address, master_port, rank_offset, world_size, group_name, backend="gloo", use_ray=False
    ):
        import torch.distributed as dist

        if use_ray:
            raise ValueError("--vllm.sync_with_ray is not supported on CPU; leave it out")
        self._weight_group = WeightGroup(master_address, master_port, dist.get_rank() + rank_offset, world_size)
        self._weight_group.connect()

    def receive_weights(self, names, shapes, dtype):
        """Receive one flat buffer with the parameters ``names`` in order and load them."""
        import torch
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=dtype)
        self._weight_group.broadcast(flat)
        pieces = [piece.view(shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)]
        self.model_runner.reload_weights(weights_iterator=iter(zip(names, pieces, strict=True)))
        # An output layer tied to the embedding loads nothing itself: reload_weights leaves its packed copy stale.
        for layer in self.model_runner.get_model().modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)
