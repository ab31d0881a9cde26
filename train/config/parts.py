"""Build what the config names by import path: the kit's own parts and the user's alike."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from hydra.utils import instantiate

from train.config.schema import SCHEMAS, Component
from train.errors import ConfigError, nearest


def locate(component: Component, *, key: str) -> Any:
    """Import the class or function that `component._target_` names.

    Raises:
        ConfigError: no such module or attribute; says which part was not found.
    """
    path = component._target_
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"{key}._target_={path} is not an import path: write it as package.module.Name")
    parents, found = module.split("."), None
    for depth in range(len(parents), 0, -1):  # the longest prefix that is a module; the rest are attributes
        candidate = ".".join(parents[:depth])
        try:
            found = importlib.import_module(candidate)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not (candidate == error.name or candidate.startswith(f"{error.name}.")):
                raise ConfigError(
                    f"{key}._target_={path}: importing {candidate} failed: {error}; install what it needs"
                ) from error
    if found is None:
        raise ConfigError(
            f"{key}._target_={path}: there is no module {parents[0]}; install it, or run in the folder that holds it"
        )
    for attribute in [*parents[depth:], name]:
        try:
            found = getattr(found, attribute)
        except AttributeError:
            names = [n for n in dir(found) if not n.startswith("_")]
            raise ConfigError(f"{key}._target_={path}: no {attribute} there; {nearest(attribute, names)}") from None
    if not callable(found):
        raise ConfigError(f"{key}._target_={path} is not a class or function")
    return found


def build(component: Component, *args: Any, key: str, **offered: Any) -> Any:
    """Call the target with `args`, the keys of its config, and those of `offered` that its signature names.

    Where only `_target_` was replaced, the rest of the group's option is still that of the built-in it came from:
    such a key is passed on only if the target has a parameter of that name or the value was changed.

    Raises:
        ConfigError: the target does not take these arguments.
    """
    target = locate(component, key=key)
    kwargs = instantiate(arguments(component, target, key=key), _convert_="all")
    parameters = signature(target)
    kwargs |= {name: value for name, value in offered.items() if name in parameters and name not in kwargs}
    return target(*args, **kwargs)


def arguments(component: Component, target: Any, *, key: str) -> dict[str, Any]:
    """The keyword arguments that the config gives to `target`, checked against its signature."""
    parameters = signature(target)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    defaults = inherited(component)
    kwargs = {
        name: value
        for name, value in component.kwargs.items()
        if name in parameters or name not in defaults or value != defaults[name]
    }
    for name in kwargs:
        if name not in parameters and not open_ended:
            raise ConfigError(f"{key}.{name}: {component._target_} has no such parameter; {nearest(name, parameters)}")
    return kwargs


def inherited(component: Component) -> dict[str, Any]:
    """The built-in option's own defaults, if `_target_` was replaced by something else; otherwise nothing."""
    schema = type(component)
    own = schema() if any(schema in group.values() for group in SCHEMAS.values()) else component
    return own.kwargs if own._target_ != component._target_ else {}


def signature(target: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except ValueError:  # some C callables have none
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}
