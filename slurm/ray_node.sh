#!/bin/bash
# One node's part of ray.sbatch, which sets the variables.   ray_node.sh run [PREFIX...] | clean
#   run    Ray in the foreground until it ends or this script gets TERM or USR2; then as clean. PREFIX goes before `ray`.
#   clean  Ray's logs to the job's, and everything of this job in the node's temporary folder away
set -uo pipefail

# The IPv4 address of a node of this name; of RAY_NIC where that is set, which must then be this node.
address_of() {
    local node=$1 found
    if [[ -n ${RAY_NIC:-} ]]; then
        found=$(ip -4 -o address show dev "$RAY_NIC" 2>/dev/null | awk '{ sub("/.*", "", $4); print $4; exit }')
        [[ -n $found ]] || { echo "RAY_NIC: no interface '$RAY_NIC' with an IPv4 address on $node" >&2; return 1; }
    else
        found=$(getent ahostsv4 "$node" | awk '{ print $1; exit }')
        [[ -n $found ]] || { echo "the name $node has no IPv4 address: see /etc/hosts, or set RAY_NIC" >&2; return 1; }
        [[ $found != 127.* ]] || {
            echo "the name $node has the address $found, where no other node can reach it: see /etc/hosts, or set RAY_NIC" >&2
            return 1
        }
    fi
    echo "$found"
}

clean() {
    local folder
    for folder in "$@"; do
        [[ -d $folder/session_latest/logs ]] && cp -r "$folder/session_latest/logs" "$RAY_LOGS/ray-$SLURMD_NODENAME"
    done
    rm -rf "$@"
}

run() {
    local folder=$1 address mib memory_kib store_kib shm_kib cpus flags ray rc
    shift
    stop=0
    trap 'stop=1' TERM USR2
    trap '' USR1 # for whoever forgets the -b of scancel -b -s USR1
    if [[ -n $SETUP ]]; then
        set +u
        # shellcheck source=/dev/null
        source "$SETUP" || { echo "SETUP: $SETUP failed with $?"; return 2; }
        set -u
        PATH=${BIN_DIR:+$BIN_DIR:}$PATH
    fi
    address=$(address_of "$SLURMD_NODENAME") || return 2
    # A power cut may have left one. Not ours to remove or to use: somebody else made it.
    rm -rf "$folder"
    mkdir -m 700 "$folder" || { echo "RAY_TMP_ROOT: cannot make $folder on $SLURMD_NODENAME"; return 2; }
    mkdir "$folder/tmp"
    export TMPDIR=$folder/tmp

    # What Slurm gave, not what the machine has.
    cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
    memory_kib=$(awk '/^MemTotal:/ { print $2 }' /proc/meminfo)
    mib=${SLURM_MEM_PER_NODE:-$((${SLURM_MEM_PER_CPU:-0} * SLURM_CPUS_ON_NODE))}
    mib=$((mib ? mib : ${SLURM_MEM_PER_GPU:-0} * ${SLURM_GPUS_ON_NODE:-0}))
    if ((mib && mib * 1024 < memory_kib)); then
        memory_kib=$((mib * 1024))
        # Ray would look at the whole machine, and end our workers because others fill it.
        export RAY_memory_monitor_refresh_ms=0
    fi
    shm_kib=$(df --output=avail /dev/shm | tail -n 1)
    store_kib=$((memory_kib * 3 / 10 < shm_kib * 9 / 10 ? memory_kib * 3 / 10 : shm_kib * 9 / 10))
    flags=(--block --disable-usage-stats --log-color=false --node-name="$SLURMD_NODENAME" --node-ip-address="$address"
        --temp-dir="$folder" --num-cpus="$cpus" --num-gpus="${RAY_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}"
        --memory=$(((memory_kib - store_kib) * 1024)) --object-store-memory=$((store_kib * 1024))
        --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0)
    export RAY_enable_metrics_collection=0 # each node would answer anybody's questions about it
    if [[ $SLURMD_NODENAME == "$RAY_HEAD" ]]; then
        # No dashboard, no autoscaler, no Ray client server, no metrics of the dashboard's process (no port is -1).
        export DASHBOARD_METRIC_PORT=-1
        export RAY_START_HOOK=ray_start_hook.no_ray_client PYTHONPATH=$ROOT/slurm${PYTHONPATH:+:$PYTHONPATH}
        flags+=(--head --port="${RAY_ADDRESS##*:}" --include-dashboard=false --no-monitor)
    else
        flags+=(--address="$RAY_ADDRESS")
        until (exec 3<>"/dev/tcp/${RAY_ADDRESS%:*}/${RAY_ADDRESS##*:}") 2>/dev/null; do
            ((stop)) && return 0
            sleep 0.3
        done
    fi
    # Ray would take it for a cluster to join.
    unset RAY_ADDRESS
    set -m # a process group of its own: Slurm's signals are for this script
    "$@" ray start "${flags[@]}" &
    ray=$!
    set +m
    while kill -0 "$ray" 2>/dev/null; do
        ((stop == 1)) && kill -TERM "$ray" && stop=2
        sleep 0.3
    done
    wait "$ray"
    rc=$?
    kill -KILL -- "-$ray" 2>/dev/null
    ((stop)) && return 0
    echo "ray start ended with $rc"
    return $((rc ? rc : 1))
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    if [[ $1 == run ]]; then
        # Of this node only, in case that the folder is not local at all.
        run "$RAY_TMP.$SLURM_NODEID" "${@:2}"
        rc=$?
        clean "$RAY_TMP.$SLURM_NODEID"
        exit $rc
    fi
    clean "$RAY_TMP".*
fi
