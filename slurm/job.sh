# shellcheck shell=bash disable=SC2154
# Sourced by both batch scripts: run one agent per node, forward signals, requeue the job for its next attempt.
# This script decides nothing: `python3 -m muster launch` gives the flags of srun and interprets the exit code. It expects
#   here=(...)       prefix of a command on this node
#   on_nodes=(...)   additional flags of srun
#   there=(...)      prefix of the command on each node
#   prepare='...'    shell commands to run before either of them
source slurm/ask.sh
eval "$prepare"

# Shortly before the time limit Slurm sends USR1 to this script only; a preemption or scancel sends TERM to all processes.
# In both cases the agents get SIGTERM, and the ranks stop at the same step and save. (srun must not be signalled: on
# TERM it kills.) A signal before srun has started is recorded; without a trap, this shell would die of it.
told='' srun=''
trap 'told=told; [ -z "$srun" ] || scancel --signal=TERM "$job" || scancel --signal=TERM "$job" || true' USR1
trap 'told=told' TERM

# A wrong override, or a script that is not there, ends the job here with exit code 2, in seconds, before any node starts and without a requeue.
plan=$(ask plan "$@")
eval "$plan" # job, run, before, srun_flags
export job
if [ -f "/proc/$$/fd/1" ]; then # the report links it
  MUSTER_LOG=$(readlink "/proc/$$/fd/1")
  export MUSTER_LOG
fi

# With Pyxis this shell is inside the container.
# shellcheck disable=SC2016  # expanded on the node
node='
set -eu
eval "$1"
shift
trap : TERM # this shell outlives its agent
code=0
"$@" || code=$?
[ "$SLURM_NODEID" -ne 0 ] || echo "$code" >"$ENDED" || true
# Elastic, and the first node is lost with the rest of this script: a remaining node requeues the job.
if [ "$code" -ne 0 ] && [ "$SLURM_NODEID" -ne 0 ] && [ -n "${MIN_NODES:-}" ] && command -v scontrol >/dev/null; then
  slurmd=$HEAD/$(scontrol show config | sed -n "s/^SlurmdPort *= *//p")
  if ! timeout 10 bash -c ": <>/dev/tcp/$slurmd" && scontrol show job "$job" | grep -q JobState=RUNNING; then
    echo "muster: the first node is lost, requeueing job $job"
    scontrol requeue "$job"
  fi
fi
exit "$code"'
code=75 # of a job that was stopped before it started
ENDED=$(mktemp) || ENDED=/dev/null # for the exit code of the first node, which is this one
export ENDED
if [ -z "$told" ]; then
  srun "${srun_flags[@]}" ${on_nodes[@]+"${on_nodes[@]}"} bash -c "$node" node "$prepare" ${there[@]+"${there[@]}"} python3 -m muster launch node "$@" &
  srun=$!
  code=0
  wait "$srun" || code=$?
  while kill -0 "$srun" 2>/dev/null; do # a trap ends `wait` early
    code=0
    wait "$srun" || code=$?
  done
fi
# Since Slurm 25, srun fails for a lost node even if the others have come to the end without it.
if [ -n "${MIN_NODES:-}" ] && [ "$(cat "$ENDED")" = 0 ]; then code=0; fi
[ ! -f "$ENDED" ] || rm -f "$ENDED"

names() { [ -z "$1" ] || scontrol show hostnames "$1" | xargs; }
is_requeued_by_slurm() { # since 24.05, a job that ends in the grace time of its preemption. Requeued by us, it would run once more at its good end
  local version
  version=$(sinfo --version | sed -nE 's/^[^0-9]*([0-9]+)\.([0-9]+).*/\1\2/p') || version=
  [[ ${version:-0} -ge 2405 && $1 == *PreemptTime=[0-9]* ]] &&
    [[ $(scontrol show config) =~ PreemptType\ *=\ preempt/partition_prio ]] &&
    [[ $(scontrol show partition "${SLURM_JOB_PARTITION:-}") =~ PreemptMode=[A-Z,]*REQUEUE ]]
}
if [ "$code" -ne 0 ]; then
  requeue=0 bad='' line="nobody could be asked how $run ended"
  lost=$(sinfo --noheader --dead --nodes="$SLURM_JOB_NODELIST" --format=%n | xargs) || true
  # A node whose ranks die often, or that the doctor has refused, is left out of the next attempt, if the job may run on any
  # node of its kind.
  nodes='' usable='' excluded=''
  state=$(scontrol show job "$job") || state=
  if [[ $state == *ReqNodeList=\(null\)* && $state == *Features=\(null\)* && $state != *Reservation=* ]]; then
    nodes=$(names "$SLURM_JOB_NODELIST") || nodes=
    usable=$(sinfo --noheader --Node --states=idle,allocated,mixed,completing --partition="${SLURM_JOB_PARTITION:-}" --format='%N %f %G %c %m' | sort -u) || usable=
    excluded=$(sed -nE 's/.*ExcNodeList=([^ (]+).*/\1/p' <<<"$state")
  fi
  if verdict=$(ask verdict "$run" "$before" "$code" "$told" "$lost" "$nodes" "$usable" "$(names "$excluded")"); then
    eval "$verdict" # code, requeue, line, bad
  fi
  echo "muster: $line"
  # Cancelled jobs and those that Slurm requeues by itself are no longer RUNNING. Requeueing is bounded: attempts without
  # progress are counted, and the last of them exits with 7; a script of your own is requeued MAX_REQUEUES times.
  state=$(scontrol show job "$job") || state=
  if [ "$requeue" -eq 1 ] && is_requeued_by_slurm "$state"; then
    echo "muster: Slurm has preempted job $job and requeues it"
  elif [ "$requeue" -eq 1 ] && [[ $state == *JobState=RUNNING* ]]; then
    echo "muster: requeueing job $job"
    trap '' TERM # which the requeue sends to all that this script starts
    # Some sites forbid it: the exit code then tells the user to submit again. What a job excludes can be changed once it is pending again.
    if scontrol requeue "$job" && [ -n "$bad" ] && scontrol update JobId="$job" ExcNodeList="${excluded:+$excluded,}$bad"; then
      echo "muster: without $bad in the next attempt (MAX_EXCLUDED=0 keeps it)"
    fi
  fi
fi
exit "$code"
