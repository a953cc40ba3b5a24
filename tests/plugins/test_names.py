"""A class whose methods are nearly hooks, or hooks that cannot be called, is refused with the agent."""

from __future__ import annotations

import re
from typing import Any

import pytest

from perdure import Agent, Plugin, Runtime
from perdure.builtin import Compaction, OutputBudget, Permissions, Plan, Redaction, RollingHistory
from perdure.errors import InvalidDefinition
from perdure.plugins import command, query
from perdure.plugins.hooks import HOOKS
from perdure.plugins.registry import PluginSet
from perdure.testing import FunctionModel
from perdure.tools.define import tool


def with_method(name: str, method: Any = None, **more: Any) -> Plugin:
    def plain(self: Plugin, *args: Any) -> None:
        """Never called."""

    made: Plugin = type("Guard", (Plugin,), {"id": "guard", name: method or plain, **more})()
    return made


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("before_toolcall", "before_tool_call"),
        ("before_tool_cal", "before_tool_call"),
        ("befor_tool_call", "before_tool_call"),
        ("before_tool_calls", "before_tool_call"),
        ("beforeToolCall", "before_tool_call"),
        ("befroe_turn", "before_turn"),
        ("after_turns", "after_turn"),
        ("aftertoolcall", "after_tool_call"),
        ("project_results", "project_result"),
        ("filter_values", "filter_value"),
        ("transfrom_text", "transform_text"),
        ("prompts", "prompt"),
        ("tool", "tools"),
        ("snapshots", "snapshot"),
        ("revison", "revision"),
    ],
)
def test_a_method_whose_name_is_nearly_a_hooks_is_refused(name: str, hook: str) -> None:
    with pytest.raises(InvalidDefinition) as caught:
        Agent(FunctionModel(lambda request: "hi"), plugins=[with_method(name)])

    assert str(caught.value) == (
        f"{name} of plugin 'guard' is no hook and would never be called: do you mean {hook}? If not, give it another "
        f"name, or say so in the class: not_hooks = ('{name}',)"
    )


@pytest.mark.parametrize(
    "name", ["_before_toolcall", "check", "before_lunch", "count", "restore_backup", "summary", "text", "turn", "run"]
)
def test_private_and_other_names_are_nobodys_business(name: str) -> None:
    assert PluginSet([with_method(name)]).ids == ("guard",)


@pytest.mark.parametrize(
    "method",
    [staticmethod(lambda: None), classmethod(lambda cls: None), property(lambda s: 1)],
    ids=["static", "class", "property"],
)
def test_however_a_near_miss_stands_in_its_class_it_is_refused(method: Any) -> None:
    with pytest.raises(InvalidDefinition, match="do you mean before_tool_call"):
        PluginSet([with_method("before_toolcall", method)])


def test_a_near_miss_of_a_base_class_is_refused_too() -> None:
    class Base(Plugin):
        def before_toolcall(self, ctx: Any) -> None:
            """Never called."""

    class Guard(Base):
        id = "guard"

    with pytest.raises(InvalidDefinition, match="do you mean before_tool_call"):
        PluginSet([Guard()])


def test_a_class_may_say_that_a_name_is_its_own() -> None:
    class Guard(Plugin):
        id = "guard"
        not_hooks: tuple[str, ...] = ("prompts",)

        def prompts(self) -> list[str]:
            return []

    class Derived(Guard):
        id = "derived"

    assert PluginSet([Guard(), Derived()]).ids == ("guard", "derived")


def test_what_is_no_tuple_of_names_is_refused() -> None:
    with pytest.raises(InvalidDefinition, match="`not_hooks` of Guard is a tuple of names, not 'prompts'"):
        PluginSet([with_method("prompts", not_hooks="prompts")])


def test_operations_tools_and_values_may_have_any_name() -> None:
    class Notes(Plugin):
        id = "notes"
        revisions = 3

        @query
        def snapshots(self) -> int:
            """How many there are."""
            return 1

        @command
        def restores(self) -> int:
            """Bring them back."""
            return 1

        @tool
        def prompts() -> str:
            """Show prompts."""
            return ""

    assert PluginSet([Notes()]).ids == ("notes",)


def test_no_built_in_plugin_has_a_name_that_is_nearly_a_hooks() -> None:
    plugins = [RollingHistory(1000), Compaction(1000), OutputBudget(), Plan(), Permissions([]), Redaction()]

    assert len(PluginSet(plugins).ids) == len(plugins)


@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "revision"])
def test_a_hook_that_cannot_take_what_it_is_called_with_is_refused(hook: str) -> None:
    def wants_more(self: Plugin, *args: Any, more: int) -> None:
        """Cannot be called."""

    with pytest.raises(InvalidDefinition, match=rf"{hook} of plugin 'guard' is called with \(.*'more'"):
        PluginSet([with_method(hook, wants_more)])


def test_a_hook_without_its_context_is_refused_where_the_agent_is_made() -> None:
    def before_tool_call(self: Plugin) -> None:
        """Never told of anything."""

    with pytest.raises(InvalidDefinition, match=r"before_tool_call of plugin 'guard' is called with \(ctx\): too many"):
        Agent(FunctionModel(lambda request: "hi"), plugins=[with_method("before_tool_call", before_tool_call)])


def test_an_async_generator_is_no_hook() -> None:
    async def prompt(self: Plugin, ctx: Any) -> Any:
        yield "never read"

    with pytest.raises(InvalidDefinition, match="prompt of plugin 'guard' is asked where nothing can wait"):
        PluginSet([with_method("prompt", prompt)])


async def _later(self: Plugin) -> Any:
    return ()


def _raising(self: Plugin) -> Any:
    raise LookupError("no sources")


@pytest.mark.parametrize(
    ("hook", "body", "told"),
    [
        ("trigger_events", _later, "trigger_events of plugin 'guard' is asked where nothing can wait"),
        ("engines", _later, "engines of plugin 'guard' is asked where nothing can wait"),
        ("trigger_events", _raising, "trigger_events of plugin 'guard' raised LookupError: no sources"),
        ("trigger_events", lambda self: None, "trigger_events of plugin 'guard' raised TypeError"),
    ],
)
def test_what_a_plugin_offers_wrongly_is_a_typed_error(hook: str, body: Any, told: str) -> None:
    with pytest.raises(InvalidDefinition, match=told):
        Agent(FunctionModel(lambda request: "hi"), plugins=[with_method(hook, body)])


class Down:
    """A set of tools that cannot say what it has."""

    def specs(self) -> Any:
        raise ConnectionError("nobody there")

    async def prepare(self, call: Any, ctx: Any) -> Any:
        return call

    async def execute(self, call: Any, ctx: Any) -> Any:
        return None


class Slow(Down):
    async def specs(self) -> Any:
        return ()


@pytest.mark.parametrize(
    ("provider", "told"),
    [
        (Down(), "the tools of a Down cannot be listed: specs() raised ConnectionError: nobody there"),
        (Slow(), "the tools of a Slow cannot be listed: specs() raised TypeError: it is asked where nothing can wait"),
    ],
)
async def test_a_set_of_tools_that_cannot_say_what_it_has_is_refused_by_agents_and_overlays(
    provider: Any, told: str
) -> None:
    with pytest.raises(InvalidDefinition, match=re.escape(told)):
        Agent(FunctionModel(lambda request: "hi"), tools=[provider])

    async with Runtime("memory", agents=[Agent(FunctionModel(lambda request: "hi"))]) as runtime:
        session = await runtime.session("s")
        with pytest.raises(InvalidDefinition, match=re.escape(told)):
            session.tools.overlay([provider])
        result = await session.run("hello")

    assert result.text == "hi"
