#!/usr/bin/env bash
# Installs if needed, then style and the whole test suite; arguments go to pytest:
#   bash scripts/test.sh                    everything
#   bash scripts/test.sh tests/unit -k fate a part
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install_cpu.sh
# The report's page is tested in a real browser. Without one, and without the right to install it, those tests say so.
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "test.sh: installing Debian's chromium for the tests of the report"
    { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 ||
        echo "test.sh: chromium could not be installed; the tests of the report's page are skipped"
fi

# Jobs are tested on a real Slurm, which the tests start in namespaces of their own.
if ! command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "test.sh: installing Debian's Slurm for the tests of slurm/"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        slurmctld slurmd slurm-client munge iproute2 procps; } >/dev/null 2>&1 ||
        echo "test.sh: Slurm could not be installed; the tests that need it are skipped"
fi

export PATH="$PWD/.venv/bin:$PATH" # DeepSpeed looks for ninja there
export OMP_NUM_THREADS=1           # more threads in several processes on few cores: 10 to 100 times slower
ruff check .
# Two files at a time: a run of real parts waits half of its time for processes to start. In their order, in which the
# short ones come last.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25 "$@"
