"""`Runtime(process_policy=…)`: what sessions may see of processes, start, await and signal, as their host decides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, ToolContext, ToolError, process, tool
from perdure.builtin.processes import process_tools
from perdure.errors import InvalidDefinition, PerdureError
from perdure.model.process import ProcessRow, TaskSpec
from perdure.model.tool import Failed, Ok
from perdure.processes.handle import ProcessAsk, ProcessPolicy
from tests.kit import SOON, Place, untyped
from tests.processes_tools.talk import Talk, agent_of, call, event_types, handle, outcomes

Ctx = ProcessContext[Any]


@process
async def report(ctx: Ctx, day: str) -> str:
    return f"report of {day}"


class Tenants(ProcessPolicy):
    """A session sees what is labelled as its tenant's, starts no reports of Sundays, and awaits and signals by day."""

    def __init__(self, night: bool = False) -> None:
        self.night, self.asked = night, list[ProcessAsk]()

    async def sees(self, session_id: str, process: ProcessRow) -> bool:
        return not process.registration.label.startswith("secret")

    def check(self, ask: ProcessAsk) -> None:
        self.asked.append(ask)
        if ask.verb == "start" and ask.data.get("day") == "Sunday":
            raise ToolError("no reports on Sundays")
        if ask.verb != "start" and self.night:
            raise PermissionError("not at night")


async def two_jobs(runtime: Runtime) -> None:
    await runtime.processes.register("open", label="open job", signals=["go"], grants=["chat"])
    await runtime.processes.register("hidden", label="secret job", signals=["go"], grants=["chat"])


def failures(found: list[Any]) -> list[str]:
    return [each.code if isinstance(each, Failed) else "ok" for each in found]


async def test_model_sees_and_reaches_only_what_the_policy_shows(place: Place) -> None:
    verbs = ("await_process", "cancel_process")
    talk = Talk(
        [call("list_processes")],
        [call(verb, handle=handle("hidden")) for verb in verbs]
        + [call("signal_process", handle=handle("hidden"), signal_name="go")],
        [call("signal_process", handle=handle("open"), signal_name="go")],
    )
    async with place.runtime(agent_of(talk, *process_tools()), process_policy=Tenants()) as runtime:
        await two_jobs(runtime)
        listed, *hidden, signalled = await outcomes(runtime)
        events = await event_types(runtime, "hidden")
        by_the_host = [row.id for row in await (await runtime.session("chat")).processes()]

    assert isinstance(listed, Ok)
    assert [each["id"] for each in listed.value] == ["open"]
    assert failures(hidden) == ["process_not_visible"] * 3
    assert isinstance(signalled, Ok)
    assert events == ["process.created"]
    assert by_the_host == ["hidden", "open"]  # the host's own calls are not narrowed


async def test_list_is_as_long_as_asked_for_though_much_is_hidden() -> None:
    talk = Talk([call("list_processes", limit=3)])
    async with Runtime("memory", agents=[agent_of(talk, *process_tools())], process_policy=Tenants()) as runtime:
        for n in range(20):
            label = "open" if n % 4 == 0 else "secret"
            await runtime.processes.register(f"job-{n}", label=label, grants=["chat"])
        [listed] = await outcomes(runtime)

    assert isinstance(listed, Ok)
    assert [each["id"] for each in listed.value] == ["job-16", "job-12", "job-8"]


async def test_what_the_turn_started_itself_is_its_own_to_see() -> None:
    @tool(background=True)
    async def crawl() -> str:
        """Crawl."""
        return "crawled"

    class Nothing(ProcessPolicy):
        def sees(self, session_id: str, process: ProcessRow) -> bool:
            return False

    talk = Talk([call("crawl")], lambda found: [call("await_process", handle=found[0])], [call("list_processes")])
    async with Runtime("memory", agents=[agent_of(talk, crawl)], process_policy=Nothing()) as runtime:
        _, awaited, listed = await outcomes(runtime)

    assert awaited == Ok("crawled")
    assert isinstance(listed, Ok)


async def test_starts_awaits_and_signals_are_decided_with_all_that_is_known_of_them(place: Place) -> None:
    policy = Tenants()
    talk = Talk(
        [call("start_process", name="report", args={"day": "Monday"})],
        lambda found: [call("await_process", handle=found[0])],
        [call("start_process", name="report", args={"day": "Sunday"})],
        [call("signal_process", handle=handle("open"), signal_name="go", payload={"n": 1})],
    )
    agent = agent_of(talk, *process_tools(report))
    async with place.runtime(agent, processes=[report], process_policy=policy) as runtime:
        await two_jobs(runtime)
        await (await runtime.session("chat", metadata={"user": "u-17"})).update(title="x")
        started, awaited, refused, signalled = await outcomes(runtime)
        of_the_host = await (await runtime.start(report, {"day": "Sunday"})).result(SOON)
        started_ids = [row.id for row in await runtime.processes.list(kind="function")]

    assert isinstance(started, Ok)
    assert awaited == Ok("report of Monday")
    assert isinstance(refused, Failed)
    assert "session 'chat' may not start 'report', by the policy of its host: no reports on Sundays" in refused.message
    assert isinstance(signalled, Ok)
    assert of_the_host == "report of Sunday"
    assert len(started_ids) == 2
    told = [(ask.verb, ask.name, ask.data, ask.process and ask.process.id) for ask in policy.asked]
    assert told == [
        ("start", "report", {"day": "Monday"}, None),
        ("await", "", None, "chat.1.1.0"),
        ("start", "report", {"day": "Sunday"}, None),
        ("signal", "go", {"n": 1}, "open"),
    ]
    assert {ask.session_id for ask in policy.asked} == {"chat"}
    assert [dict(ask.metadata) for ask in policy.asked] == [{"user": "u-17"}] * 4


async def test_refusal_in_any_words_is_told_and_nothing_is_done(place: Place) -> None:
    talk = Talk(
        [call("signal_process", handle=handle("open"), signal_name="go"), call("await_process", handle=handle("open"))]
    )
    async with place.runtime(agent_of(talk, *process_tools()), process_policy=Tenants(night=True)) as runtime:
        await two_jobs(runtime)
        found = await outcomes(runtime)
        events = await event_types(runtime, "open")

    assert failures(found) == ["process_refused"] * 2
    assert all("not at night" in each.message for each in found if isinstance(each, Failed))
    assert events == ["process.created"]


async def test_background_tool_that_may_not_be_started_is_not() -> None:
    runs: list[str] = []

    @tool(background=True)
    async def crawl(day: str) -> None:
        """Crawl."""
        runs.append(day)

    talk = Talk([call("crawl", day="Sunday")], [call("crawl", day="Monday")])
    async with Runtime("memory", agents=[agent_of(talk, crawl)], process_policy=Tenants()) as runtime:
        refused, started = await outcomes(runtime)
        await runtime.wait_idle(SOON)

    assert failures([refused, started]) == ["process_refused", "ok"]
    assert runs == ["Monday"]


async def test_process_that_was_started_before_a_crash_is_not_asked_about_again() -> None:
    policy = Tenants()

    @tool(recovery="rerun")
    async def twice(ctx: ToolContext[Any]) -> str:
        """Start the same process twice, as an attempt after a crash does."""
        first = await ctx.start(report, {"day": "Monday"}, key="k")
        second = await ctx.start(report, {"day": "Monday"}, key="k")
        assert first == second
        return str(await second.result())

    agent = agent_of(Talk([call("twice")]), twice)
    async with Runtime("memory", agents=[agent], processes=[report], process_policy=policy) as runtime:
        found = await outcomes(runtime)

    assert found == [Ok("report of Monday")]
    assert [ask.verb for ask in policy.asked] == ["start"]


async def test_plugins_and_tools_are_bound_by_it_in_their_services(place: Place) -> None:
    @tool
    async def look(ctx: ToolContext[Any]) -> list[str]:
        """Use all services that are about processes."""
        errors = []
        seen = [task.process_id for task in await ctx.host.list_background_tasks()]
        attempts: list[Callable[[], Awaitable[Any]]] = [
            lambda: ctx.host.validate_handles_visible(["hidden"]),
            lambda: ctx.host.cancel_background_task("hidden"),
            lambda: ctx.host.transfer_handles("other", ["hidden"]),
            lambda: ctx.host.start_process(report, {"day": "Sunday"}, key="k"),
        ]
        for attempt in attempts:
            try:
                await attempt()
            except PerdureError as error:
                errors.append(type(error).__name__)
        return [*seen, *errors]

    agent = agent_of(Talk([call("look")]), look)
    async with place.runtime(agent, processes=[report], process_policy=Tenants()) as runtime:
        await two_jobs(runtime)
        [found] = await outcomes(runtime)

    assert found == Ok(["open", "ProcessNotVisible", "NotFound", "ProcessNotVisible", "ProcessRefused"])


async def test_own_task_that_the_policy_hides_keeps_its_name() -> None:
    class Nothing(ProcessPolicy):
        def sees(self, session_id: str, process: ProcessRow) -> bool:
            return False

    @tool
    async def watch(ctx: ToolContext[Any]) -> str:
        """Register work that is done elsewhere."""
        try:
            await ctx.host.register_background_task(TaskSpec("watch"))
        except PerdureError as error:
            return type(error).__name__
        return "registered"

    talk = Talk([call("watch")], "one", [call("watch")])
    async with Runtime("memory", agents=[agent_of(talk, watch)], process_policy=Nothing()) as runtime:
        first, second = await outcomes(runtime), await outcomes(runtime, "again")

    assert (first, second) == ([Ok("registered")], [Ok("Conflict")])


@pytest.mark.parametrize("answer", [None, 1, "yes", LookupError("no table")])
async def test_filter_that_cannot_say_shows_nothing(answer: Any) -> None:
    class Broken(ProcessPolicy):
        def sees(self, session_id: str, process: ProcessRow) -> bool:
            if isinstance(answer, Exception):
                raise answer
            return bool(answer) if answer is True else untyped(answer)  # of a host without a type checker

    talk = Talk([call("await_process", handle=handle("open")), call("list_processes")])
    async with Runtime("memory", agents=[agent_of(talk, *process_tools())], process_policy=Broken()) as runtime:
        await two_jobs(runtime)
        found = await outcomes(runtime)

    assert [isinstance(each, Failed) for each in found] == [True, True]


def test_policy_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidDefinition, match="process_policy"):
        Runtime("memory", agents=[Agent("scripted")], process_policy=untyped("everything"))
