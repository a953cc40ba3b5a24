"""How hooks are called: in order, one at a time or all at once, and never for longer than their plugin allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.errors import PluginFault
from perdure.model.plugin import Issue
from perdure.plugins.calls import collect, first, notify, pipe
from perdure.plugins.hooks import Plugin
from tests.plugins.made import having, hooks_of

PACKAGE = str(Path(perdure.__file__).parent)
"""Where our code is. The tests may be in any folder, also in one that is called as it is."""

SHORT = 0.01
HOOK = "before_turn"


def nothing(plugin: Plugin) -> tuple[Any, ...]:
    return ()


def awaitable(body: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Awaitable[Any]]:
    """The same as a plain function: what it returns has to be awaited."""
    return lambda: body()


async def fault_of(call: Awaitable[Any]) -> PluginFault:
    with pytest.raises(PluginFault) as caught:
        await call
    return caught.value


@pytest.fixture(autouse=True)
async def _nothing_is_left_behind() -> AsyncIterator[None]:
    """No hook, and no timer of one, outlives its call, unless a test says so and ends it."""
    yield
    await asyncio.sleep(0)
    loop: Any = asyncio.get_running_loop()
    running: list[Any] = [task.get_coro() for task in asyncio.all_tasks()]
    assert [each for each in running if each.cr_code.co_filename.startswith(PACKAGE)] == []
    assert [timer for timer in loop._scheduled if not timer.cancelled()] == []


# ---------------------------------------------------------------------- the three chains


@pytest.mark.parametrize("kind", ["plain", "async", "mixed", "awaitable"])
async def test_hooks_are_asked_in_order_and_answer_under_their_own_name(kind: str) -> None:
    log: list[str] = []

    def plain(name: str) -> Callable[[], Any]:
        def body() -> Any:
            log.append(name)
            return name.upper()

        return body

    def later(name: str) -> Callable[[], Coroutine[Any, Any, Any]]:
        async def body() -> Any:
            await asyncio.sleep(0)
            log.append(name)
            return name.upper()

        return body

    bodies: list[Callable[[], Any]] = {
        "plain": [plain("a"), plain("b"), plain("c")],
        "async": [later("a"), later("b"), later("c")],
        "mixed": [plain("a"), later("b"), plain("c")],
        "awaitable": [awaitable(later("a")), plain("b"), awaitable(later("c"))],
    }[kind]
    hooks = hooks_of(HOOK, *[having(HOOK, body, id) for id, body in zip("cab", bodies, strict=True)])

    answers = await collect(hooks, nothing)

    assert [(plugin.id, answer) for plugin, answer in answers] == [("c", "A"), ("a", "B"), ("b", "C")]
    assert log == ["a", "b", "c"]
    assert hooks.waits is (kind in ("async", "mixed"))


async def test_every_hook_is_told_what_is_meant_for_its_plugin() -> None:
    hooks = hooks_of(HOOK, having(HOOK, lambda told: told, "a"), having(HOOK, lambda told: told, "b"))

    answers = await collect(hooks, lambda plugin: (f"for {plugin.id}",))

    assert [answer for _, answer in answers] == ["for a", "for b"]


async def test_the_first_answer_ends_the_asking() -> None:
    asked: list[str] = []

    def saying(id: str, answer: Any) -> Plugin:
        def body() -> Any:
            asked.append(id)
            return answer

        return having("compact", body, id)

    hooks = hooks_of("compact", saying("a", None), saying("b", ()), saying("c", "this"), saying("d", "that"))

    found = await first(hooks, nothing)

    assert found is not None
    assert (found[0].id, found[1]) == ("c", "this")
    assert asked == ["a", "b", "c"]


async def test_nobody_answers() -> None:
    assert await first(hooks_of("compact", having("compact", lambda: None)), nothing) is None
    assert await first(hooks_of("compact"), nothing) is None
    assert await collect(hooks_of(HOOK), nothing) == []
    assert await notify(hooks_of(HOOK), nothing) == []
    assert await pipe(hooks_of("transform_view"), 5, lambda _, value: (value,)) == 5


async def test_a_value_is_handed_from_one_to_the_next_by_priority() -> None:
    async def double(value: int) -> int:
        return value * 2

    hooks = hooks_of(
        "transform_view",
        having("transform_view", lambda value: value + 1, "low", priority=-1),
        having("transform_view", double, "high", priority=5),
    )

    assert await pipe(hooks, 10, lambda _, value: (value,)) == 21


async def test_an_answer_without_sense_is_blamed_on_who_gave_it() -> None:
    def number(plugin: Plugin, answer: Any) -> int:
        return int(answer)

    hooks = hooks_of(
        "transform_view",
        having("transform_view", lambda value: "nonsense", "guilty"),
        having("transform_view", lambda value: value + 1, "innocent"),
    )

    fault = await fault_of(pipe(hooks, 1, lambda _, value: (value,), number))

    assert (fault.plugin, fault.hook) == ("guilty", "transform_view")
    assert fault.what.startswith("ValueError: ")


async def test_a_reader_decides_what_counts_as_an_answer() -> None:
    def odd(plugin: Plugin, answer: Any) -> Any:
        return answer if answer % 2 else None

    hooks = hooks_of("compact", *[having("compact", lambda n=n: n, str(n)) for n in (2, 4, 5, 7)])

    found = await first(hooks, nothing, odd)

    assert found is not None
    assert found[1] == 5


async def test_a_readers_own_fault_stays_as_it_is() -> None:
    def refuse(plugin: Plugin, answer: Any) -> Any:
        raise PluginFault(plugin.id, HOOK, "no number")

    fault = await fault_of(collect(hooks_of(HOOK, having(HOOK, lambda: "x")), nothing, refuse))

    assert str(fault) == "plugin 'p': before_turn: no number"


class Shy:
    def __bool__(self) -> bool:
        raise SystemExit(1)


async def test_an_answer_that_breaks_when_it_is_looked_at_is_a_fault() -> None:
    async def shy() -> Shy:
        return Shy()

    for body in (Shy, shy):
        fault = await fault_of(first(hooks_of("compact", having("compact", body)), nothing))
        assert fault.what == "SystemExit: 1"


# ---------------------------------------------------------------------- what hooks raise


@pytest.mark.parametrize("kind", ["plain", "async", "awaitable"])
@pytest.mark.parametrize(
    ("raised", "what"),
    [
        (ValueError("broken"), "ValueError: broken"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (asyncio.CancelledError(), "CancelledError: it cancelled itself"),
        (PluginFault("other", "prompt", "not me"), "PluginFault: plugin 'other': prompt: not me"),
        (TimeoutError(), "TimeoutError: "),
    ],
    ids=["error", "exit", "interrupt", "cancelled", "fault", "timeout"],
)
async def test_the_first_error_names_its_plugin_and_ends_the_chain(kind: str, raised: BaseException, what: str) -> None:
    def plain() -> None:
        raise raised

    async def later() -> None:
        raise raised

    called: list[str] = []
    body = {"plain": plain, "async": later, "awaitable": awaitable(later)}[kind]
    hooks = hooks_of(
        HOOK,
        having(HOOK, lambda: called.append("a"), "a"),
        having(HOOK, body, "b"),
        having(HOOK, lambda: called.append("c"), "c"),
    )

    fault = await fault_of(collect(hooks, nothing))

    assert (fault.plugin, fault.hook, fault.what) == ("b", "before_turn", what)
    assert called == ["a"]


async def test_a_hook_that_cancels_its_own_task_cancels_nobody_else() -> None:
    async def cancel_and_wait() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def cancel_and_go() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    for body in (cancel_and_wait, cancel_and_go):
        fault = await fault_of(collect(hooks_of(HOOK, having(HOOK, body)), nothing))
        assert fault.what == "CancelledError: it cancelled itself"


async def test_time_limits_and_cancellations_inside_a_hook_are_its_own_business() -> None:
    async def gives_up() -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "gave up"
        return "never"

    [(_, answer)] = await collect(hooks_of(HOOK, having(HOOK, gives_up)), nothing)

    assert answer == "gave up"


# ---------------------------------------------------------------------- hooks that hang


class Hang:
    """Waits for ever and says how it was stopped. `deaf` times it goes on when it is cancelled."""

    def __init__(self, deaf: bool = False) -> None:
        self.deaf = deaf
        self.began, self.release, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cancelled = 0

    async def __call__(self) -> str:
        self.began.set()
        try:
            while True:
                try:
                    await self.release.wait()
                    return "released"
                except asyncio.CancelledError:
                    self.cancelled += 1
                    if not self.deaf:
                        raise
        finally:
            self.ended.set()


def hanging(hang: Hang, kind: str) -> Callable[[], Any]:
    async def later() -> str:
        return await hang()

    return later if kind == "async" else awaitable(later)


@pytest.mark.parametrize("kind", ["async", "awaitable"])
async def test_a_hook_that_hangs_is_cut_off_by_its_time_limit(kind: str) -> None:
    hang, called = Hang(), []
    hooks = hooks_of(
        HOOK,
        having(HOOK, hanging(hang, kind), "slow", time_limit=SHORT),
        having(HOOK, lambda: called.append("next"), "next"),
    )

    fault = await fault_of(collect(hooks, nothing))

    assert str(fault) == "plugin 'slow': before_turn: it did not end within 0.01 s"
    assert hang.cancelled == 1
    assert hang.ended.is_set()
    assert called == []


@pytest.mark.parametrize("kind", ["async", "awaitable"])
async def test_a_hook_that_swallows_its_cancellation_is_left_behind(kind: str) -> None:
    hang, called = Hang(deaf=True), []
    hooks = hooks_of(
        HOOK,
        having(HOOK, hanging(hang, kind), "deaf", time_limit=SHORT),
        having(HOOK, lambda: called.append("next"), "next"),
    )

    fault = await fault_of(collect(hooks, nothing))
    left = not hang.ended.is_set()
    hang.release.set()
    await hang.ended.wait()
    for _ in range(3):  # whoever would go on with the chain does so now
        await asyncio.sleep(0)

    assert fault.what == "it did not end within 0.01 s and ignores its cancellation: it is left behind"
    assert left
    assert called == []


async def test_an_answer_that_comes_too_late_does_not_count_and_the_right_plugin_is_named() -> None:
    async def late() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "here I am"
        return "never"

    hang = Hang()
    hooks = hooks_of(HOOK, having(HOOK, late, "late", time_limit=SHORT), having(HOOK, hanging(hang, "async"), "next"))

    fault = await fault_of(collect(hooks, nothing))

    assert fault.plugin == "late"
    assert not hang.began.is_set()


async def test_a_hook_that_has_ended_is_not_cut_off_any_more() -> None:
    async def blocks() -> str:
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        due = loop.time() + 2 * SHORT
        while loop.time() < due:  # holds the loop, so that its end and its timer come in the same pass
            pass
        return "done"

    [(_, answer)] = await collect(hooks_of(HOOK, having(HOOK, blocks, time_limit=SHORT)), nothing)

    assert answer == "done"


@pytest.mark.parametrize("kind", ["async", "awaitable"])
async def test_every_hook_has_its_own_limit_a_short_one_after_a_long_one(kind: str) -> None:
    async def quick() -> None:
        await asyncio.sleep(0)

    hang = Hang()
    body = quick if kind == "async" else awaitable(quick)
    hooks = hooks_of(HOOK, having(HOOK, body, "long"), having(HOOK, hanging(hang, kind), "short", time_limit=SHORT))

    fault = await fault_of(collect(hooks, nothing))

    assert fault.plugin == "short"
    assert hang.cancelled == 1


@pytest.mark.parametrize("kind", ["async", "awaitable"])
async def test_the_limit_of_a_short_one_does_not_cut_off_a_long_one_after_it(kind: str) -> None:
    async def longer() -> str:
        await asyncio.sleep(5 * SHORT)  # real time: the timer of the one before has to go off meanwhile
        return "done"

    async def quick() -> None:
        await asyncio.sleep(0)

    one, two = (quick, longer) if kind == "async" else (awaitable(quick), awaitable(longer))
    hooks = hooks_of(HOOK, having(HOOK, one, "short", time_limit=SHORT), having(HOOK, two, "long"))

    answers = await collect(hooks, nothing)

    assert answers[1][1] == "done"


# ---------------------------------------------------------------------- cancelled from outside


@pytest.mark.parametrize("shape", ["collect", "first", "pipe", "notify"])
@pytest.mark.parametrize("kind", ["async", "awaitable"])
async def test_a_cancellation_from_outside_reaches_the_hook_and_is_no_fault(shape: str, kind: str) -> None:
    hang = Hang()
    hooks = hooks_of(HOOK, having(HOOK, hanging(hang, kind)))
    call: Any = {
        "collect": lambda: collect(hooks, nothing),
        "first": lambda: first(hooks, nothing),
        "pipe": lambda: pipe(hooks, None, lambda plugin, _: ()),
        "notify": lambda: notify(hooks, nothing),
    }[shape]
    task = asyncio.create_task(call())
    await hang.began.wait()

    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()
    assert hang.cancelled == 1
    assert hang.ended.is_set()


async def test_a_deaf_hook_does_not_hold_up_whoever_is_cancelled() -> None:
    hang, called = Hang(deaf=True), []
    hooks = hooks_of(
        HOOK, having(HOOK, hanging(hang, "async"), "deaf"), having(HOOK, lambda: called.append("next"), "next")
    )
    task = asyncio.create_task(collect(hooks, nothing))
    await hang.began.wait()

    task.cancel()
    await asyncio.wait({task})
    left = not hang.ended.is_set()
    hang.release.set()
    await hang.ended.wait()
    for _ in range(3):
        await asyncio.sleep(0)

    assert task.cancelled()
    assert left
    assert called == []


async def test_a_cancellation_before_the_first_hook_begins_leaves_nothing() -> None:
    hang = Hang()
    task = asyncio.create_task(collect(hooks_of(HOOK, having(HOOK, hanging(hang, "awaitable"))), nothing))
    await asyncio.sleep(0)

    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()


# ---------------------------------------------------------------------- all at once


@pytest.mark.parametrize("kind", ["async", "awaitable"])
async def test_all_are_told_at_once(kind: str) -> None:
    one, two = asyncio.Event(), asyncio.Event()

    async def left() -> None:
        one.set()
        await two.wait()

    async def right() -> None:
        two.set()
        await one.wait()

    bodies = (left, right) if kind == "async" else (awaitable(left), awaitable(right))
    hooks = hooks_of("turn_persisted", *[having("turn_persisted", b, id) for id, b in zip("ab", bodies, strict=True)])

    assert await notify(hooks, nothing) == []


async def test_faults_of_those_who_are_told_come_back_in_order_and_harm_nobody() -> None:
    def plain() -> None:
        raise SystemExit(2)

    async def later() -> None:
        raise ValueError("broken")

    def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    told: list[str] = []
    hooks = hooks_of(
        "turn_persisted",
        having("turn_persisted", hanging(Hang(), "async"), "e", time_limit=SHORT),
        having("turn_persisted", later, "d"),
        having("turn_persisted", lambda: told.append("c"), "c"),
        having("turn_persisted", plain, "b"),
        having("turn_persisted", cancels, "a"),
    )

    issues = await notify(hooks, nothing)

    assert issues == [
        Issue("lifecycle_hook_failed", "plugin 'e': turn_persisted: it did not end within 0.01 s", "e"),
        Issue("lifecycle_hook_failed", "plugin 'd': turn_persisted: ValueError: broken", "d"),
        Issue("lifecycle_hook_failed", "plugin 'b': turn_persisted: SystemExit: 2", "b"),
        Issue("lifecycle_hook_failed", "plugin 'a': turn_persisted: CancelledError: it cancelled itself", "a"),
    ]
    assert told == ["c"]


async def test_a_plain_hook_that_cancels_whoever_tells_it_is_an_issue_in_a_plain_chain_too() -> None:
    def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    issues = await notify(hooks_of("turn_persisted", having("turn_persisted", cancels)), nothing)

    assert [issue.plugin for issue in issues] == ["p"]


# ---------------------------------------------------------------------- what a chain costs


async def test_a_plain_chain_makes_no_task_and_no_timer() -> None:
    made: list[Any] = []
    loop = asyncio.get_running_loop()

    def counting(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro)
        return asyncio.Task(coro, loop=loop, **options)

    loop.set_task_factory(counting)
    try:
        await collect(hooks_of(HOOK, *[having(HOOK, lambda: None, str(n)) for n in range(20)]), nothing)
        plain = len(made)

        async def later() -> None:
            await asyncio.sleep(0)

        await collect(hooks_of(HOOK, *[having(HOOK, later, str(n)) for n in range(20)]), nothing)
    finally:
        loop.set_task_factory(None)

    assert plain == 0
    assert len(made) == 1


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="eager tasks begin with Python 3.12")
async def test_a_loop_that_begins_tasks_eagerly_is_served_too() -> None:
    async def at_once() -> str:
        return "at once"

    async def later() -> str:
        await asyncio.sleep(0)
        return "later"

    hang = Hang()
    quick = hooks_of(HOOK, having(HOOK, at_once, "a"), having(HOOK, later, "b"), having(HOOK, at_once, "c"))
    slow = hooks_of(HOOK, having(HOOK, later, "a"), having(HOOK, hanging(hang, "async"), "b", time_limit=SHORT))
    loop, library = asyncio.get_running_loop(), vars(asyncio)  # the types are those of Python 3.11
    loop.set_task_factory(library["eager_task_factory"])
    try:
        answers = await collect(quick, nothing)
        fault = await fault_of(collect(slow, nothing))
    finally:
        loop.set_task_factory(None)

    assert [answer for _, answer in answers] == ["at once", "later", "at once"]
    assert fault.plugin == "b"
    assert hang.cancelled == 1
