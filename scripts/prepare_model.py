"""Make a model to train: `python scripts/prepare_model.py tiny --out data/countdown/model [--seed S]`.

`tiny` is a character-level Llama of 0.3 million parameters, warm-started on Countdown in half a minute on one core.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which else warns that it finds no GPU

from openrlhf_ext.tasks.tiny_model import WarmStart, warm_start  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_subparsers(dest="model", required=True)
    tiny = models.add_parser("tiny", help="character-level Llama, warm-started on Countdown")
    tiny.add_argument("--out", type=Path, required=True, help="folder of the model")
    tiny.add_argument("--seed", type=int, default=0, help="of weights and training puzzles (default 0)")
    tiny.add_argument("--steps", type=int, default=WarmStart().steps, help="training steps (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        report, is_new = warm_start(args.out, WarmStart(seed=args.seed, steps=args.steps))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    done = f"trained for {report.settings['steps']} steps in {report.seconds} s" if is_new else "reused"
    print(f"{args.out}: {done}, {report.parameters} parameters, accuracy {report.accuracy:.1%} at temperature 1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
