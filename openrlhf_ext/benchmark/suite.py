"""A benchmark suite: which methods, learning rates and seeds are run, each with the same budget of rollouts.

    name: countdown
    rollouts: 12800                    # of every run
    evaluate_every: 2560               # in rollouts, so that all methods are measured at the same points
    final_samples: 32                  # a prompt in the last evaluation, for pass@32
    learning_rates: [3e-5, 1e-4, 3e-4]
    seeds: [1, 2, 3]
    baselines: [grpo, dapo]            # what the others are compared to
    flags: {data.prompt_dataset: ...}  # for every run; OpenRLHF's flags or ext...
    methods:
      grpo: {config: configs/cpu/grpo.yaml}
      arpo: {config: configs/cpu/arpo.yaml, learning_rates: [1e-4], flags: {...}}
      openrlhf: {config: configs/cpu/grpo.yaml, stock: true}   # by its own trainer

Paths start at the current folder, as everywhere on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ext.config_file import assign, load_config
from openrlhf_ext.config_loading import nearest
from openrlhf_ext.settings import Settings


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the comparison."""

    name: str
    config: str
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    flags: tuple[tuple[str, object], ...] = ()
    stock: bool = False
    """Trained by OpenRLHF's own trainer."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a suite."""

    method: str
    lr: float
    seed: int
    folder: str
    """Relative to the suite's folder."""
    stock: bool
    argv: tuple[str, ...]
    """The command line of ``cli.train_ppo_ray``, without ``--ext.run_dir``."""

    @property
    def title(self) -> str:
        return f"{self.method} lr {self.lr:g} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Suite:
    """What a suite file says."""

    name: str
    rollouts: int
    evaluate_every: int
    final_samples: int | None
    baselines: tuple[str, ...]
    targets: tuple[float, ...]
    flags: tuple[tuple[str, object], ...]
    methods: tuple[Method, ...]

    def runs(self) -> list[PlannedRun]:
        """All runs: a seed of everything before the next seed, so that a suite cut short is still a comparison."""
        seeds = sorted({seed for method in self.methods for seed in method.seeds})
        rates = sorted({lr for method in self.methods for lr in method.learning_rates})
        return [
            self._run(method, lr, seed)
            for seed in seeds
            for lr in rates
            for method in self.methods
            if seed in method.seeds and lr in method.learning_rates
        ]

    def _run(self, method: Method, lr: float, seed: int) -> PlannedRun:
        flags: dict[str, object] = {
            "ext.max_rollouts": self.rollouts,
            "ext.max_steps": None,
            "ext.eval.every_rollouts": self.evaluate_every,
            "ext.rollout.seed_requests": True,
            "ext.log.distance": True,
        }
        if not method.stock:
            flags["ext.resume"] = "auto"
        if self.final_samples is not None:
            flags["ext.eval.final_samples"] = self.final_samples
        flags |= {**dict(self.flags), **dict(method.flags), "actor.adam.lr": lr, "train.seed": seed}
        argv = ["--config", method.config]
        for name, value in flags.items():
            argv += [f"--{name}", *_words(name, value)]
        folder = f"runs/{method.name}-lr{lr:g}-seed{seed}"
        return PlannedRun(method.name, lr, seed, folder, method.stock, tuple(argv))


def load_suite(path: str | Path) -> Suite:
    """Read a suite file (``base`` works as in other config files).

    Raises:
        ValueError: what is unknown, missing or of a wrong type, with file and line.
    """
    raw = load_config(path)
    content: dict = {}
    for key, value in raw.upstream.items():
        assign(content, key, value)
    reader = _Reader(str(path), raw.origins)
    known = ("name", "rollouts", "evaluate_every", "final_samples", "learning_rates", "seeds", "baselines", "targets")
    reader.only(content, "", (*known, "flags", "methods"))
    rates = reader.many(content, "learning_rates", float)
    seeds = reader.many(content, "seeds", int)
    entries = content.get("methods")
    if not isinstance(entries, Mapping) or not entries:
        raise ValueError(f"{path}: methods is missing; name at least one, as in methods: {{grpo: {{config: FILE}}}}")
    methods = tuple(_method(reader, name, entry, rates, seeds) for name, entry in entries.items())
    baselines = tuple(content.get("baselines", ()))
    for name in baselines:
        if name not in entries:
            raise ValueError(f"{reader.at('baselines')}: {name} is not among the methods ({', '.join(entries)})")
    return Suite(
        name=str(content.get("name") or Path(path).stem),
        rollouts=reader.one(content, "rollouts", int),
        evaluate_every=reader.one(content, "evaluate_every", int),
        final_samples=reader.one(content, "final_samples", int) if "final_samples" in content else None,
        baselines=baselines,
        targets=reader.many(content, "targets", float) if "targets" in content else (),
        flags=tuple(_flat(content.get("flags") or {})),
        methods=methods,
    )


def parts_key(settings: Settings) -> tuple:
    """What the processes of a session are started with; runs with the same key can share one."""
    kept = ("vllm.", "reward.", "ref.", "critic.", "ds.", "train.colocate", "train.agent", "train.full_determinism")
    names = {"actor.model_name_or_path", "actor.num_nodes", "actor.num_gpus_per_node", "data.max_len"}
    names |= {"data.max_images_per_prompt", "data.disable_fast_tokenizer", "algo.kl.init_coef"}
    flat = {k: repr(v) for k, v in settings.flat.items() if k.startswith(kept) or k in names}
    log_probs = settings.ext.rollout.log_probs, settings.flat["algo.advantage.is_correction_level"]
    return (*sorted(flat.items()), *log_probs, settings.ext.reward, settings.ext.fp32)


def _method(reader: _Reader, name: str, entry: object, rates: tuple, seeds: tuple) -> Method:
    key = f"methods.{name}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("config"), str):
        raise ValueError(
            f"{reader.at(key)}: {name} needs a config file, as in {name}: {{config: configs/cpu/grpo.yaml}}"
        )
    reader.only(entry, f"{key}.", ("config", "learning_rates", "seeds", "flags", "stock"))
    return Method(
        name=name,
        config=entry["config"],
        learning_rates=reader.many(entry, "learning_rates", float, key) if "learning_rates" in entry else rates,
        seeds=reader.many(entry, "seeds", int, key) if "seeds" in entry else seeds,
        flags=tuple(_flat(entry.get("flags") or {})),
        stock=entry.get("stock", False) is True,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values of a known kind, or says where in the file they are wrong."""

    path: str
    origins: Mapping[str, str]

    def at(self, key: str) -> str:
        return self.origins.get(key, self.path)

    def only(self, content: Mapping, prefix: str, names: Sequence[str]) -> None:
        for name in content:
            if name not in names:
                raise ValueError(
                    f"{self.at(prefix + name)}: {prefix}{name} does not exist{nearest(name, names)}; "
                    f"valid here: {', '.join(names)}"
                )

    def one(self, content: Mapping, name: str, kind: type) -> int:
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.at(name)}: {name} must be a whole number of at least 1, got {value!r}")
        return value

    def many(self, content: Mapping, name: str, kind: type, prefix: str = "") -> tuple:
        key = f"{prefix}.{name}" if prefix else name
        values = content.get(name)
        kinds = (int, float) if kind is float else (int,)
        listed = isinstance(values, list) and bool(values)
        if not listed or any(not isinstance(v, kinds) or isinstance(v, bool) or v < 0 for v in values):
            what = "numbers" if kind is float else "whole numbers"
            raise ValueError(f"{self.at(key)}: {key} must be a list of {what} that are not negative, got {values!r}")
        if len(set(values)) < len(values):
            raise ValueError(f"{self.at(key)}: {key} has a number twice: {values}; a run is made once")
        return tuple(kind(value) for value in values)


def _flat(nested: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat += _flat(value, f"{prefix}{name}.")
        else:
            flat.append((prefix + name, value))
    return flat


def _words(name: str, value: object) -> list[str]:
    """A value as command-line words. Raises ValueError for a switch of OpenRLHF that is to be off."""
    if isinstance(value, bool) and not name.startswith("ext."):
        if not value:
            raise ValueError(f"flags: {name} is a switch, which a flag can only switch on; leave it out")
        return []
    if value is None or isinstance(value, bool):
        return [{None: "null", True: "true", False: "false"}[value]]
    if isinstance(value, list):
        return [str(item) for item in value]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
