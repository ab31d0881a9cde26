"""The source line in user code of an error or a part, and short descriptions of values, for messages."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from muster.redact import redacted

KIT = str(Path(__file__).resolve().parent)
LIBRARIES = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen"})
FROM_WORKER = "Original Traceback (most recent call last):"
"""torch's header before the original traceback, when it re-raises an error of a loader worker or a DataParallel thread."""
NOTE, AGAIN = "(reading sample ", "(after a rank's death "
"""How a note on an exception begins that belongs to its message."""
MOST_PARTS, MOST_CHARACTERS = 4, 300


class SourceLine(NamedTuple):
    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def located(error: BaseException) -> str:
    """Return `ValueError: no such column (data.py:12)`, with the place in user code."""
    kind, message = kind_and_message(error)
    where = place(error)
    return f"{kind}: {message[:MOST_CHARACTERS]}{f' ({where})' if where else ''}"


def kind_and_message(error: BaseException) -> tuple[str, str]:
    """Return the error's class name and its one-line message; of an error re-raised from a worker, the original's."""
    kind, text = type(error).__name__, str(error)
    if FROM_WORKER in text:
        said = re.split(r"\n(?=\S)", text.partition(FROM_WORKER)[2].rstrip())[1:] or [text]
        kind, _, text = " ".join(said).partition(": ")
        kind = kind.rpartition(".")[2]
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith((NOTE, AGAIN))]
    text, more = " ".join(text.split()), "".join(f" {note}" for note in notes)
    return kind, redacted((text[: MOST_CHARACTERS - len(more)] if more else text) + more)


def place(error: BaseException) -> SourceLine | None:
    """Return the innermost line of user code in the traceback of `error`; without user code, the innermost line."""
    if FROM_WORKER in (text := str(error)):
        found = re.findall(r'^ *File "(.+)", line (\d+), in', text, flags=re.MULTILINE)
        places = [SourceLine(file, int(line)) for file, line in found]
    else:
        places = _places(error)
    return next((each for each in reversed(places) if is_own(each.file)), places[-1] if places else None)


def is_raised_by_own(error: BaseException) -> bool:
    return any(is_own(each.file) for each in _places(error))


def is_own(file: str) -> bool:
    """Return True if a file is user code: neither the kit's nor an installed library's."""
    return not (is_kit(file) or file.startswith(LIBRARIES))


def innermost_own(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code among `frame` and its callers; None if there is none."""
    while frame and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def defined(part: Any, *methods: str) -> str:
    """Return ` (data.py:12)`, the first line of the first of `methods` found, else of the class or function; empty if not user code."""
    part = getattr(part, "func", part)  # of functools.partial
    kind: Any = part if inspect.isclass(part) or inspect.isroutine(part) else type(part)
    for each in (*(getattr(kind, name, None) for name in methods), kind):
        if each and (found := _begins(each)) and is_own(found.file):
            return f" ({found})"
    wrapped = getattr(part, "dataset", None)  # of torch's Subset and its kin
    return defined(wrapped, *methods) if wrapped is not None and kind is not part else ""


def _begins(function: Any) -> SourceLine | None:
    try:
        function = inspect.unwrap(function)
        return SourceLine(inspect.getsourcefile(function) or "<frozen", inspect.getsourcelines(function)[1])
    except (TypeError, OSError):
        return None


def name_of(part: Any) -> str:
    """Return the name of a function or class, or of an instance's class."""
    part = getattr(part, "func", part)
    return str(getattr(part, "__name__", type(part).__name__))


def described(value: Any) -> str:
    """Describe a value: `a Tensor [8, 3] float32`, `a tuple of (a Tensor [8, 3] float32, None)`, `a dict of points [8, 4] float32`."""
    if isinstance(value, Mapping):
        return f"a {_kind(value)} of {_few(f'{name} {_short(each)}' for name, each in value.items())}"
    if isinstance(value, (tuple, list)):
        return f"a {_kind(value)} of ({_few(map(described, value))})"
    return "None" if value is None else f"{_article(value)} {_short(value)}"


def _places(error: BaseException) -> list[SourceLine]:
    """Return the traceback's lines from the kit's first one on: the callers of the kit did not cause the error."""
    places = [SourceLine(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    first = next((number for number, each in enumerate(places) if is_kit(each.file)), 0)
    return places[first:]


def is_kit(file: str) -> bool:
    """Return True if a file is the kit's."""
    return file.startswith(f"{KIT}{os.sep}")


def _article(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {'Tensor' if _kind(value) == 'Parameter' else _kind(value)}"
    return "an" if _kind(value)[0] in "aeiouAEIO" else "a"


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{[*value.shape]} {str(value.dtype).removeprefix('torch.')}"
    return _kind(value)


def _kind(value: Any) -> str:
    kind = type(value)
    return f"PIL {kind.__name__}" if kind.__module__.partition(".")[0] == "PIL" else kind.__name__


def _few(texts: Any) -> str:
    each = [*texts]
    return ", ".join([*each[:MOST_PARTS], *(["..."] if len(each) > MOST_PARTS else [])])
