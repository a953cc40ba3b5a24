"""Whatever models, tools and people do, a turn keeps its laws.

`play` drives a machine with drawn outcomes as the engine would, and keeps what the engine would write down. Each test
holds one law against what was kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.graph.commit import End, close
from perdure.graph.view import View, turn_view
from perdure.model.agent import Budget
from perdure.model.codec import decode_row, encode
from perdure.model.effect import (
    AskedCall,
    CallModel,
    CancelTurn,
    Checkpoint,
    Delivery,
    Effect,
    Finish,
    GaveUp,
    Received,
    RunCode,
    RunTools,
    TimeIsUp,
)
from perdure.model.llm import Stop, Usage
from perdure.model.message import Message, Part, Text, ToolCall, ToolResult, unanswered
from perdure.model.record import (
    INTERRUPTED,
    Called,
    Closed,
    Delivered,
    Ended,
    Faltered,
    Record,
    Replied,
    Said,
    Slot,
    Started,
)
from perdure.model.tool import Cancelled, Denied, Failed, Ok, OutcomeUnknown, ToolOutcome
from perdure.model.transcript import Transcript
from perdure.ports.protocol import TurnProtocol
from perdure.turn.code import CodeProtocol
from perdure.turn.machine import Machine, TurnState
from perdure.turn.tools import NATIVE, ToolsProtocol
from tests.fuzzing import cases
from tests.turn.play import HELLO, asking, call, end, say

LONG = 40
# Generous on time: the machine may be busy with other tests.
law = settings(max_examples=cases(200, 5_000), deadline=None, suppress_health_check=[HealthCheck.too_slow])

T = TypeVar("T")

TEXTS = ["plain", "", "[typed]", "two\nlines", "ünï"]
VALUES: list[Any] = [None, 1, "a\nb", [True, {"x": -(2**63)}], {"y": 2**63 - 1, "z": 0.5}]
OUTCOMES: list[ToolOutcome] = [
    *[Ok(value) for value in VALUES],
    Failed("tool_error", "no", {"x": 1}),
    Failed("timeout", "late"),
    Denied("too dear", "ann"),
    Cancelled("ann", "enough"),
    OutcomeUnknown("it died"),
]
USAGES = [Usage(1, 1), Usage(9, 3, cost=0.25), Usage(cache_read=5), None]
outcomes = st.sampled_from(OUTCOMES)
budgets = st.builds(
    Budget,
    steps=st.sampled_from([None, None, 0, 1, 2, 3, 6]),
    tokens=st.sampled_from([None, None, None, 0, 20, 40]),
    money=st.sampled_from([None, None, 0.5]),
    seconds=st.sampled_from([None, None, 1.0]),
    no_progress=st.sampled_from([None, None, 1, 3]),
)
rules = st.sampled_from([None, "typed"])
protocols = st.sampled_from([NATIVE, CodeProtocol(lambda tools, output: ""), ToolsProtocol(lambda tools, output: "")])
"""Native tool calls, code, and calls some of which are cells: the laws hold for all."""

CELLS = ["```python\nx = 1\n```", "Look:\n```python\nawait look()\n```\nand more", "```python\nhalf", "no cell"]


class Script:
    """What happens, one byte a decision. Strategies drawn one by one would end nearly every turn in its first steps."""

    def __init__(self, data: bytes) -> None:
        self._data, self._next = data, 0

    def number(self, below: int) -> int:
        byte = self._data[self._next] if self._next < len(self._data) else 0
        self._next += 1
        return byte % below

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number(len(options))]

    def rarely(self, once_in: int = 25) -> bool:
        return self.number(once_in) == once_in - 1


def typed(text: str) -> dict[str, str]:
    if not text.startswith("["):
        raise ValueError("put it in brackets")
    return {"word": text.strip("[]")}


RULES: dict[str | None, Any] = {None: None, "typed": typed}


def machine_for(budget: Budget, rule: str | None) -> Machine:
    return Machine(TurnState("s.1", Transcript([HELLO])), budget, RULES[rule])


@dataclass
class Played:
    """What a turn did: the states it waited in with their effects, what it received there, and its records.

    `marks` are the positions in `states` right after each record.
    """

    budget: Budget
    rule: str | None
    machine: Machine
    states: list[bytes] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    def loaded(self, state: bytes) -> Machine:
        return Machine.load(state, self.budget, RULES[self.rule])

    def next_effect(self) -> Effect:
        effect = self.machine.next_effect()
        self.states.append(self.machine.dump())
        self.effects.append(effect)
        return effect

    def take(self, received: Received) -> None:
        self.machine.receive(received)
        self.received.append(received)
        if isinstance(received, Replied | Called | Started | Faltered | Ended):
            self.records.append(received)
            self.marks.append(len(self.states))


def play(budget: Budget, rule: str | None, protocol: TurnProtocol, data: bytes) -> Played:
    script, played = Script(data), Played(budget, rule, machine_for(budget, rule))
    inputs, clock = 1, 0
    while not isinstance(effect := played.next_effect(), Finish):
        if len(played.received) >= LONG or script.rarely():
            played.take(CancelTurn("ann", script.pick(TEXTS)))
            continue
        clock += script.pick([0, 0, 0, 100, 400])
        slot = played.machine.slot(clock if budget.seconds is not None else 0)
        match effect:
            case Checkpoint():
                mail = [script.pick(TEXTS) for _ in range(script.pick([0, 0, 1, 2]))]
                found = [Delivered(inputs + i + 1, Message("user", text)) for i, text in enumerate(mail)]
                inputs += len(mail)
                played.take(Delivery(tuple(found)))
            case CallModel():
                played.take(model_outcome(script, effect, slot, protocol))
            case RunTools():
                played.take(tool_outcome(script, effect, slot))
            case RunCode():
                key = effect.cell or str(effect.step)
                made = [len(r.calls) for r in played.records if isinstance(r, Called) and r.key == key]
                played.take(cell_outcome(script, effect, slot, sum(made)))
    if script.rarely(10):
        # The commit found that a cancel request was there first.
        played.take(CancelTurn("ann"))
        played.next_effect()
    return played


plays = st.builds(play, budgets, rules, protocols, st.binary(min_size=400, max_size=400))


def model_outcome(script: Script, effect: CallModel, slot: Slot | None, protocol: TurnProtocol) -> Received:
    if script.rarely(40):
        return GaveUp("overloaded", "busy", effect.attempt)
    if script.rarely(40):
        return TimeIsUp()
    if script.rarely(6):
        code = script.pick(["overloaded", INTERRUPTED])
        return Faltered(code, "busy", script.number(9), effect.attempt, effect.step, slot=slot)
    cells = isinstance(protocol, CodeProtocol)
    count = 0 if cells and not script.rarely(10) else script.pick([0, 1, 2, 3])
    parts: list[Part] = [Text(script.pick(CELLS if cells else TEXTS))]
    for _ in range(count):
        if protocol != NATIVE and script.number(2):
            parts.append(ToolCall(script.pick(["", "a", "b"]), "run_code", {"code": "await look()"}))
        else:
            parts.append(ToolCall(script.pick(["", "a", "b"]), "look", {"x": script.pick(VALUES)}))
    read = protocol.read(parts, f"s.1.{effect.step}")
    started = () if effect.last else tuple(i for i in range(count) if i not in read.cells and script.number(2))
    stop: Stop = "tool_calls" if count else "length" if script.rarely(10) else "end"
    return Replied(
        effect.step,
        read.parts,
        script.pick(USAGES),
        stop,
        "",
        started,
        effect.attempt,
        script.number(2),
        slot=slot,
        cell=read.cell,
        fault=read.fault,
        cells=read.cells,
    )


def cell_outcome(script: Script, effect: RunCode, slot: Slot | None, made: int) -> Received:
    if made < 6 and not script.rarely(3):
        names = [script.pick(["look", "look", "finish", "sleep"]) for _ in range(script.pick([1, 1, 2]))]
        calls = tuple([ToolCall(f"c{made + n}", name, {"seconds": 1}) for n, name in enumerate(names)])
        started = tuple([made + n for n, name in enumerate(names) if name == "look" and script.number(2)])
        return Called(effect.step, made, calls, started, slot=slot, cell=effect.cell)
    if effect.calls:
        return tool_outcome(script, effect, slot)
    fine, failed = Ok({"output": "so", "answer": "[so]"}), Failed("code_raised", "it raised", {"output": ""})
    return Ended(effect.cell or str(effect.step), failed if script.rarely(3) else fine, slot=slot)


def tool_outcome(script: Script, effect: RunTools | RunCode, slot: Slot | None) -> Received:
    asked: AskedCall = script.pick(effect.calls)
    if not asked.started and not script.rarely(5):
        return Started(asked.call, {"x": 1}, asked.attempts + 1, repeated=asked.repeated, slot=slot)
    if asked.started and script.rarely(5):
        return Faltered("retry", "later", 5, asked.attempts, effect.step, asked.call, slot=slot)
    return Ended(asked.call, script.pick(OUTCOMES), asked.attempts, asked.repeated, slot=slot)


def closed_of(played: Played, riding: bool) -> list[Record]:
    """The turn's nodes after its commit; with `riding`, a last reply is part of the commit."""
    machine = played.machine
    effect = machine.next_effect()
    assert isinstance(effect, Finish)
    records = list(played.records)
    reply = records.pop() if riding and records and isinstance(records[-1], Replied) else None
    assert reply is None or isinstance(reply, Replied)
    return [Said(HELLO), *records, close(End(effect.outcome, machine.state.usage, machine.slot()), reply, 0)]


# ---------------------------------------------------------------------- laws


@law
@given(plays)
def test_a_dumped_state_asks_for_the_same_and_goes_on_to_the_same_end(played: Played) -> None:
    last = Machine.load(played.states[-1]).state
    for position, (state, effect) in enumerate(zip(played.states, played.effects, strict=True)):
        # Through another JSON library, as if somebody had stored the state as a document.
        loaded = played.loaded(json.dumps(json.loads(state)).encode())

        assert loaded.next_effect() == effect
        for received in played.received[position:]:
            loaded.receive(received)
        assert loaded.state == last


@law
@given(plays)
def test_replayed_records_lead_to_the_same_state_at_every_prefix(played: Played) -> None:
    for count, mark in enumerate(played.marks, 1):
        fresh = machine_for(played.budget, played.rule)
        records: list[Record] = [decode_row(encode(record)) for record in played.records[:count]]

        fresh.replay(records)

        live = played.loaded(played.states[mark])
        assert fresh.state == live.state
        assert fresh.messages() == live.messages()
        assert fresh.next_effect() == played.effects[mark]


@law
@given(plays)
def test_a_recorded_step_is_never_asked_again_and_an_ended_call_never_runs_again(played: Played) -> None:
    replied: set[int] = set()
    ended: set[str] = set()
    for effect, received in zip(played.effects, [*played.received, None], strict=False):
        if isinstance(effect, CallModel):
            assert effect.step not in replied
        if isinstance(effect, RunTools | RunCode):
            assert not {c.call for c in effect.calls} & ended
            assert effect.calls or isinstance(effect, RunCode)
        if isinstance(received, Replied):
            replied.add(received.step)
        elif isinstance(received, Ended):
            ended.add(received.call)


@law
@given(plays, st.booleans())
def test_every_committed_turn_has_its_calls_paired_and_reads_as_it_ran(played: Played, riding: bool) -> None:
    records = closed_of(played, riding)
    state = played.machine.state
    assert state.outcome is not None

    view = View()
    view.extend(1, [decode_row(encode(record)) for record in records])

    state.transcript.pair(state.outcome)
    assert unanswered(view.messages) == []
    assert view.messages == list(played.machine.messages())
    assert view.messages == turn_view("s.1", records).messages


@law
@given(plays)
def test_no_delivered_input_is_lost_or_told_twice(played: Played) -> None:
    given_ = [d.input for r in played.received if isinstance(r, Delivery) for d in r.inputs]

    written = [d.input for r in closed_of(played, True) for d in _delivered(r)]

    assert written == given_


def _delivered(record: Record) -> tuple[Delivered, ...]:
    inner = record.reply if isinstance(record, Closed) and record.reply is not None else None
    slots = [getattr(r, "slot", None) for r in (inner, record) if r is not None]
    return tuple(d for slot in slots if slot is not None for d in slot.delivered)


@law
@given(plays)
def test_nobody_asks_for_tools_beyond_the_step_limit(played: Played) -> None:
    limit = played.budget.steps
    for effect in played.effects:
        if isinstance(effect, CallModel):
            assert effect.last == (limit is not None and effect.step > limit)
            assert limit is None or effect.step <= limit + 1
        if isinstance(effect, RunTools | RunCode):
            assert limit is None or effect.step <= limit


@law
@given(plays, budgets, rules)
def test_a_changed_definition_goes_on_as_recorded(played: Played, budget: Budget, rule: str | None) -> None:
    for count, mark in enumerate(played.marks, 1):
        fresh = machine_for(budget, rule)

        fresh.replay(played.records[:count])

        live = played.loaded(played.states[mark])
        assert fresh.state.transcript == live.state.transcript
        assert fresh.state.usage == live.state.usage
        if isinstance(played.effects[mark], RunTools | RunCode):
            assert fresh.next_effect() == played.effects[mark]


@law
@given(st.permutations(range(5)), st.lists(outcomes, min_size=5, max_size=5))
def test_results_stand_in_emission_order_whatever_order_they_arrive(order: list[int], ends: list[ToolOutcome]) -> None:
    machine = asking()
    say(machine, *[call(f"id-{i}") for i in range(5)], started=tuple(range(5)))

    for index in order:
        assert unanswered(machine.messages()) == [f"id-{i}" for i in range(5)]
        end(machine, f"1.{index}", ends[index])

    results = [part for message in machine.messages()[2:] for part in message.parts]
    assert [r.call_id for r in results if isinstance(r, ToolResult)] == ["id-0", "id-1", "id-2", "id-3", "id-4"]
    assert len(results) == 5


@law
@given(st.lists(st.sampled_from(["", "a", "b", "s.1.1.0", "s.1.1.1", "s.1.1.2", "s.1.1.1'"]), max_size=5))
def test_calls_of_one_reply_get_ids_of_their_own(ids: list[str]) -> None:
    parts: list[Part] = [Text("see"), *[ToolCall(given_, "look") for given_ in ids]]

    unique = NATIVE.read(parts, "s.1.1").parts

    found = [p.id for p in unique if isinstance(p, ToolCall)]
    assert len(set(found)) == len(ids)
    assert all(found)
    # A first use of an id keeps it: the provider must recognise its own calls.
    assert all(
        kept == given_
        for i, (given_, kept) in enumerate(zip(ids, found, strict=True))
        if given_ and given_ not in ids[:i]
    )
    assert unique[0] == Text("see")
