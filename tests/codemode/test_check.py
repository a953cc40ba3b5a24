"""What refuses a cell before it runs, and what is told beside its result."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perdure.codemode.check import CellCode, CellVerdict, TypeFinding, judge, read_cell, read_diagnostics
from perdure.codemode.stubs import Functions
from perdure.ports.code import Executor
from tests.codemode.kit import TOOLS, executing, run, tool

CALLS = Functions(TOOLS).asynchronous


@pytest.mark.parametrize(
    "code",
    [
        "search('a')",
        "x = search('a')",
        "x = search('a')\nprint(x)",
        "print(search('a'))",
        "len(search('a'))",
        "f'{search(1)}'",
        "search('a') + 'b'",
        "search('a')[0]",
        "search('a').upper()",
        "for x in search('a'):\n    pass",
        "[x for x in search('a')]",
        "if search('a'):\n    pass",
        "while search('a'):\n    pass",
        "assert search('a')",
        "import asyncio\nasyncio.gather(search('a'))",
        "settle(search('a'))",
        "sleep(3)",
        "github.list_issues('a')",
        "def f():\n    search('a')",
        "try:\n    pay(1)\nexcept Exception:\n    pass",
        "x = not search('a')",
        "search('a')()",
    ],
)
def test_a_call_that_nobody_can_await_is_seen(code: str) -> None:
    assert len(read_cell(code, CALLS).unawaited) >= 1


@pytest.mark.parametrize(
    "code",
    [
        "await search('a')",
        "x = search('a')\nawait x",
        "import asyncio\nawait asyncio.gather(search('a'), *[search(w) for w in 'ab'])",
        "import asyncio\ncalls = [search(w) for w in 'ab']\nawait asyncio.gather(*calls)",
        "calls = []\nfor w in 'ab':\n    calls.append(search(w))\nfor call in calls:\n    print(await call)",
        "def begin(w):\n    return search(w)\nawait begin('a')",
        "begin = lambda w: search(w)\nawait begin('a')",
        "x = search('a') if 1 else pay(2)\nawait x",
        "calls = {w: search(w) for w in 'ab'}\nfor call in calls.values():\n    await call",
        "calls = tuple([search('a')])\nawait calls[0]",
        "await settle(search('a'), pay(1))",
        "finish(await search('a'))",
        "my_search = search\nawait my_search('a')",
        "def search_all():\n    pass\nsearch_all()",
    ],
)
def test_a_call_that_can_still_be_awaited_is_let_through(code: str) -> None:
    assert read_cell(code, CALLS).unawaited == ()


def test_the_names_that_a_cell_binds() -> None:
    code = """
import os.path, json as j
from math import sqrt as root, pi
a = b, (c, *d) = 1, (2, 3)
e: int = 1
for f, g in []:
    h = 1
with open('x') as i:
    pass
try:
    k = 1
except Exception as error:
    l = 1
if (m := 1):
    n = [o := p for p in [1]]
def q(r):
    global s
    s = t = 1
class U:
    v = 1
match 1:
    case {'w': w, **x}:
        y = lambda z: z
a.attribute = 1
a['item'] = 2
"""
    bound = set(read_cell(code, CALLS).binds)

    assert bound >= {*"abcdefghiklmnoqswy", "os", "j", "root", "pi", "U"}
    assert not bound & {"p", "r", "t", "v", "z", "attribute", "item"}


@pytest.mark.parametrize("code", ["x = (", "\0", "(" * 10_000, "x = 1\n" + "-" * 50_000 + "1"])
def test_code_that_this_python_cannot_read_is_left_to_the_interpreter(code: str) -> None:
    read = read_cell(code, CALLS)

    assert read == CellCode(unread=True)
    missed = TypeFinding("unresolved-reference", "Name `search` used when not defined", 1)
    assert judge(read, [missed], CALLS, CALLS) == CellVerdict()


def test_what_is_no_report_of_the_checker_is_no_finding() -> None:
    assert read_diagnostics("Traceback", 2) == []
    assert read_diagnostics('[1, {}, {"location": {}}]', 2) == []


def test_many_findings_are_counted() -> None:
    found = [TypeFinding("unresolved-reference", f"Name `n{n}` used when not defined", n) for n in range(1, 20)]
    verdict = judge(read_cell("1", CALLS), found, CALLS, [])

    assert verdict.line == 1
    assert verdict.refused.splitlines()[-1] == "… and 11 more"


# With the checker of the executor


@pytest.fixture(scope="module")
async def executor() -> AsyncIterator[Executor]:
    async with executing() as executor:
        yield executor


@pytest.mark.parametrize(
    ("code", "line", "told"),
    [
        ("x = 1\nawait serch('a')", 2, "`serch` is not defined: did you mean `search`?"),
        ("def f():\n    return nothing\nf()", 2, "`nothing` is not defined"),
        ("await search(1)", 1, "Argument to function `search` is incorrect: Expected `str`"),
        ("await search('a', lim=1)", 1, "Argument `lim` does not match any known parameter"),
        ("await search()", 1, "No argument provided for required parameter `query`"),
        ("await search('a', 1, 2)", 1, "Too many positional arguments"),
        ("await github.list_issues(1)", 1, "Argument to function `list_issues` is incorrect"),
        (
            "x = search('a')\ny = x.upper()\nawait x",
            2,
            "Object of type `CoroutineType[Any, Any, Any]` has no attribute `upper`",
        ),
        ("import asyncio\nprint('a')\nasyncio.gather(search('a'))", 3, "the call of asyncio.gather() is not awaited"),
    ],
)
async def test_a_cell_is_refused_before_any_of_it_runs(executor: Executor, code: str, line: int, told: str) -> None:
    ran = await run(await executor.open(), code)

    assert ran.end.error is not None
    assert (ran.end.error.code, ran.end.error.line, ran.end.error.rolled_back) == ("check", line, True)
    assert f"line {line}: {told}" in ran.end.error.message
    assert (ran.calls, ran.printed) == ([], "")


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("x: int = 'tea'", "is not assignable to `int`"),
        ("try:\n    import numpy\nexcept ImportError:\n    pass", "Cannot resolve imported module `numpy`"),
        ("def f(x: int) -> str:\n    return x\nf(1)", "Return type does not match"),
        ("try:\n    len(5)\nexcept TypeError:\n    pass", "Argument to function `len` is incorrect"),
        ("try:\n    rows\nexcept NameError:\n    rows = []", "`rows` is read before the cell binds it"),
    ],
)
async def test_all_else_is_told_beside_the_result(executor: Executor, code: str, note: str) -> None:
    ran = await run(await executor.open(), code)

    assert ran.end.error is None
    assert any(note in each for each in ran.end.notes)


@pytest.mark.parametrize(
    "code",
    [
        "row = ['a', 1]\nawait search(row[0], row[1])",
        "row = ['a', 1]\nawait search(*row)",
        "await search(*'a b'.split()[:1])",
        "rows = [{'query': 'a', 'limit': 1}]\n[await search(**row) for row in rows][0]",
        "rows = [{'query': 'a'}]\n[await search(**row) for row in rows][0]",
        "word = None\nif await pay(1):\n    word = 'a'\nawait search(word)",
    ],
)
async def test_an_argument_that_may_fit_is_left_to_the_call(executor: Executor, code: str) -> None:
    ran = await run(await executor.open(), code)

    assert ran.end.error is None
    assert ran.calls[-1].args["query"] == "a"
    assert all("Argument to function `search` is incorrect" in note for note in ran.end.notes)


async def test_a_cell_may_use_what_earlier_cells_bound_and_shadow_a_tool(executor: Executor) -> None:
    repl = await executor.open()
    await run(repl, "rows = [1]\ndef double(x):\n    return x * 2\nfor item in rows:\n    last = item")
    assert (await run(repl, "pay = 3")).end.error is None
    ran = await run(repl, "double(rows[0]) + item + last + pay")

    assert (ran.end.error, ran.end.value) == (None, "7")


async def test_dicts_lists_and_strings_of_the_cells_own_fit_exact_types(executor: Executor) -> None:
    spec = tool(
        "order",
        schema={
            "properties": {
                "how": {"enum": ["card", "cash"]},
                "rows": {"type": "array", "items": {"type": "number"}},
                "item": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            }
        },
    )
    code = "for how in ['card', 'cash']:\n    rows = [1, 2]\n    item = {'name': how}\n    await order(how, rows, item)"
    ran = await run(await executor.open(), code, tools=[spec])

    assert ran.end.error is None
    assert [call.args["how"] for call in ran.calls] == ["card", "cash"]


async def test_a_cell_is_checked_against_the_tools_of_today(executor: Executor) -> None:
    repl = await executor.open()
    await run(repl, "await search('a')")
    changed = tool("search", "question:integer")
    ran = await run(repl, "await search('a')", tools=[changed])

    assert ran.end.error is not None
    assert "Expected `int`" in ran.end.error.message


async def test_a_cell_that_is_too_long_is_refused(executor: Executor) -> None:
    ran = await run(await executor.open(), "x = 1\n" * 100_000)

    assert ran.end.error is not None
    assert ran.end.error.message == "The cell was not run: it is longer than 256 KiB."


@pytest.mark.parametrize(
    "code",
    [f"import {'a.' * 120_000}b", f"from .{'a.' * 120_000}b import c", "import a" + " .\\\n b" * 40_000],
)
async def test_a_name_that_takes_minutes_to_parse_is_refused(executor: Executor, code: str) -> None:
    ran = await run(await executor.open(), code)

    assert ran.end.error is not None
    assert ran.end.error.message == "The cell was not run: a name in it has 100 dots or more."


async def test_many_dots_that_are_no_long_name_run(executor: Executor) -> None:
    ran = await run(await executor.open(), f"x = [{'1.5, ' * 1000}]\n'''{'So. It is. ' * 1000}'''\nlen(x)")

    assert (ran.end.error, ran.end.value) == (None, "1000")
