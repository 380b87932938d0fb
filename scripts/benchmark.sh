#!/usr/bin/env bash
# Installs if needed, makes the sparse Countdown task and its warm model, and runs the quick suite of all methods.
#   bash scripts/benchmark.sh                          about 100 minutes on 2 cores with --jobs 2; goes on when interrupted
#   bash scripts/benchmark.sh --methods grpo popo      arguments go to openrlhf_ext.cli.benchmark
#   SUITE=configs/benchmarks/mine.yaml bash scripts/benchmark.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install_cpu.sh

export PATH="$PWD/.venv/bin:$PATH" # DeepSpeed looks for ninja there
python scripts/prepare_data.py countdown --mix sparse --train 1000 --out data/countdown_sparse
python scripts/prepare_model.py tiny --steps 400 --out data/countdown_sparse/model
exec python -m openrlhf_ext.cli.benchmark "${SUITE:-configs/benchmarks/countdown.yaml}" "$@"
