"""Errors that end a run, each with the exit code that a launcher acts on."""

from __future__ import annotations

import difflib
import errno
import os
import sys
import traceback
from collections.abc import Iterable
from typing import TextIO

from train.redact import redacted


class MusterError(Exception):
    """A run cannot go on, for a reason that a person can act on.

    The message is one line: what was given, what is valid, what to do. `retry`: whether the same command, run again
    by a launcher with nothing mended, may come further. `of_data`: whether the data set's place in the user's code helps.

    URLs in the message are stripped of their secrets.
    """

    exit_code = 1
    outcome = "failed"
    retry = True
    of_data = False

    def __init__(self, message: object = ""):
        super().__init__(redacted(str(message)))


class ConfigError(MusterError):
    """A mistake in the configuration, the command line or the environment."""

    exit_code = 2
    outcome = "config_error"
    retry = False


class DataError(MusterError):
    """Data that is missing, broken or not what it was."""

    exit_code = 3
    outcome = "data_error"
    retry = False


class NoValidCheckpoint(MusterError):
    """There are checkpoints, and none of them is whole."""

    exit_code = 4
    outcome = "no_valid_checkpoint"
    retry = False


class StorageError(MusterError):
    """The run's folder cannot be written or read."""

    exit_code = 5
    outcome = "storage_error"
    retry = False


class Damaged(StorageError):
    """A checkpoint is not what was written; not: it could not be read just now."""


class Diverged(MusterError):
    """The loss or the gradient is not finite."""

    exit_code = 6
    outcome = "diverged"
    retry = False


class CrashLoop(MusterError):
    """Restarts without a step of progress."""

    exit_code = 7
    outcome = "crash_loop"
    retry = False


class Held(MusterError):
    """The run's folder is held by another part of this very job, which has not let go of it in time: try again."""

    exit_code = 8
    outcome = "held"


class Preempted(MusterError):
    """The run was told to stop and has saved its place: run the same command again."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h
    outcome = "preempted"


class RankLost(MusterError):
    """A rank is gone, hangs or failed first; the launcher restarts the group. `rank` and `host` tell which, if known."""

    exit_code = 1
    outcome = "rank_lost"

    def __init__(self, message: str, *, rank: int | None = None, host: str | None = None):
        super().__init__(message)
        self.rank, self.host = rank, host


def of_code(exit_code: int, message: str) -> MusterError:
    """The error that ends a process with `exit_code`, as another rank has raised it."""
    return next(
        (kind(message) for kind in MusterError.__subclasses__() if kind.exit_code == exit_code), MusterError(message)
    )


def final() -> dict[int, str]:
    """Exit codes, with their outcomes, after which a restart would only fail the same way again."""
    return {kind.exit_code: kind.outcome for kind in MusterError.__subclasses__() if not kind.retry}


def storage_error(doing: str, error: OSError) -> StorageError:
    """Name the path and the system's reason, so that nobody has to read a traceback."""
    where = f" {os.fspath(error.filename)}" if error.filename else ""
    return StorageError(f"cannot {doing}{where}: {error.strerror or error}; free or fix it, then run again")


def environment_error(error: BaseException) -> ConfigError | None:
    """What to raise where a limit of the system or of a layer was met, which no restart lifts."""
    text = str(error)
    if (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)) or "Too many open files" in text:
        return ConfigError(f"out of file descriptors: {' '.join(text.split())[:100]}; raise the limit: ulimit -n 65536")
    if "Expected more than 1 value per channel" in text:
        return ConfigError(
            "a rank's micro-batch had one sample, and the model's batch norm needs two: at the end of an epoch, or at this world size. "
            "Set loader.drop_last=true, or a batch_size or micro_batch_size that leaves each rank two"
        )
    if "shared memory" in text:
        return ConfigError(
            "the loader's workers are out of shared memory: make /dev/shm larger (docker --shm-size, a Kubernetes emptyDir with medium: Memory), or set loader.num_workers=0"
        )
    return None


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line (to standard error if no other stream is given) in one piece, without the secrets of URLs.

    `print` writes the newline by itself where output is not buffered, and ranks and loader workers share a log.
    """
    stream = stream or sys.stderr
    stream.write(redacted(line) + "\n")
    stream.flush()


def one_line(error: BaseException) -> str:
    return redacted(" ".join(str(error).split()))


def traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it, without the secrets of URLs."""
    return redacted("".join(traceback.format_exception(error)).rstrip())


def nearest(given: str, valid: Iterable[str]) -> str:
    """`valid: a, b, c`, led by the likeliest meaning of a misspelt `given`."""
    names = sorted(set(valid))
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}valid: {', '.join(names)}"
