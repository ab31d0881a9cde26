"""The same command in one folder after the other, in one process: `python -m kit.resumes FOLDERS OVERRIDES...`.

FOLDERS is a file of JSON with their paths; [exit code, output] of each is put in its place.
"""

import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

from muster.faults.preemption import Preemption
from muster.job import lease
from muster.train.config.compose import compose
from muster.train.run import attempt

if __name__ == "__main__":
    lease.HELD_S = 0.5  # a holder that no record tells of is waited for
    path, *overrides = sys.argv[1:]
    ended, config = [], compose(overrides)
    for folder in json.loads(Path(path).read_text()):
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
            code = attempt(replace(config, output_dir=folder), Preemption())
        ended.append([code, said.getvalue()])
    Path(path).write_text(json.dumps(ended))
