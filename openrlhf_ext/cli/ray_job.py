"""``python -m openrlhf_ext.cli.ray_job --config FILE [--address URL] [--flag ...]``: the training as a Ray job.

Without ``--address`` it starts a Ray head of its own on this machine and ends it with the job. The settings are
checked here, before Ray starts or is asked. The exit code is the training's; `openrlhf_ext.adapters.ray_job` lists
the others.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from openrlhf_ext.checks import check_reward_file, read_prompt_files
from openrlhf_ext.cli.train_ppo_ray import checked_settings
from openrlhf_ext.placement_needs import needed_gpus
from openrlhf_ext.run_dir import replace_text
from openrlhf_ext.settings import Settings, dump_settings, refuse

NEVER_UPLOADED = (
    *(".git", ".venv*", "venv", "node_modules", "__pycache__", "*.egg-info", ".*_cache", "runs"),
    *(".env*", ".netrc", "*.pem", "*.key"),
)
"""Names, at any depth. What .gitignore and .rayignore files name is left out, too, by Ray."""
LARGEST_FILE = 10 * 2**20
"""Bytes: what is larger is data, which the job reads from where it is."""

_STOP_MARGIN_S = 20
"""After ``--ext.stop_deadline_s``, for the trainer to leave Ray and end its processes before Ray kills them."""
_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(_|$)", re.IGNORECASE)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    try:
        parser = _parser()
        options, training = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
        if options.help:
            parser.print_help()
            return 0
        _check_options(options)
        runtime_env = _runtime_env(options.runtime_env)
        settings = checked_settings(training)
        if settings is None:
            return 0
        check_reward_file(settings)
        read_prompt_files(settings)
        key = _wandb_key(settings, options.address)
        excludes = [*options.exclude, *excluded_paths(options.working_dir, own_folders(settings))]
        # A relative path would mean the unpacked copy of the working directory; this file has absolute ones.
        config = Path(settings.ext.run_dir) / "ray_job.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        replace_text(config, dump_settings(settings))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from openrlhf_ext.adapters.ray_job import Job, run_here, run_on

    stop_wait_s = math.ceil(settings.ext.stop_deadline_s) + _STOP_MARGIN_S
    defaults = {
        "TQDM_MININTERVAL": "5",  # each update of the progress bar is a line of the job's log
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else the command sees no GPU when it reserves other resources
        "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # else a variable that the trainer passes on is an error here
    }
    command = [options.python, "-m", "openrlhf_ext.cli.train_ppo_ray", "--config", str(config)]
    job = Job(
        command=f"exec {shlex.join(command)}",
        runtime_env={
            **runtime_env,
            "working_dir": str(options.working_dir),
            "excludes": [*excludes, *runtime_env.get("excludes", ())],
            "env_vars": defaults | runtime_env.get("env_vars", {}) | {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s)},
        },
        resources={name: value for name, value in vars(options).items() if name.startswith("entrypoint_") and value},
        stop_wait_s=stop_wait_s,
        start_timeout_s=options.start_timeout,
        run_dir=Path(settings.ext.run_dir),
        wait=not options.no_wait,
    )
    if options.address:
        return run_on(options.address, job)
    if key:
        os.environ["WANDB_API_KEY"] = key  # Ray's processes inherit it
    return run_here(job, needed_gpus(settings.upstream))


def own_folders(settings: Settings) -> list[Path]:
    """Where the run writes."""
    names = (settings.ext.run_dir, *(settings.flat[f"ckpt.{name}"] for name in ("path", "output_dir")))
    return [Path(str(name)).resolve() for name in names]


def excluded_paths(folder: Path, own: Iterable[Path]) -> list[str]:
    """Patterns, in the syntax of .gitignore, for what is not uploaded of ``folder``.

    The names above, folders of runs, the folders ``own``, links to folders and files over the limit. The latter are
    named on stderr.
    """
    own = set(own)
    if around := [path for path in own if folder.is_relative_to(path)]:
        raise ValueError(f"--working-dir {folder} is in {around[0]}, which the run writes; use another --ext.run_dir")
    found: list[str] = []
    large: list[str] = []

    def exclude(path: Path) -> None:
        # Every character of a pattern may be escaped, and only some must be.
        found.append("/" + re.sub(r"([^\w/.-])", r"\\\1", str(path.relative_to(folder))))

    for parent, folders, files in os.walk(folder):
        kept = []
        for name in folders:
            path = Path(parent, name)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in NEVER_UPLOADED):
                continue
            if path.is_symlink() or path.resolve() in own or (path / "metrics.jsonl").exists():
                exclude(path)
            else:
                kept.append(name)
        folders[:] = kept
        for name in files:
            path = Path(parent, name)
            if path.exists() and path.stat().st_size > LARGEST_FILE:
                exclude(path)
                large.append(str(path.relative_to(folder)))
    if large:
        more = f" and {len(large) - 1} more" if len(large) > 1 else ""
        print(f"ray_job: over {LARGEST_FILE // 2**20} MiB, not uploaded: {large[0]}{more}", file=sys.stderr)
    return [*NEVER_UPLOADED, *found]


def _check_options(options: argparse.Namespace) -> None:
    if options.address is not None:
        url = urlsplit(options.address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"--address {options.address} is not the address of a Ray dashboard; give one such as "
                "http://HOST:8265, or leave it out for a Ray head on this machine"
            )
        if url.password:
            raise ValueError("--address holds a password, which would be logged; give it without")
    if options.address is None:
        for flag, given, why in (
            ("--no-wait", options.no_wait, "a Ray head of our own ends with this command"),
            ("--entrypoint-num-gpus", options.entrypoint_num_gpus, "on one machine all GPUs are for the models"),
            ("--entrypoint-resources", options.entrypoint_resources, "a Ray head of our own has no custom resources"),
        ):
            if given:
                raise ValueError(f"{flag} needs --address: {why}")
    for name in ("entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_memory", "start_timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if not options.working_dir.is_dir():
        raise ValueError(f"--working-dir: there is no folder {options.working_dir}")
    options.working_dir = options.working_dir.resolve()
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"Ray is not installed for {sys.executable}; run scripts/install_cpu.sh, or see README.md")


def _runtime_env(file: Path | None) -> dict:
    """Ray's runtime environment from a YAML file. Raises ValueError for what does not belong there."""
    if file is None:
        return {}
    try:
        env = yaml.safe_load(file.read_text("utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--runtime-env {file}: not YAML: {error}") from None
    if not isinstance(env, dict):
        raise ValueError(f"--runtime-env {file}: expected a mapping such as `env_vars: {{NCCL_DEBUG: INFO}}`")
    if "working_dir" in env:
        raise ValueError(f"--runtime-env {file}: working_dir is given as --working-dir")
    for name, kind in (("env_vars", dict), ("excludes", list)):
        if not isinstance(env.get(name, kind()), kind):
            raise ValueError(f"--runtime-env {file}: {name} must be a {'mapping' if kind is dict else 'list'}")
    for name, value in env.get("env_vars", {}).items():
        if not isinstance(value, str):
            raise ValueError(f"--runtime-env {file}: env_vars: {name} must be a string (in quotes), got {value!r}")
        if _SECRET.search(name):
            raise ValueError(
                f"--runtime-env {file}: env_vars: {name} would be shown to everybody who sees the dashboard; set it "
                "in the environment that Ray is started from"
            )
    return env


def _wandb_key(settings: Settings, address: str | None) -> str | None:
    key = settings.changed.get("logger.wandb.key")
    if key and address:
        raise ValueError(
            "--logger.wandb.key is not sent to a cluster, where others could read it; leave it out, and set "
            "WANDB_API_KEY in the environment that the cluster's Ray is started from"
        )
    return str(key) if key else None


def _resources(text: str) -> dict[str, float]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict) or not all(isinstance(number, int | float) for number in value.values()):
        raise argparse.ArgumentTypeError(f"expected JSON such as '{{\"big\": 1}}', got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/ray_job.sh",
        description="Train as a Ray job: on a Ray head of its own, or on a cluster. Every other flag is the "
        "training's (python -m openrlhf_ext.cli.train_ppo_ray --help).",
        epilog="Ctrl-C or SIGTERM stops the job: the train step is finished and saved. A second one does not wait. "
        "Paths are made absolute here, so the machines of a cluster must see them under the same names. The exit "
        "code is the training's, or 2: refused, 70: Ray did not start here, 71: no job was taken in time, 72: the "
        "cluster was lost, 128 + n: stopped by signal n, 1: the job failed before the training began.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this and exit")
    add("--address", metavar="URL", help="dashboard of a running cluster, http://HOST:8265; it is left as it is")
    add("--no-wait", action="store_true", help="with --address: submit, and leave the job to itself")
    add("--working-dir", type=Path, default=Path("."), metavar="DIR", help="uploaded: the job's current folder")
    add("--exclude", action="append", default=[], metavar="PATTERN", help="not uploaded, as in .gitignore; repeatable")
    add("--runtime-env", type=Path, metavar="FILE", help="YAML file of Ray's runtime environment: env_vars, pip, ...")
    add("--python", default=sys.executable, metavar="PATH", help="the job's Python (default %(default)s)")
    add("--entrypoint-num-cpus", type=float, metavar="N", help="CPUs that the training's own process reserves")
    add("--entrypoint-num-gpus", type=float, metavar="N", help="GPUs, likewise; needs none")
    add("--entrypoint-memory", type=int, metavar="BYTES", help="memory, likewise")
    add("--entrypoint-resources", type=_resources, metavar="JSON", help="custom resources, likewise; choose its node")
    add("--start-timeout", type=float, default=120.0, metavar="S", help="for Ray to take the job (%(default)g)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
