#!/usr/bin/env bash
# A real Slurm cluster on one machine, up in about half a second: vcluster.sh DIR NODES     (root, Linux)
#
# The controller ("ctl", 10.77.0.1) and each node ("nodeI", 10.77.0.1I) have PID, network, host name and mount namespaces
# of their own: own addresses, ports, process list and /tmp/local; all other files are shared, as on a cluster. Nothing in
# /etc or /var is used, so that several clusters can run at once. Commands are run on ctl by
# nsenter --target CHILD --all, CHILD being the only child of this process. Prints "ready" when all nodes are idle and
# ends, with every process that it or a job started, when its standard input is closed.
#
# On ctl, DIR/run/nodeI is the process id of nodeI's first process: kill -9 is a power cut, nsenter --target PID --all
# runs a command there, and `vcluster.sh boot DIR I` starts the node again.
#
# VC_CRED_EXPIRE (s; a requeued job waits one more; under 5 counts as 120) and VC_SLURMD_TIMEOUT (s until a silent node is
# down) can be set.
set -euo pipefail

boot_node() {
    local dir=$1 i=$2 node
    # slurmd leaves its parent; what stays is the node's init, which reaps.
    # shellcheck disable=SC2016
    unshare --net --uts --mount --pid --fork --mount-proc --kill-child bash -c '
        hostname "node$1"
        mount --make-rprivate /
        mkdir -p /tmp/local && mount -t tmpfs tmpfs /tmp/local
        until ip -4 -o address show eth0 2>/dev/null | grep -q 10.77; do sleep 0.02; done
        SLURM_CONF=$2/etc/slurm.conf slurmd
        while :; do sleep 3600 & wait $!; done' init "$i" "$dir" </dev/null >"$dir/log/node$i.console" 2>&1 &
    until node=$(pgrep --parent $!); do sleep 0.02; done
    until [[ $(readlink "/proc/$node/ns/net") != $(readlink /proc/self/ns/net) ]]; do sleep 0.02; done
    ip link delete "ve$i" 2>/dev/null || true
    ip link add "ve$i" type veth peer name eth0 netns "$node"
    ip link set "ve$i" master br0 up
    nsenter --target "$node" --net bash -c "
        ip link set lo up && ip address add 10.77.0.1$i/24 dev eth0 && ip link set eth0 up"
    echo "$node" >"$dir/run/node$i"
}

if [[ ${1:-} == boot ]]; then
    boot_node "$2" "$3"
    exit
fi
dir=$1 nodes=$2
if [[ -z ${VC_INSIDE:-} ]]; then
    VC_INSIDE=1 exec unshare --pid --fork --mount --net --uts --ipc --mount-proc --kill-child bash "$0" "$dir" "$nodes"
fi
unset VC_INSIDE

mount --make-rprivate /
hostname ctl
# With nothing but lo, Slurm's name look-up finds no address and its daemons end.
ip link set lo up
ip link add br0 type bridge
ip address add 10.77.0.1/24 dev br0
ip link set br0 up
mkdir -p "$dir"/{etc,state,log,run,dev}
{
    echo "127.0.0.1 localhost"
    echo "10.77.0.1 ctl"
    for ((i = 1; i <= nodes; i++)); do
        echo "10.77.0.1$i node$i"
        mkdir -p "$dir/spool/node$i"
    done
} >"$dir/etc/hosts"
mount --bind "$dir/etc/hosts" /etc/hosts

# Two GPUs a node, as Slurm sees it; with plain files for devices it would not set CUDA_VISIBLE_DEVICES.
for i in 0 1; do mknod "$dir/dev/gpu$i" c 1 3; done
echo "Name=gpu File=$dir/dev/gpu[0-1]" >"$dir/etc/gres.conf"
export SLURM_CONF=$dir/etc/slurm.conf
# config_overrides: a node may have more CPUs than the machine. cred_expire: the default lets a requeued job wait 121 s.
cat >"$SLURM_CONF" <<END
ClusterName=vc
SlurmctldHost=ctl(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket,cred_expire=${VC_CRED_EXPIRE:-5}
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmdLogFile=$dir/log/slurmd.%n.log
SlurmdSpoolDir=$dir/spool/%n
SlurmdParameters=config_overrides
SlurmdTimeout=${VC_SLURMD_TIMEOUT:-10}
StateSaveLocation=$dir/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
EnforcePartLimits=ALL
ReturnToService=2
KillWait=30
MinJobAge=3600
RebootProgram=/bin/true
NodeName=node[1-$nodes] NodeAddr=10.77.0.1[1-$nodes] CPUs=64 CoresPerSocket=64 RealMemory=64000 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=60 DefMemPerNode=2000
END
printf 'CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n' >"$dir/etc/cgroup.conf"

(umask 077 && head -c 1024 /dev/urandom >"$dir/run/munge.key")
munged --force --key-file="$dir/run/munge.key" --socket="$dir/run/munge.socket" --pid-file="$dir/run/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed" 2>"$dir/log/munged.console"
slurmctld -c
for ((i = 1; i <= nodes; i++)); do boot_node "$dir" "$i" & done
wait
for ((tries = 200; tries > 0; tries--)); do
    (($(sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | wc -l) == nodes)) && break
    sleep 0.05
done
if ((tries == 0)); then
    echo "vcluster.sh: the nodes did not come up; the ends of the logs in $dir/log:" >&2
    tail -n 5 "$dir"/log/* >&2
    exit 1
fi
echo ready
cat >/dev/null
