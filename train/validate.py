"""`python -m muster.train.validate [--json] [overrides]`: check if `python -m train` accepts them, and print the run's folder.

Exit code 0, with the folder's absolute path on standard output, or 2, with the reason on standard error. With `--json`
standard output is {"folder": ...} or {"refused": [exit code, reason]}.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from muster.errors import ConfigError, one_line, say
from muster.faults import lost_output
from muster.launcher.answer import give
from muster.train.config.compose import run_each
from muster.train.config.keys import Config


def main(given: list[str]) -> int:
    """Check the overrides and return the exit code. Output of user modules goes to standard error."""
    as_json = given[:1] == ["--json"]
    sys.argv[1:] = given[as_json:]

    def judge(config: Config | ConfigError, _: Mapping[str, str]) -> int:
        if isinstance(config, ConfigError):
            answer, code = json.dumps({"refused": [config.exit_code, str(config)]}), config.exit_code
            if not as_json:
                say(f"muster: config error: {one_line(config)}")
        else:
            folder, code = str(Path(config.output_dir).resolve()), 0
            answer = json.dumps({"folder": folder}) if as_json else folder
        if as_json or not code:
            give(answer, sys.__stdout__)
        return code

    with contextlib.redirect_stdout(sys.stderr):
        return run_each(judge)


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main(sys.argv[1:]))
