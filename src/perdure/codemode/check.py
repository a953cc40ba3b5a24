"""What is wrong with a cell, said before it runs.

Three things refuse a cell, because none of them can be meant and each is cheaper to repair before half of the cell
has run: a name that is nowhere defined, arguments that cannot fit a tool, and a call whose result is never awaited. All
else that a type checker finds is told beside the result: it may be wrong about a program that works.

The findings come from two sides. `read_cell` goes over the syntax tree: it sees calls that are not awaited, and which
names a cell binds. A type checker, where the executor has one, reports diagnostics; `judge` sorts them.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeGuard

import msgspec
from msgspec import Struct

MOST_NOTES = 8
MOST_FAULTS = 8
LONGEST = 256 * 1024
"""Bytes of a cell."""
MOST_DOTS = 100
_DOTTED = re.compile(rf"\b[^\W\d]\w*(?:[\s\\]*\.[\s\\]*\w+){{{MOST_DOTS}}}")


class CellFault(Struct, frozen=True):
    line: int
    message: str


class CellCode(Struct, frozen=True):
    """A cell as it was read: the names that it binds for later cells, and calls that it does not await.

    `mentions` are all names that stand in it. `keeps`: it makes calls that it does not await at once, and may leave
    some in variables. `spreads` are the lines of `*row` and `**row` in calls. A cell that this Python cannot parse has
    none of this (`unread`), and is left to the interpreter, whose grammar may be another.
    """

    binds: tuple[str, ...] = ()
    mentions: frozenset[str] = frozenset()
    unawaited: tuple[CellFault, ...] = ()
    unread: bool = False
    keeps: bool = False
    spreads: frozenset[int] = frozenset()


def oversize(code: str) -> str:
    """Why a cell is not even parsed, or "". The parser of Python joins the parts of `import a.b.c` one by one: a name
    with as many of them as a cell has room for takes minutes, in which nothing else of this process runs."""
    if len(code.encode(errors="replace")) > LONGEST:
        return f"The cell was not run: it is longer than {LONGEST // 1024} KiB."
    if code.count(".") >= MOST_DOTS and _DOTTED.search(code) is not None:
        return f"The cell was not run: a name in it has {MOST_DOTS} dots or more."
    return ""


def read_cell(code: str, asynchronous: Collection[str]) -> CellCode:
    """`asynchronous` are the names, with dots, whose calls must be awaited."""
    try:
        tree = ast.parse(code)
        parents = _parents(tree)
        binds = tuple(dict.fromkeys(_binds(tree.body)))
        mentions = frozenset([node.id for node in parents if type(node) is ast.Name])
        keeps = any(_is_kept(node, parents, asynchronous) for node in parents if type(node) is ast.Call)
        spreads = frozenset([node.lineno for node, parent in parents.items() if _is_spread(node, parent)])
        return CellCode(binds, mentions, tuple(_unawaited(parents, asynchronous)), keeps=keeps, spreads=spreads)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return CellCode(unread=True)


def _is_spread(node: ast.AST, parent: ast.AST) -> TypeGuard[ast.Starred | ast.keyword]:
    """Whether it is `*row` or `**row` in a call."""
    return isinstance(parent, ast.Call) and (
        isinstance(node, ast.Starred) or (isinstance(node, ast.keyword) and node.arg is None)
    )


def _parents(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    """Every node below `tree`, outer ones first, with the one that it stands in. `ast.walk` takes several times as
    long, most of it for the contexts of names, which all nodes share."""
    found: dict[ast.AST, ast.AST] = {}
    todo: list[ast.AST] = [tree]
    for node in todo:
        for name in node._fields:
            value = None if name == "ctx" else getattr(node, name, None)
            below = value if type(value) is list else (value,)
            for child in below:
                if isinstance(child, ast.AST):
                    found[child] = node
                    todo.append(child)
    return found


# Names


def _binds(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements at the top of a cell bind, inside `if`, `for`, `with` and `try` too."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
                for inner in ast.walk(statement):
                    if isinstance(inner, ast.Global):
                        yield from inner.names
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or alias.name.partition(".")[0]
            case _:
                yield from _stored(statement)


def _stored(node: ast.AST) -> Iterator[str]:
    """Names that are stored below `node`, outside of functions, classes and the own variables of comprehensions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        assert isinstance(node, ast.stmt)
        yield from _binds([node])
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                yield from _stored(inner.target)
        return
    if isinstance(node, ast.Lambda):
        return
    for child in ast.iter_child_nodes(node):
        yield from _stored(child)


# Calls that nobody awaits

_GATHERS = frozenset({"asyncio.gather", "gather"})
_HOLDS = frozenset({"list", "tuple", "set", "dict", "zip", "enumerate", "reversed", "iter", "isinstance", "type", "id"})
"""Built-ins that may be given a call to hold: `tuple(calls)`. All others would look at its result."""
_KEEPS = (
    ast.Await, ast.Call, ast.keyword, ast.Starred, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp, ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return, ast.Lambda, ast.IfExp,
    ast.Yield,
)  # fmt: skip
"""Where a call that is not awaited may stand, because it can still be awaited from there."""


def dotted(node: ast.AST) -> str:
    """`a.b` as it is written; "" for what is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def _unawaited(parents: dict[ast.AST, ast.AST], asynchronous: Collection[str]) -> Iterator[CellFault]:
    used = _names_used(parents)
    for node, parent in parents.items():
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name not in asynchronous and name not in _GATHERS:
            continue
        if not isinstance(parent, _KEEPS) or _looks(parent, node):
            yield CellFault(node.lineno, f"the call of {name}() is not awaited: write `await {name}(…)`")
        elif isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            target = parent.targets[0].id
            if target not in used:
                yield CellFault(
                    node.lineno, f"`{target}` is a call of {name}() that is never awaited: write `await {name}(…)`"
                )


def _is_kept(call: ast.Call, parents: dict[ast.AST, ast.AST], asynchronous: Collection[str]) -> bool:
    """Whether a call of a tool is not awaited where it stands, by itself or in a `gather`."""
    if dotted(call.func) not in asynchronous:
        return False
    node = parents[call]
    while isinstance(node, _GATHERED) or (isinstance(node, ast.Call) and dotted(node.func) in _GATHERS | {"settle"}):
        node = parents[node]
    return not isinstance(node, ast.Await)


_GATHERED = (ast.Starred, ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp)


def _looks(parent: ast.AST, call: ast.AST) -> bool:
    """Whether a function looks at its argument now, so that it would see the call and not its result."""
    if not isinstance(parent, ast.Call):
        return False
    if parent.func is call:
        return True  # search()()
    name = dotted(parent.func)
    return name in _BUILTINS and name not in _HOLDS


_BUILTINS = frozenset({
    "abs", "all", "any", "bool", "bytes", "chr", "divmod", "filter", "float", "format", "frozenset", "getattr",
    "hasattr", "hash", "hex", "int", "len", "map", "max", "min", "next", "oct", "ord", "pow", "print", "range", "repr",
    "round", "sorted", "str", "sum", "json.dumps", "json.loads",
})  # fmt: skip


def _names_used(parents: dict[ast.AST, ast.AST]) -> frozenset[str]:
    """Names that are awaited, or handed on to where they can be."""
    return frozenset(
        node.id
        for node, parent in parents.items()
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and isinstance(parent, _KEEPS)
        and not _looks(parent, node)
    )


# What a type checker found


class TypeFinding(Struct, frozen=True):
    """One finding of a type checker: its rule, its words and the line of the cell."""

    rule: str
    message: str
    line: int


def read_diagnostics(rendered: str, first_line: int) -> list[TypeFinding]:
    """The JSON that ty renders. `first_line` is the line of the cell's first one in what was checked."""
    try:
        found = msgspec.json.decode(rendered)
    except msgspec.MsgspecError:
        return []
    return [
        TypeFinding(str(each.get("check_name") or each.get("code")), str(each.get("message", "")), row - first_line + 1)
        for each in found
        if isinstance(each, dict) and (row := _row(each)) >= first_line
    ]


def _row(found: dict[str, Any]) -> int:
    location = found.get("location")
    row = location.get("row") if isinstance(location, dict) else None
    return row if isinstance(row, int) else 0


class CellVerdict(Struct, frozen=True):
    """`refused` is what the model is told instead of a run, "" where the cell may run; `notes` are told beside."""

    refused: str = ""
    line: int = 0
    notes: tuple[str, ...] = ()


_ARGUMENTS = frozenset({
    "invalid-argument-type", "missing-argument", "unknown-argument", "too-many-positional-arguments",
    "parameter-already-assigned",
})  # fmt: skip
_FUNCTION = re.compile(r"function `(\w+)`")


def judge(
    code: CellCode, diagnostics: Sequence[TypeFinding], asynchronous: Collection[str], known: Collection[str]
) -> CellVerdict:
    """Sort what was found. `known` are all names that a cell may use, for "did you mean"."""
    if code.unread:  # the checker was not told of the names that it mentions, and would miss them
        return CellVerdict()
    faults = list(code.unawaited)
    seen = {fault.line for fault in faults}
    notes: list[CellFault] = []
    last = {path.rpartition(".")[2] for path in asynchronous}
    for each in diagnostics:
        function = _FUNCTION.search(each.message)
        if each.rule == "unresolved-reference" and (name := _name(each.message)) not in _PYTHON:
            if name in code.binds:  # it may mean to find out: `try: rows` and `except NameError: rows = []`
                notes.append(CellFault(each.line, f"`{name}` is read before the cell binds it"))
            else:
                faults.append(CellFault(each.line, _unknown(name, known)))
        elif each.rule in _ARGUMENTS and function is not None and function[1] in last and not _may_fit(each, code):
            faults.append(CellFault(each.line, each.message))
        elif each.rule == "unused-awaitable" or "`CoroutineType[" in each.message:
            if each.line not in seen:
                faults.append(CellFault(each.line, f"{each.message}: a call is awaited before its result is used"))
        elif each.rule not in ("invalid-syntax", "unresolved-reference"):
            notes.append(CellFault(each.line, each.message))
    if not faults:
        return CellVerdict(notes=tuple(_lines(notes, MOST_NOTES)))
    faults.sort(key=lambda fault: fault.line)
    text = "\n".join(("The cell was not run.", *_lines(faults, MOST_FAULTS)))
    return CellVerdict(text, faults[0].line, tuple(_lines(notes, MOST_NOTES)))


def _may_fit(found: TypeFinding, code: CellCode) -> bool:
    """Whether the value may fit all the same: the checker knows one type for all values of a dict or list, and the call
    itself is checked when it is made."""
    if found.rule != "invalid-argument-type":
        return False
    return found.line in code.spreads or " | " in found.message.rpartition("found `")[2]


def _lines(faults: Sequence[CellFault], most: int) -> list[str]:
    shown = list(dict.fromkeys(f"line {fault.line}: {fault.message}" for fault in faults))
    return shown if len(shown) <= most else [*shown[:most], f"… and {len(shown) - most} more"]


_PYTHON = frozenset(dir(builtins))
"""Monty's checker does not know all built-ins that Monty has. One that it has not raises when the cell gets there."""


def _name(message: str) -> str:
    quoted = re.search(r"`(\w+)`", message)
    return quoted[1] if quoted else ""


def _unknown(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"`{name}` is not defined" + (f": did you mean `{close[0]}`?" if close else "")
