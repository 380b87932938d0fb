"""Stands for the trainer: a step every 50 ms, a checkpoint after each; ends when told to, or when RUN_DIR/go exists.

Arguments: --exit CODE (of the end; 0), --refuse (ends with 2 at once), --deaf (takes no signal but KILL).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--refuse", action="store_true")
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--ext.run_dir", type=Path, dest="run_dir")
parser.add_argument("--train.seed", dest="seed")
args = parser.parse_args()

if args.refuse:
    sys.exit(2)
asked: list[int] = []
if args.deaf:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
else:
    signal.signal(signal.SIGUSR1, lambda number, _frame: asked.append(number))
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
checkpoint = args.run_dir / "checkpoint"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
Path(os.environ["TMPDIR"], "of_the_trainer").touch()
print(f"trainer: Ray at {os.environ['RAY_ADDRESS']}, seed {args.seed}, starts at step {step}", flush=True)
while not (args.run_dir / "go").exists():
    time.sleep(0.05)
    step += 1
    if asked:
        checkpoint.write_text(str(step))
        print(f"trainer: saved step {step}")
        sys.exit(85)
print(f"trainer: the last line, {args.exit}")
sys.exit(args.exit)
