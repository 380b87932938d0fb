"""Make a model to train.

    python scripts/prepare_model.py tiny --out data/countdown/model
    python scripts/prepare_model.py smollm2 --out data/smollm2/model

`tiny` is a character-level Llama of 0.3 million parameters, warm-started on Countdown in half a minute on one core.
`smollm2` is SmolLM2-135M-Instruct, downloaded once (93 MB) and warm-started on the arithmetic chats in minutes.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which else warns that it finds no GPU

from openrlhf_ext.tasks import smollm2, tiny_model  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_subparsers(dest="model", required=True)
    tiny = models.add_parser("tiny", help="character-level Llama, warm-started on Countdown")
    smol = models.add_parser("smollm2", help="SmolLM2-135M-Instruct, warm-started on the arithmetic chats")
    for command, module in ((tiny, tiny_model), (smol, smollm2)):
        command.add_argument("--out", type=Path, required=True, help="folder of the model")
        command.add_argument("--seed", type=int, default=0, help="of training problems and new weights (default 0)")
        steps = module.WarmStart().steps
        command.add_argument("--steps", type=int, default=steps, help="training steps (default %(default)s)")
    smol.add_argument(
        "--cache", type=Path, default=smollm2.CACHE, help="folder of the converted model (default %(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        if args.model == "tiny":
            settings = tiny_model.WarmStart(seed=args.seed, steps=args.steps)
            report, is_new = tiny_model.warm_start(args.out, settings)
        else:
            settings = smollm2.WarmStart(seed=args.seed, steps=args.steps)
            report, is_new = smollm2.warm_start(args.out, settings, args.cache)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    done = f"trained for {report.settings['steps']} steps in {report.seconds} s" if is_new else "reused"
    accuracy = report.accuracy if isinstance(report.accuracy, dict) else {"": report.accuracy}
    shown = ", ".join(f"{task} {share:.1%}".strip() for task, share in accuracy.items())
    print(f"{args.out}: {done}, {report.parameters} parameters, accuracy {shown} at temperature 1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
