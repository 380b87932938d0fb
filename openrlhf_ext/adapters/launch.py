"""From checked settings to a finished run: Ray, engines, models, trainer."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from openrlhf_ext.adapters import cpu_platform
from openrlhf_ext.adapters.upstream import check_version
from openrlhf_ext.prompts import PromptFile
from openrlhf_ext.settings import Settings
from openrlhf_ext.supervisor import supervise

logger = logging.getLogger(__name__)


def run(settings: Settings, files: Mapping[str, PromptFile]) -> int:
    """Train on the checked settings and prompt files (by flag); returns the exit code.

    No process that the run started is left when it returns.
    """
    check_version()
    started = time.time()
    return supervise(lambda: _train(settings, files, started))


def _train(settings: Settings, files: Mapping[str, PromptFile], started: float) -> int:
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("openrlhf_ext").setLevel(logging.INFO)
    if cpu_platform.active():
        os.environ.update(cpu_platform.process_env())
        cpu_platform.install()

    # The imports take longer than Ray's start and mostly wait for neither.
    imports = threading.Thread(target=import_module, args=("openrlhf_ext.adapters.trainer",))
    imports.start()
    _start_ray(settings)
    logger.info("Ray is up after %.1f s", time.time() - started)
    imports.join()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("openrlhf."):  # upstream sets each of its loggers to DEBUG; the progress bar says it better
            logging.getLogger(name).setLevel(logging.WARNING)

    import ray

    try:
        _run_trainer(settings, files, started)
        return 0
    except Exception as error:
        print(f"error: {_message(error)}\n{_keep_traceback(settings)}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()


def _message(error: Exception) -> str:
    """What went wrong, without the traceback of another process that Ray puts into its messages."""
    cause = getattr(error, "cause", None) or error
    return str(cause) if isinstance(cause, ValueError | RuntimeError) else f"{type(cause).__name__}: {cause}"


def _keep_traceback(settings: Settings) -> str:
    run_dir = Path(settings.ext.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "error.log"
    file.write_text(traceback.format_exc(), encoding="utf-8")
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


def _run_trainer(settings: Settings, files: Mapping[str, PromptFile], started: float) -> None:
    import ray

    from openrlhf_ext.adapters.placement import create_engines, create_models, quiet_strategy
    from openrlhf_ext.adapters.trainer import Trainer

    logger.info("starting engines and models after %.1f s", time.time() - started)
    strategy = quiet_strategy(settings)
    args = strategy.args
    models = create_models(args)
    engines = create_engines(args, settings.ext, models.shared)
    trainer = Trainer(settings, files, started, strategy, models.actor, models.critic, models.reference, engines)
    node_logs = ray._private.worker._global_node.get_logs_dir_path() if ray._private.worker._global_node else None
    if node_logs:
        trainer.run_dir.link_logs(node_logs)
    engines_ready = [engine.configure.remote(strategy, settings.ext.reward) for engine in engines]
    models.load(strategy, engines, engines_ready, trainer.max_steps)
    logger.info("engines and models are ready after %.1f s", time.time() - started)
    trainer.fit()
    models.save()
