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

    from openrlhf_ext.adapters.cluster import check_folders, check_placement, start_ray

    # Before any thread of ours: Ray forks, and a child that inherits a lock which an import holds waits for ever.
    try:
        start_ray(first.settings)
    except ValueError as error:
        return _refused(first.settings, error)
    logger.info("Ray is up after %.1f s", time.time() - started)
    from openrlhf_ext.adapters.data import check_data
    from openrlhf_ext.adapters.engine import check_agent_file
    from openrlhf_ext.adapters.lora import check_adapters
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
                if session is None:
                    check_placement(one.settings.upstream)
                check_folders(one.settings)
                if one.settings.upstream.train.agent_func_path:
                    check_agent_file(one.settings.upstream.train.agent_func_path)
                files = check_data(quiet_strategy(one.settings), one.settings.ext.data, one.files)
                check_adapters(one.settings.upstream)
            except ValueError as error:
                return _refused(one.settings, error)
            session = session or Session(first.settings, stock=first.stock)
            session.train(one.settings, files, started)
            started = time.time()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing is left that could be started again
        return 0
    except Exception as error:
        print(f"error: {_message(error)}\n{_keep_traceback(one.settings, error)}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()


def _refused(settings: Settings, error: ValueError) -> int:
    """Something that the user has to change."""
    _keep_traceback(settings, error)
    print(f"error: {error}", file=sys.stderr)
    return 2


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
