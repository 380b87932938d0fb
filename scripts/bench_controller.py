"""Time what the controller adds to a train step, with stand-ins for the engines and the model, and real buffers.

    python scripts/bench_controller.py filling [--prompts N] [--rollouts N] [--tokens N] [--json]
    python scripts/bench_controller.py replay [--stored N] [--draw N] [--insert N] [--tokens N] [--json]
    python scripts/bench_controller.py checkpoint [--stored N ...] [--insert N] [--tokens N] [--folder DIR] [--json]

filling: the group buffer and filling (POPO, arXiv 2606.01281), by the calls that the trainer makes in each step:

    fill      decide which slots take which stored groups
    restore   make samples of the stored groups that were chosen
    store     copy the fresh informative groups, with their new log-probabilities
    weigh     weights and advantages of all rows, and their metrics
    push      put the copies into the buffer, evict the oldest, and its metrics

replay: the rollout buffer (APER, arXiv 2606.04560), full: insert, evict by age, draw by priority, metrics. Beside it
the same of cpprb's PrioritizedReplayBuffer (pip install cpprb), which stores rows of one length, draws with
replacement, and returns arrays instead of rollouts.

checkpoint: a full rollout buffer, saved for the first time, saved again after one more step, and loaded. Files are
flushed to the disk of the folder, and read from its cache.

One thread; each size in a process of its own, so that its peak memory is its own. Steps are measured once the buffer
is full. An eighth of the tokens are the prompt's. CPU time is what counts where other programs keep the machine busy.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    remove_padding_in_sequences,
    split_experience_batch,
)

from openrlhf_ext.adapters.replayed_rows import copy_sample, mark_rows, restore_samples, store_group, weigh_rows
from openrlhf_ext.checkpoint import sidecar
from openrlhf_ext.config import FillConfig, GroupsConfig, ReplayConfig
from openrlhf_ext.filling import GroupFilling
from openrlhf_ext.group_buffer import GroupBuffer
from openrlhf_ext.rollout_buffer import RolloutBuffer
from openrlhf_ext.rollout_segment import ScoredGroup
from openrlhf_ext.stored_row import StoredRow
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

PHASES = ("fill", "restore", "store", "weigh", "push")
MICRO_BATCH = 8
VOCABULARY = 32_000

# The one published step time of the method: 3.2 hours for about 100 steps of its Countdown run (arXiv 2606.01281).
PUBLISHED_STEP_S = 3.2 * 3600 / 100
PUBLISHED_PROMPTS, PUBLISHED_ROLLOUTS, PUBLISHED_RESPONSE_TOKENS = 256, 8, 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One size of batch. ``tokens`` are those of a row, prompt and response."""

    prompts: int
    rollouts: int
    tokens: int
    steps: int
    effective_frac: float
    seed: int

    @property
    def prompt_tokens(self) -> int:
        return self.tokens // 8

    @property
    def num_effective(self) -> int:
        return max(1, round(self.effective_frac * self.prompts))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = parser.add_subparsers(dest="section", required=True)
    filling = sections.add_parser("filling", help="group buffer and filling")
    filling.add_argument("--prompts", type=int, default=512, help="groups in a batch (default %(default)s)")
    filling.add_argument("--rollouts", type=int, default=16, help="rollouts of a group (default %(default)s)")
    filling.add_argument("--tokens", type=int, default=4096, help="tokens of a row (default %(default)s)")
    filling.add_argument("--steps", type=int, default=5, help="measured steps of each size (default %(default)s)")
    filling.add_argument("--effective-frac", type=float, default=0.5, help="informative groups (default %(default)s)")
    replay = sections.add_parser("replay", help="rollout buffer")
    replay.add_argument("--stored", type=int, default=1_000_000, help="rollouts in the buffer (default %(default)s)")
    replay.add_argument("--draw", type=int, default=4096, help="rollouts of a draw (default %(default)s)")
    replay.add_argument("--insert", type=int, default=8192, help="rollouts of a step (default %(default)s)")
    replay.add_argument("--tokens", type=int, default=64, help="tokens of a row (default %(default)s)")
    replay.add_argument("--steps", type=int, default=9, help="measured steps (default %(default)s)")
    checkpoint = sections.add_parser("checkpoint", help="saving and loading the rollout buffer")
    checkpoint.add_argument(
        "--stored",
        type=int,
        nargs="+",
        default=[30_000, 1_000_000],
        help="rollouts in the buffer (default %(default)s)",
    )
    checkpoint.add_argument("--insert", type=int, default=4096, help="rollouts of a step (default %(default)s)")
    checkpoint.add_argument("--tokens", type=int, default=64, help="tokens of a row (default %(default)s)")
    checkpoint.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    for section in (filling, replay, checkpoint):
        section.add_argument("--seed", type=int, default=0)
        section.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args(argv)
    if args.section == "checkpoint":
        if args.insert < 8 or args.insert > min(args.stored) or args.tokens < 8:
            parser.error("needs --insert >= 8 and at most --stored, --tokens >= 8")
        cases = [ReplayCase(stored, 1, args.insert, args.tokens, 1, args.seed) for stored in args.stored]
        result = bench_checkpoint(cases, args.folder)
        print(json.dumps(result, indent=2) if args.json else checkpoint_report(result))
        return 0
    if args.section == "replay":
        if (
            not 1 <= args.draw <= args.stored
            or not 8 <= args.insert <= args.stored
            or args.tokens < 8
            or args.steps < 1
        ):
            parser.error("needs --draw >= 1, --insert >= 8, both at most --stored, --tokens >= 8, --steps >= 1")
        case = ReplayCase(**{field.name: getattr(args, field.name) for field in fields(ReplayCase)})
        result = bench_replay(case)
        print(json.dumps(result, indent=2) if args.json else replay_report(result))
        return 0
    if args.prompts < 4 or args.rollouts < 2 or args.tokens < 32 or args.steps < 1 or not 0 < args.effective_frac <= 1:
        parser.error("needs --prompts >= 4, --rollouts >= 2, --tokens >= 32, --steps >= 1, 0 < --effective-frac <= 1")
    result = bench_filling(Case(**{field.name: getattr(args, field.name) for field in fields(Case)}))
    print(json.dumps(result, indent=2) if args.json else filling_report(result))
    return 0


# -- filling --


def bench_filling(case: Case) -> dict:
    """Figures of ``case`` and of a half and a quarter of it, in groups and in tokens."""
    batches = [replace(case, prompts=case.prompts // n) for n in (4, 2)]
    lengths = [replace(case, tokens=case.tokens // n) for n in (4, 2)]
    done = {size: in_own_process(measure_filling, size) for size in (*batches, *lengths, case)}
    tokens = case.prompts * case.rollouts * (case.tokens - case.prompt_tokens)
    published_tokens = PUBLISHED_PROMPTS * PUBLISHED_ROLLOUTS * PUBLISHED_RESPONSE_TOKENS
    total = done[case]["seconds"]["total"]
    return {
        "machine": machine(),
        "by_batch": [done[size] for size in (*batches, case)],
        "by_length": [done[size] for size in (*lengths, case)],
        "share": {
            "published_step_s": PUBLISHED_STEP_S,
            "response_tokens_by_published": tokens / published_tokens,
            "of_published_step": total["median"] / PUBLISHED_STEP_S,
            "of_published_step_by_cpu": total["cpu"] / PUBLISHED_STEP_S,
            "step_s_at_one_percent": total["median"] * 100,
        },
    }


def measure_filling(case: Case) -> dict:
    """Train steps of one size: seconds by phase, bytes, peak memory."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    rng = np.random.default_rng(case.seed)
    config = FillConfig()
    buffer = GroupBuffer(capacity=case.prompts, max_bytes=int(config.max_gib * 2**30))
    filling = GroupFilling(
        config, GroupsConfig(), buffer, num_groups=case.prompts, divergence=lambda groups: [0.0] * len(groups)
    )
    start_bytes = psutil.Process().memory_info().rss
    warm_up = math.ceil(case.prompts / case.num_effective)
    steps = [filling_step(filling, config, case, version, rng) for version in range(warm_up + case.steps)][warm_up:]
    stored_tokens = sum(len(rollout.payload.tokens) for group in buffer.groups for rollout in group.rollouts)
    buffer_bytes = buffer.metrics(0)["group_buffer/num_bytes"]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux: KiB
    batch_bytes = steps[-1]["batch_bytes"]
    for step in steps:
        step |= {prefix + "total": sum(step[prefix + phase] for phase in PHASES) for prefix in ("", "cpu_")}
    seconds = {phase: spread(steps, phase) for phase in (*PHASES, "total")}
    return {
        **asdict(case),
        "prompt_tokens": case.prompt_tokens,
        "replayed_groups": steps[-1]["replayed_groups"],
        "seconds": seconds,
        "ns_per_token": seconds["total"]["median"] / (case.prompts * case.rollouts * case.tokens) * 1e9,
        "stored_groups": len(buffer),
        "buffer_bytes": buffer_bytes,
        "bytes_per_stored_token": buffer_bytes / stored_tokens,
        "batch_bytes": batch_bytes,
        "peak_rss_bytes": peak_bytes,
        "above_batch_bytes": peak_bytes - start_bytes - batch_bytes,
    }


def filling_step(
    filling: GroupFilling[Experience], config: FillConfig, case: Case, version: int, rng: np.random.Generator
) -> dict:
    """One step as the trainer does it, from the engines' groups to the push after the update."""
    step: dict[str, float] = {}
    groups = engine_groups(case, version, rng)
    with timed(step, "fill"):
        filled = filling.fill(groups, version)
    samples = [copy_sample(rollout) for group in filled.fresh for rollout in group.rollouts]
    num_fresh = len(samples)
    with timed(step, "restore"):
        samples += [sample for group in filled.replayed for sample in restore_samples(group, log_probs=True)]
    rows = model_rows(samples)
    step["batch_bytes"] = len(rows) * (tensor_bytes(samples[0]) + tensor_bytes(rows[0]))
    step["replayed_groups"] = len(filled.replayed)
    del samples
    with timed(step, "store"):
        to_store = []
        for i, group in enumerate(filled.fresh):
            if filling.is_stored(group):
                own = rows[i * case.rollouts : (i + 1) * case.rollouts]
                to_store.append(store_group(group, own, engine_gap=False))
    with timed(step, "weigh"):
        stored = [rollout.payload for group in filled.replayed for rollout in group.rollouts]
        ages = [version - group.policy_version for group in filled.replayed for _ in group.rollouts]
        mark_rows(rows[:num_fresh], "fresh")
        mark_rows(rows[num_fresh:], "replay")
        weigh_rows(
            rows[num_fresh:],
            stored,
            ages,
            objective=config.objective,
            weight_cap=config.weight_cap,
            correct_engine=False,
        )
    with timed(step, "push"):
        filling.store(to_store)
        filling.buffer.metrics(version + 1)
    return step


def filling_report(result: dict) -> str:
    case, share = result["by_batch"][-1], result["share"]
    times = case["seconds"]
    lines = [
        result["machine"],
        f"{case['prompts']} prompts x {case['rollouts']} rollouts x {case['tokens']:,} tokens "
        f"({case['prompt_tokens']:,} of them the prompt's), {case['replayed_groups']} groups replayed, "
        f"{case['steps']} steps with a full buffer",
        "",
        f"{'seconds a step':<16}{'median':>9}{'min':>9}{'max':>9}{'CPU time':>10}",
        *(f"{n:<16}{t['median']:9.4f}{t['min']:9.4f}{t['max']:9.4f}{t['cpu']:10.4f}" for n, t in times.items()),
        "",
        f"{'bytes of a stored token':<40}{case['bytes_per_stored_token']:8.2f}",
        f"{'buffer, ' + format(case['stored_groups'], ',') + ' groups':<40}{mib(case['buffer_bytes']):8,.0f} MiB",
        f"{'batch: samples and rows':<40}{mib(case['batch_bytes']):8,.0f} MiB",
        f"{'peak resident memory':<40}{mib(case['peak_rss_bytes']):8,.0f} MiB",
        f"{'  above the program and the batch':<40}{mib(case['above_batch_bytes']):8,.0f} MiB",
        "",
        "growth with the batch and with the length (median seconds)",
        f"{'prompts':>8}{'tokens':>8}{''.join(f'{name:>9}' for name in times)}{'ns/token':>10}{'buffer MiB':>12}"
        f"{'above batch MiB':>17}{'peak MiB':>10}",
        *(_growth_line(one) for one in (*result["by_batch"], *result["by_length"])),
        "",
        "Share of a step. Assumed step time: no one has published one for this size. The one that is (POPO on",
        f"Countdown, arXiv 2606.01281) is about {PUBLISHED_STEP_S:.0f} s: 3.2 hours for about 100 steps of "
        f"{PUBLISHED_PROMPTS} prompts x {PUBLISHED_ROLLOUTS} rollouts",
        f"x at most {PUBLISHED_RESPONSE_TOKENS:,} response tokens. The batch above has "
        f"{share['response_tokens_by_published']:.3g} times those tokens"
        + (", so that is a lower bound." if share["response_tokens_by_published"] >= 1 else "."),
        f"{'share of ' + format(PUBLISHED_STEP_S, '.0f') + ' s':<40}{share['of_published_step']:8.2%}",
        f"{'  by CPU time':<40}{share['of_published_step_by_cpu']:8.2%}",
        f"{'1 percent of a step that takes':<40}{share['step_s_at_one_percent']:8.1f} s",
    ]
    return "\n".join(lines)


def _growth_line(case: dict) -> str:
    seconds = "".join(f"{one['median']:9.4f}" for one in case["seconds"].values())
    return (
        f"{case['prompts']:8}{case['tokens']:8}{seconds}{case['ns_per_token']:10.2f}{mib(case['buffer_bytes']):12,.0f}"
        f"{mib(case['above_batch_bytes']):17,.0f}{mib(case['peak_rss_bytes']):10,.0f}"
    )


# -- replay --


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """One size of rollout buffer; groups have 8 rollouts."""

    stored: int
    draw: int
    insert: int
    tokens: int
    steps: int
    seed: int

    @property
    def num_sampled(self) -> int:
        return self.tokens - self.tokens // 8


def bench_replay(case: ReplayCase) -> dict:
    libraries = {"cpprb": in_own_process(measure_cpprb, case)} if importlib.util.find_spec("cpprb") else {}
    return {"machine": machine(), **asdict(case), "ours": in_own_process(measure_replay, case), **libraries}


def measure_replay(case: ReplayCase) -> dict:
    torch.set_num_threads(1)
    rng = np.random.default_rng(case.seed)
    groups = replay_groups(case, rng)
    num_inserted = 8 * len(groups)
    num_versions = case.stored // num_inserted
    buffer = RolloutBuffer(ReplayConfig(max_age=num_versions, capacity=case.stored, max_gib=1024))
    steps: list[dict[str, float]] = []
    for version in range(num_versions + case.steps):
        born = [replace(one, group=replace(one.group, policy_version=version)) for one in groups]
        step: dict[str, float] = {}
        with timed(step, "evict"):
            buffer.evict_stale(version)
        if version >= num_versions:
            with timed(step, "draw"):
                buffer.draw(case.draw, rng)
        with timed(step, "insert"):
            buffer.push(born)
        with timed(step, "metrics"):
            buffer.metrics(version)
        steps.append(step)
    return {
        "seconds": {phase: spread(steps[-case.steps :], phase) for phase in ("insert", "evict", "draw", "metrics")},
        "stored": len(buffer),
        "bookkeeping_bytes_per_rollout": buffer.bookkeeping_bytes / len(buffer),
        "bytes_per_rollout": buffer.num_bytes / len(buffer),
    }


def measure_cpprb(case: ReplayCase) -> dict:
    from cpprb import PrioritizedReplayBuffer  # type: ignore[import-not-found]

    rng = np.random.default_rng(case.seed)
    shapes = {
        "tokens": {"shape": case.tokens, "dtype": np.int32},
        "mask": {"shape": case.tokens - 1, "dtype": np.bool_},
        "log_probs": {"shape": case.num_sampled, "dtype": np.float32},
        "advantage": {"dtype": np.float32},
    }
    rows = {name: np.ones((case.insert, field.get("shape", 1)), field["dtype"]) for name, field in shapes.items()}
    priorities = np.abs(rng.standard_normal(case.insert))
    buffer = PrioritizedReplayBuffer(case.stored, shapes, alpha=0.5, eps=1e-6)
    steps: list[dict[str, float]] = []
    for _ in range(case.stored // case.insert + case.steps):
        step: dict[str, float] = {}
        with timed(step, "insert"):
            buffer.add(**rows, priorities=priorities)
        with timed(step, "draw"):
            buffer.sample(case.draw, beta=0.0)
        steps.append(step)
    return {"seconds": {phase: spread(steps[-case.steps :], phase) for phase in ("insert", "draw")}}


def replay_groups(case: ReplayCase, rng: np.random.Generator) -> list[ScoredGroup[StoredRow]]:
    """A step's groups of 1 to 7 successes of 8."""
    mask = np.arange(1, case.tokens) >= case.tokens - case.num_sampled
    groups = []
    for i in range(case.insert // 8):
        rewards = (np.arange(8) < rng.integers(1, 8)).astype(float)
        rollouts = []
        for reward in rewards.tolist():
            tokens = rng.integers(VOCABULARY, size=case.tokens, dtype=np.int32)
            log_probs = -rng.random(case.num_sampled, dtype=np.float32)
            info = {"reward": reward, "response_clip_ratio": 0.0}
            rollouts.append(
                Rollout(reward, reward, case.num_sampled, StoredRow(tokens, mask, log_probs, None, False, info, None))
            )
        group = RolloutGroup(f"g{i:08d}", Prompt(str(i), "prompt", "label"), tuple(rollouts), 0)
        groups.append(ScoredGroup.of(group, ((rewards - rewards.mean()) / rewards.std(ddof=1)).tolist()))
    return groups


def replay_report(result: dict) -> str:
    ours = result["ours"]
    lines = [
        result["machine"],
        f"{ours['stored']:,} rollouts of {result['tokens']:,} tokens stored; insertion of {result['insert']:,}, "
        f"draw of {result['draw']:,}; {result['steps']} steps",
        "",
        f"{'milliseconds':<20}{'median':>9}{'min':>9}{'max':>9}{'CPU time':>10}",
    ]
    for library in ("ours", "cpprb"):
        if library not in result:
            lines.append(f"{library} is not installed")
            continue
        for name, t in result[library]["seconds"].items():
            figures = "".join(f"{t[key] * 1e3:9.2f}" for key in ("median", "min", "max"))
            lines.append(f"{library + ': ' + name:<20}{figures}{t['cpu'] * 1e3:10.2f}")
    return "\n".join(
        [
            *lines,
            "",
            f"{'bookkeeping of a rollout':<40}{ours['bookkeeping_bytes_per_rollout']:8.1f} bytes",
            f"{'a rollout in all':<40}{ours['bytes_per_rollout']:8.1f} bytes",
        ]
    )


# -- checkpoint --


def bench_checkpoint(cases: list[ReplayCase], folder: str | None) -> dict:
    sizes = [in_own_process(partial(measure_checkpoint, folder=folder), case) for case in cases]
    return {"machine": machine(), "insert": cases[0].insert, "tokens": cases[0].tokens, "sizes": sizes}


def measure_checkpoint(case: ReplayCase, *, folder: str | None) -> dict:
    rng = np.random.default_rng(case.seed)
    groups = replay_groups(case, rng)
    num_versions = -(-case.stored // (8 * len(groups)))
    config = ReplayConfig(max_age=num_versions, capacity=case.stored, max_gib=1024)
    buffer = RolloutBuffer(config)
    for version in range(num_versions):
        buffer.push([replace(one, group=replace(one.group, policy_version=version)) for one in groups])
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as root:
        with timed(seconds, "full save"):
            full_bytes = sidecar.write(root, "full", buffer.state_dict())
        buffer.push([replace(one, group=replace(one.group, policy_version=num_versions)) for one in groups])
        with timed(seconds, "incremental save"):
            incremental_bytes = sidecar.write(root, "incremental", buffer.state_dict())
        with timed(seconds, "load"):
            again = RolloutBuffer(config)
            again.load_state_dict(sidecar.read(root, "incremental"))
    return {
        "stored": len(again),
        "buffer_bytes": again.num_bytes,
        "seconds": seconds,
        "written_bytes": {"full save": full_bytes, "incremental save": incremental_bytes},
    }


def checkpoint_report(result: dict) -> str:
    lines = [
        result["machine"],
        f"rollouts of {result['tokens']:,} tokens, {result['insert']:,} of them inserted in a step",
        "",
        f"{'rollouts':>12}{'buffer MiB':>12}  {'':<18}{'seconds':>9}{'CPU time':>10}{'MiB':>10}",
    ]
    for size in result["sizes"]:
        for phase in ("full save", "incremental save", "load"):
            written = size["written_bytes"].get(phase)
            lines.append(
                f"{size['stored']:12,}{mib(size['buffer_bytes']):12,.1f}  {phase:<18}{size['seconds'][phase]:9.2f}"
                f"{size['seconds']['cpu_' + phase]:10.2f}" + ("" if written is None else f"{mib(written):10,.2f}")
            )
    return "\n".join(lines)


# -- stand-ins --


def engine_groups(case: Case, version: int, rng: np.random.Generator) -> list[RolloutGroup[Experience]]:
    """Groups of random tokens as the engines return them, ``case.num_effective`` of them with both rewards."""
    effective = set(rng.choice(case.prompts, case.num_effective, replace=False).tolist())
    groups = []
    for i in range(case.prompts):
        prompt = Prompt(f"{version}-{i}", "prompt", "label")
        rewards = [float(i in effective and j % 2 == 0) for j in range(case.rollouts)]
        rollouts = tuple(
            Rollout(reward, reward, case.tokens - case.prompt_tokens, engine_sample(case, prompt, reward))
            for reward in rewards
        )
        groups.append(RolloutGroup(f"g{version}-{i}", prompt, rollouts, version))
    return groups


def engine_sample(case: Case, prompt: Prompt, reward: float) -> Experience:
    """Shapes and types are those of OpenRLHF's own samples."""
    action_mask = torch.zeros(1, case.tokens - 1, dtype=torch.long)
    action_mask[:, case.prompt_tokens - 1 :] = 1
    return Experience(
        sequences=torch.randint(VOCABULARY, (1, case.tokens)),
        attention_mask=torch.ones(1, case.tokens, dtype=torch.long),
        action_mask=action_mask,
        rollout_log_probs=-torch.rand(1, case.tokens - 1),
        prompts=[prompt.text],
        labels=[prompt.label],
        images=[None],
        mm_train_inputs=[None],
        rewards=torch.tensor([reward]),
        scores=torch.tensor([reward]),
        response_length=torch.tensor([case.tokens - case.prompt_tokens]),
        truncated=torch.tensor([False]),
        total_length=torch.tensor([float(case.tokens)]),
        info={"response_clip_ratio": torch.tensor([False]), "reward": torch.tensor([reward])},
    )


def model_rows(samples: list[Experience]) -> list[Experience]:
    """Rows with log-probabilities and advantages, as views of batches, which is what the experience maker returns."""
    rows = []
    for start in range(0, len(samples), MICRO_BATCH):
        batch = Experience.concat_experiences(samples[start : start + MICRO_BATCH], 0)
        batch.action_log_probs = -torch.rand(batch.action_mask.shape)
        batch.returns = batch.rewards[:, None] * batch.action_mask
        batch.advantages = batch.returns.clone()
        rows += remove_padding_in_sequences(split_experience_batch(batch))
    return rows


# -- measuring --


def in_own_process(measure: Callable[[Any], dict], case: object) -> dict:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(measure, case).result()


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started, cpu_started = time.perf_counter(), time.process_time()
    yield
    seconds[phase] = time.perf_counter() - started
    seconds["cpu_" + phase] = time.process_time() - cpu_started


def spread(steps: list[dict], phase: str) -> dict[str, float]:
    values = [step[phase] for step in steps]
    cpu = float(np.median([step["cpu_" + phase] for step in steps]))
    return {"median": float(np.median(values)), "min": min(values), "max": max(values), "cpu": cpu}


def tensor_bytes(experience: Experience) -> int:
    values = [getattr(experience, field.name) for field in fields(Experience)]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def mib(num_bytes: float) -> float:
    return num_bytes / 2**20


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, one thread"


if __name__ == "__main__":
    sys.exit(main())
