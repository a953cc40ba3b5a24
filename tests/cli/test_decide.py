"""`perdure pending`, `approve`, `reject`, `settle` and `cancel`, also while a runtime runs elsewhere."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime, ToolCall, tool
from perdure.model.event import TurnCommitted
from perdure.model.tool import Cancelled, PreparedCall, ToolSpec
from perdure.testing import ScriptedModel
from perdure.tools.waiting import InputNeeded, ParkCall
from tests.cli.sample_agents import helper
from tests.cli.shell import process, say, shell, shell_json, start, wait_for_lines


@pytest.fixture
def waiting(store: Path) -> Path:
    """A store whose session `shop` waits for an approval."""
    say(store, "shop", "pay")
    return store


@pytest.fixture
def asked(store: Path, tmp_path: Path) -> Path:
    """A store whose session `risk` asks a person what became of a call: its process was killed while it ran."""
    begun = tmp_path / "begun"
    with start("run", "sample_agents:helper", "risky", "-s", "risk", store=store, WAIT=60, BEGUN=begun) as child:
        wait_for_lines(begun)
        child.kill()
        child.communicate(timeout=60)
    assert shell("run", "sample_agents:helper", "-s", "risk", "--resume", store=store).exit_code == 3
    return store


def test_pending_lists_what_waits_in_the_whole_store(waiting: Path) -> None:
    say(waiting, "shop-2", "pay")

    shown = shell("pending", store=waiting)

    assert [c["call_id"] for c in shell_json("pending", store=waiting)] == ["shop-2.1.1.0", "shop.1.1.0"]
    assert 'shop.1.1.0    approval   pay(item="tea")' in shown.stdout
    assert "perdure approve CALL" in shown.stdout


class Booking:
    """A tool whose calls ask a person for something first."""

    def __init__(self, asks: dict[str, Any]) -> None:
        self.asks = asks

    def specs(self) -> list[ToolSpec]:
        return [ToolSpec("book", "Book a room.", {"type": "object", "properties": {}})]

    async def prepare(self, call: PreparedCall, ctx: object) -> PreparedCall:
        return call

    async def execute(self, call: PreparedCall, ctx: object) -> str:
        raise ParkCall(InputNeeded("the hotel asks: When?", self.asks, None))


HOUR = {"type": "object", "properties": {"hour": {"type": "integer", "minimum": 0, "description": "24 h"}}}
NAME = {"properties": {"size": {"enum": ["s", "l"], "default": "s"}, "name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("asks", "shown", "command"),
    [
        (
            {"srv:when": {"message": "When?", "schema": HOUR, "url": ""}},
            "  hour (integer, minimum 0, may be left out): 24 h\n",
            """perdure answer s.1.1.0 '{"hour": …}'""",
        ),
        (
            {"when": {"message": "When?", "schema": HOUR}, "who": {"message": "Who?", "schema": NAME}},
            "when: When?\n  hour (integer, minimum 0, may be left out): 24 h\n"
            'who: Who?\n  name (string)\n  size (s | l, default "s", may be left out)\n',
            """perdure answer s.1.1.0 '{"when": {"hour": …}, "who": {"name": …}}'""",
        ),
        (
            {"log in": {"message": "Log in", "schema": None, "url": "https://example.com/\nx"}},
            "  open https://example.com/�x\n",
            "perdure answer s.1.1.0 '{}'",
        ),
        ({"it": {"message": "?", "schema": {"properties": [1], "required": 7}}}, "", "perdure answer s.1.1.0 '{}'"),
        ({"it": {"message": "?", "schema": {"properties": {"a": True}}}}, "  a (anything", """'{"a": …}'"""),
    ],
    ids=["one part", "two parts", "a page", "no schema at all", "a field of any kind"],
)
def test_question_of_a_tool_is_shown_with_its_fields_and_the_command_that_answers_it(
    store: Path, asks: dict[str, Any], shown: str, command: str
) -> None:
    async def work() -> None:
        async with Runtime(
            store, agents=[Agent(ScriptedModel([[ToolCall("a", "book")]]), tools=[Booking(asks)])]
        ) as runtime:
            await (await runtime.session("s")).run("book")

    asyncio.run(work())

    told = shell("pending", store=store).stdout
    assert shown in told
    assert command in told
    assert command in shell("show", "s", store=store).stdout


def test_nothing_pending_says_so(store: Path) -> None:
    say(store, "chat", "hello")

    assert shell("pending", store=store).stdout == "nothing waits\n"
    assert shell_json("pending", store=store) == []


def test_what_a_turn_waited_for_that_is_asked_to_stop_is_not_offered_any_more(waiting: Path) -> None:
    say(waiting, "shop-2", "pay")
    assert shell("cancel", "shop", store=waiting).exit_code == 0  # nobody works on it, so it is not committed

    assert [c["call_id"] for c in shell_json("pending", store=waiting)] == ["shop-2.1.1.0"]
    assert "perdure approve" not in shell("show", "shop", store=waiting).stdout
    assert "perdure approve" in shell("show", "shop-2", store=waiting).stdout


async def test_an_approval_from_another_process_reaches_a_running_runtime(store: Path) -> None:
    async with Runtime(store, agents=[helper]) as runtime:
        session = await runtime.session("shop")
        assert (await session.run("pay")).waiting
        events = session.observe()

        approved = await asyncio.to_thread(process, "approve", "shop.1.1.0", "--by", "ada", store=store)
        async with asyncio.timeout(60):
            async for event in events:
                if isinstance(event, TurnCommitted):
                    break
        result = await session.result("shop.1")

    assert approved.stdout == "approved shop.1.1.0\n"
    assert result.text == "pay: ok: paid for tea"


def test_an_approval_without_a_runtime_waits_for_one(waiting: Path) -> None:
    approved = shell("approve", "shop.1.1.0", store=waiting)

    assert approved.stdout == ("approved shop.1.1.0\nit goes on when a Runtime with agent 'helper' opens this store\n")
    assert shell_json("pending", store=waiting) == []
    assert shell("run", "sample_agents:helper", "-s", "shop", "--resume", store=waiting).stdout == (
        "pay: ok: paid for tea\n"
    )


def test_a_rejection_tells_the_model_why(waiting: Path) -> None:
    shell("reject", "shop.1.1.0", "--reason", "too dear", "--by", "ada", store=waiting)

    ended = shell("run", "sample_agents:helper", "-s", "shop", "--resume", "--json", store=waiting)

    assert '"by": "ada"' in ended.stdout
    assert "pay: denied: {'error': 'denied', 'message': 'too dear'}" in ended.stdout


@pytest.mark.kill
def test_a_settled_call_ends_with_the_value_that_was_given(asked: Path) -> None:
    [call] = shell_json("pending", store=asked)
    assert (call["call_id"], call["kind"]) == ("risk.1.1.0", "recovery")

    settled = shell("settle", "risk.1.1.0", "done", "--value", '{"seat": "12A"}', store=asked)

    assert settled.stdout.startswith("settled as done risk.1.1.0\n")
    ended = shell("run", "sample_agents:helper", "-s", "risk", "--resume", store=asked)
    assert ended.stdout == "risky: ok: {'seat': '12A'}\n"


def test_what_became_of_a_call_is_told_later_when_its_turn_is_over(store: Path) -> None:
    @tool(timeout=0.01)
    async def order() -> None:
        """Order something."""
        await asyncio.Event().wait()

    async def work() -> None:
        model = ScriptedModel([[ToolCall("a", "order")], "I cannot know."])
        async with Runtime(store, agents=[Agent(model, tools=[order])]) as runtime:
            await (await runtime.session("shop")).run("order")

    asyncio.run(work())

    settled = shell("settle", "shop.1.1.0", "done", store=store)

    assert settled.stdout == (
        "settled as done shop.1.1.0\nits turn is over: the model is told with the next one of shop\n"
    )


def test_a_value_that_is_no_json_is_refused_before_anything_is_written(waiting: Path) -> None:
    result = shell("settle", "shop.1.1.0", "done", "--value", "12A", store=waiting)

    assert result.exit_code == 2
    assert "--value is not JSON" in result.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["approve", "shop.1.1.9"], 2, "nothing waits under this id; `perdure pending` lists"),
        (["approve", "nobody.1.1.0"], 2, "there is no session 'nobody' in this store"),
        (["approve", "shop"], 2, "is not a call id: it looks like session.turn.step.index"),
        (["settle", "shop.1.1.0", "done"], 2, "it waits for an approval; `perdure pending` lists"),
        (["answer", "shop.1.1.0", "{}"], 2, "it waits for an approval; `perdure pending` lists"),
        (["settle", "shop.1.1.0", "perhaps"], 2, "perhaps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_answer_to_nothing_is_explained(args: list[str], code: int, words: str, waiting: Path) -> None:
    result = shell(*args, store=waiting)

    assert result.exit_code == code
    assert words in result.stderr


def test_the_first_answer_stands(waiting: Path) -> None:
    shell("approve", "shop.1.1.0", store=waiting)

    second = shell("reject", "shop.1.1.0", store=waiting)

    assert second.exit_code == 1
    assert "was answered before with" in second.stderr


def test_a_session_id_with_dots_is_found_from_its_call(store: Path) -> None:
    say(store, "eu.shop.7", "pay")

    assert shell("approve", "eu.shop.7.1.1.0", store=store).exit_code == 0


# ---------------------------------------------------------------------- cancel


async def test_a_cancel_from_another_process_stops_a_running_turn(store: Path, tmp_path: Path) -> None:
    os.environ.update(BEGUN=str(tmp_path / "begun"), WAIT="60")
    try:
        async with Runtime(store, agents=[helper]) as runtime:
            session = await runtime.session("chat")
            receipt = await session.send("wait")
            await asyncio.to_thread(wait_for_lines, tmp_path / "begun")

            said = await asyncio.to_thread(process, "cancel", "chat", "--reason", "enough", "--by", "ada", store=store)
            result = await receipt.result(timeout=60)
    finally:
        del os.environ["BEGUN"], os.environ["WAIT"]

    assert (said.returncode, said.stdout) == (0, "asked turn chat.1 to stop\n")
    assert result.outcome == Cancelled("ada", "enough")


def test_a_parked_turn_can_be_cancelled(waiting: Path) -> None:
    first, second = shell_json("cancel", "shop", store=waiting), shell_json("cancel", "shop", store=waiting)
    ended = shell("run", "sample_agents:helper", "-s", "shop", "--resume", store=waiting)

    assert (first["status"], second["status"]) == ("requested", "already_requested")
    assert ended.exit_code == 4


def test_a_queued_turn_is_cancelled_by_its_number(waiting: Path) -> None:
    async def queue() -> None:
        async with Runtime(waiting, agents=[]) as runtime:
            await (await runtime.session("shop")).send("and then?")

    asyncio.run(queue())

    assert shell_json("cancel", "shop", "--turn", "2", store=waiting) == {
        "session_id": "shop",
        "turn_id": "shop.2",
        "status": "requested",
    }
    assert shell("cancel", "shop", "--turn", "7", store=waiting).exit_code == 1


def test_nothing_to_cancel_is_said_and_is_no_success(store: Path) -> None:
    say(store, "chat", "hello")

    result = shell("cancel", "chat", store=store)

    assert result.exit_code == 1
    assert result.stdout == "nothing to stop: no turn of chat is open\n"
