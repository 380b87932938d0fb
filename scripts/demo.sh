#!/usr/bin/env bash
# Installs if needed, makes a small task and a small model, trains with GRPO on the CPU and shows what came of it.
#   bash scripts/demo.sh                                arguments go to the trainer and win over configs/cpu/grpo.yaml
#   CONFIG=configs/cpu/dapo.yaml bash scripts/demo.sh   another method
#   RUN_DIR=runs/mine bash scripts/demo.sh              where the run goes; a new folder in runs/ if not given
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=${CONFIG:-configs/cpu/grpo.yaml}
run_dir=${RUN_DIR:-runs/demo-$(date +%Y%m%d-%H%M%S)}
case " $*" in *" --ext.run_dir"*)
    echo "demo.sh: give the folder as RUN_DIR=... instead of --ext.run_dir; the summary is read from there" >&2
    exit 2
    ;;
esac
bash scripts/install_cpu.sh

export PATH="$PWD/.venv/bin:$PATH" # DeepSpeed looks for ninja there
python scripts/prepare_data.py countdown --out data/countdown
python scripts/prepare_model.py tiny --out data/countdown/model
python -m openrlhf_ext.cli.train_ppo_ray --config "$config" --ext.run_dir "$run_dir" "$@"
python -m openrlhf_ext.cli.show_run "$run_dir"
