"""Tensors that a variable of a user's loop carries from one batch to the next, as a hidden state: they are in no checkpoint.

A name is carried if the loop's body may read it before it assigns it. Only the source and the values of such names are
looked at, once: nothing is attached to the user's objects.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from types import FrameType

from torch import Tensor
from torch.utils import _pytree as pytree

from muster.code_location import SourceLine, is_own

Loop = ast.For | ast.While


def carried(frame: FrameType | None, tracked: Collection[int]) -> tuple[str, SourceLine] | None:
    """Return a variable of a loop around `frame` that carries a tensor of several elements, and the loop's line; None if there is none.

    It looks at the innermost loop of each calling function whose source is available.
    frame: the frame that asks for the next batch, or one that it has called. tracked: ids of tensors to ignore.
    """
    while frame:
        if is_own(frame.f_code.co_filename) and (found := _loop(frame)):
            loop, line = found
            for name, value in _values(frame, _names(loop)).items():
                if _is_state(value, tracked):
                    return name, SourceLine(frame.f_code.co_filename, line)
        frame = frame.f_back
    return None


def _loop(frame: FrameType) -> tuple[Loop, int] | None:
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    first = max(first, 1)  # 0 for a module
    at = frame.f_lineno - first + 1
    loops = [each for each in ast.walk(tree) if isinstance(each, Loop) and each.lineno <= at <= (each.end_lineno or 0)]
    return (loops[-1], loops[-1].lineno + first - 1) if loops else None  # ast.walk goes from the outside in


def _names(loop: Loop) -> list[str]:
    """Return the names that the body of `loop` assigns, and may read before that: the previous iteration's values."""
    own = {*_assigned([loop.target])} if isinstance(loop, ast.For) else set[str]()
    read = list[str]()
    if isinstance(loop, ast.While):
        read += _read(loop.test, own)
    _follow(loop.body, own, read)
    assigned = {*_assigned(loop.body)}
    return [*dict.fromkeys(name for name in read if name in assigned)]


def _follow(body: Sequence[ast.stmt], known: set[str], read: list[str]) -> set[str]:
    """Add to `read` the names that `body` may read before it assigns them; return `known` and those that it assigns."""
    for each in body:
        blocks = [value for _, value in ast.iter_fields(each) if isinstance(value, list) and _is_block(value)]
        blocks += [handler.body for handler in getattr(each, "handlers", [])]
        blocks += [case.body for case in getattr(each, "cases", [])]
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            read += _read(each, known | {*_assigned([each])})
            known = known | {each.name}
        elif blocks:
            for value in _own_parts(each):
                read += _read(value, known)
            known = known | {*_assigned(_own_parts(each))}
            ends = [_follow(block, known, read) for block in blocks]
            if isinstance(each, ast.If | ast.Match):
                known = ends[0] & ends[1] if isinstance(each, ast.If) and each.orelse else known
            else:  # a loop or a `try` is taken for one that runs to its end
                known = ends[0]
        else:
            read += _read(each, known)
            if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and each.target.id not in known:
                read.append(each.target.id)
            known = known | {*_assigned([each])}
    return known


def _is_block(value: Sequence[object]) -> bool:
    return bool(value) and all(isinstance(each, ast.stmt) for each in value)


def _own_parts(statement: ast.stmt) -> list[ast.AST]:
    """Return what a compound statement has outside of its blocks, such as a condition."""
    return [each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.stmt | ast.ExceptHandler)]


def _read(node: ast.AST, known: Collection[str]) -> Iterator[str]:
    """Yield the names that `node` reads, except `known` ones and those of its comprehensions and lambdas."""
    inner = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    for part in ast.walk(node):
        if isinstance(part, ast.comprehension):
            inner |= {*_assigned([part.target])}
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Name)
            and isinstance(part.ctx, ast.Load)
            and part.id not in inner
            and part.id not in known
        ):
            yield part.id


def _assigned(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id


def _values(frame: FrameType, names: Sequence[str]) -> dict[str, object]:
    if not names:
        return {}
    there = frame.f_locals
    found = {name: there[name] for name in names if name in there}
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        there.clear()  # a copy, which the frame keeps: with it, all tensors of this batch
    return found


def _is_state(value: object, tracked: Collection[int]) -> bool:
    leaves = pytree.tree_leaves(value) if isinstance(value, tuple | list | dict) else [value]
    return any(isinstance(each, Tensor) and each.numel() > 1 and id(each) not in tracked for each in leaves)
