#!/usr/bin/env bash
# A Slurm cluster of three hosts on one machine, each in its own network and UTS namespace: for tests, as root, on Debian.
#   slurm.sh start DIR    slurm.sh stop DIR    slurm.sh on DIR HOST COMMAND...
#   slurm.sh link DIR HOST up|down    slurm.sh power DIR HOST on|off
# Hosts: ctl (slurmctld, where jobs are submitted) and n1, n2, n3. PIDs of the daemons are in DIR/*.pid.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
action=$1 dir=$2
shift 2
declare -A address=([ctl]=10.77.0.1 [n1]=10.77.0.11 [n2]=10.77.0.12 [n3]=10.77.0.13)

on() { # HOST COMMAND...: with the host's own name, network, /etc/hosts and munge
  local host=$1
  shift
  # shellcheck disable=SC2016
  nsenter --net="/run/netns/muster-$host" unshare -u -m bash -c \
    'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/munge-$1" "$2/munge"; shift 2; exec "$@"' _ "$host" "$dir" "$@"
}

network() {
  local host
  ip netns add muster-ctl
  ip -n muster-ctl link set lo up
  ip -n muster-ctl link add br0 type bridge
  ip -n muster-ctl addr add "${address[ctl]}/24" dev br0
  ip -n muster-ctl link set br0 up
  for host in n1 n2 n3; do
    ip netns add "muster-$host"
    ip -n "muster-$host" link set lo up
    ip -n muster-ctl link add "p-$host" type veth peer name eth0 netns "muster-$host"
    ip -n muster-ctl link set "p-$host" master br0 up
    ip -n "muster-$host" addr add "${address[$host]}/24" dev eth0
    ip -n "muster-$host" link set eth0 up
  done
  { echo "127.0.0.1 localhost"; for host in "${!address[@]}"; do echo "${address[$host]} $host"; done; } >"$dir/hosts"
}

configure() {
  mkdir -p "$dir"/{state,spool-n1,spool-n2,spool-n3,log}
  cat >"$dir/slurm.conf" <<EOF
ClusterName=muster
SlurmctldHost=ctl(${address[ctl]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd-%n
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=30
JobRequeue=1
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2
$(for host in n1 n2 n3; do echo "NodeName=$host NodeAddr=${address[$host]} CPUs=2 RealMemory=4000 State=UNKNOWN"; done)
PartitionName=main Nodes=n1,n2,n3 Default=YES PriorityTier=1 State=UP GraceTime=30
PartitionName=urgent Nodes=n1,n2,n3 PriorityTier=10 State=UP
EOF
}

case $action in
start)
  mkdir -p "$dir"
  if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null || ! command -v ip >/dev/null; then
    "$here/apt.sh" install slurm-wlm munge iproute2 >"$dir/apt.log" 2>&1
  fi
  network
  configure
  head -c 1024 /dev/urandom >"$dir/munge.key"
  chmod 400 "$dir/munge.key"
  # One for each host, with the same key: a credential for several nodes is decoded on each, and Slurm 25 takes it for replayed
  # if one munged is asked twice.
  mkdir -p "$dir/munge"
  for host in "${!address[@]}"; do
    mkdir -p "$dir/munge-$host"
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge-$host/socket" --pid-file="$dir/munged-$host.pid" \
      --log-file="$dir/log/munged-$host" --seed-file="$dir/munge-$host/seed"
  done
  export SLURM_CONF=$dir/slurm.conf
  on ctl slurmctld
  for host in n1 n2 n3; do on "$host" slurmd -N "$host"; done
  for _ in $(seq 240); do
    if [ "$(on ctl sinfo -h -t idle -o %D -p main)" = 3 ]; then exit 0; fi
    sleep 0.5
  done
  on ctl sinfo >&2
  exit 1
  ;;
on)
  host=$1
  shift
  export SLURM_CONF=$dir/slurm.conf
  on "$host" "$@"
  ;;
link) ip -n muster-ctl link set "p-$1" "$2" ;;
power) # off: the link first, so that no connection is closed
  if [ "$2" = off ]; then
    ip -n muster-ctl link set "p-$1" down
    ip netns pids "muster-$1" | xargs --no-run-if-empty kill -KILL
  else
    ip -n muster-ctl link set "p-$1" up
    SLURM_CONF=$dir/slurm.conf on "$1" slurmd -N "$1"
  fi
  ;;
stop)
  for pid in "$dir"/*.pid; do
    if [ -s "$pid" ]; then kill "$(cat "$pid")" 2>/dev/null || true; fi
  done
  sleep 1
  for host in n1 n2 n3 ctl; do ip netns del "muster-$host" 2>/dev/null || true; done
  ;;
*)
  echo "usage: slurm.sh start|stop|on|link|power DIR ..." >&2
  exit 2
  ;;
esac
