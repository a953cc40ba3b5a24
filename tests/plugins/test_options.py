"""Options of a session's plugins: checked when they are given, kept with the session, there without host code."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, Message, ModelRequest
from perdure.errors import InvalidInput, PluginError
from perdure.model.outcome import Finished, PluginAborted
from perdure.model.plugin import CreateSession
from perdure.model.session import load_settings
from perdure.plugins.hooks import Plugin, PromptContext, SessionContext, TurnContext
from perdure.plugins.operations import QueryContext, query
from perdure.testing import FunctionModel
from tests.kit import Place, TellingModel, crash


class Tone(Plugin):
    """Says in every prompt how to speak; `tone` is one of two, and must be there when it is `needed`."""

    id = "tone"

    def __init__(self, needed: bool = False, tone: str = "plain") -> None:
        self.needed, self.tone = needed, tone

    def for_session(self, ctx: SessionContext) -> Plugin:
        if ctx.options is None and self.needed:
            raise ValueError("give a tone")
        tone = (ctx.options or {}).get("tone", "plain")
        if tone not in ("plain", "kind"):
            raise ValueError(f"there is no tone {tone!r}: use plain or kind")
        return type(self)(self.needed, tone)

    def prompt(self, ctx: PromptContext) -> str:
        return f"{self.id} {self.tone}"

    @query
    def which(self, ctx: QueryContext) -> str:
        """The tone."""
        return self.tone


class Other(Tone):
    id = "other"


def instructions_of(request: ModelRequest) -> str:
    """A model that answers with its instructions."""
    return request.messages[0].text


def agent(*plugins: Plugin) -> Agent[str]:
    return Agent(FunctionModel(instructions_of), name="agent", plugins=plugins or (Tone(),))


KIND = {"tone": {"tone": "kind"}}


async def test_options_are_kept_with_the_session_and_with_no_other(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        first = await (await runtime.session("s", options=KIND)).run("go")
        again = await (await runtime.session("s")).run("go on")
        other = await (await runtime.session("other")).run("go")
    async with place.runtime(agent()) as runtime:
        later = await (await runtime.session("s")).run("and now?")

    assert [each.text for each in (first, again, other, later)] == ["tone kind", "tone kind", "tone plain", "tone kind"]


async def test_options_are_there_when_a_turn_goes_on_without_host_code(place: Place) -> None:
    died = TellingModel()
    runtime = await place.runtime(Agent(died, name="agent", plugins=[Tone()])).__aenter__()
    receipt = await (await runtime.session("s", options=KIND)).send("go")
    await died.next()
    await crash(runtime)
    async with place.runtime(agent()) as runtime:
        assert await runtime.wait_idle(5)
        result = await (await runtime.session("s")).result(receipt.turn_id)

    assert result.text == "tone kind"


async def test_opening_with_options_writes_nothing_until_they_are_needed(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s", options=KIND)
        assert await runtime.store.session("s") is None

        assert (await session.call("tone.which")).output == "kind"
        row = await runtime.store.session("s")

    assert row is not None
    assert load_settings(row.settings).options == KIND


async def test_tools_are_told_of_a_session_with_its_options(place: Place) -> None:
    class Hiding(Tone):
        def hidden_tools(self, ctx: Any) -> list[str]:
            return ["shout"] if self.tone == "kind" else []

    def shout() -> str:
        """Shout."""
        return "!"

    made = Agent(FunctionModel(instructions_of), name="agent", tools=[shout], plugins=[Hiding()])
    async with place.runtime(made) as runtime:
        assert [each["name"] for each in await (await runtime.session("s")).tools.list()] == ["shout"]
        assert await (await runtime.session("s", options=KIND)).tools.list() == []


async def test_options_given_later_count_from_the_next_turn_on_and_others_stay(place: Place) -> None:
    async with place.runtime(agent(Tone(needed=True), Other(needed=True))) as runtime:
        both = {"tone": {"tone": "kind"}, "other": {"tone": "kind"}}
        first = await (await runtime.session("s", options=both)).run("go")
        # Only one of them is given again: the other one still has what it needs.
        changed = await (await runtime.session("s", options={"other": {"tone": "plain"}})).run("go on")

    assert first.text == "tone kind\n\nother kind"
    assert changed.text == "tone kind\n\nother plain"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tone": {"tone": "loud"}}, PluginError, "plugin 'tone': for_session: ValueError: there is no tone 'loud'"),
        ({"tune": {}}, InvalidInput, "there is no plugin 'tune' to give options to; agent 'agent' has: tone"),
        ({"tone": {"tone": object()}}, InvalidInput, "object"),
    ],
    ids=["refused by the plugin", "unknown plugin", "no JSON"],
)
async def test_options_that_make_no_sense_are_refused_at_once(
    place: Place, options: Any, error: type[Exception], says: str
) -> None:
    async with place.runtime(agent()) as runtime:
        await (await runtime.session("s", options=KIND)).run("go")
        with pytest.raises(error, match=says):
            await runtime.session("s", options=options)
        with pytest.raises(error, match=says):
            await runtime.session("new", options=options)
        after = await (await runtime.session("s")).run("go on")

        assert await runtime.store.session("new") is None
    assert after.text == "tone kind"


async def test_options_need_the_agent_that_they_are_for(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        await (await runtime.session("s")).run("go")
    async with place.runtime(Agent(FunctionModel(instructions_of), name="another")) as runtime:
        with pytest.raises(InvalidInput, match="its agent is not part of this Runtime"):
            await runtime.session("s", options=KIND)


async def test_plugin_that_does_not_take_its_kept_options_any_more_refuses_turns_until_it_does(place: Place) -> None:
    class Stricter(Tone):
        def for_session(self, ctx: SessionContext) -> Plugin:
            raise ValueError("not in this version")

    async with place.runtime(agent()) as runtime:
        await (await runtime.session("s", options=KIND)).run("go")
    async with place.runtime(agent(Stricter())) as runtime:
        refused = await (await runtime.session("s")).run("go on")
    async with place.runtime(agent()) as runtime:
        after = await (await runtime.session("s")).run("and now?")

    assert isinstance(refused.outcome, PluginAborted)
    assert (refused.outcome.plugin, refused.outcome.code) == ("tone", "plugin_session")
    assert after.outcome == Finished("tone kind")


async def test_options_of_a_plugin_that_is_away_wait_for_it(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        await (await runtime.session("s", options=KIND)).run("go")
    async with place.runtime(agent(Other())) as runtime:
        away = await (await runtime.session("s", options={"other": {"tone": "kind"}})).run("go on")
    async with place.runtime(agent()) as runtime:
        back = await (await runtime.session("s")).run("and now?")

    assert (away.text, back.text) == ("other kind", "tone kind")


async def test_fork_has_the_options_of_its_source(place: Place) -> None:
    async with place.runtime(agent()) as runtime:
        session = await runtime.session("s", options=KIND)
        await session.run("go")
        fork = await session.fork(session_id="fork")
        await (await runtime.session("s", options={"tone": {"tone": "plain"}})).run("go on")

        assert (await fork.run("and you?")).text == "tone kind"


# ---------------------------------------------------------------------- children


class Begins(Plugin):
    """Begins a child with these options in the first turn of `s`."""

    id = "begins"

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def before_turn(self, ctx: TurnContext) -> Any:
        if ctx.session_id != "s":
            return None
        return CreateSession(session_id="child", said=Message("user", "go"), options=self.options)


async def test_child_has_the_options_it_was_given_and_none_of_its_parent(place: Place) -> None:
    async with place.runtime(agent(Tone(), Other(), Begins({"other": {"tone": "kind"}}))) as runtime:
        await (await runtime.session("s", options=KIND)).run("go")
        result = await (await runtime.session("child")).result("child.1")

    assert result.text == "tone plain\n\nother kind"


@pytest.mark.parametrize(
    ("options", "says"),
    [({"tone": {"tone": "loud"}}, "there is no tone 'loud'"), ({"tune": {}}, "there is no plugin 'tune'")],
)
async def test_child_with_options_that_make_no_sense_is_an_issue_of_the_turn(
    place: Place, options: dict[str, Any], says: str
) -> None:
    async with place.runtime(agent(Tone(), Begins(options))) as runtime:
        result = await (await runtime.session("s")).run("go")

        assert await runtime.store.session("child") is None
    assert result.outcome == Finished("tone plain")
    assert [(issue.plugin, says in issue.message) for issue in result.issues] == [("begins", True)]
