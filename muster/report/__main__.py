"""`muster report RUN [RUN...]`: write a report on a run, or compare several; `--watch` follows them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from muster.code_location import located
from muster.errors import MusterError, say, storage_error
from muster.faults import lost_output
from muster.loggers import jsonl
from muster.report.history import History
from muster.report.page import NAME, write_page
from muster.report.results import RECORDS, runs_in


def main(arguments: list[str] | None = None) -> int:
    """Return 0, 2 if a folder is not a run's, or 5 if the page cannot be made."""
    parser = argparse.ArgumentParser(prog="muster report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a folder of such folders")
    parser.add_argument(
        "--output", type=Path, help="file to write (default: report.html, in the folder if one is given, else here)"
    )
    parser.add_argument(
        "--watch", action="store_true", help="show the status of the runs in the terminal until they end"
    )
    parser.add_argument("--once", action="store_true", help="with --watch: show the status once")
    given = parser.parse_args(arguments)
    folders = [folder for run in given.runs for folder in runs_in(run) or [run]]
    nothing = [str(folder) for folder in folders if not any((folder / name).exists() for name in RECORDS)]
    if given.watch:
        from muster.report.watch import watch

        return watch(folders, once=given.once)
    if nothing:
        say(f"muster: {nothing[0]} is not a run's folder: it has no {jsonl.NAME}; give output_dir, such as runs/NAME")
        return 2
    path = given.output or (given.runs[0] if len(given.runs) == 1 else Path()) / NAME
    try:
        print(write_page([History.of(folder) for folder in folders], path))
    except MusterError as error:
        say(f"muster: {error}")
        return error.exit_code
    except OSError as error:
        say(f"muster: {storage_error('make the report:', error)}")
        return 5
    except Exception as error:  # records that do not fit each other
        say(
            f"muster: cannot make the report: the records of {', '.join(map(str, folders))} do not fit: {located(error)}"
        )
        return 5
    return 0


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main())
