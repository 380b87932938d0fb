#!/usr/bin/env bash
# Installs if needed, then style and the whole test suite; arguments go to pytest:
#   bash scripts/test.sh                    everything
#   bash scripts/test.sh tests/unit -k fate a part
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install_cpu.sh

export PATH="$PWD/.venv/bin:$PATH" # DeepSpeed looks for ninja there
export OMP_NUM_THREADS=1           # more threads in several processes on few cores: 10 to 100 times slower
ruff check .
exec python -m pytest --durations=15 "$@"
