"""Ray, engines and model actors, kept up for one run or for several, one after the other.

Starting them takes half a minute; the runs of a benchmark take two. What is built anew for every run, and what stays:

=================================  ==================================================================================
anew for every run                 the trainer with sampler, pool, buffers, ledger and all random generators;
                                   in every actor: weights from disk, DeepSpeed engine, optimizer, LR plan, seeds;
                                   in the engines: weights (sent by the actor), prefix cache
kept                               processes, Ray, ``torch.distributed``'s group, the engines' KV cache memory,
                                   the reward processes, the engines' own random stream
=================================  ==================================================================================

The last one makes a run depend on the runs before it, unless requests bring their own seeds
(``--ext.rollout.seed_requests``), as those of the benchmark do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import ray

from openrlhf_ext.adapters.actors import PolicyActor
from openrlhf_ext.adapters.placement import create_engines, create_models, quiet_strategy
from openrlhf_ext.adapters.trainer import Trainer
from openrlhf_ext.prompts import PromptFile
from openrlhf_ext.settings import Settings

logger = logging.getLogger(__name__)


class Session:
    """The real parts of a run. Ray must be up; ends with it.

    Args:
        settings: of the first run; later ones need the same ``benchmark.suite.parts_key``.
        stock: OpenRLHF's own trainer and actors (``stock_trainer.py``) instead of ours.
    """

    def __init__(self, settings: Settings, *, stock: bool = False) -> None:
        self._trainer, actor = Trainer, PolicyActor
        if stock:
            from openrlhf_ext.adapters.stock_trainer import StockActor, StockTrainer

            self._trainer, actor = StockTrainer, StockActor
        args = quiet_strategy(settings).args
        self._models = create_models(args, actor)
        self._engines = create_engines(args, settings.ext, self._models.shared)
        self._used = False

    def train(self, settings: Settings, files: Mapping[str, PromptFile], started: float) -> None:
        """One whole run, from the model on disk; ``started`` is when it began, for its wall-clock figures."""
        strategy, models = quiet_strategy(settings), self._models
        trainer = self._trainer(
            settings, files, started, strategy, models.actor, models.critic, models.reference, self._engines
        )
        trainer.reporter.num_skipped_rows = sum(len(file.skipped) for file in files.values())
        node = ray._private.worker._global_node
        if node:
            trainer.run_dir.link_logs(node.get_logs_dir_path())
        ready = []
        if not self._used:
            ready = [engine.configure.remote(strategy, settings.ext.reward) for engine in self._engines]
        models.load(strategy, self._engines, ready, trainer.max_steps)
        if self._used:
            trainer.broadcast_to_vllm()
        self._used = True
        logger.info("engines and models are ready after %.1f s", time.time() - started)
        trainer.fit(models.save)
