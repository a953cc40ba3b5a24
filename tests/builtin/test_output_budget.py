"""The output budget as a plugin."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, tool
from perdure.builtin import OutputLimit
from perdure.errors import InvalidDefinition, PluginConflict
from perdure.model.tool import Denied, Failed, Ok, OutcomeUnknown, OutputBudget, ToolOutcome, ToolSpec
from perdure.plugins.hooks import Plugin, ToolEndContext
from perdure.plugins.registry import PluginSet
from perdure.testing import FunctionModel

READ = ToolSpec("read")


def ended(outcome: ToolOutcome, tool: ToolSpec = READ) -> ToolEndContext:
    host: Any = None
    return ToolEndContext(
        "chat", "chat.1", "assistant", None, host, call_id="chat.1.1.0", tool=tool, args={}, outcome=outcome
    )


@pytest.mark.parametrize("value", [None, 7, "short", ["a", {"b": 1}], "x" * 1_000])
def test_what_fits_is_shown_as_it_is(value: Any) -> None:
    assert OutputLimit(bytes=1_000).project_result(ended(Ok(value))) == value


def test_bytes_limit_what_the_model_sees() -> None:
    shown = OutputLimit(bytes=1_000).project_result(ended(Ok("é" * 2_000)))

    assert 900 < len(shown.encode()) <= 1_000
    assert "the whole output is kept" in shown


def test_lines_limit_what_the_model_sees() -> None:
    shown = OutputLimit(lines=10).project_result(ended(Ok("line\n" * 30_000)))

    assert len(shown.splitlines()) <= 10
    assert shown.startswith("line\nline\n")


def test_lines_alone_leave_bytes_free() -> None:
    value = "x" * 100_000

    assert OutputLimit(lines=10).project_result(ended(Ok(value))) == value


def test_tokens_are_four_bytes_each() -> None:
    shown = OutputLimit(tokens=300).project_result(ended(Ok("x" * 5_000)))

    assert 1_100 < len(shown) <= 1_200


def test_lines_and_tokens_go_together() -> None:
    plugin = OutputLimit(tokens=300, lines=10)

    assert len(plugin.project_result(ended(Ok("x" * 5_000)))) <= 1_200
    assert len(plugin.project_result(ended(Ok("a\n" * 300))).splitlines()) <= 10


def test_without_numbers_it_is_the_usual_budget() -> None:
    plugin = OutputLimit()

    assert plugin.project_result(ended(Ok("x" * 16_384))) == "x" * 16_384
    assert len(plugin.project_result(ended(Ok("x" * 16_385)))) <= 16_384
    assert len(plugin.project_result(ended(Ok("a\n" * 500))).splitlines()) <= 400


def test_a_value_keeps_its_shape() -> None:
    shown = OutputLimit(bytes=1_000).project_result(ended(Ok({"path": "a.txt", "text": "x" * 5_000, "size": 5_000})))

    assert (shown["path"], shown["size"]) == ("a.txt", 5_000)
    assert len(shown["text"]) < 1_000


def test_a_tool_with_a_budget_of_its_own_keeps_it() -> None:
    generous = ToolSpec("read", output_budget=OutputBudget(bytes=10_000, lines=None))

    assert OutputLimit(bytes=1_000).project_result(ended(Ok("x" * 9_000), generous)) == "x" * 9_000
    assert len(OutputLimit(bytes=20_000).project_result(ended(Ok("x" * 15_000), generous))) <= 10_000


def test_the_words_of_a_failure_are_within_the_budget_and_say_what_failed() -> None:
    shown = OutputLimit(bytes=1_000).project_result(ended(Failed("tool_raised", "E" * 20_000)))

    assert shown["error"] == "tool_raised"
    assert len(shown["message"]) < 1_000


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (Failed("not_found", "no such file"), {"error": "not_found", "message": "no such file"}),
        (Denied("too dear"), {"error": "denied", "message": "too dear"}),
        (
            OutcomeUnknown("it died"),
            {
                "error": "outcome_unknown",
                "message": "it died: the call may or may not have taken effect and was not repeated; "
                "check before you call it again",
            },
        ),
    ],
)
def test_other_outcomes_are_told_as_always(outcome: ToolOutcome, shown: Any) -> None:
    assert OutputLimit().project_result(ended(outcome)) == shown


def test_a_second_plugin_that_projects_results_is_refused() -> None:
    class Mine(Plugin):
        id = "mine"

        def project_result(self, ctx: ToolEndContext) -> Any:
            return "mine"

    with pytest.raises(PluginConflict, match=r"(?s)mine.*output_budget|output_budget.*mine"):
        PluginSet([OutputLimit(), Mine()])


@pytest.mark.parametrize(
    "wrong",
    [{"bytes": 10}, {"lines": 1}, {"tokens": 0}, {"tokens": 10}, {"tokens": 1.5}, {"bytes": 1_000, "tokens": 1_000}],
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition):
        OutputLimit(**wrong)


@pytest.mark.parametrize(("plugin", "shown"), [(OutputLimit(bytes=1_000), 1_000), (OutputLimit(tokens=10_000), 30_000)])
async def test_in_a_turn_it_goes_before_the_agents_own_budget(plugin: OutputLimit, shown: int) -> None:
    @tool
    def read() -> str:
        """Read it."""
        return "x" * 30_000

    def answer(request: ModelRequest) -> Any:
        results = request.messages[-1].tool_results
        return [ToolCall("c", "read")] if not results else str(len(results[0].content.encode()))

    async with Runtime("memory", agents=[Agent(FunctionModel(answer), tools=[read], plugins=[plugin])]) as runtime:
        result = await (await runtime.session()).run("go")

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Ok)
    assert shown - 100 < int(result.text) <= shown
    assert (outcome.whole is None) == (shown == 30_000)
    assert outcome.whole is None or outcome.whole.size == 30_002
