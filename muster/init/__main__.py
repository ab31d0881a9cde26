"""`muster init [slurm] [docker] [k8s]`: write templates and an example into the project in this folder.

A file that is there already is never changed; its difference from the kit's is printed, unless it is the example. With
`--check` nothing is written, and the exit code is 1 if a file other than the example differs.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping
from pathlib import Path

from muster.errors import MusterError, say, storage_error, tell
from muster.faults import lost_output
from muster.files import create_file
from muster.init.project import SUBSTRATES, files, project

DIFFERS = 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="muster init", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("substrates", nargs="*", metavar="SUBSTRATE", help=f"{', '.join(SUBSTRATES)} (default: all)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--trainer", action="store_true", help="your model and data in the kit's trainer (default)")
    kind.add_argument("--loop", action="store_true", help="a training loop of your own")
    kind.add_argument(
        "--script", default="", metavar="'my.py --lr 1e-3'", help="a script that you have, with its arguments"
    )
    parser.add_argument("--name", help="name of the job (default: the folder's)")
    parser.add_argument("--image", help="image of the job (default: NAME:1)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each node, with a process for each")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and show what differs from the kit's files"
    )
    given = parser.parse_args()
    here = Path.cwd()
    try:
        mine = project(here, name=given.name, image=given.image, loop=given.loop, script=given.script, gpus=given.gpus)
        wanted = files(mine, given.substrates or [*SUBSTRATES])
        left = {name: wanted.pop(name) for name in (mine.example, ".gitignore") if (here / name).is_file()}
        if ".gitignore" in left and not given.check:  # both are a user's own from the first edit on
            if lacking := sorted(patterns(left[".gitignore"]) - patterns(read(here / ".gitignore"))):
                say(f"left as is .gitignore, which has no {', '.join(lacking)}", sys.stdout)
        listed = next((name for name in ("pyproject.toml", "setup.py") if (here / name).is_file()), "")
        if "docker/Dockerfile" in wanted and not mine.has_packages and listed:
            say(
                f"docker/Dockerfile installs no packages of your own: list those of {listed} in requirements.txt first",
                sys.stdout,
            )
        return check(here, wanted) if given.check else write(here, wanted)
    except MusterError as error:
        tell(error)
        return error.exit_code


def patterns(text: str) -> set[str]:
    """Return a .gitignore's patterns, however a folder's name is written."""
    return {line.strip("/* ") for line in text.splitlines() if line.strip() and line[0] not in "#!"}


def write(folder: Path, wanted: Mapping[str, str]) -> int:
    """Raises StorageError."""
    for name, text in wanted.items():
        path = folder / name
        if created(path, text):
            say(f"wrote      {name}", sys.stdout)
        elif difference := compared(path, text):
            say(f"left as is {name}, which differs from the kit's:\n{difference}", sys.stdout)
    say("\nMUSTER.md has the commands. In containers a script can write to runs/ and /tmp alone.", sys.stdout)
    return 0


def created(path: Path, text: str) -> bool:
    """Return False if there is a file already. Raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_file(path, text.encode())
    except FileExistsError as error:
        if not path.parent.is_dir():
            raise storage_error("write", error, path) from error
        return False
    except OSError as error:
        raise storage_error("write", error, path) from error
    path.chmod(0o755 if text.startswith("#!") else 0o644)
    return True


def check(folder: Path, wanted: Mapping[str, str]) -> int:
    different = {name: compared(folder / name, text) for name, text in wanted.items() if (folder / name).is_file()}
    for name, difference in different.items():
        if difference:
            say(f"{name} differs from the kit's:\n{difference}", sys.stdout)
    return DIFFERS if any(different.values()) else 0


def compared(path: Path, text: str) -> str:
    """Return the unified diff from the file to the kit's `text`; empty if equal. Raises StorageError."""
    lines = difflib.unified_diff(
        read(path).splitlines(),
        text.splitlines(),
        f"{path.name} (yours)",
        f"{path.name} (the kit's)",
        lineterm="",
    )
    return "\n".join(f"    {line}" for line in lines)


def read(path: Path) -> str:
    """Raises StorageError."""
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError as error:
        raise storage_error("read", error, path) from error


if __name__ == "__main__":
    lost_output.endure()
    sys.exit(main())
