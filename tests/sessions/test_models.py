"""Another model, or other settings, for one turn or for a session: kept by name, and asked again after a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, ModelRequest, ModelSettings, Runtime
from perdure.errors import InvalidInput
from perdure.model.outcome import ProviderFailed
from perdure.testing import FunctionModel
from tests.kit import Place


def named(name: str) -> FunctionModel:
    def answer(request: ModelRequest) -> str:
        settings = request.settings
        return f"{name} {settings.temperature} {settings.max_tokens}"

    return FunctionModel(answer, name)


OWN = Agent(named("own"), settings=ModelSettings(temperature=0.1, max_tokens=10))
MODELS = {"other": named("other"), "third": named("third")}


async def test_a_turn_may_ask_another_model_in_another_way(place: Place) -> None:
    async with place.runtime(OWN, models=MODELS) as runtime:
        session = await runtime.session("s")
        texts = [
            (await session.run("1")).text,
            (await session.run("2", model="other")).text,
            (await session.run("3", settings=ModelSettings(temperature=0.9))).text,
            (
                await (await session.send("4", model=MODELS["third"], settings=ModelSettings(max_tokens=5))).result()
            ).text,
            (await session.run("5")).text,
        ]
        async with session.stream("6", model="other") as turn:
            streamed = (await turn.result()).text

    assert texts == ["own 0.1 10", "other 0.1 10", "own 0.9 10", "third 0.1 5", "own 0.1 10"]
    assert streamed == "other 0.1 10"


async def test_a_session_keeps_what_it_was_configured_with(place: Place) -> None:
    async with place.runtime(OWN, models=MODELS) as runtime:
        session = await runtime.session("s")
        await session.configure(model="other")
        await session.configure(settings=ModelSettings(max_tokens=7))
        first = (await session.run("1")).text
    async with place.runtime(OWN, models=MODELS) as runtime:
        session = await runtime.session("s")
        second = (await session.run("2")).text
        single = (await session.run("3", model="third", settings=ModelSettings(temperature=0.5))).text
        await session.configure(reset=True)
        third = (await session.run("4")).text

    assert [first, second, single, third] == ["other 0.1 7", "other 0.1 7", "third 0.5 7", "own 0.1 10"]


async def test_an_interrupted_turn_asks_the_model_that_it_was_given(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def hangs(request: ModelRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        return "never"

    settings = ModelSettings(temperature=0.7)
    async with Runtime(tmp_path / "a.db", agents=[OWN], models={"other": FunctionModel(hangs)}, grace=0) as runtime:
        receipt = await (await runtime.session("s")).send("go", model="other", settings=settings)
        await asked.wait()
    async with Runtime(tmp_path / "a.db", agents=[OWN], models=MODELS) as runtime:
        result = await (await runtime.session("s")).result(receipt.turn_id)

    assert result.text == "other 0.7 10"


@pytest.mark.parametrize("before", ["", "third"], ids=["the agent's model", "the session's model"])
async def test_a_turn_asks_the_model_it_was_accepted_under_whatever_is_configured_meanwhile(
    tmp_path: Path, before: str
) -> None:
    asked = asyncio.Event()

    async def hangs(request: ModelRequest) -> str:
        asked.set()
        await asyncio.Event().wait()
        return "never"

    hanging = {"other": named("other"), "third": FunctionModel(hangs)}
    agent = OWN.override(model=FunctionModel(hangs))
    async with Runtime(tmp_path / "a.db", agents=[agent], models=hanging, grace=0) as runtime:
        session = await runtime.session("s")
        if before:
            await session.configure(model=before)
        opened, queued = await session.send("1"), await session.send("2")
        await asked.wait()
        await session.configure(model="other", settings=ModelSettings(max_tokens=7))
        after = await session.send("3")
        await session.configure(settings=ModelSettings(max_tokens=8))
        last = await session.send("4", settings=ModelSettings(temperature=0.9))
        await session.configure(reset=True)
    async with Runtime(tmp_path / "a.db", agents=[OWN], models=MODELS) as runtime:
        session = await runtime.session("s")
        texts = [(await session.result(each.turn_id)).text for each in (opened, queued, after, last)]
        texts.append((await session.run("5")).text)

    first = f"{before or 'own'} 0.1 10"
    assert texts == [first, first, "other 0.1 7", "other 0.9 8", "own 0.1 10"]


async def test_a_fork_asks_the_model_of_its_source(place: Place) -> None:
    async with place.runtime(OWN, models=MODELS) as runtime:
        session = await runtime.session("s")
        receipts = [await session.send(str(number)) for number in range(3)]
        await session.configure(model="other")
        for each in receipts:
            await each.result()
        fork = await session.fork("s.1")
        text = (await fork.run("and you?")).text

    assert text == "other 0.1 10"


async def test_a_model_that_is_not_there_any_more_ends_the_turn_and_names_itself(tmp_path: Path) -> None:
    async with Runtime(tmp_path / "a.db", agents=[OWN], models=MODELS) as runtime:
        await (await runtime.session("s")).configure(model="other")
    async with Runtime(tmp_path / "a.db", agents=[OWN]) as runtime:
        result = await (await runtime.session("s")).run("go")

    assert isinstance(result.outcome, ProviderFailed)
    assert result.outcome.code == "no_model"
    assert "models={'other': …}" in result.outcome.message


@pytest.mark.parametrize(
    "wrong",
    [{"model": "nobody:x"}, {"model": 5}, {"model": named("unknown")}, {"settings": {"temperature": 1}}],
    ids=["an unknown service", "no model", "an object that has no name here", "a dict"],
)
async def test_what_is_no_model_is_refused_before_anything_is_written(place: Place, wrong: dict[str, Any]) -> None:
    async with place.runtime(OWN, models=MODELS) as runtime:
        session = await runtime.session("s")
        for verb in (session.run, session.send):
            with pytest.raises(InvalidInput):
                await verb("go", **wrong)
        with pytest.raises(InvalidInput):
            await session.configure(**wrong)
        assert await runtime.sessions.list() == []


@pytest.mark.parametrize("wrong", [["x"], {"": named("a")}, {5: named("a")}, {"x": 5}, {"x": "nobody:y"}])
def test_models_that_are_none_are_refused_by_the_runtime(wrong: Any) -> None:
    with pytest.raises(InvalidInput):
        Runtime("memory", models=wrong)
