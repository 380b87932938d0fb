"""Two processes of a gloo group train recorded rollouts and save what came out, as FOLDER/RANK.pt. Run by the tests.

Usage: python two_ranks.py FOLDER
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

from openrlhf_ext.adapters import cpu_platform

os.environ.update(cpu_platform.process_env())
cpu_platform.install()

import openrlhf.trainer.ppo_utils.experience_maker as upstream_maker  # noqa: E402
import openrlhf.trainer.ray.launcher as launcher  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fakes import LocalRay, policy_actor  # noqa: E402
from recorded import (  # noqa: E402
    copies,
    maker,
    mixed_rewards,
    recorded_samples,
    rows_for,
    train,
    train_upstream,
    upstream_args,
)
from replayed import SMALL, mixed_rows, rows_of_three_origins  # noqa: E402
from torch.multiprocessing import start_processes  # noqa: E402

from openrlhf_ext.adapters.actors import _reduce  # noqa: E402
from openrlhf_ext.adapters.generation import unify_info  # noqa: E402


def means(rank: int) -> dict[str, float]:
    """Sums of (rank 0) 4 tokens and 2 samples, (rank 1) 1 token and 1 sample, with keys in another order."""
    first = {"_token": 4.0, "_sample": 2.0, "token:policy_loss": 4 * 0.5, "sample:reward": 1.0}
    second = {"sample:reward": 1.0, "token:policy_loss": 1 * 2.0, "_sample": 1.0, "_token": 1.0}
    return _reduce(second if rank else first)


def trained(args, step, rows) -> dict:
    """Gradients and metrics after two train steps with ``step``."""
    actor = policy_actor(args)
    for _ in range(2):
        status = step(actor, rows)
    return {
        "gradients": actor._engine.gradients,
        "status": {key: float(value) for key, value in status.items()},
    }


def mixed_info(args) -> dict[str, float]:
    """Metrics of 7 rows of which every third one has a ``format`` entry."""
    samples = recorded_samples(mixed_rewards(1))
    for sample in samples[::3]:
        sample.info["format"] = torch.tensor([1.0])
    unify_info(samples)
    return train(policy_actor(args), copies(maker(args, ours=True).make_rows(samples))[:7], args)


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for module in (upstream_maker, launcher):
        module.ray = LocalRay
    found: dict = {"means": means(rank)}
    for mode in ("token-mean", "seq-mean-token-mean"):
        args = upstream_args("group_norm", "--actor.loss_agg_mode", mode)
        rows = rows_for(args)
        found[f"ours/{mode}"] = trained(args, lambda actor, rows, args=args: train(actor, rows, args), rows)
        found[f"upstream/{mode}"] = trained(args, train_upstream, rows)
    args = upstream_args()
    for num_rows in (40, 7, 1):
        found[num_rows] = trained(args, lambda actor, rows: train(actor, rows, args), rows_for(args)[:num_rows])
    found["mixed_info"] = mixed_info(args)
    found["replay"] = trained(args, lambda actor, rows: train(actor, rows, args), mixed_rows(args))
    small = upstream_args("group_norm", *SMALL)
    rows = rows_of_three_origins(small, folder / f"run{rank}")
    found["three_origins"] = trained(small, lambda actor, rows: train(actor, rows, small), rows)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked, so that the imports are paid once.
    start_processes(run_rank, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
