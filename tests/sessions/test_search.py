"""Finding what was said: in every store that keeps an index, from the moment that it is acknowledged until it is
deleted, whoever writes it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime, ToolCall, tool
from perdure.errors import InvalidDefinition, InvalidInput, SearchUnavailable
from perdure.model.search import SearchPage
from perdure.stores.memory import MemoryRows, MemoryStore
from perdure.testing import FunctionModel
from tests.kit import Place, until


def echo(name: str = "a") -> Agent[str]:
    return Agent(FunctionModel(lambda request: f"about {request.messages[-1].text}"), name=name)


def places(page: SearchPage) -> list[str]:
    return [each.node_id for each in page.hits]


async def indexed(runtime: Runtime) -> None:
    async def whole() -> bool:
        return (await runtime.sessions.search("x")).complete

    await until(whole)


async def test_what_a_user_and_an_agent_said_is_found(place: Place) -> None:
    async with place.runtime(echo(), search=True) as runtime:
        await (await runtime.session("one")).run("Where is my parcel?")
        await (await runtime.session("two")).run("My LAMP, and the façade")
        parcels = await runtime.sessions.search("parcel")
        both = await runtime.sessions.search("facade lamp")
        nothing = await runtime.sessions.search("lamp parcel")

    assert [(h.session_id, h.turn_id, h.node_id, h.role) for h in parcels.hits] == [
        ("one", "one.1", "one.1.1", "assistant"),
        ("one", "one.1", "one.1.0", "user"),
    ]
    assert parcels.hits[1].snippet == "Where is my parcel?"
    assert parcels.complete
    assert places(both) == ["two.1.1", "two.1.0"]
    assert nothing.hits == ()


async def test_inputs_are_found_that_wait_and_results_of_tools_are_not(place: Place) -> None:
    @tool
    def weigh() -> str:
        """Weigh it."""
        return "seventeen kilograms"

    def model(request: Any) -> str | list[ToolCall]:
        if request.messages[-1].role == "tool":
            return "It is heavy."
        return [ToolCall(name="weigh", args={})]

    async with place.runtime(Agent(FunctionModel(model), tools=[weigh], name="a"), search=True) as runtime:
        session = await runtime.session("s")
        await session.run("Weigh the parcel")
        results = await runtime.sessions.search("kilograms")
        answers = await runtime.sessions.search("heavy")

    assert results.hits == ()
    assert [h.role for h in answers.hits] == ["assistant"]


async def test_a_search_is_narrowed_and_goes_on_page_by_page(place: Place) -> None:
    async with place.runtime(echo(), echo("b"), search=True) as runtime:
        for number in range(5):
            session = await runtime.session(f"s{number}", agent="b" if number == 3 else "a", metadata={"n": number % 2})
            await session.run("the same words")
        pages, cursor = list[str](), None
        while (page := await runtime.sessions.search("same words", limit=3, cursor=cursor)).hits:
            pages += places(page)
            cursor = page.cursor
        odd = await runtime.sessions.search("words", metadata={"n": 1})
        others = await runtime.sessions.search("words", agent="b")

    assert pages == [f"s{n}.1.{o}" for n in (4, 3, 2, 1, 0) for o in (1, 0)]
    assert [h.session_id for h in odd.hits] == ["s3", "s3", "s1", "s1"]
    assert [h.session_id for h in others.hits] == ["s3", "s3"]


async def test_a_large_input_is_found(place: Place) -> None:
    async with place.runtime(echo(), search=True) as runtime:
        await (await runtime.session("s")).run("padding " * 9_000 + "needle " + "padding " * 9_000)
        page = await runtime.sessions.search("needle")

    assert places(page)[-1] == "s.1.0"
    assert len(page.hits[-1].snippet) < 400


async def test_a_deleted_session_is_not_found(place: Place) -> None:
    async with place.runtime(echo(), search=True) as runtime:
        session = await runtime.session("s")
        await session.run("secret")
        await session.fork(session_id="f")
        await runtime.sessions.delete("s")
        shared = await runtime.sessions.search("secret")
        await runtime.sessions.delete("f")
        gone = await runtime.sessions.search("secret")

    assert (shared.hits, gone.hits) == ((), ())


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ('parcel" OR "x', False),
        ("parcel*", True),
        ("NEAR(parcel lamp)", False),
        ("text:parcel", False),
        ("-parcel ^parcel {parcel}", True),
        ("(parcel", True),
        ("par\x00cel parcel", False),
        ("\x00parcel", True),
        ("p'arcel; DROP TABLE words", False),
        ("PARCEL parcel Parcel", True),
    ],
)
async def test_a_query_is_words_whatever_is_in_it(place: Place, query: str, found: bool) -> None:
    async with place.runtime(echo(), search=True) as runtime:
        await (await runtime.session("s")).run("my parcel")

        assert bool((await runtime.sessions.search(query)).hits) == found


@pytest.mark.parametrize(
    "asked",
    [
        {"query": ""},
        {"query": '"" * ()'},
        {"query": "x" * 1001},
        {"query": " ".join(f"w{n}" for n in range(33))},
        {"query": 5},
        {"query": b"parcel"},
        {"query": "x", "limit": -1},
        {"query": "x", "cursor": "1.2"},
        {"query": "x", "cursor": "; DROP"},
        {"query": "x", "metadata": {"a": []}},
        {"query": "x", "agent": 7},
    ],
    ids=str,
)
async def test_what_cannot_be_searched_for_is_refused(place: Place, asked: dict[str, Any]) -> None:
    async with place.runtime(echo(), search=True) as runtime:
        with pytest.raises(InvalidInput):
            await runtime.sessions.search(**asked)


async def test_a_store_without_an_index_says_so(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        await (await runtime.session("s")).run("parcel")
        with pytest.raises(SearchUnavailable, match=r"search=True"):
            await runtime.sessions.search("parcel")


async def test_an_index_takes_in_what_was_there_and_is_dropped_again(place: Place) -> None:
    async with place.runtime(echo()) as runtime:
        for number in range(8):
            await (await runtime.session(f"s{number}")).run(f"parcel {number}")
    async with place.runtime(echo(), search=True) as runtime:
        await (await runtime.session("s9")).run("parcel 9")
        await indexed(runtime)
        later = await runtime.sessions.search("parcel", limit=99)
    async with place.runtime(echo()) as runtime:
        await (await runtime.session("s10")).run("parcel 10")
        kept = await runtime.sessions.search("parcel 10")
    async with place.runtime(echo(), search=False) as runtime:
        with pytest.raises(SearchUnavailable):
            await runtime.sessions.search("parcel")

    assert {h.session_id for h in later.hits} == {f"s{n}" for n in (0, 1, 2, 3, 4, 5, 6, 7, 9)}
    assert len(later.hits) == 18
    assert [h.session_id for h in kept.hits] == ["s10", "s10"]


def test_search_is_true_false_or_left_as_it_is() -> None:
    wrong: Any = "yes"
    with pytest.raises(InvalidDefinition, match=r"give True or False"):
        Runtime("memory", search=wrong)


class Plain:
    """A store of a host that has no index."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("keep_index", "index_more", "search"):
            raise AttributeError(name)
        return getattr(self.inner, name)


async def test_a_store_that_cannot_keep_an_index_is_refused() -> None:
    store: Any = Plain(MemoryStore(MemoryRows()))
    with pytest.raises(SearchUnavailable, match="Plain keeps no index"):
        async with Runtime(store, agents=[echo()], search=True):
            pass
    async with Runtime(store, agents=[echo()]) as runtime:
        with pytest.raises(SearchUnavailable, match="Plain keeps no index"):
            await runtime.sessions.search("x")


# ---------------------------------------------------------------------- a file


async def test_another_runtime_on_the_file_keeps_the_index_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with Runtime(path, agents=[echo()]) as first:
        session = await first.session("s")
        await session.run("before")
        async with Runtime(path, search=True) as second:
            await session.run("between")
            await indexed(second)
            found = [len((await second.sessions.search(word)).hits) for word in ("before", "between")]
        await session.run("after")
        async with Runtime(path, search=False):
            await session.run("without")
        with pytest.raises(SearchUnavailable):
            await first.sessions.search("after")
        async with Runtime(path, search=True) as third:
            await indexed(third)
            again = [len((await first.sessions.search(word)).hits) for word in ("after", "without")]

    assert (found, again) == ([2, 2], [2, 2])


async def test_the_words_of_a_deleted_session_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    def left() -> list[int]:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            word = "CAST('zyzzyva' AS BLOB)"
            return [
                connection.execute(f"SELECT count(*) FROM words_data WHERE instr(block, {word})").fetchone()[0],
                connection.execute("SELECT count(*) FROM words_content WHERE instr(c0, 'zyzzyva')").fetchone()[0],
                connection.execute(f"SELECT count(*) FROM nodes WHERE instr(body, {word})").fetchone()[0],
            ]

    async with Runtime(path, agents=[echo()], search=True) as runtime:
        for number in range(6):
            await (await runtime.session(f"s{number}")).run("zyzzyva" if number == 3 else f"plain words {number}")
        before = left()
        await runtime.sessions.delete("s3")

        async def merged() -> bool:
            return await asyncio.to_thread(left) == [0, 0, 0]

        await until(merged)
        others = await runtime.sessions.search("plain words")

    assert before[1:] == [2, 2]
    assert before[0] > 0
    assert len(others.hits) == 10


async def test_a_copy_has_the_index_and_a_compacted_store_keeps_it(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.db", tmp_path / "copy.db"
    async with Runtime(path, agents=[echo()], search=True) as runtime:
        await (await runtime.session("s")).run("parcel")
        await runtime.backup(copy)
    await Runtime.compact(path)
    await Runtime.restore(copy)
    found = []
    for each in (path, copy):
        async with Runtime(each) as runtime:
            found.append(places(await runtime.sessions.search("parcel")))
            facts = await runtime.store.facts(deep=True)
            assert facts.checks == ("ok",)

    assert found == [["s.1.1", "s.1.0"]] * 2
