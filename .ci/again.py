"""`python .ci/again.py FOLDER LANE...`: repeat once, alone, the tests that have failed in these lanes.

FOLDER has a file a lane, written by `pytest --failures`. The exit code is 0 if at most three tests failed and each passes
now: these are flaky, and printed with their first failure. Anything else fails, also a lane that did not end.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
TESTS_FAILED = 1  # pytest's exit code


def failures(folder: Path, lanes: list[str]) -> dict[str, str]:
    """Return the first failure of each failed test.

    Raises:
        ValueError: a lane has not ended, or has failed by something else than a test.
    """
    found: dict[str, str] = {}
    for lane in lanes:
        file = folder / f"{lane}.jsonl"
        lines = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
        failed = {line["test"]: line["failure"] for line in reversed(lines) if "test" in line}
        code = next((line["exit_code"] for line in lines if "exit_code" in line), None)
        if code is None:
            raise ValueError(f"lane {lane} did not end")
        if code != (TESTS_FAILED if failed else 0):
            raise ValueError(f"lane {lane} ended with {code}, and {len(failed)} of its tests failed")
        found |= failed
    return found


def main(folder: str, *lanes: str) -> int:
    try:
        failed = failures(Path(folder), list(lanes))
    except ValueError as error:
        print(f"again: {error}")
        return 1
    if not 0 < len(failed) <= MOST:
        print(f"again: {len(failed)} tests failed; at most {MOST} are repeated:", *failed, sep="\n  ")
        return 1
    print("\nrepeated, alone:", *failed, sep="\n  ", flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", "-rs", *failed]).returncode
    if code == 0:
        print(f"\nflaky: {len(failed)} failed once and passed when repeated alone")
        for test, failure in failed.items():
            print(f"\nflaky: {test}\n{failure}")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
