# shellcheck shell=bash disable=SC2154
# Sourced by both batch scripts: run one agent per node, forward signals, requeue the job for its next attempt.
# This script decides nothing: `python3 -m muster launch` gives the flags of srun and interprets the exit code. It expects
#   here=(...)       prefix of a command on this node
#   on_nodes=(...)   additional flags of srun
#   there=(...)      prefix of the command on each node
#   prepare='...'    shell commands to run before either of them
set -euo pipefail # not before: the scripts of conda and modules do not tolerate it

# Otherwise srun passes on only what sbatch exported, which sites and users can restrict.
export SLURM_EXPORT_ENV=ALL
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
eval "$prepare"

# Shortly before the time limit Slurm sends USR1 to this script only; a preemption or scancel sends TERM to all processes.
# In both cases the agents get SIGTERM, and the ranks stop at the same step and save. (srun must not be signalled: on
# TERM it kills.) A signal before srun has started is recorded; without a trap, this shell would die of it.
told='' srun=''
trap 'told=told; [ -z "$srun" ] || scancel --signal=TERM "$job" || scancel --signal=TERM "$job" || true' USR1
trap 'told=told' TERM

# A wrong override, or a script that is not there, ends the job here with exit code 2, in seconds, before any node starts and without a requeue.
plan=$("${here[@]}" python3 -m muster launch plan "$@")
eval "$plan" # job, run, before, srun_flags
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
if [ -z "$told" ]; then
  srun "${srun_flags[@]}" "${on_nodes[@]}" bash -c "$node" node "$prepare" "${there[@]}" python3 -m muster launch node "$@" &
  srun=$!
  code=0
  wait "$srun" || code=$?
  while kill -0 "$srun" 2>/dev/null; do # a trap ends `wait` early
    code=0
    wait "$srun" || code=$?
  done
fi

if [ "$code" -ne 0 ]; then
  requeue=0 line="nobody could be asked how $run ended"
  lost=$(sinfo --noheader --dead --nodes="$SLURM_JOB_NODELIST" --format=%n | xargs) || true
  if verdict=$("${here[@]}" python3 -m muster launch verdict "$run" "$before" "$code" "$told" "$lost"); then
    eval "$verdict" # code, requeue, line
  fi
  echo "muster: $line"
  # Cancelled jobs and those that Slurm requeues by itself are no longer RUNNING. Requeueing is bounded: attempts without
  # progress are counted, and the last of them exits with 7; a script of your own is requeued MAX_REQUEUES times.
  # Since 24.05, Slurm itself requeues a job that ends in the grace time of its preemption, and a job that was requeued in it once more
  # at its good end.
  state=$(scontrol show job "$job") config=$(scontrol show config) version=$(sinfo --version | grep -o '[0-9]*' | head -n 2 | xargs printf '%02d')
  if [ "$requeue" -eq 1 ] && [[ $state == *PreemptTime=[0-9]* && $config =~ PreemptMode\ *=\ [A-Z,]*REQUEUE ]] && [ "$version" -ge 2405 ]; then
    echo "muster: Slurm has preempted job $job and requeues it"
  elif [ "$requeue" -eq 1 ] && [[ $state == *JobState=RUNNING* ]]; then
    # A node whose ranks have died often is excluded: what a job excludes can be changed once it is pending again.
    names() { if [ -n "$1" ]; then scontrol show hostnames "$1"; fi; }
    excluded=$(squeue --noheader --jobs="$job" --format=%x | sed "s/^(null)$//") || excluded=
    usable=$(sinfo --noheader --responding --Node --partition="${SLURM_JOB_PARTITION:-}" --format=%N | sort -u | xargs) || true
    bad=$("${here[@]}" python3 -m muster launch exclude "$run" "$(names "$SLURM_JOB_NODELIST" | xargs)" "$usable" "$(names "$excluded" | xargs)") || bad=
    echo "muster: requeueing job $job${bad:+ without $bad, where ranks have died often (MAX_EXCLUDED=0 keeps it)}"
    scontrol requeue "$job" || true # some sites forbid it: the exit code then tells the user to submit again
    if [ -n "$bad" ]; then
      scontrol update JobId="$job" ExcNodeList="${excluded:+$excluded,}$bad" || true
    fi
  fi
fi
exit "$code"
