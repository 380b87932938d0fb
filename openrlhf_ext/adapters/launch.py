"""From checked settings to finished runs: Ray, engines, models, trainer."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from openrlhf_ext.adapters import cpu_platform
from openrlhf_ext.adapters.upstream import check_version
from openrlhf_ext.prompts import PromptFile
from openrlhf_ext.settings import Settings
from openrlhf_ext.supervisor import STOP_GRACE_S, supervise

logger = logging.getLogger(__name__)

_ENDING_S = 10.0
"""For Ray to shut down, after the deadline of a step that is abandoned."""


@dataclass(frozen=True, slots=True)
class Run:
    """Checked settings, with the prompt files that they name (by flag)."""

    settings: Settings
    files: Mapping[str, PromptFile]
    stock: bool = False
    """OpenRLHF's own trainer, for comparison."""


def run(settings: Settings, files: Mapping[str, PromptFile]) -> int:
    """Train; returns the exit code. No process that the run started is left when it returns."""
    return run_all([Run(settings, files)], stop_grace_s=settings.ext.stop_deadline_s + _ENDING_S)


def run_all(runs: Iterable[Run], *, stop_grace_s: float = STOP_GRACE_S) -> int:
    """Train one after the other on the same Ray, engines and actors (see ``session.py``), up to the first that fails.

    The settings must have the same ``benchmark.suite.parts_key``; a run is asked for when the one before it is done.
    ``stop_grace_s`` is that of `supervise`.
    """
    check_version()
    started = time.time()
    return supervise(lambda: _train_all(iter(runs), started), stop_grace_s=stop_grace_s)


def _train_all(runs: Iterator[Run], started: float) -> int:
    first = next(runs, None)
    if first is None:
        return 0
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("openrlhf_ext").setLevel(logging.INFO)
    if cpu_platform.active():
        os.environ.update(cpu_platform.process_env())
        cpu_platform.install()

    # Before any thread of ours: Ray forks, and a child that inherits a lock which an import holds waits for ever.
    _start_ray(first.settings)
    logger.info("Ray is up after %.1f s", time.time() - started)
    from openrlhf_ext.adapters.data import check_data
    from openrlhf_ext.adapters.placement import quiet_strategy
    from openrlhf_ext.adapters.session import Session

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("openrlhf."):  # upstream sets each of its loggers to DEBUG; the progress bar says it better
            logging.getLogger(name).setLevel(logging.WARNING)

    import ray

    one = first
    session: Session | None = None
    try:
        for one in chain([first], runs):
            try:
                files = check_data(quiet_strategy(one.settings), one.settings.ext.data, one.files)
            except ValueError as error:
                _keep_traceback(one.settings, error)
                print(f"error: {error}", file=sys.stderr)
                return 2
            session = session or Session(first.settings, stock=first.stock)
            session.train(one.settings, files, started)
            started = time.time()
        return 0
    except Exception as error:
        print(f"error: {_message(error)}\n{_keep_traceback(one.settings, error)}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()


def _message(error: Exception) -> str:
    """What went wrong, without the traceback of another process that Ray puts into its messages."""
    cause = getattr(error, "cause", None) or error
    return str(cause) if isinstance(cause, ValueError | RuntimeError) else f"{type(cause).__name__}: {cause}"


def _keep_traceback(settings: Settings, error: Exception) -> str:
    run_dir = Path(settings.ext.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "error.log"
    file.write_text(f"error: {_message(error)}\n{traceback.format_exc()}", encoding="utf-8")
    return f"the traceback is in {file}, the output of the workers under {run_dir / 'logs'}"


def _start_ray(settings: Settings) -> None:
    """Connect to the cluster in RAY_ADDRESS, or start one of our own; never to one that merely happens to run."""
    import ray

    args = settings.upstream
    env = {
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"),
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    }
    runtime_env: dict[str, object] = {"env_vars": env}
    resources: dict[str, object] = {}
    address = os.environ.get("RAY_ADDRESS")
    if cpu_platform.active():
        env |= cpu_platform.process_env()
        runtime_env["worker_process_setup_hook"] = cpu_platform.HOOK
        if not address:
            # Logical resources: upstream places its models on "GPUs", Ray does not ask for hardware.
            gpus = _num_gpus(args)
            resources = {"num_cpus": gpus + 1, "num_gpus": gpus}
    stop = signal.getsignal(signal.SIGTERM)
    ray.init(
        address=address or "local",
        include_dashboard=False if not address else None,
        log_to_driver=settings.ext.log.worker_output == "console",
        logging_level=logging.WARNING,
        runtime_env=runtime_env,
        **resources,
    )
    signal.signal(signal.SIGTERM, stop)  # Ray's own handler prints its stack and exits with 1


def _num_gpus(args) -> int:
    """GPUs that a placement without colocation takes."""
    groups = [args.actor]
    groups += [args.ref] if args.algo.kl.init_coef > 0 else []
    groups += [args.critic] if args.critic.model_name_or_path else []
    models = sum(group.num_nodes * group.num_gpus_per_node for group in groups)
    return models + args.vllm.num_engines * args.vllm.tensor_parallel_size
