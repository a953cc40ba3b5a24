"""Permissions: rules for calls, what a session remembers of the answers, and the trail of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Agent, Runtime, ToolCall, tool
from perdure.builtin.permissions import MAX_APPROVED, Choice, Entry, Permissions, Rule
from perdure.errors import InvalidDefinition, PluginError
from perdure.model.outcome import Waiting
from perdure.model.plugin import AskPerson, Directive, EmitTrace, PluginSnapshot, ReplaceArgs, ShortCircuit
from perdure.model.tool import Denied, Failed, Ok, ToolOutcome, ToolSpec
from perdure.plugins import decisions
from perdure.plugins.calls import before_tool_call
from perdure.plugins.hooks import Plugin, SessionContext, SnapshotWriter, ToolCallContext, ToolEndContext
from perdure.plugins.registry import PluginSet, restore_snapshot, take_snapshot
from perdure.testing import ScriptedModel

HOST: Any = None  # no rule needs it
RM = {"command": "rm -rf /tmp/x"}
LS = {"command": "ls"}


def asked(args: dict[str, Any], tool: str = "shell", call: str = "chat.1.1.0", again: bool = False) -> ToolCallContext:
    """The model wants to call a tool."""
    turn = call.rsplit(".", 2)[0]
    return ToolCallContext("chat", turn, "assistant", None, HOST, call, ToolSpec(tool), args, again)


def ended(
    args: dict[str, Any], tool: str = "shell", call: str = "chat.1.1.0", outcome: ToolOutcome | None = None
) -> ToolEndContext:
    """The call was not stopped by anybody, and is over."""
    turn = call.rsplit(".", 2)[0]
    return ToolEndContext("chat", turn, "assistant", None, HOST, call, ToolSpec(tool), args, outcome or Ok("done"))


def opened(plugin: Permissions, options: Any = None) -> Permissions:
    return plugin.for_session(SessionContext("chat", "assistant", options))


def decided(plugin: Permissions, ctx: ToolCallContext) -> list[Directive]:
    """What becomes of the call, without what is only told to the trace."""
    return [each for each in plugin.before_tool_call(ctx) if not isinstance(each, EmitTrace)]


def restarted(plugin: Permissions) -> Permissions:
    """The same session after its process died with everything recorded."""
    taken = take_snapshot(plugin).snapshot
    again = opened(plugin)

    assert restore_snapshot(again, taken, {}) is None
    return again


MAYBE: Any = "maybe"
ASKED = [AskPerson("the rule `ask shell` asks")]


# ---------------------------------------------------------------------- which calls a rule is about


@pytest.mark.parametrize(
    ("rule", "tool", "args", "fits"),
    [
        (Rule("deny"), "anything", {}, True),
        (Rule("deny", "shell"), "shell", RM, True),
        (Rule("deny", "shell"), "shell2", RM, False),
        (Rule("deny", "file_*"), "file_write", {}, True),
        (Rule("deny", "SHELL"), "shell", {}, False),
        (Rule("deny", "shell", {"command": "rm *"}), "shell", RM, True),
        (Rule("deny", "shell", {"command": "rm *"}), "shell", LS, False),
        (Rule("deny", "shell", {"command": "rm *"}), "shell", {}, False),
        (Rule("deny", "shell", {"command": "rm *"}), "shell", {"command": "rm a\nrm b"}, True),
        (Rule("deny", "http", {"url": "*", "body.user.role": "admin"}), "http", {"url": "u"}, False),
        (Rule("deny", "http", {"body.user.role": "admin"}), "http", {"body": {"user": {"role": "admin"}}}, True),
        (Rule("deny", "http", {"body.user.role": "admin"}), "http", {"body": "admin"}, False),
        (Rule("deny", "http", {"body": "admin"}), "http", {"body": {"user": {"role": "admin"}}}, True),
        (Rule("deny", "http", {"*": "*secret*"}), "http", {"url": "x", "body": {"a": ["a secret"]}}, True),
        (Rule("deny", "http", {"*": "*secret*"}), "http", {"secret": "x"}, False),
        (Rule("deny", "set", {"count": "5"}), "set", {"count": 5}, True),
        (Rule("deny", "set", {"to": "null"}), "set", {"to": None}, True),
        (Rule("deny", "set", {"to": "0.5"}), "set", {"to": 0.5}, True),
    ],
)
def test_a_rule_fits_a_call_by_globs_on_its_name_and_arguments(
    rule: Rule, tool: str, args: dict[str, Any], fits: bool
) -> None:
    assert rule.fits(tool, args) is fits


@pytest.mark.parametrize(
    ("paths", "denied", "allowed"),
    [
        (["/tmp/a", "/tmp/b"], True, True),
        (["/etc/passwd", "/tmp/a"], True, False),
        (["/etc/passwd"], False, False),
        ([], False, False),
        ([{"path": "/tmp/a"}, "/etc/passwd"], True, False),
    ],
)
def test_one_of_several_values_is_enough_to_deny_and_all_are_needed_to_allow(
    paths: list[Any], denied: bool, allowed: bool
) -> None:
    args = {"paths": paths}

    assert Rule("deny", args={"paths": "/tmp/*"}).fits("read", args) is denied
    assert Rule("ask", args={"paths": "/tmp/*"}).fits("read", args) is denied
    assert Rule("allow", args={"paths": "/tmp/*"}).fits("read", args) is allowed


def test_an_allow_does_not_fit_when_its_path_leads_nowhere_for_one_of_several_values() -> None:
    args = {"files": [{"path": "/tmp/a"}, {"name": "b"}]}

    assert not Rule("allow", args={"files.path": "/tmp/*"}).fits("read", args)
    assert Rule("deny", args={"files.path": "/tmp/*"}).fits("read", args)


@pytest.mark.parametrize(
    ("glob", "value"),
    [
        ("true", 1),
        ("true", "True"),
        ("true", "1"),
        ("false", 0),
        ("5", 5.0),
        ("5", "5.0"),
        ("1", True),
        ("null", "NULL"),
    ],
    ids=repr,
)
def test_an_argument_that_is_spelled_otherwise_is_no_way_around_a_deny(glob: str, value: Any) -> None:
    """Arguments are checked after the plugin, and a tool that takes a bool takes 1 and "True" as well."""
    assert Rule("deny", args={"force": glob}).fits("push", {"force": value})
    assert not Rule("allow", args={"force": glob}).fits("push", {"force": value})


# ---------------------------------------------------------------------- what several rules decide


@pytest.mark.parametrize(
    ("rules", "decision"),
    [
        ([Rule("allow", "shell"), Rule("deny", "*")], "deny"),
        ([Rule("allow", "shell"), Rule("ask", "sh*"), Rule("deny", "shell", {"command": "rm *"})], "deny"),
        ([Rule("allow", "shell"), Rule("ask", "*")], "ask"),
        ([Rule("allow", "shell"), Rule("deny", "shell", {"command": "ls*"})], "allow"),
    ],
)
def test_the_strictest_rule_decides_in_whatever_order_they_are_written(rules: list[Rule], decision: Choice) -> None:
    found = {Permissions(order, default="allow").judge("shell", RM).decision for order in permutations(rules)}

    assert found == {decision}


@pytest.mark.parametrize("default", ["allow", "ask", "deny"])
def test_a_call_that_no_rule_fits_is_decided_by_the_default(default: Choice) -> None:
    plugin = Permissions([Rule("deny", "other")], default=default)

    assert plugin.judge("shell", RM).decision == default


def test_without_rules_a_person_is_asked_about_everything() -> None:
    assert decided(opened(Permissions()), asked(RM)) == [AskPerson("no rule permits it")]


def test_a_denied_call_ends_with_the_reason_of_its_rule() -> None:
    plugin = opened(Permissions([Rule("deny", "shell", {"command": "rm *"}, reason="use the trash tool")]))

    assert decided(plugin, asked(RM)) == [ShortCircuit(Denied("use the trash tool", "permissions"))]


def test_a_denied_call_names_the_rule_when_it_gives_no_reason() -> None:
    plugin = opened(Permissions([Rule("deny", "shell", {"command": "rm *"})]))

    assert decided(plugin, asked(RM)) == [
        ShortCircuit(Denied("not permitted by the rule `deny shell command=rm *`", "permissions"))
    ]


def test_a_person_is_told_why_they_are_asked() -> None:
    plugin = opened(Permissions([Rule("ask", "shell"), Rule("ask", "mail", reason="it reaches customers")]))

    assert decided(plugin, asked({}, "mail")) == [AskPerson("it reaches customers")]
    assert decided(plugin, asked(LS, call="chat.1.1.1")) == ASKED


def test_an_allowed_call_is_left_alone() -> None:
    assert decided(opened(Permissions([Rule("allow", "shell")])), asked(RM)) == []


# ---------------------------------------------------------------------- what is remembered


def test_a_call_that_was_approved_once_runs_again_without_asking_when_its_rule_remembers() -> None:
    plugin = opened(Permissions([Rule("ask", "shell", remember=True)]))
    assert decided(plugin, asked(RM)) == ASKED
    plugin.after_tool_call(ended(RM))

    assert decided(plugin, asked(RM, call="chat.2.1.0")) == []
    assert decided(plugin, asked(LS, call="chat.2.1.1")) == ASKED


def test_a_call_that_failed_was_approved_all_the_same() -> None:
    plugin = opened(Permissions([Rule("ask", "shell", remember=True)]))
    plugin.before_tool_call(asked(RM))
    plugin.after_tool_call(ended(RM, outcome=Failed("tool_error", "disk full")))

    assert decided(plugin, asked(RM, call="chat.2.1.0")) == []


def test_a_rule_asks_every_time_unless_it_says_that_it_remembers() -> None:
    plugin = opened(Permissions([Rule("ask", "shell")]))
    plugin.before_tool_call(asked(RM))
    plugin.after_tool_call(ended(RM))

    assert decided(plugin, asked(RM, call="chat.2.1.0")) == ASKED
    assert plugin.snapshot(SnapshotWriter())["approved"] == []


def test_a_rule_that_asks_every_time_is_not_silenced_by_one_that_remembers() -> None:
    plugin = opened(Permissions([Rule("ask", "shell", remember=True), Rule("ask", "*", {"command": "rm *"})]))
    plugin.before_tool_call(asked(RM))
    plugin.after_tool_call(ended(RM))

    assert decided(plugin, asked(RM, call="chat.2.1.0")) == ASKED


def test_nothing_is_remembered_of_what_comes_after_its_turn_since_anybody_may_have_started_it() -> None:
    plugin = opened(Permissions([Rule("ask", "shell", remember=True)]))

    plugin.after_tool_call(replace(ended(RM), late=True))

    assert decided(plugin, asked(RM)) == [AskPerson("the rule `ask shell` asks")]


def test_nothing_is_remembered_of_a_call_that_never_ran() -> None:
    plugin = opened(Permissions([Rule("ask", "shell", remember=True)]))
    plugin.before_tool_call(asked(RM))  # and a person rejects it: no hook is told

    assert decided(plugin, asked(RM, call="chat.1.2.0")) == ASKED


def test_a_deny_holds_against_what_was_approved_before() -> None:
    plugin = opened(Permissions([Rule("ask", "shell", remember=True)]))
    plugin.before_tool_call(asked(RM))
    plugin.after_tool_call(ended(RM))
    plugin.remember(Rule("deny", "shell", {"command": "rm *"}, reason="no more"))

    assert decided(plugin, asked(RM, call="chat.2.1.0")) == [ShortCircuit(Denied("no more", "permissions"))]


def test_a_remembered_allow_goes_before_every_ask_and_before_no_deny() -> None:
    plugin = opened(Permissions([Rule("ask", "shell"), Rule("deny", "shell", {"command": "rm *"}, reason="no")]))
    plugin.remember(Rule("allow", "shell"))

    assert decided(plugin, asked(LS)) == []
    assert decided(plugin, asked(RM, call="chat.1.1.1")) == [ShortCircuit(Denied("no", "permissions"))]


def test_a_rule_is_remembered_once() -> None:
    plugin = opened(Permissions())
    plugin.remember(Rule("allow", "shell"))
    before = plugin.revision
    plugin.remember(Rule("allow", "shell"))

    assert plugin.revision == before


def test_sessions_do_not_share_what_they_remember() -> None:
    shared = Permissions([Rule("ask", "shell")])
    first, second = opened(shared), opened(shared)
    first.remember(Rule("allow", "shell"))

    assert decided(first, asked(LS)) == []
    assert decided(second, asked(LS)) == ASKED
    assert shared.judge("shell", LS).decision == "ask"


# ---------------------------------------------------------------------- together with other plugins


class Replacing(Plugin):
    """Makes another call of the one it sees."""

    id = "replacing"

    def before_tool_call(self, ctx: ToolCallContext) -> ReplaceArgs | None:
        return None if ctx.inspecting else ReplaceArgs(LS)


class Answering(Plugin):
    """Knows the result without calling."""

    id = "answering"

    def before_tool_call(self, ctx: ToolCallContext) -> ShortCircuit:
        return ShortCircuit(Ok("from my cache"))


async def judged(plugins: Sequence[Plugin], args: dict[str, Any]) -> tuple[decisions.CallVerdict, Permissions]:
    session = PluginSet(plugins).open({each.id: SessionContext("chat", "assistant") for each in plugins})
    verdict = await before_tool_call(
        session.hooks("before_tool_call"), lambda now, again: asked(now, again=again), args
    )
    return verdict, next(each for each in session.plugins if isinstance(each, Permissions))


async def test_what_is_remembered_is_what_the_person_was_shown() -> None:
    verdict, plugin = await judged([Permissions([Rule("ask", remember=True)]), Replacing()], RM)
    plugin.after_tool_call(ended(LS))

    assert (verdict.args, verdict.ask) == (LS, "the rule `ask *` asks")
    assert plugin.judge("shell", LS).decision == "allow"
    assert plugin.judge("shell", RM).decision == "ask"


async def test_arguments_that_were_replaced_after_a_question_are_not_remembered_as_approved() -> None:
    """The person sees harmless arguments: a yes to them is none to the ones that were asked about first."""
    rules = [Rule("ask", "shell", {"command": "rm *"}, remember=True)]
    verdict, plugin = await judged([Permissions(rules, default="allow"), Replacing()], RM)
    plugin.after_tool_call(ended(LS))

    assert verdict.ask == "the rule `ask shell command=rm *` asks"
    assert plugin.judge("shell", RM).decision == "ask"


async def test_arguments_that_another_plugin_puts_in_are_judged_too() -> None:
    rules = [Rule("deny", "shell", {"command": "ls"}, reason="no")]
    verdict, _ = await judged([Permissions(rules, default="allow"), Replacing()], RM)

    assert verdict.outcome == Denied("no", "permissions")


@pytest.mark.parametrize("order", [1, -1])
async def test_no_other_plugin_gives_back_what_a_rule_denies(order: int) -> None:
    plugins: list[Plugin] = [Permissions([Rule("deny", "shell", reason="no")]), Answering()]
    verdict, _ = await judged(plugins[::order], RM)

    assert verdict.outcome == Denied("no", "permissions")


# ---------------------------------------------------------------------- the trail


def test_the_trail_says_what_was_decided_by_which_rule() -> None:
    rules = [Rule("allow", "read"), Rule("ask", "shell", {"command": "*"}), Rule("deny", "mail")]
    plugin = opened(Permissions(rules))
    plugin.before_tool_call(asked({}, "read", "chat.1.1.0"))
    plugin.before_tool_call(asked(RM, "shell", "chat.1.1.1"))
    plugin.before_tool_call(asked({}, "mail", "chat.1.1.2"))
    plugin.after_tool_call(ended({}, "read", "chat.1.1.0"))
    plugin.after_tool_call(ended(RM, "shell", "chat.1.1.1"))
    plugin.before_tool_call(asked({}, "other", "chat.1.2.0"))

    assert plugin.trail == (
        Entry("chat.1.1.0", "read", "allow", "allow read"),
        Entry("chat.1.1.1", "shell", "ask", "ask shell command=*"),
        Entry("chat.1.1.2", "mail", "deny", "deny mail"),
        Entry("chat.1.1.1", "shell", "ran", "ask shell command=*"),
        Entry("chat.1.2.0", "other", "ask", "default"),
    )


def test_every_decision_is_traced() -> None:
    plugin = opened(Permissions([Rule("allow", "read")]))
    told = {"call_id": "chat.1.1.0", "tool": "read", "decision": "allow", "rule": "allow read"}

    assert plugin.before_tool_call(asked({}, "read")) == [EmitTrace("decision", told)]


def test_the_trail_keeps_the_newest_decisions_only() -> None:
    plugin = opened(Permissions(default="allow", trail=2))
    for number in range(5):
        plugin.before_tool_call(asked(LS, call=f"chat.1.{number}.0"))

    assert [entry.call_id for entry in plugin.trail] == ["chat.1.3.0", "chat.1.4.0"]


def test_without_a_trail_an_allowed_call_changes_nothing_to_be_saved() -> None:
    plugin = opened(Permissions(default="allow", trail=0))
    plugin.before_tool_call(asked(LS))

    assert plugin.trail == ()
    assert plugin.revision == 0


def test_without_a_trail_approvals_are_saved_all_the_same() -> None:
    plugin = opened(Permissions([Rule("ask", remember=True)], trail=0))
    plugin.after_tool_call(ended(LS))

    assert plugin.revision == 1
    assert decided(restarted(plugin), asked(LS)) == []


def test_the_oldest_approvals_are_forgotten_when_there_are_too_many() -> None:
    plugin = opened(Permissions([Rule("ask", remember=True)], trail=0))
    for number in range(MAX_APPROVED + 1):
        plugin.after_tool_call(ended({"number": number}))

    assert plugin.judge("shell", {"number": 0}).decision == "ask"
    assert plugin.judge("shell", {"number": 1}).decision == "allow"
    assert plugin.judge("shell", {"number": MAX_APPROVED}).decision == "allow"


def test_a_hook_that_runs_again_after_a_crash_leaves_one_line() -> None:
    plugin = opened(Permissions([Rule("ask", "shell")]))
    plugin.before_tool_call(asked(RM))
    before = plugin.revision
    again = restarted(plugin)

    assert decided(again, asked(RM)) == ASKED
    assert len(again.trail) == 1
    assert again.revision == before


def test_arguments_are_not_kept() -> None:
    plugin = opened(Permissions([Rule("ask", "login", remember=True)]))
    plugin.before_tool_call(asked({"password": "hunter2"}, "login"))
    plugin.after_tool_call(ended({"password": "hunter2"}, "login"))

    assert "hunter2" not in repr(plugin.snapshot(SnapshotWriter()))


# ---------------------------------------------------------------------- state


def test_everything_remembered_is_there_after_a_restart() -> None:
    plugin = opened(Permissions([Rule("ask", "shell", remember=True)]))
    plugin.before_tool_call(asked(RM))
    plugin.after_tool_call(ended(RM))
    plugin.remember(Rule("allow", "mail", {"to": "*@example.com"}))
    again = restarted(plugin)

    assert again.trail == plugin.trail
    assert again.revision == plugin.revision
    assert decided(again, asked(RM, call="chat.2.1.0")) == []
    assert decided(again, asked({"to": "a@example.com"}, "mail", "chat.2.1.1")) == []


def test_a_session_without_anything_saved_begins_with_nothing() -> None:
    plugin = opened(Permissions([Rule("ask", "shell")]))

    assert restore_snapshot(plugin, None, {}) is None
    assert (plugin.trail, plugin.revision) == ((), 0)


@pytest.mark.parametrize("saved", ["nonsense", {"rules": [{"decision": "maybe"}]}, {"trail": [["chat.1.1.0"]]}])
def test_a_memory_that_cannot_be_read_is_an_issue_of_a_required_plugin(saved: Any) -> None:
    plugin = opened(Permissions())
    issue = restore_snapshot(plugin, PluginSnapshot("1", 3, saved), {})

    assert issue is not None
    assert (issue.code, issue.plugin) == ("plugin_snapshot_unreadable", "permissions")
    assert plugin.required


# ---------------------------------------------------------------------- options and bad input


def test_a_session_may_bring_rules_and_a_default_of_its_own() -> None:
    options = {"rules": [{"decision": "allow", "tool": "search"}], "default": "deny"}
    plugin = opened(Permissions([Rule("ask", "shell")]), options)

    assert plugin.judge("search", {}).decision == "allow"
    assert plugin.judge("shell", LS).decision == "ask"
    assert plugin.judge("other", {}).decision == "deny"


def test_rules_of_a_session_do_not_open_what_the_agent_denies() -> None:
    plugin = opened(Permissions([Rule("deny", "shell")]), {"rules": [{"decision": "allow", "tool": "shell"}]})

    assert plugin.judge("shell", LS).decision == "deny"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rules": [{"decision": "maybe"}]}, "maybe"),
        ({"rules": [{"decision": "deny", "tools": "shell"}]}, "tools"),
        ({"rules": [{"decision": "deny", "args": {"command": 5}}]}, "str"),
        ({"default": "perhaps"}, "perhaps"),
        ({"rule": []}, "rule"),
        ([], "object"),
    ],
)
def test_options_that_make_no_sense_refuse_the_session(options: Any, says: str) -> None:
    plugin = Permissions()

    with pytest.raises(PluginError, match=says) as caught:
        PluginSet([plugin]).open({plugin.id: SessionContext("chat", "assistant", options)})
    assert caught.value.plugin == "permissions"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rule(MAYBE), "a rule says allow, ask or deny, not 'maybe'"),
        (lambda: Rule("allow", "shell", remember=True), "means nothing for 'allow'"),
        (lambda: Permissions(default=MAYBE), "the default is allow, ask or deny, not 'maybe'"),
        (lambda: Permissions(trail=-1), "give 0 or more"),
    ],
)
def test_a_definition_that_makes_no_sense_is_refused(make: Any, says: str) -> None:
    with pytest.raises(InvalidDefinition, match=says):
        make()


def test_a_session_of_another_version_is_not_touched() -> None:
    plugin = opened(Permissions())
    taken = replace(take_snapshot(plugin).snapshot, version="2")
    issue = restore_snapshot(plugin, taken, {})

    assert issue is not None
    assert issue.code == "plugin_snapshot_newer"


# ---------------------------------------------------------------------- in a session


@tool
async def shell(command: str) -> str:
    """Run a command."""
    return f"ran {command}"


async def test_a_person_is_asked_once_in_whatever_process_they_answer(tmp_path: Path) -> None:
    model = ScriptedModel(
        [[ToolCall("1", "shell", LS)], [ToolCall("2", "shell", LS), ToolCall("3", "shell", RM)], "done"]
    )
    rules = [Rule("ask", "shell", remember=True), Rule("deny", "shell", {"command": "rm *"}, reason="no")]
    agent = Agent(model, tools=[shell], plugins=[Permissions(rules)])
    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        waiting = (await (await runtime.session("chat")).run("tidy up")).outcome

    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        await session.approve("chat.1.1.0")
        result = await session.result("chat.1")

    assert isinstance(waiting, Waiting)
    assert [(call.call_id, call.args, call.reason) for call in waiting.calls] == [
        ("chat.1.1.0", LS, "the rule `ask shell` asks")
    ]
    assert result.text == "done"
    assert [call.outcome for call in result.tool_calls] == [Ok("ran ls"), Ok("ran ls"), Denied("no", "permissions")]


async def test_a_rejected_call_is_asked_about_again_and_a_later_turn_remembers_the_approval(tmp_path: Path) -> None:
    calls = [[ToolCall(str(number), "shell", LS)] for number in range(3)]
    model = ScriptedModel([calls[0], calls[1], "done", calls[2], "again"])
    agent = Agent(model, tools=[shell], plugins=[Permissions([Rule("ask", "shell", remember=True)])])
    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        await session.run("look")
        await session.reject("chat.1.1.0", "not now")
        await session.result("chat.1")
        await session.approve("chat.1.2.0")
        first = await session.result("chat.1")

    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        second = await (await runtime.session("chat")).run("look again")

    assert [call.outcome for call in first.tool_calls] == [Denied("not now", "host"), Ok("ran ls")]
    assert [call.outcome for call in second.tool_calls] == [Ok("ran ls")]
    assert second.text == "again"
