"""What every protocol must do: the shipped ones, and one that a plugin brings."""

from __future__ import annotations

import msgspec
import pytest

from perdure.model.effect import Checkpoint, RunCode, RunTools
from perdure.model.message import Message, Part, Reasoning, Text, ToolCall, ToolResult
from perdure.model.outcome import Finished, Incomplete
from perdure.model.protocol import Prompt
from perdure.model.record import Replied
from perdure.model.tool import ToolSpec
from perdure.ports.protocol import TurnProtocol
from perdure.turn.code import CodeProtocol
from perdure.turn.tools import ToolsProtocol
from tests.turn.play import HELLO, asking, say
from tests.turn.protocols import PlanProtocol

CODE = CodeProtocol(lambda tools, output: ", ".join(tool.name for tool in tools))
PROTOCOLS = [
    pytest.param(ToolsProtocol(), id="tools"),
    pytest.param(CODE, id="code"),
    pytest.param(PlanProtocol(), id="plan"),
]
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)

# What each of them can have left behind: native calls, cells, plans.
PAST = [
    HELLO,
    Message("assistant", (Text("Let me look."), ToolCall("p", "look", {"n": 1}))),
    Message("tool", (ToolResult("p", "look", {"found": 2}),)),
    Message("assistant", "Let me see.\n```python\nx = await look(1)\n```\nOutput: 43"),
    Message("user", "Output of the cell:\n2"),
    Message("assistant", (ToolCall("q", "look", {"n": 2}), ToolCall("r", "look", {"n": 3}))),
    Message("tool", (ToolResult("q", "look", 4),)),
    Message("tool", (ToolResult("r", "look", 6),)),
    Message("assistant", "It is 2."),
]
TOOLS = (ToolSpec("look"), ToolSpec("pay"))

ANSWERS: list[list[Part]] = [
    [],
    [Text("")],
    [Text("It is 2.")],
    [Text('{"answer": "It is 2."}')],
    [Text('{"calls": [{"tool": "look", "args": {"n": 1}}, {"tool": "look", "args": {"n": 2}}]}')],
    [Text('{"calls": 7}')],
    [Text("```python\nx = 1\n```")],
    [Text("```python\nx = 1")],
    [Text("``"), Text("`python\nx = 1\n```\nand more")],
    [Reasoning("hm"), Text("I look."), ToolCall("", "look", {"n": 1}), ToolCall("", "look", {"n": 2})],
    [ToolCall("a", "look"), ToolCall("a", "look")],
]


@every_protocol
def test_model_is_shown_calls_only_where_it_is_offered_tools_and_each_with_its_result(protocol: TurnProtocol) -> None:
    asked = protocol.ask(Prompt("Be kind.", PAST, TOOLS))

    calls = [part.id for message in asked.messages for part in message.parts if isinstance(part, ToolCall)]
    results = [part.call_id for message in asked.messages for part in message.parts if isinstance(part, ToolResult)]
    assert calls == results
    assert bool(asked.tools) or not calls


def test_native_tool_calls_are_asked_for_with_the_prompt_as_it_is() -> None:
    prompt = Prompt("Be kind.", PAST, TOOLS)

    assert ToolsProtocol().ask(prompt) is prompt


@every_protocol
def test_nothing_of_the_past_is_lost_for_the_model(protocol: TurnProtocol) -> None:
    shown = msgspec.json.encode(protocol.ask(Prompt("", PAST, TOOLS)).messages).decode()

    for said in ("hello", "found", "x = await look(1)", "Output of the cell", "It is 2."):
        assert said in shown


@every_protocol
def test_model_is_told_every_tool_and_the_instructions(protocol: TurnProtocol) -> None:
    asked = protocol.ask(Prompt("Be kind.", PAST, TOOLS))

    assert asked.instructions.startswith("Be kind.")
    for tool in TOOLS:
        assert tool in asked.tools or tool.name in asked.instructions


@every_protocol
def test_asking_changes_nothing_that_it_was_given_and_gives_the_same_again(protocol: TurnProtocol) -> None:
    before = msgspec.json.encode(PAST)

    assert protocol.ask(Prompt("", PAST, TOOLS)) == protocol.ask(Prompt("", PAST, TOOLS))
    assert msgspec.json.encode(PAST) == before


@every_protocol
@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_reading_is_the_same_again_and_every_call_has_an_id_of_its_own(
    protocol: TurnProtocol, answer: list[Part]
) -> None:
    read = protocol.read(answer, "s.1.1")

    ids = [part.id for part in read.parts if isinstance(part, ToolCall)]
    text = "".join([part.text for part in read.parts if isinstance(part, Text)])
    assert read == protocol.read(answer, "s.1.1")
    assert all(ids)
    assert len(set(ids)) == len(ids)
    assert read.cell is None or (not ids and not read.fault and 0 <= read.cell[0] <= read.cell[1] <= len(text))


@every_protocol
@pytest.mark.parametrize("answer", ANSWERS, ids=repr)
def test_turn_acts_on_its_record_alone(protocol: TurnProtocol, answer: list[Part]) -> None:
    live, again = asking(), asking()
    record = say(live, *answer, protocol=protocol)

    again.replay([msgspec.json.decode(msgspec.json.encode(record), type=Replied)])

    assert again.dump() == live.dump()
    assert again.next_effect() == live.next_effect()


@pytest.mark.parametrize(
    ("protocol", "text"),
    [
        (ToolsProtocol(), "It is 2."),
        (CODE, "It is 2."),
        (PlanProtocol(), '{"answer": "It is 2."}'),
    ],
    ids=["tools", "code", "plan"],
)
def test_answer_ends_the_turn(protocol: TurnProtocol, text: str) -> None:
    machine = asking()

    say(machine, text, protocol=protocol)

    assert machine.next_effect() == Checkpoint("before_completion")
    assert machine.state.outcome == Finished("It is 2.")


@pytest.mark.parametrize(
    ("protocol", "said", "effect"),
    [
        (ToolsProtocol(), ToolCall("a", "look", {"n": 1}), RunTools),
        (CODE, "```python\nawait look(1)\n```", RunCode),
        (PlanProtocol(), '{"calls": [{"tool": "look", "args": {"n": 1}}]}', RunTools),
    ],
    ids=["tools", "code", "plan"],
)
def test_what_is_to_be_done_is_done(protocol: TurnProtocol, said: str | Part, effect: type) -> None:
    machine = asking()

    say(machine, said, protocol=protocol)

    assert type(machine.next_effect()) is effect


@pytest.mark.parametrize(
    ("protocol", "text"), [(CODE, "```python\nx = 1"), (PlanProtocol(), "It is 2.")], ids=["code", "plan"]
)
def test_answer_that_cannot_be_read_is_repaired_twice(protocol: TurnProtocol, text: str) -> None:
    machine = asking()
    for _ in range(2):
        say(machine, text, protocol=protocol)
        assert machine.messages()[-1].text.startswith("Nothing was run: ")
    say(machine, text, protocol=protocol)

    assert isinstance(machine.state.outcome, Incomplete)
