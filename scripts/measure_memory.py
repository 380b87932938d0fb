"""Run a command and say how much memory it and everything it started had at most:

    python scripts/measure_memory.py python -m openrlhf_ext.cli.train_ppo_ray --config configs/cpu/smollm2_grpo.yaml

Memory is the proportional set size (PSS: pages that processes share count once), summed over the process tree and
sampled twice a second, so a peak shorter than that may be missed. Needs Linux. Exits with the command's exit code.
"""

import subprocess
import sys
import time

import psutil

PERIOD_S = 0.5
GIB = 2**30


def main(argv: list[str]) -> int:
    if not argv:
        sys.exit(__doc__)
    process = subprocess.Popen(argv)
    top, peak, at_peak = psutil.Process(process.pid), 0, {}
    while process.poll() is None:
        sizes = tree_sizes(top)
        if sum(sizes.values()) > peak:
            peak, at_peak = sum(sizes.values()), sizes
        time.sleep(PERIOD_S)
    print(f"peak of the process tree: {peak / GIB:.2f} GiB, of which", file=sys.stderr)
    for name, size in sorted(at_peak.items(), key=lambda item: -item[1])[:6]:
        print(f"  {size / GIB:6.2f} GiB  {name}", file=sys.stderr)
    return process.returncode


def tree_sizes(top: psutil.Process) -> dict[str, int]:
    """Bytes of the processes under `top`, itself included, by the start of their command line."""
    sizes: dict[str, int] = {}
    try:
        processes = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return sizes
    for one in processes:
        try:
            name, size = " ".join(one.cmdline())[:60], one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # ended in the meantime
            continue
        sizes[name] = sizes.get(name, 0) + size
    return sizes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
