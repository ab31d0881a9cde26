# shellcheck shell=bash disable=SC2154
# Sourced by job.sh and doctor.sbatch: what both begin with.
set -euo pipefail # not before: the scripts of conda and modules do not tolerate it

# Otherwise srun passes on only what sbatch exported, which sites and users can restrict.
export SLURM_EXPORT_ENV=ALL
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # not head, which ends before scontrol has written all
export HEAD

# Print the answer of `muster launch "$@"` alone. It stands between two lines that nothing else can know: banners, modules and C
# libraries print to standard output, too, and this script evaluates what it reads. What they print goes to the log.
mark=answer-$RANDOM$RANDOM$RANDOM$RANDOM
ask() {
  local said code=0
  said=$(export MUSTER_ANSWER=$mark && eval "${prepare:-}" && ${here[@]+"${here[@]}"} python3 -m muster launch "$@" | tr -d '\r') || code=$?
  if [ "$(grep -cx "$mark" <<<"$said")" -eq 2 ]; then
    sed "/^$mark\$/,/^$mark\$/d" <<<"$said" >&2
    sed -n "/^$mark\$/,/^$mark\$/{//!p;}" <<<"$said"
  else
    echo "$said" >&2
    [ "$code" -ne 0 ] || { echo "muster: python3 -m muster launch $1 gave no answer: see above" >&2 && code=1; }
  fi
  return "$code"
}
