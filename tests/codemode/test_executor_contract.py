"""What every executor does with a cell, whatever runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from perdure.codemode.inside.values import EARLIER
from perdure.errors import InternalError
from perdure.model.code import CellEnd, CodeAnswer, CodeCall, CodeLimits, Given, Paused, Raise, StopCell
from perdure.ports.code import Executor, Repl
from tests.codemode.kit import AT, KINDS, TOOLS, either, go_on, run, tool


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
async def executor(kind: str) -> AsyncIterator[Executor]:
    async with either(kind) as executor:
        yield executor


@pytest.fixture
async def repl(executor: Executor) -> AsyncIterator[Repl]:
    repl = await executor.open()
    yield repl
    await repl.close()


# Calls


async def test_a_call_comes_out_by_the_tools_own_names_and_its_answer_goes_in(repl: Repl) -> None:
    step = await repl.begin("x = 1\nfound = await search('tea', limit=3)\nfound", TOOLS, at=AT, seed="s")

    assert step == Paused((CodeCall(0, "search", {"query": "tea", "limit": 3}, line=2),))
    assert await repl.resume(Given(0, ["a", {"b": None}])) == CellEnd(value="['a', {'b': None}]")


async def test_a_tool_of_a_namespace_is_called_through_it(repl: Repl) -> None:
    ran = await run(repl, "await github.list_issues('tea', from_={'a-b': 1})")

    assert ran.told == [("github.list-issues", {"repo": "tea", "from": {"a-b": 1}})]
    assert ran.end.value == "'github.list-issues0'"

    again = await run(repl, "f = github.list_issues\nawait f('x')")
    assert again.told == [("github.list-issues", {"repo": "x"})]


async def test_a_namespace_with_the_name_of_a_module_leaves_that_to_those_who_import_it(repl: Repl) -> None:
    code = "import datetime\nday = datetime.datetime.strptime('2020-02-01', '%Y-%m-%d')\nawait calendar_.create('x')"
    step = await repl.begin(code, [tool("calendar.create", "title:string")], at=AT, seed="s")

    assert isinstance(step, Paused), step
    assert (step.calls[0].name, step.calls[0].args) == ("calendar.create", {"title": "x"})


async def test_gather_lets_calls_out_at_once_and_takes_answers_in_any_order(repl: Repl) -> None:
    code = "import asyncio\nawait asyncio.gather(search('a'), search('b'), pay(3))"
    step = await repl.begin(code, TOOLS, at=AT, seed="s")

    assert isinstance(step, Paused)
    assert [call.number for call in step.calls] == [0, 1, 2]
    assert await repl.resume(Given(2, "C")) == Paused()
    assert await repl.resume(Given(0, "A")) == Paused()
    assert await repl.resume(Given(1, "B")) == CellEnd(value="['A', 'B', 'C']")


async def test_a_branch_that_can_go_on_does_before_the_next_answer(repl: Repl) -> None:
    code = """
import asyncio
async def both(word):
    first = await search(word)
    return await search(first)
await asyncio.gather(both('a'), both('b'))
"""
    step = await repl.begin(code, TOOLS, at=AT, seed="s")
    second = await repl.resume(Given(1, "later"))

    assert isinstance(step, Paused)
    assert isinstance(second, Paused)
    assert [(call.number, call.args["query"]) for call in step.calls] == [(0, "a"), (1, "b")]
    assert [(call.number, call.args["query"]) for call in second.calls] == [(2, "later")]
    assert repl.paused is not None
    assert [call.number for call in repl.paused.calls] == [0, 2]


async def test_the_answer_to_a_call_of_a_failed_gather_is_taken_and_changes_nothing(repl: Repl) -> None:
    code = """
import asyncio
try:
    await asyncio.gather(search('a'), search('b'))
except Exception as error:
    print(error)
await search('c')
"""
    await repl.begin(code, TOOLS, at=AT, seed="s")
    after = await repl.resume(Raise(0, "failed", "no"))

    assert after == Paused((CodeCall(2, "search", {"query": "c"}, line=7),), "no\n")
    assert await repl.resume(Given(1, "late")) == Paused()
    assert await repl.resume(Given(2, "done")) == CellEnd(value="'done'")


async def test_a_cell_ends_when_every_call_has_its_answer(repl: Repl) -> None:
    step = await repl.begin(
        "import asyncio\nx = search('a')\ny = search('b')\nawait y", TOOLS, at=AT, seed="s", check=False
    )

    assert isinstance(step, Paused)
    assert await repl.resume(Given(1, "b")) == Paused()
    assert await repl.resume(Given(0, "a")) == CellEnd(value="'b'")


KEPT_CALLS = {
    "without an answer": "early = search('a')\nkept = 1",
    "answered meanwhile": "early = search('a')\nawait search('b')\nkept = 1",
    "awaited": "early = search('a')\nawait early\nkept = 1",
    "of a cell that failed": "early = search('a')\nkept = 1\nawait search('b')\n1 / 0",
    "in a list": "kept, calls = 1, [search('a'), search('b')]\nawait calls[1]\nearly = 0",
    "in a dict of tuples": "kept, calls = 1, [{'a': (0, search('a'))}]\nawait search('b')\ncalls = calls[0]['a']",
    "gathered": "import asyncio\nkept, early = 1, asyncio.gather(search('a'), search('b'))\nawait search('c')",
}


@pytest.mark.parametrize("code", KEPT_CALLS.values(), ids=KEPT_CALLS.keys())
async def test_an_await_on_a_call_of_an_earlier_cell_raises_at_its_line(repl: Repl, code: str) -> None:
    awaited = "calls[-1]" if "calls" in code else "early"
    await run(repl, code, check=False)
    caught = f"try:\n    await {awaited}\nexcept Exception as error:\n    print(type(error).__name__, error)"

    assert (await run(repl, caught)).printed == f"RuntimeError {EARLIER}\n"
    # The numbers of calls begin anew in each cell: an answer of this one must not reach the earlier one.
    ran = await run(repl, f"late = search('b')\nkept = 2\nx = await {awaited}\nawait late", check=False)
    assert ran.end.error is not None
    assert (ran.end.error.code, ran.end.error.kind, ran.end.error.line) == ("raised", "RuntimeError", 3)
    assert (await run(repl, "kept")).end.value == "2"


async def test_calls_that_cannot_be_told_as_plain_data_raise_at_their_line(repl: Repl) -> None:
    async def raised(code: str) -> str:
        ran = await run(repl, code, check=False)
        assert ran.calls == []
        assert ran.end.error is not None
        return ran.end.error.message.splitlines()[-1]

    assert await raised("await search()") == "TypeError: search() missing required arguments: query"
    assert (
        await raised("await search('a', 1, 2)") == "TypeError: search() takes 2 positional arguments but 3 were given"
    )
    assert (
        await raised("await search('a', query='b')") == "TypeError: search() got multiple values for argument 'query'"
    )
    assert await raised("await search('a', lim=1)") == "TypeError: search() got an unexpected keyword argument 'lim'"
    assert await raised("await search({1})") == "TypeError: a set is not JSON: pass numbers, strings, lists and dicts"
    assert await raised("await search(b'')") == "TypeError: a bytes is not JSON: pass numbers, strings, lists and dicts"
    assert await raised("await search({1: 2})") == "TypeError: a int cannot be a key of a JSON object: use strings"
    assert (await raised("await search(2**64)")).startswith("TypeError: an int of more than 64 bits")
    assert (await raised("await search(float('nan'))")).startswith("TypeError: nan is not JSON")
    assert (await raised("class A:\n    pass\nawait search(A())")).startswith("TypeError: a A is not JSON")
    assert (await raised("x = []\nfor i in range(100):\n    x = [x]\nawait search(x)")).startswith(
        "TypeError: the value is nested deeper"
    )
    assert (await raised("x = ['a' * 1000] * 100\nfor i in range(12):\n    x = [x, x]\nawait search(x)")).startswith(
        "TypeError: the arguments are too large"
    )
    assert await raised("nothing_like_it()") == "NameError: name 'nothing_like_it' is not defined"
    assert await raised("finish(1, 2)") == "TypeError: finish() takes one argument, value"
    assert await raised("await sleep('long')") == "TypeError: sleep() takes a number of seconds"


# Exceptions


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (Raise(0, "failed", "no"), "RuntimeError"),
        (Raise(0, "refused", "no"), "RuntimeError"),
        (Raise(0, "denied", "no"), "PermissionError"),
        (Raise(0, "invalid", "no"), "ValueError"),
    ],
)
async def test_a_call_that_failed_raises_what_except_exception_catches(
    repl: Repl, answer: CodeAnswer, raised: str
) -> None:
    code = "try:\n    await pay(1)\nexcept Exception as error:\n    print(type(error).__name__, error)"

    assert (await run(repl, code, lambda call: answer)).printed == f"{raised} no\n"


async def test_an_unknown_outcome_passes_except_exception(repl: Repl) -> None:
    code = """
for cents in (1, 2, 3):
    try:
        await pay(cents)
    except Exception:
        print('caught')
"""
    ran = await run(repl, code, lambda call: Raise(call.number, "unknown", "it may have been paid"))

    assert len(ran.calls) == 1
    assert ran.printed == ""
    assert ran.end.error is not None
    assert ran.end.error.kind == "BaseException"


async def test_settle_returns_errors_in_their_place(repl: Repl) -> None:
    code = "one, two = await settle(search('a'), pay(1))\n(str(one), isinstance(one, Exception), two)"
    ran = await run(repl, code, lambda call: Raise(0, "failed", "no") if call.number == 0 else Given(1, 7))

    assert ran.end.value == "('no', True, 7)"

    ran = await run(repl, code, lambda call: Raise(0, "unknown", "who knows") if call.number == 0 else Given(1, 7))
    assert ran.end.error is not None
    assert ran.end.error.kind == "BaseException"


async def test_an_error_names_its_line_and_keeps_the_variables_before_it(repl: Repl) -> None:
    await run(repl, "def half(x):\n    return 1 / x")
    ran = await run(repl, "x = 5\ny = half(0)\nz = 6")

    assert ran.end.error is not None
    assert (ran.end.error.code, ran.end.error.kind, ran.end.error.line) == ("raised", "ZeroDivisionError", 2)
    assert ran.end.error.message.splitlines()[1:3] == ['  File "cell", line 2, in <module>', "    y = half(0)"]
    assert not ran.end.error.rolled_back
    assert (await run(repl, "x")).end.value == "5"


@pytest.mark.parametrize(
    "code",
    ["await sleep(True)", "await search(1, 2, 3, 4)", "await search(object)", "x = (", "x = 1\x00", "eval('1 +')"],
)
async def test_an_error_shows_no_file_of_the_host(repl: Repl, code: str) -> None:
    ran = await run(repl, code, check=False)

    assert ran.end.error is not None
    assert "codemode" not in ran.end.error.message
    assert "ast.py" not in ran.end.error.message


@pytest.mark.parametrize(("code", "line"), [("x = (", 1), ("x = 1\n  y = 2", 2)])
async def test_what_does_not_parse_runs_in_no_part(repl: Repl, code: str, line: int) -> None:
    ran = await run(repl, code)

    assert ran.end.error is not None
    assert (ran.end.error.code, ran.end.error.line, ran.end.error.rolled_back) == ("syntax", line, True)


@pytest.mark.parametrize(
    ("code", "value", "told"),
    [
        ("def f():\n    yield 1\nlist(f())", "[1]", "line 2: This Python has no yield expressions: write it"),
        ("x = [1, 2]\ndel x[0]\nx", "[2]", "line 2: This Python has no 'del' statement: write it"),
    ],
)
async def test_syntax_that_only_one_of_them_has_is_told_or_runs(
    repl: Repl, kind: str, code: str, value: str, told: str
) -> None:
    ran = await run(repl, code)

    if kind == "cpython":
        assert ran.end == CellEnd(value=value)
    else:
        assert ran.end.error is not None
        assert (ran.end.error.code, ran.end.error.line, ran.end.error.rolled_back) == ("syntax", 2, True)
        assert ran.end.error.message.startswith(told)


# Finish


async def test_finish_stops_the_cell_at_its_line_and_variables_stay(repl: Repl) -> None:
    ran = await run(repl, "x = 1\nfinish({'a': x})\nx = 2\nprint('never')", lambda call: StopCell(call.number))

    assert ran.calls == [CodeCall(0, "finish", {"value": {"a": 1}}, line=2, sync=True)]
    assert ran.end == CellEnd()
    assert ran.printed == ""
    assert (await run(repl, "x")).end.value == "1"


async def test_a_finish_that_does_not_fit_raises_at_its_line(repl: Repl) -> None:
    code = "try:\n    finish('x')\nexcept ValueError as error:\n    print(error)\nfinish(3)"
    ran = await run(
        repl, code, lambda call: StopCell(1) if call.number else Raise(0, "invalid", "a number was asked for")
    )

    assert [call.args for call in ran.calls] == [{"value": "x"}, {"value": 3}]
    assert ran.printed == "a number was asked for\n"
    assert ran.end.error is None


async def test_code_that_catches_the_stop_makes_no_more_calls(repl: Repl) -> None:
    code = """
import asyncio
while True:
    try:
        finish(1)
    except BaseException:
        break
await search('later')
"""
    ran = await run(repl, code, lambda call: StopCell(call.number))

    assert [call.name for call in ran.calls] == ["finish"]
    assert ran.end == CellEnd()


async def test_finish_beside_calls_in_flight_drops_them(repl: Repl) -> None:
    code = """
import asyncio
async def first(word):
    finish(await search(word))
await asyncio.gather(first('a'), search('b'))
"""
    await repl.begin(code, TOOLS, at=AT, seed="s")
    step = await repl.resume(Given(1, "A"))  # `search('b')` came out first: `first` runs when it is awaited

    assert step == Paused((CodeCall(2, "finish", {"value": "A"}, line=4, sync=True),))
    assert await repl.resume(StopCell(2)) == CellEnd()
    assert repl.paused is None


# Variables and output


async def test_variables_functions_and_imports_stay_for_later_cells(repl: Repl) -> None:
    await run(repl, "import json\nx = [1, 2]\ndef double(y):\n    return y * 2")
    ran = await run(repl, "x.append(3)\njson.dumps(double(x))")

    assert ran.end.value == "'[1, 2, 3, 1, 2, 3]'"
    assert repl.names == ("json", "x", "double")
    described = {each.name: (each.type, each.size) for each in await repl.variables()}
    assert described == {"json": ("module", None), "x": ("list", 3), "double": ("function", None)}


async def test_output_comes_with_the_step_in_which_it_was_printed(repl: Repl) -> None:
    ran = await run(repl, "print('one')\nawait search('a')\nprint('two', end='')\nNone")

    assert [step.printed for step in ran.steps] == ["one\n", "two"]
    assert ran.end.value is None


async def test_the_last_expression_is_shown_as_python_shows_it_and_cut_where_it_has_no_end(repl: Repl) -> None:
    shown = {
        "'tea'": "'tea'",
        "{1: {2, 3}, 'x': (4,)}": "{1: {2, 3}, 'x': (4,)}",
        "set()": "set()",
        "b'x'": "b'x'",
        "2 ** 70": "1180591620717411303424",
    }
    for code, text in shown.items():
        assert (await run(repl, code)).end.value == text

    endless = await run(repl, "x = ['tea']\nfor i in range(60):\n    x = [x, x]\nx")
    assert endless.end.value is not None
    assert endless.end.value.startswith("[[[[")
    long = await run(repl, "['tea' * 1000] * 100_000")
    assert long.end.value is not None
    assert long.end.value.endswith(" … (cut)")


# Clock, sleep, random numbers


async def test_the_clock_reads_what_the_caller_says_and_never_goes_back(repl: Repl) -> None:
    code = """
import time, datetime
print(time.time(), datetime.datetime.now(), datetime.datetime.now(datetime.timezone.utc).isoformat(), time.monotonic())
await search('a')
print(time.time(), datetime.date.today())
await search('b')
print(time.time())
"""
    step = await repl.begin(code, TOOLS, at=AT, seed="s")
    later = await repl.resume(Given(0), at=AT + 86_400_500)
    end = await repl.resume(Given(1), at=AT)

    assert step.printed == "1700000000.0 2023-11-14 22:13:20 2023-11-14T22:13:20+00:00 1700000000.0\n"
    assert later.printed == "1700086400.5 2023-11-15\n"
    assert end.printed == "1700086400.5\n"


async def test_every_way_to_sleep_is_a_call(repl: Repl) -> None:
    code = "import asyncio, time\nawait sleep(1)\nawait asyncio.sleep(2)\ntime.sleep(3)\nnap = time.sleep\nnap(4)"
    ran = await run(repl, code)

    assert [(call.name, call.args["seconds"], call.sync) for call in ran.calls] == [
        ("sleep", 1, False),
        ("sleep", 2, False),
        ("sleep", 3, True),
        ("sleep", 4, True),
    ]


async def test_random_numbers_come_from_the_seed(executor: Executor) -> None:
    code = "import os, random\n(random.random(), random.sample(range(100), 3), os.urandom(4))"
    first, same, other = [
        (await run(await executor.open(), code, seed=seed)).end.value for seed in ("one", "one", "two")
    ]

    assert first == same
    assert first != other


# Cells that are dropped


async def test_a_rollback_leaves_the_variables_as_before_the_cell(repl: Repl) -> None:
    await run(repl, "x = 1")
    await repl.begin("x = 2\nawait search('a')\nx = 3", TOOLS, at=AT, seed="s")
    await repl.rollback()

    assert repl.paused is None
    assert (await run(repl, "x")).end.value == "1"


async def test_a_cancel_ends_code_that_never_waits(repl: Repl) -> None:
    await run(repl, "x = 1")
    running = asyncio.create_task(repl.begin("x = 2\nwhile True:\n    pass", TOOLS, at=AT, seed="s"))
    done, _ = await asyncio.wait([running], timeout=0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await repl.rollback()

    assert not done
    assert (await run(repl, "x")).end.value == "1"


@pytest.mark.slow
async def test_a_cell_that_runs_too_long_is_as_if_it_had_not_run(kind: str) -> None:
    codes = [
        "while True:\n    pass",
        "sum(range(10 ** 12))",
        "try:\n    while True:\n        pass\nexcept BaseException:\n    pass",
        "import time\nwhile time.time() < 9e9:\n    pass",
        "import asyncio\nwhile True:\n    await search('a')\n    y = sum(range(10 ** 6))",  # counted over all its steps
    ]
    # Time enough for the cells that must not reach it, on a machine that does much else.
    async with either(kind, limits=CodeLimits(seconds=1.5, calls=2**31), workers=len(codes)) as executor:
        repls = [await executor.open() for _ in codes]
        for repl in repls:
            await run(repl, "x = 1")
        ran = await asyncio.gather(*[run(repl, f"x = 2\n{code}") for repl, code in zip(repls, codes, strict=True)])

        errors = [each.end.error for each in ran]
        assert [(error.which, error.rolled_back) for error in errors if error] == [("time", True)] * len(codes)
        assert [(await run(repl, "x")).end.value for repl in repls] == ["1"] * len(codes)


@pytest.mark.parametrize(
    ("which", "limits", "code"),
    [
        ("memory", CodeLimits(memory=20_000_000), "y = []\nwhile True:\n    y.append('tea' * 100)"),
        ("memory", CodeLimits(memory=20_000_000), "'tea' * 10 ** 9"),
        ("memory", CodeLimits(memory=20_000_000), "1 << 10 ** 11"),
        ("output", CodeLimits(output=10_000), "while True:\n    print('tea' * 100)"),
        (
            "output",
            CodeLimits(output=10_000),
            "try:\n    while True:\n        print('tea')\nexcept BaseException:\n    pass",
        ),
        ("state", CodeLimits(state=100_000), "y = [await search('a'), list(range(100_000))]"),
        ("calls", CodeLimits(calls=3), "import asyncio\nawait asyncio.gather(*[search('a') for i in range(9)])"),
    ],
)
async def test_a_cell_that_reaches_a_limit_is_as_if_it_had_not_run(
    kind: str, which: str, limits: CodeLimits, code: str
) -> None:
    async with either(kind, limits=limits) as executor:
        repl = await executor.open()
        await run(repl, "x = 1")
        ran = await run(repl, f"x = 2\n{code}", lambda call: Given(call.number, "tea" * 100_000))

        assert ran.end.error is not None
        assert (ran.end.error.code, ran.end.error.which, ran.end.error.rolled_back) == ("limit", which, True)
        assert len(ran.end.printed) <= limits.output
        assert (await run(repl, "x")).end.value == "1"


async def test_misuse_is_our_own_mistake(repl: Repl) -> None:
    with pytest.raises(InternalError):
        await repl.resume(Given(0))
    await repl.begin("await search('a')", TOOLS, at=AT, seed="s")
    with pytest.raises(InternalError):
        await repl.begin("1", TOOLS, at=AT, seed="s")
    with pytest.raises(InternalError):
        await repl.resume(Given(1))
    await repl.resume(Given(0))
    with pytest.raises(InternalError):
        await repl.resume(Given(0))


async def test_a_tool_that_is_gone_is_no_name_any_more(repl: Repl) -> None:
    await run(repl, "find = search")
    ran = await run(repl, "await find('a')", tools=[tool("other")])

    assert ran.end.error is not None
    assert ran.end.error.message.endswith("NameError: name 'search' is not defined")


async def test_a_paused_cell_says_what_it_waits_for(repl: Repl) -> None:
    step = await repl.begin("await search('a')", TOOLS, at=AT, seed="s")

    assert repl.paused == step
    ran = await go_on(repl, step)
    assert ran.end.value == "'search0'"
    assert repl.paused is None


# Python as it is


def doubled(call: CodeCall) -> CodeAnswer:
    if call.name != "pay":
        return Given(call.number, f"<{call.args.get('query')}>")
    cents = call.args["cents"]
    return Given(call.number, cents * 2) if cents >= 0 else Raise(call.number, "failed", f"no {cents}")


PAY_TWICE = "async def f(x=await pay(1)):\n    return x\n(await f(), await f(), await f(5))"
GLOBAL_SUM = """
import asyncio
n = 1
async def add(cents):
    global n
    n += await pay(cents)
await asyncio.gather(add(1), add(2))
n
"""
FINALLY_RETURN = """
async def f():
    try:
        return await pay(1)
    finally:
        print(await search('bye'))
await f()
"""
FINALLY_FAILED = """
log = []
try:
    try:
        await pay(-1)
    finally:
        log.append(await pay(1))
except Exception as error:
    log.append(str(error))
log
"""
FINALLY_LOOP = """
out = []
for i in range(4):
    try:
        if i == 1:
            continue
        if i == 3:
            break
        out.append(await pay(i))
    finally:
        out.append(i)
out
"""
WRAPPED = """
def logged(tool):
    async def call(*given):
        print('call', *given)
        return await tool(*given)
    return call
paid = logged(pay)
await paid(2)
"""
RECURSIVE = "async def down(n):\n    return [] if n == 0 else [await pay(n)] + await down(n - 1)\nawait down(3)"
RETRIED = """
for n in (-2, 3):
    try:
        r = await pay(n)
        break
    except Exception as error:
        print(error)
r
"""


@pytest.mark.parametrize(
    ("cells", "value", "printed"),
    [
        (["d = {'a': 1}\nd['a'] += await pay(2)\nd"], "{'a': 5}", ""),
        (["class C:\n    def __init__(self):\n        self.n = 1\nc = C()", "c.n += await pay(1)\nc.n"], "3", ""),
        ([GLOBAL_SUM], "5", ""),  # both read `n` before they wait
        (["x = 'kept'\nr = [x for x in range(3)]\n(x, r)"], "('kept', [0, 1, 2])", ""),
        (["[[await pay(i + j) for j in range(2)] for i in range(2)]"], "[[0, 2], [2, 4]]", ""),
        (["{await search(w): await pay(i) for i, w in enumerate('ab')}"], "{'<a>': 0, '<b>': 2}", ""),
        (["[i for i in range(4) if await pay(i) > 2]"], "[2, 3]", ""),
        ([FINALLY_RETURN], "2", "<bye>\n"),
        ([FINALLY_FAILED], "[2, 'no -1']", ""),
        ([FINALLY_LOOP], "[0, 0, 1, 4, 2, 3]", ""),
        ([PAY_TWICE], "(2, 2, 5)", ""),
        ([RECURSIVE], "[6, 4, 2]", ""),
        (["k = 1\ndef f():\n    return k", "k = 5\nf()"], "5", ""),
        (["def f():\n    return 1\ndef g():\n    return f()", "def f():\n    return 2\ng()"], "2", ""),
        (["def f(x, seen=[]):\n    seen.append(x)\n    return seen\nf(1)", "f(2)"], "[1, 2]", ""),
        (["f'{await search(\"a\")} and {await pay(3):03d}'"], "'<a> and 006'", ""),
        (["0 <= await pay(1) < 3 <= 3, 0 > 1 > await pay(-1), '' and await pay(-1)"], "(True, False, '')", ""),
        (["def f(a, b):\n    return a, b\nf(b=await pay(1), a=await pay(2))"], "(4, 2)", ""),
        ([WRAPPED], "4", "call 2\n"),
        (["table = {'p': pay}", "await table['p'](4)"], "8", ""),
        (["r = []\nwhile (n := await pay(len(r))) < 4:\n    r.append(n)\nr"], "[0, 2]", ""),
        ([RETRIED], "6", "no -2\n"),
    ],
)
async def test_code_around_calls_does_what_python_does(repl: Repl, cells: list[str], value: str, printed: str) -> None:
    *before, last = cells
    for cell in before:
        await run(repl, cell, doubled)
    ran = await run(repl, last, doubled)

    assert ran.end.error is None, ran.end.error
    assert (ran.end.value, ran.printed) == (value, printed)
