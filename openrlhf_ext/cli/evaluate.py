"""``python -m openrlhf_ext.cli.evaluate MODEL DATA.jsonl...``: accuracy, pass@k and response lengths of a model.

Several sets are evaluated on one engine. With ``--out``, results are written after every set, and the same command
goes on after the sets that are done. With ``--base``, the accuracy-efficiency score against another model's results.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_ext.eval_results import (
    Results,
    check_same_data,
    complete,
    grade,
    read_results,
    render,
    resume,
    sample_rows,
    set_result,
    write_results,
)
from openrlhf_ext.eval_sets import (
    INPUT_KEYS,
    LABEL_KEYS,
    MATH_TEMPLATE,
    PLACEHOLDER,
    EvalSet,
    read_eval_sets,
    read_template,
)
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rewards.result import RewardFailure, check_reward
from openrlhf_ext.settings import refuse
from openrlhf_ext.tasks.jsonl import write_jsonl

if TYPE_CHECKING:
    from openrlhf_ext.adapters.evaluator import ModelFolder

MATH_REWARD = Path(__file__).parents[1] / "rewards" / "math.py"


@dataclass(frozen=True, slots=True)
class Job:
    """An evaluation whose inputs were all checked."""

    model: ModelFolder
    sets: Sequence[EvalSet]
    prompts: dict[str, list[str]]
    """Of each set, by its name."""
    pool: RewardPool
    results: Results
    """So far."""
    base: Results | None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    with ExitStack() as stack:
        try:
            args = _arguments(argv)
            job = _prepare(args, stack)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        _evaluate(args, job)
    return 0


def _prepare(args: argparse.Namespace, stack: ExitStack) -> Job:
    sets = read_eval_sets(args.data, args.input_key, args.label_key, args.limit)
    template = read_template(args.template or (PLACEHOLDER if args.reward else MATH_TEMPLATE))
    base = read_results(args.base) if args.base else None
    if base:
        check_same_data(base, args.base, sets)

    from openrlhf_ext.adapters.evaluator import ModelFolder

    model = ModelFolder(args.model)
    as_chat = _as_chat(args.chat, model)
    reward: Path = args.reward or MATH_REWARD
    prompts = {s.name: model.prompts(s, template, as_chat=as_chat) for s in sets}
    pool = stack.enter_context(closing(RewardPool(str(reward), args.deadline, args.workers)))
    for eval_set in sets:
        _try_reward(pool, eval_set, prompts[eval_set.name][0])
    same = ("deadline", "input_key", "label_key", "n", "k", "temperature", "top_p", "max_tokens", "seed")
    settings = {
        "model": str(args.model.resolve()),
        "weights_modified": model.modified(),
        "reward": str(reward.resolve()),
        "reward_sha256": hashlib.sha256(reward.read_bytes()).hexdigest(),
        "template": template,
        "as_chat": as_chat,
        **{name: getattr(args, name) for name in same},
    }
    results = resume(args.out, settings, sets) if args.out else {"settings": settings, "sets": {}}
    return Job(model, sets, prompts, pool, results, base)


def _evaluate(args: argparse.Namespace, job: Job) -> None:
    """Evaluate the sets that are not done, then print the table."""
    todo = [s for s in job.sets if s.name not in job.results["sets"]]
    if len(todo) < len(job.sets):
        print(f"{len(job.sets) - len(todo)} of {len(job.sets)} sets are already in {args.out}", file=sys.stderr)
    if todo:
        from openrlhf_ext.adapters.evaluator import Evaluator

        evaluator = Evaluator(
            job.model,
            n=args.n,
            temperature=args.temperature,
            top_p=args.top_p,
            max_tokens=args.max_tokens,
            seed=args.seed,
            max_prompt_tokens=max(len(t) for s in todo for t in job.model.encode(job.prompts[s.name])),
        )
    for eval_set in todo:
        prompts = job.prompts[eval_set.name]
        print(f"{eval_set.name}: {len(prompts)} problems, {args.n} responses to each", file=sys.stderr)
        started = time.monotonic()
        responses = evaluator.generate(prompts)
        generated = time.monotonic()
        graded = grade(job.pool, eval_set, prompts, responses, args.workers)
        seconds = {"generation": generated - started, "grading": time.monotonic() - generated}
        if graded.first_failure:
            count = sum(graded.failures.values())
            print(
                f"warning: {eval_set.name}: {count} of {len(prompts) * args.n} responses could not be graded and "
                f"count as wrong; the first: {graded.first_failure.detail}",
                file=sys.stderr,
            )
        if args.samples:
            write_jsonl(args.samples / f"{eval_set.name}.jsonl", sample_rows(graded))
        job.results["sets"][eval_set.name] = {**set_result(eval_set, graded, args.k), "seconds": seconds}
        _keep(args, job)
    _keep(args, job)
    print(render(job.results))


def _keep(args: argparse.Namespace, job: Job) -> None:
    complete(job.results, job.base, alpha=args.alpha, beta=args.beta, gamma=args.gamma)
    if args.out:
        write_results(args.out, job.results)


def _as_chat(choice: str, model: ModelFolder) -> bool:
    has_template = bool(model.tokenizer.chat_template)
    if choice == "on" and not has_template:
        raise ValueError(f"--chat on: the tokenizer in {model.path} has no chat template; use --chat off")
    return has_template and choice != "off"


def _try_reward(pool: RewardPool, eval_set: EvalSet, prompt: str) -> None:
    """Grade an empty response to the first row: a reward file that cannot read the labels is found out now."""
    row = eval_set.rows[0]
    values = check_reward(pool([prompt], [prompt], [row.label]), pool.path)
    if isinstance(values, RewardFailure):
        raise ValueError(f"{eval_set.path}:{row.line}: cannot be graded: {values.detail}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate",
        description="Accuracy, pass@k and response lengths of a model on sets of problems.",
        allow_abbrev=False,
    )
    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("model", type=Path, help="folder of a Hugging Face model")
    add("data", type=Path, nargs="+", metavar="DATA.jsonl", help="sets of problems, one JSON object a line")
    add("--n", type=int, default=8, help="responses to each problem (default %(default)s)")
    add("--k", help="numbers of samples for pass@k, such as 1,4,8 (default: powers of 2 up to --n)")
    add("--temperature", type=float, default=1.0, help="of sampling; 0: the likeliest token (default %(default)s)")
    add("--top-p", type=float, default=1.0, help="share of the probability sampled from (default %(default)s)")
    add("--max-tokens", type=int, default=1024, help="limit of a response (default %(default)s)")
    add("--seed", type=int, default=0, help="of sampling (default %(default)s)")
    add("--limit", type=int, help="only this many problems from the start of each set")
    add("--input-key", help=f"column of the problem (default: the first there is of {', '.join(INPUT_KEYS)})")
    add("--label-key", help=f"column of the answer (default: the first there is of {', '.join(LABEL_KEYS)})")
    add("--template", help=f"text around {PLACEHOLDER}, or a .txt file of it (default: asks for the answer in a box)")
    add("--chat", choices=("auto", "on", "off"), default="auto", help="chat template; auto (default): if there is one")
    add("--reward", type=Path, help="reward file (default: openrlhf_ext/rewards/math.py); its template: {input}")
    add("--deadline", type=float, default=10.0, help="seconds for one call of the reward file (default %(default)s)")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), help="grading processes (default %(default)s)")
    add("--out", type=Path, help="JSON file of the results")
    add("--samples", type=Path, help="folder for all responses, a .jsonl file for each set")
    add("--base", type=Path, help="results of another model, to compute the accuracy-efficiency score (AES) against")
    add("--alpha", type=float, default=1.0, help="AES: weight of shorter responses (default %(default)s)")
    add("--beta", type=float, default=3.0, help="AES: weight of higher accuracy (default %(default)s)")
    add("--gamma", type=float, default=5.0, help="AES: weight of lower accuracy (default %(default)s)")
    args = parser.parse_args(argv)
    for name in ("n", "max_tokens", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.temperature < 0 or not 0 < args.top_p <= 1:
        raise ValueError(
            f"--temperature must be at least 0 and --top-p in (0, 1], got {args.temperature:g} and {args.top_p:g}"
        )
    if args.temperature == 0 and args.n > 1:
        raise ValueError(f"--temperature 0 gives {args.n} times the same response; use --n 1")
    args.k = _numbers_of_samples(args.k, args.n)
    return args


def _numbers_of_samples(text: str | None, n: int) -> list[int]:
    if text is None:
        return [2**i for i in range(n.bit_length())]
    ks = text.split(",")
    if not all(k.isdecimal() and 1 <= int(k) <= n for k in ks):
        raise ValueError(f"--k must be numbers from 1 to --n {n}, such as 1,{n}; got {text!r}")
    return sorted({int(k) for k in ks})


if __name__ == "__main__":
    sys.exit(main())
