"""Import a class or function by its path."""

from __future__ import annotations

import importlib
from typing import Any

from muster.code_location import located
from muster.errors import ConfigError, nearest


def imported(target: str, *, said: str) -> Any:
    """Import `package.module.Name`; messages name it by the setting `said`.

    Raises ConfigError: no such module or attribute (the message names the part of the path), an import fails, or it is not callable.
    """
    module = target.rpartition(".")[0]
    if not module:
        raise ConfigError(f"{said} is not an import path: write it as package.module.Name")
    words, found, depth = target.split("."), None, 0
    for depth in range(len(words) - 1, 0, -1):  # the longest prefix that is a module; the rest are attributes
        found = _module(".".join(words[:depth]), said)
        if found is not None:
            break
    if found is None:
        raise ConfigError(f"{said}: there is no module {words[0]}; install it, or run in the folder that contains it")
    for attribute in words[depth:]:
        if not hasattr(found, attribute):
            names = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(f"{said}: no {attribute} there; {nearest(attribute, names)}")
        found = getattr(found, attribute)
    if not callable(found):
        raise ConfigError(f"{said} is not a class or function")
    return found


def _module(path: str, said: str) -> Any:
    """Return None if no module has that name. Raises ConfigError: its import fails."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise ConfigError(f"{said}: importing {path} failed: {error}; install what it needs") from error
    except Exception as error:
        raise ConfigError(f"{said}: importing {path} failed: {located(error)}; fix it") from error
    return None
