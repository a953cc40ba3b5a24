"""Playing a turn by hand: what the engine would do between two effects, in one short call each."""

from __future__ import annotations

from typing import Any

from perdure.model.agent import Budget
from perdure.model.effect import CallModel, Delivery
from perdure.model.llm import Usage
from perdure.model.message import Message, Part, Text, ToolCall
from perdure.model.record import Delivered, Ended, Replied
from perdure.model.tool import Ok, ToolOutcome
from perdure.model.transcript import Transcript
from perdure.ports.protocol import TurnProtocol
from perdure.turn.machine import Machine, OutputRule, TurnState
from perdure.turn.tools import NATIVE

HELLO = Message("user", "hello")


def begin(budget: Budget | None = None, output: OutputRule | None = None) -> Machine:
    return Machine(TurnState("s.1", Transcript([HELLO])), budget or Budget(), output)


def asking(budget: Budget | None = None, output: OutputRule | None = None) -> Machine:
    """A turn that waits for its first model reply."""
    machine = begin(budget, output)
    machine.receive(Delivery())
    return machine


def call(provider_id: str, name: str = "look", **args: Any) -> ToolCall:
    return ToolCall(provider_id, name, args)


def say(machine: Machine, *parts: str | Part, protocol: TurnProtocol = NATIVE, **fields: Any) -> Replied:
    """The model answers what the machine asks for, and its protocol reads that."""
    effect = machine.next_effect()
    assert isinstance(effect, CallModel), effect
    read = protocol.read([Text(p) if isinstance(p, str) else p for p in parts], f"s.1.{effect.step}")
    fields.setdefault("usage", Usage(input=10, output=1))
    record = Replied(
        effect.step,
        read.parts,
        attempt=effect.attempt,
        slot=machine.slot(),
        cell=read.cell,
        fault=read.fault,
        cells=read.cells,
        **fields,
    )
    machine.receive(record)
    return record


def end(machine: Machine, key: str, outcome: ToolOutcome | None = None, **fields: Any) -> Ended:
    record = Ended(key, Ok(f"result of {key}") if outcome is None else outcome, slot=machine.slot(), **fields)
    machine.receive(record)
    return record


def deliver(machine: Machine, *texts: str, first: int = 2) -> None:
    inputs = [Delivered(first + i, Message("user", text)) for i, text in enumerate(texts)]
    machine.receive(Delivery(tuple(inputs)))


def one_step(machine: Machine, outcome: ToolOutcome | None = None, **fields: Any) -> None:
    """One whole step with a tool call, up to the boundary after it."""
    reply = say(machine, call("a"), started=(0,), **fields)
    end(machine, f"{reply.step}.0", outcome)
