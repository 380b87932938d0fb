"""``python -m openrlhf_ext.cli.report RUN... [--out FOLDER]``: runs and suites as one HTML page with plots.

Exit code 2 and one line on stderr for a folder that is no run's and no suite's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_ext.report.page import write_report
from openrlhf_ext.settings import refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="report", description="Runs as one HTML page that opens offline.")
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("run", type=Path, nargs="+", metavar="RUN", help="folder of a run or of a benchmark suite")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: report/ in RUN if there is one RUN, else runs/report"
    )
    try:
        args = parser.parse_args(argv)
        page = write_report(args.run, args.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
