"""Checkpoints on disk: OpenRLHF's folder of each model, and the controller's own state beside them.

    CKPT_PATH/_actor/global_step20    model, optimizer and LR schedule, by DeepSpeed (_critic likewise)
    CKPT_PATH/ext/global_step20       everything else (``checkpoint/sidecar.py``); written last
    CKPT_PATH/ext/segments            parts of replay buffers that several checkpoints share
    CKPT_PATH/ext/best.json           tag, metric and value of the best checkpoint so far

So a checkpoint is complete when its ``ext`` folder is. Loading takes the newest complete one whose files all have the
sizes they were written with; a damaged one is left out with a message. ``--ckpt.max_num`` are kept, and the best one
(``--ckpt.best_metric_key``) beside them; upstream's own rotation, which may remove what ``latest`` points to, is off.
Which one is the best is part of the state, so that steps that are done again find the best of the steps before them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from openrlhf_ext.checkpoint import sidecar
from openrlhf_ext.run_dir import replace_text

logger = logging.getLogger(__name__)

_TAG = re.compile(r"global_step\d+")


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was found complete."""

    tag: str
    step: int
    state: Mapping


class Checkpoints:
    """The checkpoints under ``--ckpt.path``.

    Args:
        models: folder name and actors of each trained model.
        max_num: how many are kept beside the best.
    """

    def __init__(self, path: str, models: Mapping[str, object], *, max_num: int) -> None:
        self._path, self._models, self._max_num = Path(path), models, max_num
        self._root = self._path / "ext"
        self.best: Mapping[str, object] | None = None
        """Tag, key and value of the best checkpoint, as of the newest one."""

    @property
    def are_upstreams(self) -> bool:
        """Whether OpenRLHF's own trainer wrote them, which has no state beside the models."""
        return (self._path / "_actor").is_dir() and not self._root.is_dir()

    def newest(self) -> Restored | None:
        """The newest complete checkpoint. The models will load the same one."""
        for tag in sorted(_tags(self._root), key=_step_of, reverse=True):
            try:
                state = sidecar.read(self._root, tag)
                self._check_models(tag, state["models"])
            except sidecar.CorruptCheckpoint as problem:
                logger.warning("checkpoint %s is left out: %s", tag, problem)
                continue
            for model in self._models:
                if (self._path / model).is_dir():
                    replace_text(self._path / model / "latest", tag)
            self.best = state["best"]
            self._write_best()
            return Restored(tag, _step_of(tag), state)
        return None

    def save(self, step: int, state: Mapping[str, object], *, best: Mapping[str, object] | None = None) -> None:
        """Write the checkpoint of ``step``, then remove what is kept no longer.

        Args:
            best: key and value of the metric, when no checkpoint had a better one.
        """
        tag = f"global_step{step}"
        # From here on models without a state are an incomplete checkpoint of ours, not one of OpenRLHF.
        self._root.mkdir(parents=True, exist_ok=True)
        # One that was left over by an attempt that went further, or is being replaced, must not look complete now.
        self._remove(tag)
        calls = [group.async_run_method("save_checkpoint", tag=tag) for group in self._models.values()]
        ray.get([ref for refs in calls for ref in refs])
        if best is not None:
            self.best = {"tag": tag, **best}
        sidecar.write(self._root, tag, {**state, "models": self._model_files(tag), "best": self.best})
        self._write_best()
        self._rotate(tag)

    def mark_best(self, step: int, best: Mapping[str, object]) -> None:
        """Make the checkpoint of ``step`` the best one: its evaluation came after it was written."""
        self.best = {"tag": f"global_step{step}", **best}
        self._write_best()

    def forget_after(self, step: int) -> None:
        """Remove what there is of later steps, complete or not: a run that goes on from ``step`` makes it anew."""
        for tag in set().union(*map(_tags, (self._root, *(self._path / model for model in self._models)))):
            if _step_of(tag) > step:
                self._remove(tag)

    def _write_best(self) -> None:
        if self.best is not None:
            replace_text(self._root / "best.json", json.dumps(self.best))
        else:
            (self._root / "best.json").unlink(missing_ok=True)

    def _rotate(self, newest: str) -> None:
        kept = {newest, self.best["tag"] if self.best is not None else None}
        ours = sorted(sidecar.tags(self._root), key=_step_of, reverse=True)
        for tag in [tag for tag in ours if tag not in kept][max(0, self._max_num - 1) :]:
            self._remove(tag)
        sidecar.collect_garbage(self._root)

    def _remove(self, tag: str) -> None:
        # The state last: what a kill leaves is then a checkpoint with missing files, which is removed the next time.
        for model in self._models:
            shutil.rmtree(self._path / model / tag, ignore_errors=True)
        shutil.rmtree(self._path / f"{tag}_hf", ignore_errors=True)
        sidecar.remove(self._root, tag)

    def _model_files(self, tag: str) -> dict[str, int]:
        """Size of every file that the actors wrote. Those on another machine's own disk are not seen from here."""
        folders = [self._path / model / tag for model in self._models]
        files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
        return {str(file.relative_to(self._path)): file.stat().st_size for file in files}

    def _check_models(self, tag: str, sizes: Mapping[str, int]) -> None:
        if not sizes:
            raise sidecar.CorruptCheckpoint(
                f"no file of its models is under {self._path}; written with --ckpt.disable_ds, or on another disk?"
            )
        for name, size in sizes.items():
            file = self._path / name
            if not file.is_file():
                raise sidecar.CorruptCheckpoint(f"{file} is missing")
            if file.stat().st_size != size:
                raise sidecar.CorruptCheckpoint(f"{file} has {file.stat().st_size} bytes, {size} were written")


def _tags(folder: Path) -> set[str]:
    """Of checkpoints in ``folder``, complete or not."""
    return {path.name for path in folder.glob("global_step*") if _TAG.fullmatch(path.name)}


def _step_of(tag: str) -> int:
    return int(tag.removeprefix("global_step"))
