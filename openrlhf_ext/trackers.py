"""The same figures in TensorBoard and Weights & Biases. ``metrics.jsonl`` exists with or without them."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars by metric name."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=folder)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases, offline or online, with rollouts and tokens as alternative x-axes.

    Steps are not comparable between methods, rollouts are. The API key comes from the environment only and is never
    part of the configuration that is uploaded. The run id is kept in the run directory, so a resumed run continues.
    """

    def __init__(
        self, *, run_dir: Path, mode: Literal["offline", "online"], names: Mapping[str, str | None], config: dict
    ) -> None:
        import wandb

        id_file = run_dir / "wandb_run_id"
        run_id = id_file.read_text("utf-8").strip() if id_file.exists() else secrets.token_hex(4)
        id_file.write_text(run_id + "\n", encoding="utf-8")
        self._run = wandb.init(
            id=run_id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(run_dir),
            config=config,
            # Metadata would hold the command line, and so a key that was given there.
            settings=wandb.Settings(console="off", save_code=False, disable_git=True, x_disable_meta=True),
            **names,
        )
        for axis in ("step", "budget/rollouts_generated", "budget/tokens_generated"):
            self._run.define_metric(axis)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def open_trackers(
    *,
    run_dir: Path,
    tensorboard_dir: str | None,
    wandb_mode: str,
    wandb_key: str | None,
    wandb_names: Mapping[str, str | None],
    config: dict,
) -> list[Tracker]:
    """The trackers that are switched on. Neither can stop a run: one that fails to open is reported and left out."""
    trackers: list[Tracker] = []
    if tensorboard_dir:
        trackers.append(TensorBoard(tensorboard_dir))
    if wandb_mode != "off":
        if wandb_key:
            os.environ["WANDB_API_KEY"] = wandb_key
        try:
            trackers.append(WandB(run_dir=run_dir, mode=wandb_mode, names=wandb_names, config=config))
        except Exception as error:  # wandb raises many kinds: no network, no key, a full disk
            logger.warning("Weights & Biases is left out of this run: %s", error)
    return trackers
