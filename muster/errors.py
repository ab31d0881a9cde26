"""Errors that end a run, each with the exit code that launchers act on."""

from __future__ import annotations

import difflib
import errno
import os
import socket
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from muster.code_location import located
from muster.redact import redacted


class MusterError(Exception):
    """Base class of errors that end a run and that a user can fix.

    The message is one line: what was given, what is valid, what to do. Secrets in its URLs are removed.
    retry: True if a launcher may run the same command again unchanged and get further.
    of_data: True if the message should name the place of the data set in the user's code.
    origin: the rank and the host on which it occurred, if another rank raises it, too.
    """

    exit_code = 1
    outcome = "failed"
    retry = True
    of_data = False
    origin: tuple[int, str] | None = None

    def __init__(self, message: object = ""):
        super().__init__(redacted(str(message)))


class ConfigError(MusterError):
    """A mistake in the configuration, the command line or the environment."""

    exit_code = 2
    outcome = "config_error"
    retry = False


class DataError(MusterError):
    """The data is missing, damaged or has changed."""

    exit_code = 3
    outcome = "data_error"
    retry = False


class NoValidCheckpoint(MusterError):
    """Checkpoints exist and none of them is valid."""

    exit_code = 4
    outcome = "no_valid_checkpoint"
    retry = False


class StorageError(MusterError):
    """The run's folder cannot be written or read."""

    exit_code = 5
    outcome = "storage_error"
    retry = False


class Damaged(StorageError):
    """A checkpoint's content differs from what was written. A failed read alone is a StorageError."""


class Diverged(MusterError):
    """The loss, a gradient or the weights are not finite."""

    exit_code = 6
    outcome = "diverged"
    retry = False


class CrashLoop(MusterError):
    """The run was restarted repeatedly without completing a step."""

    exit_code = 7
    outcome = "crash_loop"
    retry = False


class Held(MusterError):
    """Another part of the same job held the run's folder until the wait timed out: try again."""

    exit_code = 8
    outcome = "held"


class Preempted(MusterError):
    """The run was preempted and has saved a checkpoint: run the same command again to resume."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h
    outcome = "preempted"


class BadHost(ConfigError):
    """One host of several cannot train, by the doctor's word: a job may go on without it."""

    def __init__(self, message: str, *, host: str):
        super().__init__(message)
        self.host = host


class RankLost(MusterError):
    """A rank is gone, hangs or failed first; the launcher restarts the group. `rank` and `host` name it, if known.

    hangs: it, or all ranks, make no progress.
    """

    exit_code = 1
    outcome = "rank_lost"

    def __init__(self, message: str, *, rank: int | None = None, host: str | None = None, hangs: bool = False):
        super().__init__(message)
        self.rank, self.host, self.hangs = rank, host, hangs


def of_code(exit_code: int, message: str) -> MusterError:
    """Return the error with this exit code, to raise an error of another rank on this one."""
    return next(
        (kind(message) for kind in MusterError.__subclasses__() if kind.exit_code == exit_code), MusterError(message)
    )


def final() -> dict[int, str]:
    """Return exit code -> outcome of the errors that a restart would only repeat."""
    return {kind.exit_code: kind.outcome for kind in MusterError.__subclasses__() if not kind.retry}


def storage_error(doing: str, error: OSError, place: str | os.PathLike[str] = "") -> StorageError:
    """Return a StorageError that names `place` and the system's reason, in place of a traceback.

    Without a `place` it names the file that the system names, which may be a draft of which no user knows.
    """
    where = place or error.filename or ""
    named = f"{doing} {os.fspath(where)}" if where else doing.removesuffix(":")
    return StorageError(f"cannot {named}: {error.strerror or error}; free or fix it, then run again")


def environment_error(error: BaseException) -> ConfigError | None:
    """Return a ConfigError for a limit of the system or of a layer, which a restart does not lift; else None."""
    text = str(error)
    if (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)) or "Too many open files" in text:
        return ConfigError(f"out of file descriptors: {' '.join(text.split())[:100]}; raise the limit: ulimit -n 65536")
    if "Expected more than 1 value per channel" in text:
        return ConfigError(
            "a rank's micro-batch had one sample, and the model's batch norm needs two: at the end of an epoch, or at this world size. "
            "Drop the last batch (loader.drop_last=true, and in a Job batches(drop_last=True)), or choose a batch_size, a micro_batch_size "
            "or a number of ranks that leaves each rank two"
        )
    if "InvalidCxxCompiler" in text or "Failed to find C compiler" in text:
        return ConfigError(
            f"torch.compile finds no compiler that works on {socket.gethostname()}: install g++ (on GPUs gcc and the headers of libc), "
            "or leave it out with compile=false"
        )
    if "does not have a deterministic implementation" in text:
        return ConfigError(
            f"{text.split()[0]} has no deterministic form, and deterministic=true (or the script's own use_deterministic_algorithms) "
            "refuses it: use another layer, or allow it with deterministic=false"
        )
    if "shared memory" in text:
        return ConfigError(
            "the loader's workers are out of shared memory: make /dev/shm larger (docker --shm-size, a Kubernetes emptyDir with medium: Memory), or set loader.num_workers=0"
        )
    return None


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line to `stream` (default: standard error) in one write, without secrets in URLs.

    If output is not buffered, `print` writes the newline separately, which mixes lines in a log that ranks and loader
    workers share.
    """
    stream = stream or sys.stderr
    stream.write(redacted(line) + "\n")
    stream.flush()


def one_line(error: BaseException) -> str:
    """Return the error's message in one line, without secrets in URLs."""
    return redacted(" ".join(str(error).split()))


def traceback_of(error: BaseException) -> str:
    """Return the traceback as Python prints it, without secrets in URLs."""
    return redacted("".join(traceback.format_exception(error)).rstrip())


def nearest(given: str, valid: Iterable[str]) -> str:
    """Return `valid: a, b, c`, preceded by the closest match for a misspelled `given`."""
    names = sorted(set(valid))
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}valid: {', '.join(names)}"


def tell(error: BaseException, kept: Path | None = None) -> None:
    """Print `error` in one line.

    For an error that is not a MusterError, `kept` is the file with the traceback; if None, the traceback is printed
    first.
    """
    if isinstance(error, MusterError):
        return say(f"muster: {error.outcome.replace('_', ' ')}: {in_words(error)}")
    if isinstance(error, SystemExit) and error.code == Preempted.exit_code:
        return say(f"muster: the script has ended itself by {located(error)}: run the same command again to go on")
    if not kept:
        say(traceback_of(error))
    say(f"muster: failed: {and_where(error, kept)}")


def and_where(error: BaseException, kept: Path | None) -> str:
    """Return the error in one line, with the file `kept` that has its traceback, if there is one."""
    more = f"; fix it, and run the same command again. The full traceback is in {kept}" if kept else ""
    return f"{in_words(error)}{more}"


def in_words(error: BaseException) -> str:
    """Return a MusterError's message; for any other error its type, message and place."""
    return one_line(error) if isinstance(error, MusterError) else located(error)
