"""Run the same command in one folder after the other, in one process: `python -m kit.resumes FOLDERS OVERRIDES...`.

FOLDERS is a JSON file with their paths, which are replaced by [exit code, output].
"""

import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

from muster.faults.preemption import Preemption
from muster.lease import folder_lease
from muster.train.config.compose import compose
from muster.train.run import attempt

if __name__ == "__main__":
    folder_lease.HELD_S = 0.5  # a holder without a record is waited for
    path, *overrides = sys.argv[1:]
    ended, config = [], compose(overrides)
    for folder in json.loads(Path(path).read_text()):
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
            code = attempt(replace(config, output_dir=folder), Preemption())
        ended.append([code, said.getvalue()])
    Path(path).write_text(json.dumps(ended))
