"""Make prompt files `train.jsonl` and `eval.jsonl` for OpenRLHF (input_key `input`, label_key `label`).

    python scripts/prepare_data.py countdown --out data/countdown
    python scripts/prepare_data.py arithmetic_chat --out data/smollm2
    python scripts/prepare_data.py reasoning_gym --task chain_sum --out data/chain_sum
    python scripts/prepare_data.py countdown_words --out data/countdown_words
    python scripts/prepare_data.py deepscaler --eval-set math500=math500.jsonl --out data/deepscaler
    python scripts/prepare_data.py geometry3k --out data/geometry3k

Files that already have the right content are left alone.
"""

import argparse
import difflib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_ext.eval_sets import MATH_TEMPLATE, read_template
from openrlhf_ext.tasks import arithmetic_chat, countdown_words, math_data
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
    chat = tasks.add_parser("arithmetic_chat", help="Countdown and sums of two-digit numbers, as chat messages")
    chat.add_argument(
        "--tasks",
        nargs="+",
        choices=arithmetic_chat.TASKS,
        default=arithmetic_chat.TASKS,
        help="in equal shares (default: both)",
    )
    reasoning_gym = tasks.add_parser("reasoning_gym", help="a task of the reasoning-gym package")
    reasoning_gym.add_argument("--task", required=True, help="its name in reasoning-gym, such as chain_sum")
    reasoning_gym.add_argument(
        "--config", default="{}", help="the task's settings as JSON, such as '{\"max_terms\": 2}'"
    )
    for task in (countdown, chat, reasoning_gym):
        task.add_argument("--out", type=Path, required=True, help="folder of the two files")
        task.add_argument("--train", type=_positive, default=2000, help="training rows (default %(default)s)")
        task.add_argument("--eval", type=_positive, default=200, help="evaluation rows (default %(default)s)")
        task.add_argument("--seed", type=int, default=0, help="default %(default)s")
    words = tasks.add_parser("countdown_words", help="Countdown in words, of TinyZero's puzzles")
    problems = [tasks.add_parser(name, help=f"mathematics: {what}") for name, (_, what) in math_data.SETS.items()]
    problems.append(tasks.add_parser("math", help="mathematics: problems and answers of your own files (--source)"))
    for task in (words, *problems):
        _add_published(task, is_math=task is not words)
    geometry = tasks.add_parser("geometry3k", help="geometry problems with diagrams")
    geometry.add_argument("--out", type=Path, required=True, help="folder of the two files and of the pictures")
    geometry.add_argument(
        "--source",
        nargs=2,
        default=["hiyouga/geometry3k:train", "hiyouga/geometry3k:test"],
        metavar=("TRAIN", "EVAL"),
        help="two of its .parquet files, or OWNER/NAME:SPLIT on the hub (default %(default)s)",
    )
    args = parser.parse_args(argv)
    try:
        if args.data == "geometry3k":
            return _write_geometry3k(args)
        if args.data == "math" or args.data in math_data.SETS:
            return _write_math(args)
        if args.data == "countdown":
            is_new = write_dataset(args.out, args.train, args.eval, args.seed, args.mix)
        elif args.data == "arithmetic_chat":
            is_new = arithmetic_chat.write_dataset(args.out, args.train, args.eval, args.seed, args.tasks)
        elif args.data == "countdown_words":
            is_new = countdown_words.write_dataset(args.out, args.source, args.train, args.eval, args.seed)
        else:
            is_new = _write_reasoning_gym(args)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{args.out}: {'wrote' if is_new else 'reused'} {args.train} training and {args.eval} evaluation prompts")
    return 0


def _add_published(task: argparse.ArgumentParser, is_math: bool) -> None:
    """The options of data that others have published, in files or on the Hugging Face hub."""
    name = task.prog.split()[-1]
    published = math_data.SETS[name][0] if name in math_data.SETS else None if is_math else countdown_words.SOURCE
    task.add_argument(
        "--source",
        nargs="+",
        default=[published] if published else None,
        required=not published,
        help=".jsonl, .json or .parquet files, or OWNER/NAME[@CONFIGURATION][:SPLIT] on the hub"
        + (" (default %(default)s)" if published else ""),
    )
    # MoPPS's sizes for Countdown: 2,000 and 512 puzzles.
    train, rows = (None, 200) if is_math else (2000, 512)
    task.add_argument("--out", type=Path, required=True, help="folder of the two files")
    task.add_argument("--train", type=_positive, default=train, help=f"training rows (default {train or 'all'})")
    task.add_argument(
        "--eval", type=_positive, default=rows, help="rows held out to evaluate on (default %(default)s)"
    )
    task.add_argument("--seed", type=int, default=0, help="of the choice of rows (default %(default)s)")
    if is_math:
        task.add_argument(
            "--eval-set",
            action="append",
            default=[],
            metavar="NAME=SOURCE",
            help="evaluate on this set, reported as NAME, instead of rows that are held out; may be repeated",
        )
        task.add_argument(
            "--template", default=MATH_TEMPLATE, help="text or .txt file with {input} (default %(default)r)"
        )
        task.add_argument("--system", help="a system message; '' keeps a chat template from adding its own")


def _needs_math_verify() -> None:
    if not importlib.util.find_spec("math_verify"):
        raise ValueError(
            "the math-verify package, which grades the answers, is missing: pip install math-verify==0.9.0"
        )


def _write_geometry3k(args: argparse.Namespace) -> int:
    _needs_math_verify()
    from openrlhf_ext.tasks import geometry3k

    (train, evaluation), left_out, is_new = geometry3k.write_dataset(args.out, args.source)
    print(f"{args.out}: {'wrote' if is_new else 'reused'} {train} training and {evaluation} evaluation prompts")
    _print_left_out(left_out)
    return 0


def _print_left_out(left_out: Mapping[str, int]) -> None:
    for reason, count in left_out.items():
        print(f"left out {count} rows: {reason}")


def _write_math(args: argparse.Namespace) -> int:
    _needs_math_verify()
    eval_sets = dict(item.split("=", 1) if "=" in item else ("", item) for item in args.eval_set)
    if "" in eval_sets or len(eval_sets) < len(args.eval_set):
        raise ValueError(f"--eval-set must be NAME=SOURCE with different names, got {' '.join(args.eval_set)}")
    written = math_data.write_dataset(
        args.out,
        args.data,
        args.source,
        eval_sets,
        train=args.train,
        held_out=args.eval,
        seed=args.seed,
        template=read_template(args.template),
        system=args.system,
    )
    verb = "wrote" if written.is_new else "reused"
    print(f"{args.out}: {verb} {written.train} training and {written.eval} evaluation prompts")
    _print_left_out(written.left_out)
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
