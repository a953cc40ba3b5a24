"""`@process`: what can be wrong with a definition is said when it is made, and with a start when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perdure import ProcessContext, Runtime, process
from perdure.errors import InvalidDefinition, InvalidInput, InvalidProcess
from perdure.model.process import EventType
from tests.kit import Place, untyped
from tests.processes.functions import living, memory, result

__all__ = ["memory"]

Ctx = ProcessContext[Any]


async def fine(ctx: Ctx, day: str, limit: int = 5) -> list[Any]:
    return [day, limit]


async def no_context(day: str) -> str:
    return day


def not_async(ctx: Ctx) -> None: ...


NOT_ASYNC: Any = not_async


class NoJson:
    def __init__(self, anything: Any) -> None: ...


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: process(NOT_ASYNC), "decorate an `async def` once"),
    (lambda: process(process(fine)), "decorate an `async def` once"),
    (lambda: untyped(process)(no_context), "annotate one as `ctx: ProcessContext`"),
    (lambda: process(name="no spaces")(fine), "as its name"),
    (lambda: process(name="")(fine), "as its name"),
    (lambda: process(version="")(fine), "is not usable: give a short text"),
    (lambda: process(version="1@2")(fine), "is not usable: give a short text"),
    (lambda: process(max_attempts=0)(fine), "give 1 or more, or None"),
    (lambda: process(signals={"": int})(fine), "a signal needs a name"),
    (lambda: process(signals={"go": NoJson})(fine), "NoJson"),
    (lambda: process(events=["process.completed"])(fine), "are reserved"),
    (lambda: process(events=["signal.go"])(fine), "are reserved"),
    (lambda: process(events=[EventType("")])(fine), "cannot be an event"),
]


@pytest.mark.parametrize(("make", "advice"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_a_definition_that_cannot_work_is_refused_with_advice(make: Callable[[], Any], advice: str) -> None:
    with pytest.raises(InvalidDefinition, match=advice):
        make()


def test_a_definition_says_what_it_is() -> None:
    made = process(version="2", signals={"go": int}, events=["told"])(fine)

    assert (made.name, made.definition, made.__name__) == ("fine", "fine@2", "fine")
    assert [each.name for each in made.events] == ["signal.go", "told"]
    assert made.open_signals is False
    assert made.input_schema["required"] == ["day"]
    assert repr(made) == "<Process fine@2>"


async def test_two_of_one_name_and_version_are_refused_on_entry() -> None:
    with pytest.raises(InvalidDefinition, match="two processes are 'fine@1'"):
        async with Runtime("memory", processes=[process(fine), process(fine)]):
            pass


async def test_what_is_no_process_is_refused_on_entry() -> None:
    wrong: Any = fine
    with pytest.raises(InvalidDefinition, match="decorate it with @process"):
        async with Runtime("memory", processes=[wrong]):
            pass


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        ({}, "day"),
        ({"day": 7}, "day"),
        ({"day": "monday", "night": 1}, "night"),
        ({"day": object()}, "not JSON"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused_and_nothing_is_begun(
    memory: Place, args: dict[str, Any], advice: str
) -> None:
    async with living(memory, process(fine)) as runtime:
        with pytest.raises(InvalidInput, match=advice):
            await runtime.start("fine", args)

        assert await runtime.processes.list() == []


async def test_it_is_started_by_itself_its_name_or_its_definition(memory: Place) -> None:
    made = process(fine)
    async with living(memory, made) as runtime:
        for what in (made, "fine", "fine@1"):
            assert await result(await runtime.start(what, {"day": "monday"})) == ["monday", 5]
        with pytest.raises(InvalidProcess, match="cannot be started"):
            await runtime.start("fine@2")
        with pytest.raises(InvalidProcess, match="not part of this Runtime"):
            await runtime.start(process(name="other")(fine), {"day": "monday"})


async def test_it_may_be_called_as_if_it_were_not_decorated() -> None:
    context: Any = None

    assert await process(fine)(context, "monday", 3) == ["monday", 3]
