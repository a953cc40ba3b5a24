"""What a listing shows of a session besides its state: a title in any case, and the error of its last turn."""

from __future__ import annotations

import pytest

from perdure import Agent, ModelRequest
from perdure.builtin.redaction import InputRedaction, Pattern, Redactor
from perdure.errors import ProviderError
from perdure.model.message import Message, Text
from perdure.model.session import TurnError, made_title
from perdure.testing import FunctionModel, VirtualClock
from tests.kit import Place


def echo() -> Agent[str]:
    return Agent(FunctionModel(lambda request: f"heard {request.messages[-1].text}"), name="a")


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("Where is my parcel?", "Where is my parcel?"),
        ("\n \t\nWhere is it?\nAnd why?", "Where is it?"),
        ("a\tb\x00c\x1b[31mred\u202eevil\u200b", "a b c [31mred evil"),
        ("👩\u200d🚀 on the way", "👩\u200d🚀 on the way"),
        ("\u200d\u200c\nwords", "words"),
        ("", ""),
        ("\x00\x01\n\u2028", ""),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * 79 + "…"),
        ("word " * 40, "word " * 15 + "word…"),
        ("one " + "x" * 200, "one " + "x" * 75 + "…"),
        ("sixteen letters " * 5 + "more", "sixteen letters " * 4 + "sixteen letters…"),
    ],
)
def test_a_title_is_the_first_line_that_says_something(said: str, title: str) -> None:
    assert made_title(Message("user", (Text(said),))) == title
    assert len(title) <= 80


async def test_a_session_is_listed_under_its_first_input_unless_the_host_gives_it_a_title(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("s")
        await session.run("Where is my parcel?\nIt is late.")
        await session.run("And the other one?")
        [made] = await runtime.sessions.list()
        await session.update(title="The parcels")
        [given] = await runtime.sessions.list()
        await session.update(title="")
        [taken] = await runtime.sessions.list()

    assert (made.title, given.title, taken.title) == (
        "Where is my parcel?",
        "The parcels",
        "Where is my parcel?",
    )


async def test_a_long_first_input_is_cut_for_the_title(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        await (await runtime.session("s")).run("parcels " * 20_000)
        [row] = await runtime.sessions.list()

    assert row.title == "parcels " * 9 + "parcels…"


async def test_a_fork_is_listed_under_what_was_said_in_it(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        session = await runtime.session("s")
        await session.run("Where is my parcel?")
        fork = await session.fork(session_id="f")
        silent = {row.id: row.title for row in await runtime.sessions.list()}
        await fork.run("Now elsewhere")
        spoken = {row.id: row.title for row in await runtime.sessions.list()}

    assert silent == {"s": "Where is my parcel?", "f": ""}
    assert spoken == {"s": "Where is my parcel?", "f": "Now elsewhere"}


def failing(request: ModelRequest) -> str:
    if "fail" in request.messages[-1].text:
        raise ProviderError("no such model", code="not_found", retryable=False)
    return "ok"


async def test_the_error_of_the_last_turn_is_listed_until_a_turn_succeeds(place: Place) -> None:
    clock = VirtualClock()
    async with place.runtime(Agent(FunctionModel(failing), name="a"), clock=clock) as runtime:
        session = await runtime.session("s")
        await session.run("hello")
        [before] = await runtime.sessions.list()
        await session.run("fail")
        [failed] = await runtime.sessions.list()
        await session.run("go on")
        [after] = await runtime.sessions.list()

    assert failed.error == TurnError("s.2", "provider_failed", "not_found: no such model", failed.updated)
    assert (before.error, after.error) == (None, None)


SECRETS = Redactor(patterns=[Pattern("password", r"hunter2")])


async def test_what_a_filter_takes_out_is_in_no_title_and_found_by_no_search(place: Place) -> None:
    agent = Agent(FunctionModel(lambda request: "noted"), name="a", plugins=[InputRedaction(SECRETS)])
    async with place.runtime(agent, search=True) as runtime:
        await (await runtime.session("s")).run("my password is hunter2 today")
        [row] = await runtime.sessions.list()
        found = await runtime.sessions.search("hunter2")
        kept = await runtime.sessions.search("password")

    assert row.title.startswith("my password is ")
    assert "hunter2" not in row.title
    assert (found.hits, [each.node_id for each in kept.hits]) == ((), ["s.1.0"])
