# shellcheck shell=bash disable=SC2154
# What both batch scripts do, sourced by them: one agent on each node, signals handed on, the next attempt asked for.
# It decides nothing: `python3 -m train.launch` says what srun is told, and what the end means. It expects
#   here=(...)       before a command that is to run on this node
#   on_nodes=(...)   further flags of srun, and
#   there=(...)      before a command that is to run on each node
#   prepare='...'    what a shell does before either of them
set -euo pipefail # not before: the scripts of conda and modules do not tolerate it

# Where sites or users export less than everything, srun would pass on no more than that.
export SLURM_EXPORT_ENV=ALL
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
eval "$prepare"

# Shortly before the time limit Slurm sends USR1 to this script alone; a preemption or scancel sends TERM to everybody.
# Either way the agents get SIGTERM, and the ranks stop at one step and save it. (srun itself must not be signalled: on
# TERM it kills.) A signal that comes before srun has begun is kept: a shell without a trap would die of it.
told='' srun=''
trap 'told=told; [ -z "$srun" ] || scancel --signal=TERM "$job" || scancel --signal=TERM "$job" || true' USR1
trap 'told=told' TERM

# A wrong override ends the job here: exit code 2, in seconds, before any node starts, and without a requeue.
plan=$("${here[@]}" python3 -m train.launch plan "$@")
eval "$plan" # job, folder, before, srun_flags
export job

# With Pyxis this shell is inside the container.
# shellcheck disable=SC2016  # expanded on the node
node='
set -eu
eval "$1"
shift
trap : TERM # this shell outlives its agent
code=0
"$@" || code=$?
# Elastic, and the first node is gone with the rest of this script: a node that is left requeues the job.
if [ "$code" -ne 0 ] && [ "$SLURM_NODEID" -ne 0 ] && [ -n "${MIN_NODES:-}" ] && command -v scontrol >/dev/null; then
  slurmd=$HEAD/$(scontrol show config | sed -n "s/^SlurmdPort *= *//p")
  if ! timeout 10 bash -c ": <>/dev/tcp/$slurmd" && scontrol show job "$job" | grep -q JobState=RUNNING; then
    echo "muster: the first node is lost, requeueing job $job"
    scontrol requeue "$job"
  fi
fi
exit "$code"'
code=143 # of a job that was told to stop before it began
if [ -z "$told" ]; then
  srun "${srun_flags[@]}" "${on_nodes[@]}" bash -c "$node" node "$prepare" "${there[@]}" python3 -m train.launch node "$@" &
  srun=$!
  code=0
  wait "$srun" || code=$?
  while kill -0 "$srun" 2>/dev/null; do # a trap ends `wait` early
    code=0
    wait "$srun" || code=$?
  done
fi

if [ "$code" -ne 0 ]; then
  requeue=0 line="nobody could be asked how the run in $folder ended"
  if verdict=$("${here[@]}" python3 -m train.launch verdict "$folder" "$before" "$code" ${told:+"$told"}); then
    eval "$verdict" # code, requeue, line
  fi
  echo "muster: $line"
  # Cancelled jobs and those that Slurm requeues by itself no longer count as running. It ends: attempts without a step
  # of progress are counted, and the last of them exits with 7.
  if [ "$requeue" -eq 1 ] && scontrol show job "$job" | grep -q 'JobState=RUNNING'; then
    echo "muster: requeueing job $job"
    scontrol requeue "$job" || true # some sites forbid it: then the exit code says that it is to be sent again
  fi
fi
exit "$code"
