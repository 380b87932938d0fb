"""Configuration of the extensions: one frozen dataclass per part.

Every field is a flag ``--ext.<part>.<name>`` and a YAML key of the same name; its metadata says what it means, its
unit and where the default comes from, and is what ``--help`` prints. A part that is off is ``None``. A new part is a
new dataclass and one field of `ExtConfig`; `config_loading.from_dict` reads any of them. OpenRLHF's own settings are
not repeated here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Metric = Literal["reward", "accuracy"]
Objective = Literal["decoupled", "on_policy", "behavior_clip"]


class ConfigError(ValueError):
    """A setting the user has to change.

    `key` is its dotted name, such as ``ext.dapo.max_rounds``; `where` is the file and line it was read from, if any.
    """

    def __init__(self, key: str, problem: str, where: str = "") -> None:
        super().__init__(f"{where}: --{key} {problem}" if where else f"--{key} {problem}")
        self.key = key
        self.problem = problem


def _meta(help: str, *, unit: str = "", source: str = "") -> dict[str, str]:
    return {"help": help, "unit": unit, "source": source}


def _at_least(key: str, value: float, bound: float, way_out: str) -> None:
    """Raises ConfigError unless `value` is a finite number >= `bound`."""
    if not math.isfinite(value) or value < bound:
        raise ConfigError(key, f"must be at least {bound:g}, got {value:g}; {way_out}")


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    """Which groups count as effective, and what happens to the others."""

    ineffective: Literal["keep", "drop"] = field(
        default="keep",
        metadata=_meta("groups whose metric does not vary: train on them, or drop them", source="OpenRLHF keeps them"),
    )
    metric: Metric = field(default="reward", metadata=_meta("the value that has to vary within a group"))
    tolerance: float = field(
        default=1e-6,
        metadata=_meta(
            "a group is effective iff max - min of the metric exceeds this",
            unit="metric units",
            source="far below any reward step, far above float noise",
        ),
    )

    def __post_init__(self) -> None:
        _at_least("ext.groups.tolerance", self.tolerance, 0, "0 means that any difference counts")


@dataclass(frozen=True, slots=True)
class DapoConfig:
    """Dynamic sampling: generate more prompts until the batch is full of effective groups (arXiv:2503.14476)."""

    prompts_per_round: int | None = field(
        default=None,
        metadata=_meta(
            "prompts generated per round; null = 3 x rollout.batch_size", unit="prompts", source="verl's DAPO recipe"
        ),
    )
    max_rounds: int = field(
        default=10,
        metadata=_meta("generation rounds per train step, at most", unit="rounds", source="verl's DAPO recipe"),
    )
    metric: Metric = field(
        default="accuracy",
        metadata=_meta("the value that has to vary within a group", source="verl's DAPO recipe"),
    )
    tolerance: float = field(
        default=1e-6,
        metadata=_meta(
            "a group is effective iff max - min of the metric exceeds this",
            unit="metric units",
            source="as ext.groups.tolerance",
        ),
    )

    def __post_init__(self) -> None:
        if self.prompts_per_round is not None:
            _at_least("ext.dapo.prompts_per_round", self.prompts_per_round, 1, "null means 3 x rollout.batch_size")
        _at_least("ext.dapo.max_rounds", self.max_rounds, 1, "1 means no further round, --ext.dapo null is off")
        _at_least("ext.dapo.tolerance", self.tolerance, 0, "0 means that any difference counts")


@dataclass(frozen=True, slots=True)
class FillConfig:
    """Zero-variance slots are trained on groups from a buffer (POPO, arXiv:2606.01281).

    What counts as zero-variance, and what happens to a slot that nothing can fill, is ``ext.groups``.
    """

    capacity: int | None = field(
        default=None,
        metadata=_meta(
            "groups that the buffer holds; null = rollout.batch_size",
            unit="groups",
            source="our choice; the paper says 'small'",
        ),
    )
    max_gib: float = field(
        default=8.0, metadata=_meta("memory of the buffer; beyond it the oldest groups go", unit="GiB")
    )
    store: Literal["effective", "all"] = field(
        default="effective",
        metadata=_meta("store informative groups, or all of them (the paper's ablation POPO-ineff)"),
    )
    choose: Literal["newest", "kl"] = field(
        default="newest",
        metadata=_meta(
            "which stored groups come first: the newest, or those closest to the current policy by estimated KL, "
            "which costs a forward pass over the buffer (POPO-KL)",
            source="the paper",
        ),
    )
    min_age: int = field(
        default=1,
        metadata=_meta("youngest age that is used; 10 is the paper's ablation POPO-stale", unit="train steps"),
    )
    max_age: int | None = field(
        default=None, metadata=_meta("oldest age that is used; null = no limit", unit="train steps")
    )
    max_uses: int | None = field(default=None, metadata=_meta("times a group is used; null = no limit", unit="uses"))
    objective: Objective = field(
        default="decoupled",
        metadata=_meta(
            "replayed tokens: weighted by proximal/behavior and clipped around the proximal policy, treated as "
            "on-policy (weight 1), or clipped around the behavior policy (weight 1)",
            source="the paper; the last two are its ablations",
        ),
    )
    weight_cap: float = field(
        default=5.0,
        metadata=_meta("upper bound of the weight of a replayed token", source="our choice; AReaL's is 5"),
    )

    def __post_init__(self) -> None:
        if self.capacity is not None:
            _at_least("ext.fill.capacity", self.capacity, 1, "--ext.fill null is off")
        if not math.isfinite(self.max_gib) or self.max_gib <= 0:
            raise ConfigError("ext.fill.max_gib", f"must be a positive number of GiB, got {self.max_gib:g}")
        _at_least("ext.fill.min_age", self.min_age, 1, "a group can be used from the next step on, at age 1")
        if self.max_age is not None:
            _at_least("ext.fill.max_age", self.max_age, self.min_age, "it cannot be below --ext.fill.min_age")
        if self.max_uses is not None:
            _at_least("ext.fill.max_uses", self.max_uses, 1, "null means no limit, --ext.fill null is off")
        _at_least("ext.fill.weight_cap", self.weight_cap, 1, "below 1 even an unchanged policy would be capped")


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How long generation may take, and what it records."""

    deadline_s: float = field(default=1800.0, metadata=_meta("deadline of one group request", unit="seconds"))
    max_retries: int = field(default=1, metadata=_meta("times a failed group request is sent again", unit="retries"))
    log_probs: bool = field(
        default=True,
        metadata=_meta("collect the engine's log-probs, to measure the engine/trainer mismatch"),
    )

    def __post_init__(self) -> None:
        if not math.isfinite(self.deadline_s) or self.deadline_s <= 0:
            raise ConfigError(
                "ext.rollout.deadline_s",
                f"must be a positive number of seconds, got {self.deadline_s:g}; for a long wait give a large number",
            )
        _at_least("ext.rollout.max_retries", self.max_retries, 0, "0 means that a failed request is not sent again")


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """How reward files are run."""

    deadline_s: float = field(
        default=10.0,
        metadata=_meta(
            "deadline of one reward call; 0 = OpenRLHF's call in a thread, without a deadline",
            unit="seconds",
        ),
    )
    workers: int = field(default=2, metadata=_meta("reward processes per vLLM engine", unit="processes"))
    on_invalid: Literal["drop_group", "zero"] = field(
        default="drop_group",
        metadata=_meta("a rollout without a valid reward: drop its group, or give it reward 0"),
    )

    def __post_init__(self) -> None:
        _at_least("ext.reward.deadline_s", self.deadline_s, 0, "0 means no deadline")
        _at_least("ext.reward.workers", self.workers, 1, "for no worker processes set --ext.reward.deadline_s 0")


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What an evaluation reports. The number of samples is OpenRLHF's eval.n_samples_per_prompt."""

    pass_at: tuple[int, ...] = field(
        default=(1, 2, 4, 8),
        metadata=_meta("the k of the reported pass@k, increasing", unit="samples"),
    )
    correct_at: float = field(
        default=1.0,
        metadata=_meta("a rollout is correct iff its score is at least this", source="0/1 graders"),
    )
    at_start: bool = field(default=True, metadata=_meta("evaluate before the first train step"))

    def __post_init__(self) -> None:
        increasing = sorted(set(self.pass_at))
        if not self.pass_at or list(self.pass_at) != increasing or increasing[0] < 1:
            raise ConfigError(
                "ext.eval.pass_at", f"must be increasing positive integers such as 1 2 4 8, got {list(self.pass_at)}"
            )
        if not math.isfinite(self.correct_at):
            raise ConfigError("ext.eval.correct_at", f"must be a finite score, got {self.correct_at:g}; 1.0 is usual")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """How prompt files are checked."""

    on_bad_row: Literal["refuse", "skip"] = field(
        default="refuse", metadata=_meta("a bad row in a prompt file: refuse to start, or skip it")
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is logged, and where."""

    samples_per_step: int = field(default=4, metadata=_meta("rollouts written out per train step", unit="rollouts"))
    wandb: Literal["off", "offline", "online"] = field(
        default="off", metadata=_meta("Weights & Biases mode", source="OpenRLHF's is off without a key")
    )
    worker_output: Literal["file", "console"] = field(
        default="file", metadata=_meta("where the output of Ray workers goes")
    )

    def __post_init__(self) -> None:
        _at_least("ext.log.samples_per_step", self.samples_per_step, 0, "0 means none")


@dataclass(frozen=True, slots=True)
class ExtConfig:
    """Everything under ``ext``. Frozen, so that it can be shared with every Ray worker."""

    run_dir: str = field(metadata=_meta("directory of this run's outputs"))
    max_steps: int | None = field(
        default=None,
        metadata=_meta(
            "train steps, also the plan of the learning rate; null = train.num_episodes passes over the data",
            unit="train steps",
            source="OpenRLHF's plan",
        ),
    )
    groups: GroupsConfig | None = field(
        default=None, metadata=_meta("effective groups; null = OpenRLHF's own behavior for groups without variance")
    )
    dapo: DapoConfig | None = field(default=None, metadata=_meta("dynamic sampling; null = off"))
    fill: FillConfig | None = field(
        default=None, metadata=_meta("zero-variance slots filled from a group buffer; null = off")
    )
    rollout: RolloutConfig = field(default=RolloutConfig(), metadata=_meta("generation"))
    reward: RewardConfig = field(default=RewardConfig(), metadata=_meta("reward calls"))
    eval: EvalConfig = field(default=EvalConfig(), metadata=_meta("evaluation"))
    data: DataConfig = field(default=DataConfig(), metadata=_meta("prompt files"))
    log: LogConfig = field(default=LogConfig(), metadata=_meta("logging"))

    def __post_init__(self) -> None:
        if not self.run_dir.strip():
            raise ConfigError("ext.run_dir", "is empty; name a directory, for example runs/first")
        if self.max_steps is not None:
            _at_least("ext.max_steps", self.max_steps, 1, "null means one pass over the data per train.num_episodes")
