"""Train with two processes that this script starts, without a launcher: `python script.py [overrides]`.

The script needs no `if __name__ == "__main__":`, because the processes do not import it again.
"""

import sys

import muster
from muster.errors import MusterError

try:
    run = muster.launch(["name=script", *sys.argv[1:]], nproc=2, max_restarts=3)
except MusterError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)  # 75: preempted and saved; the same command resumes
print(run.folder, run.outcome["outcome"], "at step", run.outcome["step"])
