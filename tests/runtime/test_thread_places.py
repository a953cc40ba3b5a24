"""`Runtime(threads=…)`: how many sync tools and steps are on threads at once, and who gives its place up."""

import asyncio
import threading
from typing import Any

import pytest

from perdure import Agent, ProcessContext, Runtime, ToolCall, ToolContext, process, tool
from perdure.engine.admission import THREADS, Admission, Capacity, ThreadPlaces
from perdure.errors import InvalidDefinition
from perdure.model.event import ThreadWait, ToolStarted
from perdure.model.llm import ModelRequest
from perdure.model.outcome import Finished
from perdure.model.tool import Cancelled, Ok, OutcomeUnknown
from perdure.testing import FunctionModel
from tests.kit import SOON, Place, agent_calling, crash, until, untyped


class Block:
    """A sync tool that holds its thread until it is let go: it counts the threads that are in it."""

    def __init__(self, **options: Any) -> None:
        self.go, self.now, self.most, self.begun = threading.Event(), 0, 0, 0
        self._lock = threading.Lock()

        @tool(name="block", **options)
        def block() -> str:
            with self._lock:
                self.now, self.begun = self.now + 1, self.begun + 1
                self.most = max(self.most, self.now)
            self.go.wait(SOON)
            with self._lock:
                self.now -= 1
            return "done"

        self.tool = block

    def agent(self, **options: Any) -> Agent[str]:
        return agent_calling("block", tools=[self.tool], **options)


def in_use(runtime: Runtime) -> int:
    return runtime._dispatcher.admission.in_use(THREADS)


async def test_sync_tools_beyond_the_bound_wait_and_all_run(place: Place) -> None:
    block = Block()
    async with place.runtime(block.agent(), threads=3) as runtime:
        receipts = [await (await runtime.session(f"s{number}")).send("go") for number in range(12)]
        await until(lambda: block.now == 3)
        block.go.set()
        results = [await each.result(SOON) for each in receipts]
        await until(lambda: in_use(runtime) == 0)

    assert [result.outcome for result in results] == [Finished("done")] * 12
    assert (block.most, block.begun) == (3, 12)


async def test_the_default_is_64(place: Place) -> None:
    block = Block()
    async with place.runtime(block.agent()) as runtime:
        receipts = [await (await runtime.session(f"s{number}")).send("go") for number in range(80)]
        await until(lambda: block.now == 64)
        block.go.set()
        for each in receipts:
            await each.result(SOON)

    assert block.most == 64


async def test_a_call_that_waits_for_a_thread_says_so_before_it_starts(place: Place) -> None:
    block = Block()
    async with place.runtime(block.agent(), threads=1) as runtime:
        await (await runtime.session("first")).send("go")
        await until(lambda: block.now == 1)
        told = list[Any]()
        async with (await runtime.session("second")).stream("go") as turn:
            async for event in turn:
                if isinstance(event, ThreadWait | ToolStarted):
                    told.append(event)
                    block.go.set()

    assert [type(event) for event in told] == [ThreadWait, ToolStarted]
    assert (told[0].call_id, told[0].tool) == ("second.1.1.0", "block")


async def test_a_call_that_is_cancelled_while_it_waits_for_a_thread_never_runs(place: Place) -> None:
    block = Block()
    async with place.runtime(block.agent(), threads=1) as runtime:
        first = await (await runtime.session("first")).send("go")
        await until(lambda: block.now == 1)
        session = await runtime.session("second")
        async with session.stream("go") as turn:
            async for event in turn:
                if isinstance(event, ThreadWait):
                    await session.cancel()
            cancelled = await turn.result()
        block.go.set()
        await first.result(SOON)
        await until(lambda: in_use(runtime) == 0)

    assert isinstance(cancelled.outcome, Cancelled)
    assert not any(isinstance(call.outcome, OutcomeUnknown) for call in cancelled.tool_calls)
    assert block.begun == 1


async def test_a_call_that_waited_for_a_thread_at_a_crash_runs_once_afterwards(place: Place) -> None:
    """Nothing says that it started, so that even a `once` tool runs."""
    block = Block()
    runtime = await place.runtime(block.agent(), threads=1).__aenter__()
    await (await runtime.session("first")).send("go")
    await until(lambda: block.now == 1)
    async with (await runtime.session("second")).stream("go") as turn:
        async for event in turn:
            if isinstance(event, ThreadWait):
                break
    await crash(runtime)
    block.go.set()
    async with place.runtime(block.agent(), threads=1) as runtime:
        lost = await (await runtime.session("first")).result("first.1")
        waited = await (await runtime.session("second")).result("second.1")

    assert type(lost.tool_calls[0].outcome) is OutcomeUnknown
    assert (waited.tool_calls[0].outcome, waited.tool_calls[0].attempts) == (Ok("done"), 1)
    assert block.begun == 2


async def test_a_thread_of_a_call_that_outlived_its_time_limit_still_counts_and_is_named(place: Place) -> None:
    block = Block(timeout=0.01)
    async with place.runtime(block.agent(), threads=1) as runtime:
        result = await (await runtime.session("first")).run("go")
        left = [each.name for each in runtime._dispatcher.thread_places.calls if each.given_up]
        receipt = await (await runtime.session("second")).send("go")
        await until(lambda: runtime._dispatcher.admission.waiting() == 1)
        before = (block.begun, in_use(runtime))
        block.go.set()
        await receipt.result(SOON)
        await until(lambda: in_use(runtime) == 0)

    assert type(result.tool_calls[0].outcome) is OutcomeUnknown
    assert left == ["first.1.1.0"]
    assert before == (1, 1)
    assert block.begun == 2


async def test_a_tool_that_waits_in_its_thread_for_another_sync_tool_gives_its_place_up(place: Place) -> None:
    rooms = list[tuple[Runtime, asyncio.AbstractEventLoop]]()

    @tool
    def leaf() -> str:
        return "leaf"

    @tool
    def ask(ctx: ToolContext[None]) -> str:
        runtime, loop = rooms[0]

        async def consult() -> str:
            return (await (await runtime.session("other", agent="other")).run("go")).text

        return asyncio.run_coroutine_threadsafe(consult(), loop).result(SOON)

    agents = [
        agent_calling("ask", tools=[ask]),
        agent_calling("leaf", answer="from the leaf", tools=[leaf], name="other"),
    ]
    async with place.runtime(*agents, threads=1) as runtime:
        rooms.append((runtime, asyncio.get_running_loop()))
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)
        await until(lambda: in_use(runtime) == 0)

    assert result.tool_calls[0].outcome == Ok("from the leaf")


async def test_a_tool_that_waits_in_its_thread_for_a_process_gives_its_place_up(place: Place) -> None:
    rooms = list[tuple[Runtime, asyncio.AbstractEventLoop]]()

    def work() -> str:
        return "worked"

    @process
    async def chore(ctx: ProcessContext[None]) -> str:
        return await ctx.step(work)

    @tool
    def ask(ctx: ToolContext[None]) -> str:
        runtime, loop = rooms[0]

        async def consult() -> str:
            return str(await (await runtime.start(chore)).result())

        return asyncio.run_coroutine_threadsafe(consult(), loop).result(SOON)

    async with place.runtime(agent_calling("ask", tools=[ask]), processes=[chore], threads=1) as runtime:
        rooms.append((runtime, asyncio.get_running_loop()))
        result = await asyncio.wait_for((await runtime.session("s")).run("go"), SOON)

    assert result.tool_calls[0].outcome == Ok("worked")


async def test_sync_steps_and_background_tools_count(place: Place) -> None:
    block = Block()

    def hold() -> str:
        block.go.wait(SOON)
        return "held"

    @process
    async def chore(ctx: ProcessContext[None]) -> str:
        return await ctx.step(hold)

    async with place.runtime(block.agent(), processes=[chore], threads=2) as runtime:
        handles = [await runtime.start(chore) for _ in range(3)]
        await until(lambda: in_use(runtime) == 2)
        background = await runtime.start(block.tool)
        await until(lambda: runtime._dispatcher.admission.waiting() == 2)
        most = in_use(runtime), block.begun
        block.go.set()
        ends = [await handle.result() for handle in (*handles, background)]
        await until(lambda: in_use(runtime) == 0)

    assert (most, ends) == ((2, 0), ["held", "held", "held", "done"])


async def test_a_waiter_that_lacks_its_own_limit_keeps_no_thread_from_others() -> None:
    admission, thread = Admission(), Capacity(THREADS, 2, shared=True)
    narrow = (Capacity("tool narrow", 1), thread)

    assert admission.try_take(narrow)
    waiting = asyncio.create_task(admission.take(narrow))
    await asyncio.sleep(0)

    assert admission.try_take((thread,))
    assert not admission.try_take((thread,))
    admission.release(narrow)
    await waiting
    assert admission.in_use(THREADS) == 2


async def test_a_lent_place_is_released_once() -> None:
    places = ThreadPlaces(Admission(), 1)
    needs = places.needs((), threaded=True)
    for order in ("lend take end", "lend end take", "lend lend take take end", "end lend take"):
        assert places.admission.try_take(needs)
        place = places.begin("s.1.1.0", needs)
        for each in order.split():
            {"lend": place.lend, "take": place.take_back, "end": place.end}[each]()

        assert places.admission.in_use(THREADS) == 0, order
        assert not places.calls


async def test_async_tools_need_no_thread(place: Place) -> None:
    block, begun = Block(), asyncio.Event()

    @tool
    async def light() -> str:
        begun.set()
        return "light"

    def model(request: ModelRequest) -> Any:
        said = request.messages[-1]
        return "ok" if said.role == "tool" else [ToolCall("c", said.text, {})]

    agent = Agent(FunctionModel(model), tools=[block.tool, light])
    async with place.runtime(agent, threads=1) as runtime:
        await (await runtime.session("a")).send("block")
        await until(lambda: block.now == 1)
        await (await runtime.session("b")).run("light")
        block.go.set()

    assert begun.is_set()


@pytest.mark.parametrize("wrong", [0, -1, None, 1.5, True])
def test_a_bound_that_is_no_number_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidDefinition, match="threads="):
        Runtime("memory", threads=untyped(wrong))
