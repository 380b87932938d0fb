#!/usr/bin/env bash
# Trains as a Ray job, on a Ray head of its own that ends with it, or on a running cluster, which is left as it is.
#   bash scripts/ray_job.sh --config configs/cpu/popo.yaml                               on this machine
#   bash scripts/ray_job.sh --address http://HOST:8265 --config configs/cpu/popo.yaml    on a cluster
#   bash scripts/ray_job.sh --help                                                       options and exit codes
# Ctrl-C stops the job (its step is finished and saved); a second one does not wait. The exit code is the training's.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
[ ! -d .venv/bin ] || PATH=$PWD/.venv/bin:$PATH
if ! command -v python >/dev/null; then
    echo "error: there is no python on PATH and no .venv; run scripts/install_cpu.sh, or activate an environment" >&2
    exit 2
fi
export PATH
exec python -m openrlhf_ext.cli.ray_job "$@"
