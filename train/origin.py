"""Where in a user's own code an error or a part comes from, and what a value is, in a few words."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from train.redact import redacted

KIT = str(Path(__file__).resolve().parent)
LIBRARIES = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen"})
FROM_WORKER = "Original Traceback (most recent call last):"
"""How torch shows an error of a loader's worker, or of a thread of DataParallel, in the error that it raises for it."""
MOST_PARTS, MOST_CHARACTERS = 4, 300


class SourceLine(NamedTuple):
    file: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def located(error: BaseException) -> str:
    """What was raised and where in a user's code, in one line: `ValueError: no such column (data.py:12)`."""
    kind, message = kind_and_message(error)
    where = place(error)
    return f"{kind}: {message[:MOST_CHARACTERS]}{f' ({where})' if where else ''}"


def kind_and_message(error: BaseException) -> tuple[str, str]:
    """The error's class and its message in one line, of the first error where another process or thread raised it."""
    kind, text = type(error).__name__, str(error)
    if FROM_WORKER in text:
        said = re.split(r"\n(?=\S)", text.partition(FROM_WORKER)[2].rstrip())[1:] or [text]
        kind, _, text = " ".join(said).partition(": ")
        kind = kind.rpartition(".")[2]
    return kind, redacted(" ".join(text.split()))


def place(error: BaseException) -> SourceLine | None:
    """The innermost line of a user's own code under `error`; where there is none, the innermost line."""
    if FROM_WORKER in (text := str(error)):
        found = re.findall(r'^ *File "(.+)", line (\d+), in', text, flags=re.MULTILINE)
        places = [SourceLine(file, int(line)) for file, line in found]
    else:
        places = _places(error)
    return next((each for each in reversed(places) if is_own(each.file)), places[-1] if places else None)


def is_raised_by_own(error: BaseException) -> bool:
    """Whether a user's own code has a part in `error`."""
    return any(is_own(each.file) for each in _places(error))


def is_own(file: str) -> bool:
    """Whether a file is a user's: neither the kit's nor an installed library's."""
    return not (_is_kit(file) or file.startswith(LIBRARIES))


def defined(part: Any, *methods: str) -> str:
    """` (data.py:12)`: where a user's class or function, or the first of its `methods`, begins; empty if it is not a user's."""
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
    """The name of a function or class, or of an instance's class."""
    part = getattr(part, "func", part)
    return str(getattr(part, "__name__", type(part).__name__))


def described(value: Any) -> str:
    """`a Tensor [8, 3] float32`, `a tuple of (a Tensor [8, 3] float32, None)`, `a dict of points [8, 4] float32`."""
    if isinstance(value, Mapping):
        return f"a {_kind(value)} of {_few(f'{name} {_short(each)}' for name, each in value.items())}"
    if isinstance(value, (tuple, list)):
        return f"a {_kind(value)} of ({_few(map(described, value))})"
    return "None" if value is None else f"{_article(value)} {_short(value)}"


def _places(error: BaseException) -> list[SourceLine]:
    """From the kit's first line on: what called it has no part in the error."""
    places = [SourceLine(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    first = next((number for number, each in enumerate(places) if _is_kit(each.file)), 0)
    return places[first:]


def _is_kit(file: str) -> bool:
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
