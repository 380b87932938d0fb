#!/usr/bin/env bash
# Trains with TRL what the benchmark trains here: GRPOTrainer and its replay trainer, three learning rates, three seeds.
#   bash scripts/benchmark_peers.sh [OUT]                         OUT: a suite folder, runs/benchmark/peers if not given
#   DATA=data/countdown bash scripts/benchmark_peers.sh           train.jsonl, eval.jsonl and model/ of another folder
#   ROLLOUTS=25600 bash scripts/benchmark_peers.sh                rollouts a run, 12800 if not given
# Makes an environment of its own, .venv-peers (1.5 GB), by PYTHON (python3 if not given). Finished runs are skipped,
# unfinished and failed ones made anew. Exit status 1 when a run failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
trap 'exit 130' INT

out=${1:-runs/benchmark/peers}
data=${DATA:-data/countdown_sparse}
rollouts=${ROLLOUTS:-12800}
venv=.venv-peers
torch=torch==2.13.0+cpu
torch_index=https://download.pytorch.org/whl/cpu # PyTorch's own; PyPI has the CUDA build only
# TRL 1.13 is the last with the replay trainer, and imports requests without requiring it.
packages="trl==1.13.0 transformers==5.15.0 accelerate==1.15.0 datasets==5.2.0 requests==2.34.2"

export PYTHONPATH=$PWD OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1

if [ "$(cat "$venv/installed" 2>/dev/null)" != "$torch $packages" ]; then
    echo "benchmark_peers.sh: installing TRL in $venv"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet "$torch" ||
        "$venv/bin/python" -m pip install --quiet --extra-index-url "$torch_index" "$torch"
    # shellcheck disable=SC2086 # one word for each package
    "$venv/bin/python" -m pip install --quiet $packages
    echo "$torch $packages" >"$venv/installed"
fi
if [ -z "${DATA:-}" ]; then
    "$venv/bin/python" scripts/prepare_data.py countdown --mix sparse --train 1000 --out "$data"
    "$venv/bin/python" scripts/prepare_model.py tiny --steps 400 --out "$data/model"
fi

mkdir -p "$out/runs" "$out/logs"
runs=({1,2,3}" "{3e-05,0.0001,0.0003}" "{grpo,replay}) # a seed through everything before the next one
if [ ! -e "$out/suite.json" ]; then
    listed=()
    for run in "${runs[@]}"; do
        read -r seed lr trainer <<<"$run"
        dir=runs/trl_$trainer-lr$lr-seed$seed
        listed+=("{\"method\": \"trl_$trainer\", \"lr\": $lr, \"seed\": $seed, \"dir\": \"$dir\"}")
    done
    printf -v index '%s,\n  ' "${listed[@]}"
    printf '{"name": "peers", "baselines": ["trl_grpo"], "targets": [], "runs": [\n  %s\n]}\n' "${index%,*}" \
        >"$out/suite.json"
fi

failed=()
for run in "${runs[@]}"; do
    read -r seed lr trainer <<<"$run"
    name=trl_$trainer-lr$lr-seed$seed
    [ ! -e "$out/runs/$name/summary.json" ] || continue
    echo "benchmark_peers.sh: $name"
    rm -rf "${out:?}/runs/$name"
    "$venv/bin/python" scripts/peers_trl.py --trainer "$trainer" --model "$data/model" \
        --train "$data/train.jsonl" --eval "$data/eval.jsonl" --lr "$lr" --seed "$seed" \
        --rollouts "$rollouts" --out "$out/runs/$name" >"$out/logs/$name.log" 2>&1 ||
        failed+=("$name: $(tail -n 1 "$out/logs/$name.log")")
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'benchmark_peers.sh: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
