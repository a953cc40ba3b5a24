"""What is seen of cells: live events, and what a model is told of its variables."""

import asyncio
from collections.abc import Mapping
from typing import Any

from perdure import Agent, ToolCall, tool
from perdure.codemode import run_code
from perdure.model.event import CellFinished, CellStarted, ToolFinished, ToolStarted
from perdure.model.message import Message
from perdure.model.plugin import CompactedHistory
from perdure.model.tool import Failed, Ok
from perdure.plugins.hooks import CompactContext, Plugin
from perdure.testing import ScriptedModel, VirtualClock
from tests.kit import SOON, Place
from tests.tools.coding import cell, coder


@tool
async def double(n: int) -> int:
    """Twice as much."""
    return 2 * n


@tool(approval="ask")
async def sign() -> str:
    """Sign."""
    return "signed"


def names(events: list[Any]) -> list[tuple[str, str]]:
    """The events of cells and calls, with the ids that they are about."""
    about = CellStarted | CellFinished | ToolStarted | ToolFinished
    return [
        (type(each).__name__, each.cell_id if isinstance(each, CellStarted | CellFinished) else each.call_id)
        for each in events
        if isinstance(each, about)
    ]


async def test_events_of_a_cell_stand_around_those_of_its_calls(place: Place) -> None:
    agent = coder(cell("x = await double(4)\nprint(x)"), cell("1 / 0"), "done", tools=[double])
    async with place.runtime(agent) as runtime, (await runtime.session("s")).stream("go") as turn:
        events = [event async for event in turn]

    assert names(events) == [
        ("CellStarted", "s.1.1"),
        ("ToolStarted", "s.1.1.0"),
        ("ToolFinished", "s.1.1.0"),
        ("CellFinished", "s.1.1"),
        ("CellStarted", "s.1.2"),
        ("CellFinished", "s.1.2"),
    ]
    started = [each for each in events if isinstance(each, CellStarted)]
    ended = [each.outcome for each in events if isinstance(each, CellFinished)]
    assert [(each.code, each.resumed) for each in started] == [
        ("x = await double(4)\nprint(x)\n", False),
        ("1 / 0\n", False),
    ]
    assert ended[0] == Ok({"output": "8"})
    assert isinstance(ended[1], Failed)


class Lines:
    """A trace sink that keeps what is about cells."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any]] = []

    def write(self, name: str, payload: Mapping[str, Any]) -> None:
        if name.startswith("cell."):
            self.kept.append((name, payload["payload"]))


async def test_trace_tells_what_a_cell_called_and_how_it_ended_and_nothing_that_it_was_given(place: Place) -> None:
    agent = coder(cell("x = await double(4)\nawait sign()"), "done", tools=[double, sign])
    lines = Lines()
    async with place.runtime(agent, trace=lines) as runtime:
        session = await runtime.session("s")
        await session.run("go")
        await session.reject("s.1.1.1", "secret reason")
        await session.result("s.1")

    begun, on, ended = lines.kept
    assert begun == ("cell.started", {"cell_id": "s.1.1", "resumed": False})
    assert on == ("cell.started", {"cell_id": "s.1.1", "resumed": True})
    assert ended == (
        "cell.ended",
        {
            "cell_id": "s.1.1",
            "outcome": "failed",
            "calls": [
                {"call_id": "s.1.1.0", "tool": "double", "outcome": "ok"},
                {"call_id": "s.1.1.1", "tool": "sign", "outcome": "denied"},
            ],
            "more_calls": 0,
        },
    )


async def test_events_of_run_code_are_those_of_a_cell(place: Place) -> None:
    answers = [[ToolCall("c", "run_code", {"code": "await double(4)"})], "done"]
    agent = Agent(ScriptedModel(answers), tools=[double, run_code])
    async with place.runtime(agent) as runtime, (await runtime.session("s")).stream("go") as turn:
        events = [event async for event in turn]

    assert names(events) == [
        ("CellStarted", "s.1.1.0"),
        ("ToolStarted", "s.1.1.0.0"),
        ("ToolFinished", "s.1.1.0.0"),
        ("CellFinished", "s.1.1.0"),
    ]


async def test_cell_that_goes_on_after_an_approval_says_so(place: Place) -> None:
    # A clock that stands still: the turn goes on because of the answer, and not because somebody looks for open turns.
    agent = coder(cell("await sign()"), "done", tools=[sign])
    async with place.runtime(agent, clock=VirtualClock()) as runtime:
        session = await runtime.session("s")
        async with session.stream("go") as turn:
            first = [event async for event in turn]
        await session.approve("s.1.1.0")
        seen: list[Any] = []
        async with asyncio.timeout(SOON):
            async for event in session.observe(first[-1].cursor):
                seen.append(event)
                if isinstance(event, CellFinished):
                    break

    assert [each.resumed for each in [*first, *seen] if isinstance(each, CellStarted)] == [False, True]


class Forgetful(Plugin):
    """Begins every turn but the first with one message in place of the past."""

    id = "forgetful"

    def compact(self, ctx: CompactContext) -> CompactedHistory | None:
        return CompactedHistory((Message("user", "Long ago."),), reason="long") if ctx.messages else None


VARIABLES = "[Variables of your earlier code, with the lengths of some: "


async def test_after_compaction_the_model_is_told_its_variables_also_in_a_fork_elsewhere(place: Place) -> None:
    seen: list[Any] = []
    cells = [cell("a = await double(4)\nrows = [a] * 3\nname = 'x'"), "one"]
    async with place.runtime(coder(*cells, tools=[double], plugins=[Forgetful()])) as runtime:
        session = await runtime.session("s")
        await session.run("first")
        branch = (await session.fork()).id
    more = ["two", cell("print(a, rows)"), "three", "four"]
    async with place.runtime(coder(*more, seen=seen, tools=[double], plugins=[Forgetful()])) as runtime:
        session = await runtime.session("s")
        await session.run("second")
        result = await session.run("third")
        await (await runtime.session(branch)).run("elsewhere")

    told = [[m.text for m in messages if m.text.startswith(VARIABLES)] for messages in seen]
    listed = f"{VARIABLES}a: int, rows: list (3), name: str (1)]"
    assert told == [[listed], [listed], [listed], [listed]]
    assert result.new_messages[2].text == "Output of the cell:\n8 [8, 8, 8]"


async def test_session_without_cells_is_told_of_no_variables(place: Place) -> None:
    seen: list[Any] = []
    async with place.runtime(coder("one", "two", seen=seen, tools=[double], plugins=[Forgetful()])) as runtime:
        session = await runtime.session("s")
        await session.run("first")
        await session.run("second")

    assert [m.text for m in seen[1] if m.role == "user"] == ["Long ago.", "second"]
