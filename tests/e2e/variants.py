"""Trains several configurations, one after the other, on one Ray, one engine and one actor. Run by the tests.

Usage: python variants.py FOLDER FLAG... -- CONFIG [FLAG...] -- CONFIG [FLAG...] ...

The real parts take half a minute to start; what differs between these configurations lives in the controller. Weights
and optimizer go on from one to the next. The flags before the first ``--`` are for all of them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from openrlhf_ext.adapters import cpu_platform, launch
from openrlhf_ext.checks import read_prompt_files
from openrlhf_ext.cli.train_ppo_ray import checked_settings
from openrlhf_ext.settings import Settings
from openrlhf_ext.supervisor import supervise


def read(folder: Path, common: list[str], config: str, flags: list[str]) -> Settings:
    """The checked settings of one configuration, as the command line reads them."""
    run_dir = ["--ext.run_dir", str(folder / config)]
    settings = checked_settings(["--config", f"configs/cpu/{config}.yaml", *common, *run_dir, *flags])
    assert settings is not None
    return settings


def train_all(all_settings: list[Settings]) -> int:
    cpu_platform.install()
    launch._start_ray(all_settings[0])

    import ray

    from openrlhf_ext.adapters.placement import create_engines, create_models, quiet_strategy
    from openrlhf_ext.adapters.trainer import Trainer

    started, first = time.time(), all_settings[0]
    strategy = quiet_strategy(first)
    models = create_models(strategy.args)
    engines = create_engines(strategy.args, first.ext, models.shared)
    ready = [engine.configure.remote(strategy, first.ext.reward) for engine in engines]
    models.load(strategy, engines, ready, first.ext.max_steps)
    for settings in all_settings:
        own = quiet_strategy(settings)
        Trainer(settings, read_prompt_files(settings), started, own, models.actor, None, None, engines).fit()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    parts: list[list[str]] = [[]]
    for argument in sys.argv[2:]:
        parts.append([]) if argument == "--" else parts[-1].append(argument)
    every = [read(Path(sys.argv[1]), parts[0], part[0], part[1:]) for part in parts[1:]]
    os.environ.update(cpu_platform.process_env())
    sys.exit(supervise(lambda: train_all(every)))
