"""Whole runs of the controller without a cluster: the real trainer, and stand-ins for Ray, engines and model actors.

Everything is deterministic and everything is connected: an engine's answers depend on the request's seed and on every
bit of the weights that it was sent, and the weights on every number of every row that the actors were given, in order.
So a run that differs anywhere from another one differs in all that follows.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
import torch
from fake_engines import Ref
from fakes import VOCABULARY, ModelHandle, Remote, TinyPolicy
from openrlhf.trainer.ppo_utils.experience import Experience
from recorded import response

from openrlhf_ext.adapters.placement import ActorGroup
from openrlhf_ext.adapters.trainer import Trainer
from openrlhf_ext.adapters.upstream_cli import build_parser, nest
from openrlhf_ext.checkpoint.state_tree import flatten
from openrlhf_ext.checks import read_prompt_files
from openrlhf_ext.run_dir import read_metrics
from openrlhf_ext.settings import Settings, resolve

CONFIGS = Path(__file__).parents[2] / "configs" / "cpu"
FLAGS = {
    "--rollout.batch_size": "4",
    "--rollout.n_samples_per_prompt": "4",
    "--rollout.micro_batch_size": "8",
    "--rollout.max_new_tokens": "16",
    "--train.batch_size": "8",
    "--train.micro_batch_size": "4",
    "--eval.steps": "3",
    "--eval.n_samples_per_prompt": "2",
    "--ext.eval.pass_at": "1",
    "--ext.max_steps": "8",
    "--ext.resume": "auto",
    "--ext.rollout.seed_requests": "true",
    "--ext.log.samples_per_step": "1000",
}
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 1.0)
"""Of the prompts, in turn."""


class Kill(BaseException):
    """The process is gone: nothing catches this, and what was in memory is thrown away."""


class Cluster:
    """``ray`` whose calls are done at once, and are reported done in a random order that no run has twice."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self._rng = random.Random()

    def get(self, refs, timeout: float | None = None):
        return [self.get(one) for one in refs] if isinstance(refs, list) else getattr(refs, "outcome", refs)

    def put(self, value):
        return value

    def wait(self, refs: list, timeout: float) -> tuple[list, list]:
        picked = self._rng.choice(refs)
        return [picked], [ref for ref in refs if ref is not picked]


class Tokenizer:
    """A token for each character; decodes to numbers."""

    pad_token_id = 0

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, tokens: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens.tolist()))


class Engine:
    """Answers by seed, prompt and weights, half of them in two turns; about one request in ten fails in some way."""

    def __init__(self, at: Callable[[str], None]) -> None:
        self._at, self.weights = at, ""
        self.generate_group = Remote(lambda **call: Ref(self._answer(**call)))
        self.check_health = self.reset_prefix_cache = Remote(lambda: None)

    def _answer(self, *, prompt: str, label: str, num_rollouts: int, seed: int, **_sampling) -> tuple:
        self._at("request")
        luck = random.Random(f"{seed}/{prompt}").random()
        answers = [self._response(prompt, label, seed + i) for i in range(num_rollouts)]
        if luck < 0.05:
            return answers[1:], "deadline"
        if luck < 0.08:
            return [], "OutOfMemoryError: no memory"
        if luck < 0.1:
            answers[-1]["reward"] = float("nan")
        return answers, None

    def _response(self, prompt: str, label: str, seed: int) -> dict:
        rng = random.Random(f"{seed}/{prompt}/{self.weights}")
        reward = float(rng.random() < ACCURACIES[int(label) % len(ACCURACIES)])
        extra = {"format": rng.random()} if rng.random() < 0.5 else {}
        more = {"prompt_tokens": 2 + int(label) % 4, "response_tokens": rng.randint(1, 8)}
        more |= {"feedback": (3, 1) if rng.random() < 0.5 else (), "truncated": rng.random() < 0.2}
        return response(reward=reward, extra_logs=extra, rng=rng, **more) | {"prompt": prompt, "label": label}


class Model(TinyPolicy):
    """Weights with momentum. An update depends on all rows, on their order, and on the random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.logits.requires_grad_(False)
        self.momentum = torch.zeros_like(self.logits)

    def update(self, window: list[Experience], generator: torch.Generator) -> None:
        step = torch.rand(self.logits.shape, generator=generator) / 100
        for batch in window:
            cells = batch.sequences[:, :-1] * VOCABULARY + batch.sequences[:, 1:]
            values = batch.advantages * (1 + batch.action_log_probs / 10) * batch.action_mask
            step.view(-1).index_add_(0, cells.flatten(), values.float().flatten())
        self.momentum = 0.9 * self.momentum + step
        self.logits += 0.02 * self.momentum

    def digest(self) -> str:
        return hashlib.sha256(self.logits.numpy().tobytes() + self.momentum.numpy().tobytes()).hexdigest()


class Rank(ModelHandle):
    """A policy actor: upstream's forward dispatch, an update in place of training, checkpoints in DeepSpeed's layout.

    All ranks of a group share one model.
    """

    def __init__(self, rank: int, model: Model, engines: list[Engine], at: Callable[[str], None]) -> None:
        super().__init__(model)
        self._rank, self._engines, self._at = rank, engines, at
        self._generator = torch.Generator().manual_seed(rank)
        self.trained: list[str] = []
        """What each train step was given."""
        for name in ("set_windows", "fit", "skip_train_step", "broadcast_to_vllm", "save_checkpoint"):
            setattr(self, name, Remote(getattr(self, f"_{name}")))
        self.get_checkpoint_states = Remote(lambda: self._states)
        self.random_state = Remote(lambda: {"cpu": self._generator.get_state()})
        self.set_random_state = Remote(self._set_random_state)

    def load(self, args) -> None:
        """As upstream's actor at its start: the checkpoint that ``latest`` names, if it is told to load one."""
        self._folder, self._states = Path(args.ckpt.path) / "_actor", {}
        if args.ckpt.load_enable and (self._folder / "latest").exists():
            folder = self._folder / (self._folder / "latest").read_text()
            self._model.logits.copy_(torch.from_numpy(np.load(folder / "model.npy")))
            self._model.momentum = torch.from_numpy(np.load(folder / "optimizer.npy"))
            self._states = json.loads((folder / "states.json").read_text())

    def _save_checkpoint(self, tag: str) -> None:
        if self._rank == 0:
            folder = self._folder / tag
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / "model.npy", self._model.logits.numpy())
            self._at("actor saving")
            np.save(folder / "optimizer.npy", self._model.momentum.numpy())
            (folder / "states.json").write_text("{}")
            (self._folder / "latest").write_text(tag)
            self._at("actor saved")

    def _set_windows(self, windows: list[list[Experience]]) -> None:
        self._windows = windows

    def _fit(self, kl_ctl: float) -> dict[str, float]:
        self.trained.append(digest([[_content(batch) for batch in window] for window in self._windows]))
        for window in self._windows:
            self._model.update(window, self._generator)
        self._at("trained")
        return {"kl": float(self._model.logits.square().mean()), "kl_coef": kl_ctl}

    def _skip_train_step(self) -> None:
        self.trained.append("nothing")

    def _broadcast_to_vllm(self) -> None:
        for engine in self._engines:
            engine.weights = self._model.digest()

    def _set_random_state(self, states: list[dict[str, torch.Tensor]]) -> None:
        if self._rank < len(states):
            self._generator.set_state(states[self._rank]["cpu"])


def group(handles: list[ModelHandle]) -> ActorGroup:
    made = object.__new__(ActorGroup)
    made.duplicate_actors, made._actor_handlers = 1, handles
    return made


def _content(batch: Experience) -> dict[str, object]:
    return {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "index"}


def digest(tree: object) -> str:
    """Of a state (``state_tree.py``), its arrays and its immutable parts."""
    flat = flatten(tree)
    found = hashlib.sha256(json.dumps(flat.tree, sort_keys=True).encode())
    for name in sorted(flat.arrays):
        array = flat.arrays[name]
        found.update(f"{name}{array.dtype}{array.shape}".encode() + array.tobytes())
    for part in flat.immutables:
        found.update(digest(part.tree).encode())
    return found.hexdigest()


class ObservedTrainer(Trainer):
    """Keeps what every step left behind, and says where it is."""

    def observe(self, at: Callable[[str], None]) -> None:
        self._at, self.steps = at, {}

    def _step(self, step: int) -> None:
        self._at(f"step {step}")
        super()._step(step)
        # The evaluation comes later, and seconds differ.
        state = {k: v for k, v in self._state(step).items() if k not in ("reporter", "evaluation_due", "evaluated")}
        ranks = self.actor_model_group._actor_handlers
        self.steps[step] = {key: digest(value) for key, value in state.items()} | {
            "model": ranks[0]._model.digest(),
            "trained": [rank.trained[-1] for rank in ranks],
        }
        self._at("update done")

    def _finish_step(self, step: int, **how: bool) -> None:
        super()._finish_step(step, **how)
        self._at(f"finished {step}")

    def evaluate(self, step: int, *, last: bool = False) -> dict[str, float]:
        self._at(f"evaluation {step}")
        metrics = super().evaluate(step, last=last)
        self._at(f"evaluated {step}")
        return metrics


class Attempt:
    """A run from its start, or from what lies in ``folder``, to its end or until ``at`` raises.

    Args:
        at: called with the name of every instant at which the process may end.
        more: flags beside and before FLAGS.
    """

    def __init__(
        self,
        folder: Path,
        config: str = "grpo",
        more: Mapping[str, str] | None = None,
        *,
        at: Callable[[str], None] = lambda instant: None,
        num_ranks: int = 1,
    ) -> None:
        flags = FLAGS | {"--ext.run_dir": str(folder)} | dict(more or {})
        self.folder = folder
        self.settings = settings(config, flags, folder.parent)
        args = self.settings.upstream
        engines = [Engine(at), Engine(at)]
        self.model = Model()
        ranks = [Rank(rank, self.model, engines, at) for rank in range(num_ranks)]
        reference = group([ModelHandle(TinyPolicy(2)) for _ in ranks]) if args.algo.kl.init_coef > 0 else None
        strategy, files = SimpleNamespace(args=args), read_prompt_files(self.settings)
        self.trainer = ObservedTrainer(
            self.settings, files, time.time(), strategy, group(ranks), None, reference, engines
        )
        self.trainer.observe(at)
        self._at = at
        self.written: list[str] = []
        """Digests of the final model, once for each time that it was written."""
        for rank in ranks:
            rank.load(args)
        for engine in engines:
            engine.weights = Model().digest()  # from the model's own folder

    def run(self) -> Attempt:
        self.trainer.fit(self._write_model)
        return self

    def _write_model(self) -> None:
        self._at("writing the model")
        self.written.append(self.model.digest())

    @property
    def steps(self) -> dict[int, dict]:
        return self.trainer.steps


def settings(config: str, flags: Mapping[str, str], task: Path) -> Settings:
    own = {"--data.prompt_dataset": task / "train.jsonl", "--eval.dataset": task / "eval.jsonl"}
    words = [word for flag, value in (own | dict(flags)).items() for word in (flag, str(value))]
    return resolve(str(CONFIGS / f"{config}.yaml"), words, _parser(), nest)


@cache
def _parser():
    return build_parser()


def write_task(folder: Path, num_prompts: int, num_eval: int = 3) -> Path:
    """Data files for the attempts in ``folder``."""
    for name, count in (("train", num_prompts), ("eval", num_eval)):
        rows = [{"id": f"{name}-{i}", "input": f"{name} {i}", "label": str(i)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# -- what a run leaves behind --

_TIMED = ("timing/", "wall_s", "train_wall_s", "startup_s", "step_seconds_median", "rollout/engine_busy_frac")


def outcome(folder: Path) -> dict[str, object]:
    """Everything that is written, without seconds."""
    found: dict[str, object] = {"metrics.jsonl": [_untimed(row) for row in read_metrics(folder)]}
    for name in ("eval_prompts.jsonl", "replay.jsonl", "samples.jsonl"):
        file = folder / name
        found[name] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for name in ("ledger.json", "summary.json"):
        found[name] = _untimed(json.loads((folder / name).read_text()))
    return found


def _untimed(row: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if not key.startswith(_TIMED)}


def copy_run(folder: Path, name: str) -> Path:
    """What a kill at this instant leaves: the files, and nothing of what was in memory."""
    return Path(shutil.copytree(folder, folder.with_name(name), symlinks=True))
