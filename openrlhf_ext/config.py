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
            "groups that the buffer holds; null = min_age x rollout.batch_size, with which a full batch is old enough",
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
    max_frac: float = field(
        default=1.0,
        metadata=_meta(
            "largest share of the batch's groups that is replayed", unit="fraction", source="the paper's is 1"
        ),
    )
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
        if not 0.0 < self.max_frac <= 1.0:
            raise ConfigError(
                "ext.fill.max_frac", f"must be above 0 and at most 1, got {self.max_frac:g}; 1 is no cap"
            )
        _at_least("ext.fill.weight_cap", self.weight_cap, 1, "below 1 even an unchanged policy would be capped")


@dataclass(frozen=True, slots=True)
class PilotConfig:
    """Pilot-Commit: a few pilot rollouts decide which prompts get a whole group (arXiv:2605.26606)."""

    n_pilot: int | None = field(
        default=None,
        metadata=_meta(
            "pilot rollouts per prompt; null = a quarter of rollout.n_samples_per_prompt",
            unit="rollouts",
            source="16 of 64 and 32 of 128 in the paper",
        ),
    )
    n_effective: int | None = field(
        default=None,
        metadata=_meta(
            "pilots that are trained, a subset of maximal variance; null = all of them",
            unit="rollouts",
            source="a diagnosis",
        ),
    )
    commit_only: bool = field(
        default=False, metadata=_meta("train no pilots, commit whole groups", source="a diagnosis of selection bias")
    )
    p_lower: float = field(
        default=0.125, metadata=_meta("a prompt with a lower pilot accuracy is deferred", source="the paper's scripts")
    )
    p_upper: float = field(
        default=0.75, metadata=_meta("a prompt with a higher pilot accuracy is skipped", source="the paper's scripts")
    )
    p_solve: float = field(
        default=1.0,
        metadata=_meta("a prompt of this pilot accuracy counts as solved, see ext.pool", source="the paper's scripts"),
    )
    prompts_per_round: int | None = field(
        default=None,
        metadata=_meta("prompts piloted per round; null = 3 x rollout.batch_size", unit="prompts", source="the paper"),
    )
    max_rounds: int = field(
        default=10, metadata=_meta("rounds per train step, at most", unit="rounds", source="the paper's scripts")
    )
    max_age: int = field(
        default=4,
        metadata=_meta(
            "oldest pilots that may be committed, with bind", unit="train steps", source="the paper's scripts"
        ),
    )
    max_survivors: int | None = field(
        default=None,
        metadata=_meta(
            "prompts that wait for their commit, at most; null = prompts_per_round or rollout.batch_size, the larger",
            unit="prompts",
        ),
    )
    order: Literal["random", "max_variance", "oldest"] = field(
        default="random", metadata=_meta("which waiting prompts are committed first", source="the paper's 4B script")
    )
    bind: bool = field(
        default=True,
        metadata=_meta(
            "send pilots of the next step along with the commits of this one; false = pilots, then their commits, "
            "strictly on-policy",
            source="the paper",
        ),
    )

    def __post_init__(self) -> None:
        for name, way_out in (
            ("n_pilot", "null means a quarter of a group"),
            ("n_effective", "null means all pilots"),
            ("prompts_per_round", "null means 3 x rollout.batch_size"),
            ("max_rounds", "1 means that a step without waiting prompts trains nothing"),
            ("max_survivors", "null means as many as a round pilots"),
        ):
            value = getattr(self, name)
            if value is not None:
                _at_least(f"ext.pilot.{name}", value, 1, way_out)
        _at_least("ext.pilot.max_age", self.max_age, 0, "0 commits only pilots of the current policy")
        if not 0.0 <= self.p_lower <= self.p_upper <= self.p_solve <= 1.0:
            raise ConfigError(
                "ext.pilot.p_lower",
                f"must not exceed p_upper, nor p_upper p_solve, all in [0, 1]; got {self.p_lower:g}, {self.p_upper:g} "
                f"and {self.p_solve:g}",
            )

    def pilots_per_prompt(self, group_size: int) -> int:
        return max(1, group_size // 4) if self.n_pilot is None else self.n_pilot

    def pilots_per_group(self, group_size: int) -> int:
        """How many of a prompt's pilots are trained."""
        return 0 if self.commit_only else self.n_effective or self.pilots_per_prompt(group_size)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """When a solved prompt leaves the pool of training prompts, and for how long."""

    exclude_min_rollouts: int = field(
        default=16,
        metadata=_meta(
            "a prompt is excluded after this many solved rollouts without a failure in between",
            unit="rollouts",
            source="Pilot-Commit's smallest pilot",
        ),
    )
    exclude_min_visits: int = field(
        default=2, metadata=_meta("and after solved pilots in this many epochs", unit="epochs")
    )
    exclude_epochs: int | None = field(
        default=None,
        metadata=_meta(
            "epochs for which a prompt stays excluded; null = for good", unit="epochs", source="Pilot-Commit"
        ),
    )
    floor: float = field(default=0.25, metadata=_meta("share of the prompts that is never excluded", unit="fraction"))

    def __post_init__(self) -> None:
        _at_least("ext.pool.exclude_min_rollouts", self.exclude_min_rollouts, 1, "1 means no minimum")
        _at_least("ext.pool.exclude_min_visits", self.exclude_min_visits, 1, "1 excludes at the first solved pilot")
        if self.exclude_epochs is not None:
            _at_least("ext.pool.exclude_epochs", self.exclude_epochs, 1, "null means for good")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError("ext.pool.floor", f"must be in [0, 1], got {self.floor:g}; 1 excludes no prompt")


@dataclass(frozen=True, slots=True)
class MoppsConfig:
    """MoPPS: of several candidates, roll out the prompts predicted nearest to a target accuracy (arXiv:2507.04632)."""

    candidates: int = field(
        default=8, metadata=_meta("candidates per chosen prompt", source="the paper's Countdown runs; 16 for math")
    )
    target: float = field(default=0.5, metadata=_meta("the wanted accuracy", source="the paper"))
    decay: float = field(
        default=0.5,
        metadata=_meta("weight of what was known before a visit", source="the paper's Countdown runs; 1 for math"),
    )

    def __post_init__(self) -> None:
        _at_least("ext.mopps.candidates", self.candidates, 2, "1 would leave no choice, --ext.mopps null is off")
        for name, value in (("target", self.target), ("decay", self.decay)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"ext.mopps.{name}", f"must be in [0, 1], got {value:g}; the default is 0.5")


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Rollouts of earlier steps are trained again beside the fresh batch (APER, arXiv:2606.04560).

    What counts as informative is ``ext.groups``. Values with "secondary source" are a third party's transcription of
    the paper's settings.
    """

    ratio: float = field(
        default=0.5, metadata=_meta("replayed per fresh informative rollout", source="secondary source")
    )
    composition: Literal["fresh_anchored", "pool"] = field(
        default="fresh_anchored",
        metadata=_meta(
            "all fresh informative rollouts and a draw beside them, or (1 + ratio) times as many drawn from fresh and "
            "stored together",
            source="the paper; pool is its naive baseline, its size is our choice",
        ),
    )
    granularity: Literal["rollout", "group"] = field(
        default="rollout", metadata=_meta("what is drawn", source="the paper; groups are naive replay")
    )
    priority: Literal["abs_advantage", "sigma", "uniform"] = field(
        default="abs_advantage",
        metadata=_meta(
            "what makes a draw likely: the advantage's size (its mean over a group), the group's reward deviation, or "
            "nothing",
            source="the paper; the last two are its baselines",
        ),
    )
    alpha: float = field(
        default=0.5,
        metadata=_meta("P ~ (priority + eps)^alpha; 0 is uniform", source="secondary source"),
    )
    eps: float = field(default=1e-6, metadata=_meta("added to the priority", source="secondary source"))
    warmup_steps: int = field(
        default=20,
        metadata=_meta(
            "steps that only fill the buffer, also after a restart without it; scale it down for runs below 50 steps",
            unit="train steps",
            source="secondary source",
        ),
    )
    eviction: Literal["age", "capacity", "none"] = field(
        default="age",
        metadata=_meta(
            "what leaves the buffer: rollouts beyond max_age and then beyond capacity, the oldest beyond capacity, or "
            "nothing; beyond max_gib the oldest always go",
            source="the paper; the last two are its ablations",
        ),
    )
    max_age: int = field(
        default=10,
        metadata=_meta("oldest age that is used, with eviction age", unit="train steps", source="the paper"),
    )
    capacity: int = field(
        default=30_000,
        metadata=_meta(
            "rollouts that the buffer holds; a back-stop with eviction age",
            unit="rollouts",
            source="secondary source",
        ),
    )
    max_gib: float = field(
        default=8.0, metadata=_meta("memory of the buffer; beyond it the oldest steps go", unit="GiB")
    )
    max_uses: int | None = field(
        default=None, metadata=_meta("times a rollout is drawn; null = no limit", unit="uses")
    )
    beta: float = field(
        default=0.0,
        metadata=_meta(
            "exponent of the weights that correct for the priorities; 0 = off", source="off; PER (arXiv:1511.05952)"
        ),
    )
    objective: Objective = field(
        default="behavior_clip",
        metadata=_meta(
            "replayed tokens: clipped around the behavior policy (weight 1), or as ext.fill.objective",
            source="secondary source",
        ),
    )
    weight_cap: float = field(
        default=5.0, metadata=_meta("as ext.fill.weight_cap, with objective decoupled", source="our choice")
    )
    rare_max_age: int | None = field(
        default=None,
        metadata=_meta(
            "oldest age of a rare success, above max_age; null = as any rollout",
            unit="train steps",
            source="an extension beyond the paper",
        ),
    )
    rare_accuracy: float = field(
        default=0.25,
        metadata=_meta("a correct rollout is a rare success in a group of at most this accuracy", source="our choice"),
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 10.0:
            raise ConfigError("ext.replay.alpha", f"must be in [0, 10], got {self.alpha:g}; 0 draws uniformly")
        _at_least("ext.replay.warmup_steps", self.warmup_steps, 0, "0 draws as soon as something is stored")
        _at_least("ext.replay.max_age", self.max_age, 1, "a rollout can be drawn from the next step on, at age 1")
        _at_least("ext.replay.capacity", self.capacity, 1, "--ext.replay null is off")
        _at_least("ext.replay.beta", self.beta, 0, "0 is off")
        _at_least("ext.replay.weight_cap", self.weight_cap, 1, "below 1 even an unchanged policy would be capped")
        if self.max_uses is not None:
            _at_least("ext.replay.max_uses", self.max_uses, 1, "null means no limit, --ext.replay null is off")
        for name in ("ratio", "eps", "max_gib"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"ext.replay.{name}", f"must be a positive number, got {value:g}")
        if self.beta and self.composition == "pool":
            raise ConfigError("ext.replay.beta", "must be 0 with composition pool: fresh rollouts are drawn, too")
        self._check_rare()

    def _check_rare(self) -> None:
        if not 0.0 < self.rare_accuracy < 1.0:
            raise ConfigError("ext.replay.rare_accuracy", f"must be above 0 and below 1, got {self.rare_accuracy:g}")
        if self.rare_max_age is None:
            return
        _at_least("ext.replay.rare_max_age", self.rare_max_age, self.max_age, "it cannot be below max_age")
        if self.eviction != "age" or self.granularity != "rollout":
            raise ConfigError("ext.replay.rare_max_age", "needs eviction age and granularity rollout; null is off")


@dataclass(frozen=True, slots=True)
class ThrottleConfig:
    """Less is replayed after a step in which replay went too far (ext.fill and ext.replay). Our extension."""

    max_row_frac: float | None = field(
        default=0.5, metadata=_meta("largest share of replayed rows; null = not looked at", source="our choice")
    )
    min_effective_sample_frac: float | None = field(
        default=0.5,
        metadata=_meta(
            "smallest effective sample size of the replayed tokens' weights, as a share; null = not looked at",
            source="our choice",
        ),
    )
    max_behavior_kl: float | None = field(
        default=0.1,
        metadata=_meta(
            "largest mean KL(behavior || proximal policy) of replayed tokens; null = not looked at",
            unit="nats per token",
            source="our choice",
        ),
    )
    shrink: float = field(
        default=0.5, metadata=_meta("factor of the replay share after such a step", source="our choice")
    )
    recover: float = field(
        default=0.05, metadata=_meta("added to the replay share after any other step", source="our choice")
    )
    min_share: float = field(
        default=0.1, metadata=_meta("the replay share shrinks to this at most", source="our choice")
    )

    def __post_init__(self) -> None:
        for name in ("max_row_frac", "min_effective_sample_frac", "shrink", "recover", "min_share"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ConfigError(f"ext.throttle.{name}", f"must be above 0 and at most 1, got {value:g}")
        if self.max_behavior_kl is not None:
            _at_least("ext.throttle.max_behavior_kl", self.max_behavior_kl, 0, "null means that it is not looked at")


@dataclass(frozen=True, slots=True)
class SuccessReplayConfig:
    """A failed group's first rollout is replaced by a stored success of its prompt (ARPO, arXiv:2505.16282)."""

    capacity: int = field(
        default=8,
        metadata=_meta("successes that are stored of each prompt", unit="rollouts", source="the paper's code"),
    )
    max_gib: float = field(default=8.0, metadata=_meta("memory of them all; beyond it the oldest go", unit="GiB"))

    def __post_init__(self) -> None:
        _at_least("ext.success_replay.capacity", self.capacity, 1, "--ext.success_replay null is off")
        if not math.isfinite(self.max_gib) or self.max_gib <= 0:
            raise ConfigError("ext.success_replay.max_gib", f"must be a positive number of GiB, got {self.max_gib:g}")


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How long generation may take, and what it records."""

    deadline_s: float = field(default=1800.0, metadata=_meta("deadline of one group request", unit="seconds"))
    max_retries: int = field(default=1, metadata=_meta("times a failed group request is sent again", unit="retries"))
    log_probs: bool = field(
        default=True,
        metadata=_meta("collect the engine's log-probs, to measure the engine/trainer mismatch"),
    )
    seed_requests: bool = field(
        default=False,
        metadata=_meta(
            "every rollout draws from a seed of its own (train.seed, step, place in the step), so that a run can be "
            "repeated whatever the engines did before; vLLM samples seeded requests one by one",
            source="OpenRLHF seeds its engines only",
        ),
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
        metadata=_meta("the k of the reported pass@k, increasing, as far as there are samples", unit="samples"),
    )
    correct_at: float = field(
        default=1.0,
        metadata=_meta("a rollout is correct iff its score is at least this", source="0/1 graders"),
    )
    at_start: bool = field(default=True, metadata=_meta("evaluate before the first train step"))
    every_rollouts: int | None = field(
        default=None,
        metadata=_meta(
            "evaluate after the step in which the generated rollouts pass a multiple of this, instead of every "
            "eval.steps: methods that need different numbers of rollouts a step are then measured at the same points",
            unit="rollouts",
        ),
    )
    final_samples: int | None = field(
        default=None,
        metadata=_meta("samples per prompt in the last evaluation; null = as in the others", unit="samples"),
    )

    def __post_init__(self) -> None:
        increasing = sorted(set(self.pass_at))
        if not self.pass_at or list(self.pass_at) != increasing or increasing[0] < 1:
            raise ConfigError(
                "ext.eval.pass_at", f"must be increasing positive integers such as 1 2 4 8, got {list(self.pass_at)}"
            )
        if not math.isfinite(self.correct_at):
            raise ConfigError("ext.eval.correct_at", f"must be a finite score, got {self.correct_at:g}; 1.0 is usual")
        if self.every_rollouts is not None:
            _at_least("ext.eval.every_rollouts", self.every_rollouts, 1, "null means every eval.steps")
        if self.final_samples is not None:
            _at_least("ext.eval.final_samples", self.final_samples, 1, "null means as many as in the others")


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
    distance: bool = field(
        default=False,
        metadata=_meta(
            "measure at every evaluation how far the parameters have moved; each actor keeps a copy of its start on "
            "the CPU"
        ),
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
            "train steps, also the plan of the learning rate; null = as many as max_rollouts takes, or else "
            "train.num_episodes passes over the data",
            unit="train steps",
            source="OpenRLHF's plan",
        ),
    )
    max_rollouts: int | None = field(
        default=None,
        metadata=_meta(
            "end after the step in which the generated rollouts reach this; null = max_steps alone decides. With "
            "max_steps null, the learning rate is planned for steps of rollout.batch_size whole groups",
            unit="rollouts",
        ),
    )
    resume: Literal["never", "auto"] = field(
        default="never",
        metadata=_meta(
            "auto: go on from the newest complete checkpoint, if there is one, and save when the run ends or is asked "
            "to stop; never: refuse a run_dir that holds a run (OpenRLHF's ckpt.load_enable goes on, too)"
        ),
    )
    stop_deadline_s: float = field(
        default=20.0,
        metadata=_meta(
            "after SIGTERM or SIGUSR1, time for the train step to end and be saved, before it is abandoned",
            unit="seconds",
        ),
    )
    fp32: bool = field(
        default=False,
        metadata=_meta(
            "models and engines compute in float32 instead of bfloat16: their log-probs then agree to 1e-5, where "
            "bfloat16 leaves 0.01 to 0.05; several times the time and twice the memory",
            source="OpenRLHF has bf16 and fp16",
        ),
    )
    groups: GroupsConfig | None = field(
        default=None, metadata=_meta("effective groups; null = OpenRLHF's own behavior for groups without variance")
    )
    dapo: DapoConfig | None = field(default=None, metadata=_meta("dynamic sampling; null = off"))
    fill: FillConfig | None = field(
        default=None, metadata=_meta("zero-variance slots filled from a group buffer; null = off")
    )
    pilot: PilotConfig | None = field(
        default=None, metadata=_meta("pilot rollouts decide which prompts are trained; null = off")
    )
    pool: PoolConfig = field(default=PoolConfig(), metadata=_meta("exclusion of solved prompts"))
    mopps: MoppsConfig | None = field(default=None, metadata=_meta("predictive prompt selection; null = off"))
    replay: ReplayConfig | None = field(
        default=None, metadata=_meta("rollouts of earlier steps beside the fresh batch; null = off")
    )
    success_replay: SuccessReplayConfig | None = field(
        default=None, metadata=_meta("stored successes in failed groups; null = off")
    )
    throttle: ThrottleConfig | None = field(
        default=None, metadata=_meta("less replay after a step in which it went too far; null = off")
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
        _at_least("ext.stop_deadline_s", self.stop_deadline_s, 0, "0 abandons the step at once")
        if self.max_rollouts is not None:
            _at_least("ext.max_rollouts", self.max_rollouts, 1, "null means that max_steps alone ends the run")
