"""Trains the runs of a benchmark that it is told on stdin, one line of JSON each, on engines that stay up.

Started by ``cli.benchmark``. A line is ``{"argv": [...], "stock": false}``. Ends with the input, and with code 1 after
the first run that fails: its processes may be in any state, and the next run gets new ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from openrlhf_ext.checks import read_prompt_files
from openrlhf_ext.cli.train_ppo_ray import checked_settings


def main() -> int:
    from openrlhf_ext.adapters.launch import Run, run_all

    def runs() -> Iterator[Run]:
        for line in iter(sys.stdin.readline, ""):
            order = json.loads(line)
            settings = checked_settings(order["argv"])
            assert settings is not None
            yield Run(settings, read_prompt_files(settings), stock=order["stock"])

    return run_all(runs())


if __name__ == "__main__":
    sys.exit(main())
