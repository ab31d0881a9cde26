"""Parts: classes and functions that the config names by import path, the kit's own or a user's.

A part's constructor is its schema: parameter names and annotations are checked before anything is built, and limits and
freedom are in the annotations (constraints.py). The values are those of the part's YAML under conf/, changed by overrides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from muster.code_location import located
from muster.errors import ConfigError, nearest
from muster.import_by_path import imported
from muster.train.config.constraints import FREE, LOCAL, not_finite, out_of_range

TARGET = "_target_"
# torchvision's datasets, and most others, call the folder on the node `root`: it may differ and move.
BY_CONVENTION = {"data.root": (FREE, LOCAL)}


@dataclass(frozen=True)
class Part:
    """A class or function to call, with its values from the config; `aside`: values that are for the caller, not for its constructor."""

    key: str
    target: str
    values: dict[str, Any] = field(default_factory=dict)
    aside: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, key: str, node: dict[str, Any], aside: Sequence[str] = ()) -> Part:
        """Create a part from a config's `{_target_: ..., ...}`. Raises ConfigError if it has no target."""
        if not isinstance(node, dict):
            raise ConfigError(f"{key}={node} is not a part: write {key}.{TARGET}=your.Own and its values next to it")
        values = {str(name): value for name, value in node.items() if name not in aside}
        target = values.pop(TARGET, None)
        if not isinstance(target, str):
            raise ConfigError(f"{key}.{TARGET}={target} names no part: give {key} by name, or {key}.{TARGET}=your.Own")
        return cls(key, target, values, {name: node[name] for name in aside if node.get(name) not in (None, [], {})})


def build(part: Part, *args: Any, **offered: Any) -> Any:
    """Call the part's target with `args`, its values, and the entries of `offered` that its signature names.

    Raises ConfigError: the target cannot be imported, or does not accept these values.
    """
    target = locate(part)
    kwargs = {name: _built(f"{part.key}.{name}", value) for name, value in checked_values(part).items()}
    parameters = signature(target)
    kwargs |= {name: value for name, value in offered.items() if name in parameters and name not in kwargs}
    positional = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if missing := [
        name
        for name, p in parameters.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and name not in {*kwargs, *positional[: len(args)]}
    ]:
        raise ConfigError(f"{part.key}: {part.target} needs {', '.join(missing)}: write +{part.key}.{missing[0]}=...")
    try:
        return target(*args, **kwargs)
    except ValueError as error:
        raise ConfigError(f"{part.key}: {part.target} rejects its arguments: {located(error)}") from error


def bound(part: Part, *, free: int, **offered: Any) -> Any:
    """Return a callable that takes `free` positional arguments. Raises ConfigError.

    A function that needs exactly `free` more arguments is returned with its values bound. A class, or a function that makes the
    callable, is built.
    """
    target = locate(part)
    parameters = signature(target).values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    left = [name for name in needed if name not in part.values and name not in offered]
    if inspect.isclass(target) or len(left) != free:
        return build(part, **offered)
    given = {name: value for name, value in offered.items() if name in signature(target)}
    return functools.partial(target, **{**given, **checked_values(part)})


def callable_of(key: str, value: Any, *, train: bool = True) -> Any:
    """Return the callable that `value` names; None for None. Raises ConfigError.

    An import path names a function, returned as is, or a class, built without arguments. A `_target_` names a part to build. A
    parameter `train` of the function or class is true if the callable is used for training.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        found = build(Part.of(key, value), train=train)
    else:
        found = locate(Part(key, str(value)))
        found = _told(found, train=train)() if inspect.isclass(found) else found
    return _told(found, train=train)


def _told(target: Any, *, train: bool) -> Any:
    asks = callable(target) and "train" in signature(target)
    return functools.partial(target, train=train) if asks else target


def _built(key: str, value: Any) -> Any:
    if isinstance(value, dict) and TARGET in value:
        return build(Part.of(key, value))
    if isinstance(value, dict):
        return {name: _built(f"{key}.{name}", item) for name, item in value.items()}
    return [_built(key, item) for item in value] if isinstance(value, list) else value


def locate(part: Part) -> Any:
    """Import the class or function that a part names. Raises ConfigError."""
    return imported(part.target, said=f"{part.key}.{TARGET}={part.target}")


def checked_values(part: Part) -> dict[str, Any]:
    """Return the part's values, validated and converted by its constructor's annotations.

    Raises ConfigError: a name is not a parameter, or a value has the wrong type or is out of range.
    """
    target = locate(part)
    parameters, hints = signature(target), type_hints(target)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in part.values:
        if name not in parameters and not open_ended:
            raise ConfigError(f"{part.key}.{name}: {part.target} has no such parameter; {nearest(name, parameters)}")
    return {name: _checked(part, name, value, hints.get(name)) for name, value in part.values.items()}


def _checked(part: Part, name: str, value: Any, hint: Any) -> Any:
    key = f"{part.key}.{name}"
    is_own = part.target.startswith("muster.train.") or part.key in ("optimizer", "scheduler")
    if problem := out_of_range(key, value, _marks(hint)) or not_finite(key, value, may_be_infinite=not is_own):
        raise ConfigError(problem)
    if hint is None or (isinstance(value, dict) and TARGET in value):
        return value
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].lower()
        raise ConfigError(f"{key}={value}: {reason}; {part.target} takes {inspect.formatannotation(hint)}") from None
    except (PydanticUserError, TypeError):
        return value  # the annotation is not a type that values can be checked against


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Return the validator of an annotation. Raises PydanticUserError or TypeError if it is not a type."""
    try:
        return TypeAdapter(hint, config={"arbitrary_types_allowed": True})
    except PydanticUserError:  # a type with its own pydantic config
        return TypeAdapter(hint)


def marks(part: Part) -> dict[str, tuple[Any, ...]]:
    """Return the marks of each parameter of the part, by full key."""
    hints = type_hints(locate(part))
    named = {f"{part.key}.{name}": _marks(hint) for name, hint in hints.items()}
    return {
        key: found + BY_CONVENTION.get(key, ()) for key, found in {**dict.fromkeys(BY_CONVENTION, ()), **named}.items()
    }


def _marks(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def type_hints(target: Any) -> dict[str, Any]:
    """Return annotations by parameter; empty if they cannot be evaluated, and the call then reports errors."""
    try:
        hints = get_type_hints(_annotated(target), include_extras=True)
        return {name: hint for name, hint in hints.items() if name in signature(target)}
    except Exception:  # names that are imported for type checkers only
        return {}


def _annotated(target: Any) -> Any:
    """Return the object that holds the parameters' annotations: a dataclass may inherit fields from another module."""
    if not inspect.isclass(target):
        return target
    definer = next(base for base in target.__mro__ if "__init__" in vars(base))
    return definer if "__dataclass_params__" in vars(definer) else target.__init__


def signature(target: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except ValueError:  # some C callables have none
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name is one of the patterns, lies in a module that is, or fits one with `*`."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)
