"""Make prompt files `train.jsonl` and `eval.jsonl` for OpenRLHF (input_key `input`, label_key `label`).

    python scripts/prepare_data.py countdown --out data/countdown
    python scripts/prepare_data.py reasoning_gym --task chain_sum --out data/chain_sum

Files that already have the right content are left alone.
"""

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_ext.tasks.countdown_data import TRAIN_MIXES, write_dataset
from openrlhf_ext.tasks.jsonl import write_jsonl

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

_EVAL_SEED_OFFSET = 1_000_000
"""reasoning-gym draws entry i of seed s from s + i, so near seeds give the same entries."""

_DRAWS_PER_EVAL_ROW = 20


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="data", required=True)
    countdown = tasks.add_parser("countdown", help="arithmetic puzzles with 2 to 4 numbers")
    countdown.add_argument(
        "--mix",
        choices=TRAIN_MIXES,
        default="even",
        help="of training puzzles; sparse: most are solved or hopeless (default %(default)s)",
    )
    reasoning_gym = tasks.add_parser("reasoning_gym", help="a task of the reasoning-gym package")
    reasoning_gym.add_argument("--task", required=True, help="its name in reasoning-gym, such as chain_sum")
    reasoning_gym.add_argument(
        "--config", default="{}", help="the task's settings as JSON, such as '{\"max_terms\": 2}'"
    )
    for task in (countdown, reasoning_gym):
        task.add_argument("--out", type=Path, required=True, help="folder of the two files")
        task.add_argument("--train", type=_positive, default=2000, help="training rows (default %(default)s)")
        task.add_argument("--eval", type=_positive, default=200, help="evaluation rows (default %(default)s)")
        task.add_argument("--seed", type=int, default=0, help="default %(default)s")
    args = parser.parse_args(argv)
    try:
        if args.data == "countdown":
            is_new = write_dataset(args.out, args.train, args.eval, args.seed, args.mix)
        else:
            is_new = _write_reasoning_gym(args)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{args.out}: {'wrote' if is_new else 'reused'} {args.train} training and {args.eval} evaluation prompts")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _write_reasoning_gym(args: argparse.Namespace) -> bool:
    dataset = _reasoning_gym_dataset(args.task, args.config, args.train, args.seed)
    training = [_reasoning_gym_row(dataset, args.task, "train", index) for index in range(args.train)]
    known = {row["input"] for row in training}
    draws = _DRAWS_PER_EVAL_ROW * args.eval
    dataset = _reasoning_gym_dataset(args.task, args.config, draws, args.seed + _EVAL_SEED_OFFSET)
    evaluation: list[dict[str, str]] = []
    for index in range(draws):
        row = _reasoning_gym_row(dataset, args.task, "eval", index)
        if row["input"] not in known:
            known.add(row["input"])
            evaluation.append(row)
        if len(evaluation) == args.eval:
            break
    else:
        raise ValueError(
            f"{args.task} has too few different prompts: found {len(evaluation)} of {args.eval} for evaluation that "
            f"are not among the {args.train} for training. Lower --train or --eval, or enlarge the task with --config."
        )
    changed = [write_jsonl(args.out / "train.jsonl", training), write_jsonl(args.out / "eval.jsonl", evaluation)]
    return any(changed)


def _reasoning_gym_dataset(task: str, config: str, size: int, seed: int) -> "ProceduralDataset":
    """The task's data set, whose entries are drawn when they are asked for."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError("the reasoning-gym package is missing: pip install reasoning-gym") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
        raise ValueError(f"reasoning-gym has no task {task!r}. Nearest names: {', '.join(near)}.")
    try:
        return create_dataset(task, **{"size": size, "seed": seed, **json.loads(config)})
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"--config {config!r} does not suit reasoning-gym's {task}: {error}") from error


def _reasoning_gym_row(dataset: "ProceduralDataset", task: str, split: str, index: int) -> dict[str, str]:
    """A row whose label is the whole entry; checks that it is graded the same after its way through JSON."""
    from reasoning_gym import get_score_answer_fn

    entry = dataset[index]
    try:
        label = json.dumps(entry)
        is_same = get_score_answer_fn(task)(entry["answer"], json.loads(label)) == dataset.score_answer(
            entry["answer"], entry
        )
    except TypeError:
        is_same = False
    if not is_same:
        raise ValueError(f"entries of {task} cannot be graded from a JSON file; choose another task")
    return {"id": f"{task}-{split}-{index:05d}", "input": entry["question"], "label": label, "datasource": task}


if __name__ == "__main__":
    sys.exit(main())
