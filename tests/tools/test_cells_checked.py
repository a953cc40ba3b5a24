"""What is refused of cells, and what a call of a cell promises, as a turn shows it."""

import asyncio
from typing import Any

import pytest

from perdure import tool
from perdure.model.outcome import Finished
from perdure.model.tool import Failed, Ok
from tests.kit import Place
from tests.tools.coding import cell, coder, outputs


class Purse:
    """A tool that notes what was paid."""

    def __init__(self) -> None:
        self.paid: list[int] = []

        @tool
        async def pay(n: int, note: str = "") -> int:
            """Pay."""
            self.paid.append(n)
            return n

        self.tool = pay


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (cell("await pay(1)\nif True print('x')"), "line 2"),
        (cell("await pay(1)\nprint(nowhere)"), "nowhere"),
        (cell("await pay(1)\nawait pya(2)"), "pya"),
        (cell("await pay(1)\nawait pay('one')"), "pay"),
        (cell("await pay(1)\nawait pay()"), "pay"),
        (cell("await pay(1)\nawait pay(1, amount=2)"), "amount"),
        (cell("await pay(1)\npay(2)"), "await"),
        ("```bash\npay 1\n```", "Only Python is run here, and the answer has code in bash"),
        ("```javascript\nawait pay(1)\n```\nand\n```sh\npay 1\n```", "code in javascript, sh"),
        ("```python\nawait pay(1)", "The code block is not closed"),
    ],
    ids=[
        "syntax",
        "an unknown name",
        "an unknown tool",
        "an argument that does not fit",
        "a missing argument",
        "an unknown argument",
        "a call without await",
        "another language",
        "two other languages",
        "half a fence",
    ],
)
async def test_answer_that_cannot_be_run_runs_in_no_part_and_the_model_is_told(
    place: Place, said: str, told: str
) -> None:
    purse, seen = Purse(), list[Any]()
    async with place.runtime(coder(said, "I see.", seen=seen, tools=[purse.tool])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert (purse.paid, result.tool_calls) == ([], [])
    assert result.outcome == Finished("I see.")
    assert told in seen[1][-1].text


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("await pay(1)\nawait pay(object())", "line 2"),
        ("await pay(1)\nawait pay({1, 2})", "pay"),
        ("await pay(1)\nawait pay(n=2, note=print)", "pay"),
    ],
    ids=["an object", "a set", "a function"],
)
async def test_value_that_is_no_json_raises_at_its_line_and_nothing_is_called(
    place: Place, code: str, told: str
) -> None:
    purse = Purse()
    async with place.runtime(coder(cell(code), "I see.", tools=[purse.tool])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert purse.paid in ([], [1])  # where the check knows the type, none of it has run
    assert len(result.tool_calls) == len(purse.paid)
    assert told in outputs(result.messages)[0]


async def test_of_several_fences_the_first_is_run(place: Place) -> None:
    purse = Purse()
    said = f"{cell('await pay(1)')}\nand then\n{cell('await pay(2)')}"
    async with place.runtime(coder(said, "done", tools=[purse.tool])) as runtime:
        await (await runtime.session("s")).run("go")

    assert purse.paid == [1]


async def test_finish_that_does_not_fit_and_is_not_caught_is_told_and_the_turn_goes_on(place: Place) -> None:
    agent = coder(cell("finish('words')"), cell("finish([1])"), tools=[Purse().tool], output=list[int])
    async with place.runtime(agent) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert result.output == [1]
    assert [(call.tool, type(call.outcome)) for call in result.tool_calls] == [("finish", Failed), ("finish", Ok)]
    assert "line 1" in outputs(result.messages)[0]


async def test_cell_ends_when_every_call_that_it_started_has_an_outcome(place: Place) -> None:
    """A call that it does not await to the end is not left behind."""
    purse = Purse()
    code = "later = [pay(2)]\nprint(await pay(1))"
    async with place.runtime(coder(cell(code), "done", tools=[purse.tool])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert sorted(purse.paid) == [1, 2]
    assert [type(call.outcome) for call in result.tool_calls] == [Ok, Ok]
    assert outputs(result.messages) == ["Output of the cell:\n1"]


async def test_values_are_as_json_gives_them_back(place: Place) -> None:
    @tool
    async def pair() -> tuple[int, dict[int, str]]:
        """Pair."""
        return (1, {2: "x"})

    async with place.runtime(coder(cell("print(await pair())"), "done", tools=[pair])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert outputs(result.messages) == ["Output of the cell:\n[1, {'2': 'x'}]"]


async def test_clock_and_random_numbers_are_the_same_when_a_cell_is_run_again(place: Place) -> None:
    """The store in memory has no key, so nothing that was saved is loaded by another Runtime."""
    code = "import random, time\nawait pay(1)\nseen = [time.time(), random.random()]\nprint(seen)"
    async with place.runtime(coder(cell(code), "one", tools=[Purse().tool])) as runtime:
        first = await (await runtime.session("s")).run("go")
    purse = Purse()
    async with place.runtime(coder(cell("print(seen)"), "two", tools=[purse.tool])) as runtime:
        again = await (await runtime.session("s")).run("go")

    assert outputs(first.messages) == outputs(again.new_messages)
    assert purse.paid == []


async def test_calls_at_once_are_within_the_limit_of_their_tool(place: Place) -> None:
    running, most = 0, 0

    @tool(limit=1)
    async def alone(n: int) -> int:
        """Alone."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return n

    code = "import asyncio\nprint(await asyncio.gather(*[alone(n) for n in range(4)]))"
    async with place.runtime(coder(cell(code), "done", tools=[alone])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert most == 1
    assert outputs(result.messages) == ["Output of the cell:\n[0, 1, 2, 3]"]


async def test_settle_gives_failures_in_their_place(place: Place) -> None:
    @tool
    async def fail(n: int) -> int:
        """Fail."""
        if n:
            raise ValueError(f"no {n}")
        return n

    code = "print([type(each).__name__ for each in await settle(fail(0), fail(1))])"
    async with place.runtime(coder(cell(code), "done", tools=[fail])) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert outputs(result.messages) == ["Output of the cell:\n['int', 'RuntimeError']"]
