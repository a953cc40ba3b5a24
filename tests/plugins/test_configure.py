"""`configure`: plugins see how a session runs, as a whole, and change it: when it is opened, and after every change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, Budget, ModelRequest, ModelSettings, Plugin, Runtime, ToolCall, ToolContext, tool
from perdure.model.tool import OutputBudget
from perdure.plugins import CommandContext, SessionConfig, SessionContext, command
from perdure.testing import FunctionModel
from tests.kit import Place, TellingModel, crash

BUDGET = Budget(steps=7)
OUTPUT = OutputBudget(bytes=4096)
SETTINGS = ModelSettings(temperature=0.5)

Change = Callable[[SessionContext, SessionConfig], Any]


class Seeing(Plugin):
    """Remembers what it was shown, and what it was told of changes."""

    id = "seeing"

    def __init__(self, change: Change | None = None) -> None:
        self.change = change
        self.seen: list[tuple[dict[str, Any], SessionConfig]] = []
        self.told: list[tuple[SessionConfig, SessionConfig]] = []

    def configure(self, ctx: SessionContext, config: SessionConfig) -> SessionConfig:
        self.seen.append((dict(ctx.metadata), config))
        made: SessionConfig = config if self.change is None else self.change(ctx, config)
        return made

    def session_config_changed(self, ctx: SessionContext, before: SessionConfig, after: SessionConfig) -> None:
        self.told.append((before, after))

    @property
    def configs(self) -> list[SessionConfig]:
        return [config for _, config in self.seen]


class Named:
    """A model that answers with its name and how it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[ModelRequest] = []
        self._model = FunctionModel(self._answer)

    def _answer(self, request: ModelRequest) -> str:
        self.asked.append(request)
        return f"{self.name} at {request.settings.temperature}"

    def stream(self, request: ModelRequest) -> Any:
        return self._model.stream(request)


def agent_with(*plugins: Plugin, **options: Any) -> Agent[str]:
    given: dict[str, Any] = {"instructions": "Help.", "budget": BUDGET, "output_budget": OUTPUT, "settings": SETTINGS}
    return Agent(Named("small"), name="support", plugins=plugins, **(given | options))


async def test_a_plugin_sees_the_whole_configuration() -> None:
    seeing = Seeing()
    async with Runtime("memory", agents=[agent_with(seeing)]) as runtime:
        await (await runtime.session("s")).run("one")
        await (await runtime.session("s")).run("two")

    assert seeing.configs == [SessionConfig("Help.", BUDGET, "small", SETTINGS, OUTPUT)]
    assert seeing.told == []


async def test_it_runs_again_after_session_configure_and_sees_what_was_chosen(place: Place) -> None:
    seeing = Seeing()
    async with place.runtime(agent_with(seeing), models={"large": Named("large")}) as runtime:
        session = await runtime.session("s")
        texts = [(await session.run("one")).text]
        await session.configure(model="large", settings=ModelSettings(max_tokens=99))
        texts.append((await session.run("two")).text)
        texts.append((await session.run("three")).text)

    before = SessionConfig("Help.", BUDGET, "small", SETTINGS, OUTPUT)
    after = SessionConfig("Help.", BUDGET, "large", ModelSettings(temperature=0.5, max_tokens=99), OUTPUT)
    assert texts == ["small at 0.5", "large at 0.5", "large at 0.5"]
    assert seeing.configs == [before, after]
    assert seeing.told == [(before, after)]


async def test_it_runs_again_after_session_update_and_sees_whom_the_session_is_for(place: Place) -> None:
    def by_tenant(ctx: SessionContext, config: SessionConfig) -> SessionConfig:
        return replace(config, model="large") if ctx.metadata.get("tenant") == "paying" else config

    seeing = Seeing(by_tenant)
    async with place.runtime(agent_with(seeing), models={"large": Named("large")}) as runtime:
        session = await runtime.session("s", metadata={"tenant": "trial"})
        texts = [(await session.run("one")).text]
        await session.update(metadata={"tenant": "paying"})
        texts.append((await session.run("two")).text)

    assert texts == ["small at 0.5", "large at 0.5"]
    assert [metadata for metadata, _ in seeing.seen] == [{"tenant": "trial"}, {"tenant": "paying"}]
    assert [(before.model, after.model) for before, after in seeing.told] == [("small", "large")]


async def test_it_runs_on_the_changed_definition_of_a_deploy(file: Place) -> None:
    old, new = Seeing(), Seeing()
    async with file.runtime(agent_with(old)) as runtime:
        await (await runtime.session("s")).run("one")
    async with file.runtime(agent_with(new, instructions="Help well.", budget=Budget(steps=9))) as runtime:
        await (await runtime.session("s")).run("two")

    assert old.configs == [SessionConfig("Help.", BUDGET, "small", SETTINGS, OUTPUT)]
    assert new.configs == [SessionConfig("Help well.", Budget(steps=9), "small", SETTINGS, OUTPUT)]


async def test_what_it_made_before_is_not_what_it_sees(place: Place) -> None:
    louder = Seeing(lambda ctx, config: replace(config, instructions=config.instructions + "!"))
    async with place.runtime(agent_with(louder)) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        await session.configure(settings=ModelSettings(seed=1))
        await session.run("two")

    assert [config.instructions for config in louder.configs] == ["Help.", "Help."]


async def test_each_plugin_sees_what_the_one_before_made_of_it() -> None:
    first = Seeing(lambda ctx, config: replace(config, settings=ModelSettings(temperature=0.1)))
    second = Seeing()
    second.id = "second"
    async with Runtime("memory", agents=[agent_with(first, second)]) as runtime:
        text = (await (await runtime.session("s")).run("one")).text

    assert second.configs[0].settings == ModelSettings(temperature=0.1)
    assert text == "small at 0.1"


async def test_what_a_plugin_leaves_out_stays_as_it_was() -> None:
    brief = Seeing(lambda ctx, config: SessionConfig("Be brief.", config.budget))
    second = Seeing()
    second.id = "second"
    async with Runtime("memory", agents=[agent_with(brief, second)]) as runtime:
        text = (await (await runtime.session("s")).run("one")).text

    assert second.configs == [SessionConfig("Be brief.", BUDGET, "small", SETTINGS, OUTPUT)]
    assert text == "small at 0.5"


async def test_an_input_that_names_its_model_goes_over_all_that() -> None:
    pinned = Seeing(lambda ctx, config: replace(config, model="large"))
    models = {"large": Named("large"), "tiny": Named("tiny")}
    async with Runtime("memory", agents=[agent_with(pinned)], models=models) as runtime:
        session = await runtime.session("s")
        texts = [(await session.run("one")).text, (await session.run("two", model="tiny")).text]

    assert texts == ["large at 0.5", "tiny at 0.5"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ctx, config: replace(config, model="no such model"),
        lambda ctx, config: replace(config, model=7),
        lambda ctx, config: replace(config, settings="warm"),
        lambda ctx, config: replace(config, output_budget=3),
        lambda ctx, config: [].pop(),
        lambda ctx, config: None,
    ],
    ids=["unknown model", "model", "settings", "output", "raises", "none"],
)
async def test_a_plugin_that_fails_keeps_the_configuration_and_is_reported(wrong: Change) -> None:
    async with Runtime("memory", agents=[agent_with(Seeing(wrong))]) as runtime:
        result = await (await runtime.session("s")).run("one")

    assert result.text == "small at 0.5"
    assert [(issue.code, issue.plugin) for issue in result.issues] == [("config_mutator_failed", "seeing")]


async def test_how_much_of_an_output_is_shown_may_be_changed() -> None:
    @tool
    async def lines(ctx: ToolContext[Any]) -> str:
        """Lines."""
        return "\n".join(["line"] * 300)

    def model(request: ModelRequest) -> Any:
        results = request.messages[-1].tool_results
        return str(results[0].content) if results else [ToolCall("a", "lines")]

    short = Seeing(lambda ctx, config: replace(config, output_budget=OutputBudget(lines=20)))
    shown = [
        (await Agent(FunctionModel(model), tools=[lines], plugins=plugins).run("go")).text for plugins in ([], [short])
    ]

    assert shown[0].count("line") == 300
    assert shown[1].count("line") < 40


async def test_a_turn_that_is_taken_over_runs_under_what_it_was_opened_with(place: Place) -> None:
    """Metadata and model were changed while it ran: they are for the next turn, also after a crash."""
    model, seeing = TellingModel(), Seeing()
    agent = Agent(model, name="support", plugins=[seeing])
    runtime = await place.runtime(agent, models={"large": Named("large")}).__aenter__()
    session = await runtime.session("s", metadata={"tenant": "first"})
    await session.send("one")
    await model.next()
    await session.update(metadata={"tenant": "second"})
    await session.configure(model="large")
    await crash(runtime)

    model.say("again")
    async with place.runtime(agent, models={"large": Named("large")}) as runtime:
        session = await runtime.session("s")
        first = await session.result("s.1")
        second = await session.run("two")

    assert (first.text, second.text) == ("again", "large at None")
    seen = [(metadata["tenant"], config.model) for metadata, config in seeing.seen]
    assert seen == [("first", "telling"), ("first", "telling"), ("second", "large")]


async def test_a_question_beside_the_conversation_goes_to_the_same_model() -> None:
    class Asking(Seeing):
        @command
        async def ask(self, ctx: CommandContext) -> str:
            """Ask."""
            return (await ctx.host.complete("well?", label="aside")).text

    asking = Asking(lambda ctx, config: replace(config, model="large"))
    async with Runtime("memory", agents=[agent_with(asking)], models={"large": Named("large")}) as runtime:
        session = await runtime.session("s")
        await session.run("one")
        told = await session.call("seeing.ask")

    assert told.output == "large at None"


async def test_a_model_that_cannot_be_had_is_looked_for_again_in_the_next_turn(place: Place) -> None:
    seeing = Seeing()
    async with place.runtime(agent_with(), models={"mine": Named("mine")}) as runtime:
        await (await runtime.session("s")).configure(model="mine")
    async with place.runtime(agent_with(seeing)) as runtime:
        session = await runtime.session("s")
        outcomes = [(await session.run(said)).outcome for said in ("one", "two")]

    assert [getattr(outcome, "code", "") for outcome in outcomes] == ["no_model", "no_model"]
    assert [config.model for config in seeing.configs] == ["mine", "mine"]
