"""What a variable of a user's loop carries from one batch to the next and no checkpoint has: a hidden state, a best value, a count.

A name is carried if the loop's body may read it before it assigns it. Only the source and the values of such names are
looked at, once: nothing is attached to the user's objects.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import tokenize
from collections.abc import Collection, Iterator, Sequence
from types import CodeType, FrameType

from torch import Tensor
from torch.utils import _pytree as pytree

from muster.code_location import SourceLine, is_kit, is_own

Loop = ast.For | ast.While
STATE, BEST, COUNT, RATE = "state", "best", "count", "rate"
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def carried(
    frame: FrameType | None, tracked: Collection[int], rates: Collection[float]
) -> Iterator[tuple[str, SourceLine, str]]:
    """Yield variables of loops around `frame` that carry something, the loop's line, and what that is.

    STATE: a tensor of several elements. COUNT: a number that the loop counts up, as a sum of losses. BEST: one that it compares
    otherwise, as a best accuracy, or None before there is one. RATE: either, with the value of one of `rates`. It looks at the innermost loop of each calling function whose source is available.
    frame: the frame that asks for the next batch, or one that it has called. tracked: ids of tensors to ignore.
    """
    for each in own_frames(frame):
        if found := loop_of(each):
            loop, line = found
            kinds = dict.fromkeys(_compared(loop), BEST) | dict.fromkeys(_counted(loop), COUNT)
            names = _names(loop)
            own = local_names(each.f_code)
            shared = {name: each.f_globals[name] for name in names if name in each.f_globals and name not in own}
            for name, value in {**shared, **values_of(each, names)}.items():
                is_none_yet = value is None and kinds.get(name) == BEST
                is_number = _is_number(value) or is_none_yet
                kind = STATE if _is_state(value, tracked) else kinds.get(name) if is_number else None
                if kind in (BEST, COUNT) and isinstance(value, float) and value and value in rates:
                    kind = RATE
                if kind:
                    yield name, SourceLine(each.f_code.co_filename, line), kind


def enumerated(frame: FrameType | None) -> str:
    """Return the counter of a loop around `frame` whose body reads it, as `i` in `for i, x in enumerate(batches)`; empty without one."""
    for each in own_frames(frame):
        loop = found[0] if (found := loop_of(each)) else None
        call = loop.iter if isinstance(loop, ast.For) else None
        is_one = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "enumerate"
        if loop and isinstance(call, ast.Call) and is_one and len(call.args) == 1 and not call.keywords:
            first = next(assigned([loop.target]), "") if isinstance(loop, ast.For) else ""
            return first if first in {name for part in loop.body for name in _loaded(part)} else ""
    return ""


def early(frame: FrameType | None, iterables: set[int]) -> tuple[str, SourceLine] | None:
    """Return what saves or asks to stop before `job.step`, from which `frame` was called, in a loop over one of `iterables`; None without it.

    iterables: ids of objects whose state goes on as the loop takes a batch from them.
    """
    for each in own_frames(frame):
        loop, line = loop_of(each) or (None, 0)
        if not isinstance(loop, ast.For) or iterables.isdisjoint(map(id, _values_in(loop.iter, each))):
            continue
        at = each.f_lineno - line + loop.lineno
        named = [part for part in parts(loop) if isinstance(part, ast.Attribute)]
        jobs = {
            ast.dump(one.value) for one in named if one.attr == "step" and one.lineno <= at <= (one.end_lineno or 0)
        }
        calls = [part for part in parts(loop) if isinstance(part, ast.Call)]
        chooses = {id(call.func) for call in calls if any(one.arg == "best" for one in call.keywords)}
        for one in named:
            asks = one.attr in ("save", "should_stop") or (one.attr == "evaluate" and id(one) in chooses)
            if asks and one.lineno < at and ast.dump(one.value) in jobs:
                return ast.unparse(one), SourceLine(each.f_code.co_filename, one.lineno + line - loop.lineno)
    return None


def _values_in(node: ast.AST, frame: FrameType) -> Iterator[object]:
    """Yield the values of the variables, and of their attributes, that `node` names."""
    found = {**frame.f_globals, **values_of(frame, _loaded(node))}
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield found.get(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            yield getattr(found.get(part.value.id), "__dict__", {}).get(part.attr)


def own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the script's own functions that have called `frame`; what is around `Job.run` is no part of the job."""
    is_in_own = False
    while frame and not (is_in_own and is_kit(frame.f_code.co_filename)):
        if is_own(frame.f_code.co_filename):
            is_in_own = True
            yield frame
        frame = frame.f_back


def loop_of(frame: FrameType) -> tuple[Loop, int] | None:
    """Return the innermost loop that `frame` is in, and its line; None without one, or without its source."""
    try:
        lines, first = inspect.getsourcelines(frame)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the file may have been edited meanwhile
        return None
    first = max(first, 1)  # 0 for a module
    at = frame.f_lineno - first + 1
    loops = [each for each in ast.walk(tree) if isinstance(each, Loop) and each.lineno <= at <= (each.end_lineno or 0)]
    return (loops[-1], loops[-1].lineno + first - 1) if loops else None  # ast.walk goes from the outside in


def _names(loop: Loop) -> list[str]:
    """Return the names that the body of `loop` assigns, and may read before: in an iteration, what the one before has left.

    A batch that was read ahead, by `next(...)` or a method of this name, is not counted.
    """
    own = {*assigned([loop.target])} if isinstance(loop, ast.For) else set[str]()
    read = list[str]()
    if isinstance(loop, ast.While):
        read += _read(loop.test, own)
    _follow(loop.body, own, read)
    ahead = {*assigned([each for part in loop.body for each in ast.walk(part) if _is_read_ahead(each)])}
    own_names = {*assigned(loop.body)} - ahead
    return [*dict.fromkeys(name for name in read if name in own_names)]


def _compared(loop: Loop) -> set[str]:
    """Return the names that the body of `loop` orders by themselves, also by `max` and `min`, and does not take from a clock."""
    found, timed = set[str](), set[str]()
    for part in parts(loop):
        if isinstance(part, ast.Assign) and "time" in _loaded(part.value):
            timed |= {*assigned(part.targets)}
        found |= {each.id for each in _ordered(part) if isinstance(each, ast.Name)}
    return found - timed


def _ordered(node: ast.AST) -> list[ast.expr]:
    """Return what `node` orders: the operands of a comparison, or of `max` and `min`."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return [node.left, *node.comparators]
    return node.args if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("max", "min") else []


def _counted(loop: Loop) -> set[str]:
    """Return the names to which the body of `loop` adds something, or which it makes of themselves, and not of the time that has passed."""
    found, timed = set[str](), set[str]()
    for part in parts(loop):
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.Assign) and len(part.targets) == 1:
            ordered = {
                each.id for node in ast.walk(part.value) for each in _ordered(node) if isinstance(each, ast.Name)
            }
            found |= {*assigned(part.targets)} & _loaded(part.value) - ordered
        if isinstance(part, ast.AugAssign | ast.Assign) and "time" in _loaded(part.value):
            timed |= {*assigned([part])}
    steps = (part for part in parts(loop) if isinstance(part, ast.If) and "ends_step" in ast.unparse(part.test))
    sets = (each for part in steps for each in ast.walk(part) if isinstance(each, ast.Assign))
    return (
        found - timed - {*assigned([each for each in sets if isinstance(each.value, ast.Constant)])}
    )  # 0 in each step


def parts(loop: Loop) -> Iterator[ast.AST]:
    """Yield all that the body of `loop` consists of."""
    return (part for statement in loop.body for part in ast.walk(statement))


def _loaded(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_read_ahead(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Assign) else None
    function = call.func if isinstance(call, ast.Call) else None
    return "next" in (getattr(function, "id", ""), getattr(function, "attr", ""))


def _follow(body: Sequence[ast.stmt], known: set[str], read: list[str]) -> set[str]:
    """Add to `read` the names that `body` may read before it assigns them; return `known` and those that it assigns."""
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            read += _read(each, known | {*assigned([each])})
            known = known | {each.name}
        elif isinstance(each, ast.If | ast.Match):
            blocks = _blocks(each) if isinstance(each, ast.If) else [case.body for case in each.cases]
            known = known | _follow_parts(each, known, read)
            ends = [_follow(block, known, read) for block in blocks if not _leaves(block)]
            for block in filter(_leaves, blocks):
                _follow(block, known, read)
            known = set.intersection(*ends) if ends and isinstance(each, ast.If) else known
        elif blocks := [getattr(each, name) for name in ("body", "orelse", "finalbody") if getattr(each, name, None)]:
            known = known | _follow_parts(each, known, read)
            for handler in getattr(each, "handlers", []):
                _follow(handler.body, known, read)
            for block in blocks:  # a loop or a `try` is taken for one that runs to its end
                known = _follow(block, known, read)
        else:
            known = known | {*assigned([each for each in ast.walk(each) if isinstance(each, ast.NamedExpr)])}
            read += _read(each, known)
            if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and each.target.id not in known:
                read.append(each.target.id)
            known = known | {*assigned([each])}
    return known


def _blocks(statement: ast.If) -> list[list[ast.stmt]]:
    """Return the two blocks of an `if`, or those of `if x == 1: ... elif x == 2: ...`, of which one is taken to run."""
    first, blocks, last = statement.test, [statement.body], statement
    while len(last.orelse) == 1 and isinstance(last.orelse[0], ast.If) and _is_case(last.orelse[0].test, first):
        last = last.orelse[0]
        blocks.append(last.body)
    return blocks if len(blocks) > 1 and not last.orelse else [statement.body, statement.orelse]


def _is_case(test: ast.expr, first: ast.expr) -> bool:
    """Return True if two conditions compare the same thing with one value each."""
    pair = (test, first)
    if not all(isinstance(each, ast.Compare) and [*map(type, each.ops)] == [ast.Eq] for each in pair):
        return False
    return len({ast.dump(each.left) for each in pair if isinstance(each, ast.Compare)}) == 1


def _follow_parts(statement: ast.stmt, known: set[str], read: list[str]) -> set[str]:
    """Do the same for what a compound statement has outside of its blocks, such as a condition; return what that assigns."""
    parts = [each for each in ast.iter_child_nodes(statement) if not isinstance(each, BLOCKS)]
    for part in parts:
        read += _read(part, known)
    return {*assigned(parts)}


def _leaves(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Raise | ast.Continue | ast.Break | ast.Return)


def _read(node: ast.AST, known: Collection[str]) -> Iterator[str]:
    """Yield the names that `node` reads, except `known` ones and those of its comprehensions and lambdas."""
    inner = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    for part in ast.walk(node):
        if isinstance(part, ast.comprehension):
            inner |= {*assigned([part.target])}
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Name)
            and isinstance(part.ctx, ast.Load)
            and part.id not in inner
            and part.id not in known
        ):
            yield part.id


def assigned(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names that `nodes` assign."""
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id


def local_names(code: CodeType) -> frozenset[str]:
    """Return the names that are local in a function, or of one around it, also those that have no value yet; none for a module."""
    return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))


def values_of(frame: FrameType, names: Collection[str]) -> dict[str, object]:
    """Return the values of those variables of `frame` that have one."""
    if not names:
        return {}
    there = frame.f_locals
    found = {name: there[name] for name in names if name in there}
    is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    if is_copy and sys.getrefcount(there) <= 3:  # nobody but the frame keeps it, and with it all tensors of this batch
        there.clear()
    return found


def _is_number(value: object) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return is_one or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_state(value: object, tracked: Collection[int]) -> bool:
    leaves = pytree.tree_leaves(value) if isinstance(value, tuple | list | dict) else [value]
    return any(isinstance(each, Tensor) and each.numel() > 1 and id(each) not in tracked for each in leaves)
