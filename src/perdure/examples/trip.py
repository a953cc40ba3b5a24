"""An agent that books a trip, as a host program of its own, and the services that its tools call.

    python -m perdure.examples.trip FOLDER PACE POINTS

It is an ordinary host: one Runtime on one file, one input under a key. It has no code for recovery; after a kill the
same program is started again. Every effect outside (a model asked, a seat taken, money moved) is appended to
`ledger.jsonl` in FOLDER by the service, and synced at once, so that effects can be counted without the agent's records.
With a PACE below 1 it waits at each of POINTS, where it is to be killed: at that speed a signal would come too late.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perdure import (
    Agent,
    Message,
    ModelRequest,
    ModelResponse,
    Runtime,
    ToolCall,
    ToolContext,
    ToolResult,
    Usage,
    tool,
)
from perdure.testing import FunctionModel

SESSION = "trip"
PROMPT = "Ada has to be in Ghent on Friday morning. Book the train and a room, pay, and write her a plan."
AMOUNT = 184.5


class Line(Struct, frozen=True, omit_defaults=True):
    """One line of the ledger. `what` is asked (a model), began, effect, or recognised (a key seen before).

    `key` is the call's id, `given` the idempotency key that the service was given with it.
    """

    what: str
    who: str
    key: str
    pid: int
    at: int
    detail: str = ""
    given: str = ""


class KillPoint(Struct, frozen=True, omit_defaults=True):
    """Where to kill, in words; and the moment: tick `at` of a tool or word `at` of the model, once `after` is done."""

    where: str
    who: str
    at: int
    after: str = ""


class Services:
    """The services outside: their ledger, and a folder with the files that they make."""

    def __init__(self, folder: Path, pace: float = 1.0, points: Sequence[KillPoint] = ()) -> None:
        self.folder, self.pace, self._points = folder, pace, points
        self.ledger = folder / "ledger.jsonl"
        (folder / "parts").mkdir(exist_ok=True)

    def note(self, what: str, who: str, key: str, detail: str = "", given: str = "") -> None:
        """Append a line and sync it, so that it survives a kill."""
        line = Line(what, who, key, os.getpid(), time.time_ns() // 1_000_000, detail, given)
        descriptor = os.open(self.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, msgspec.json.encode(line) + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lines(self) -> list[Line]:
        return read_ledger(self.ledger)

    async def serve(self, ctx: ToolContext[Any], seconds: float, detail: str, steps: tuple[str, str, str]) -> bool:
        """One request to a service. False: it knows the key, and did not do it a second time."""
        self.note("began", ctx.tool, ctx.call_id)
        known = any(line.what == "effect" and line.given == ctx.idempotency_key for line in self.lines())
        for tick in range(1, 6):
            await self._tick(ctx, steps[0], tick, seconds)
        self.note("recognised" if known else "effect", ctx.tool, ctx.call_id, detail, ctx.idempotency_key)
        for tick in range(6, 11):
            await self._tick(ctx, steps[1] if tick < 9 else steps[2], tick, seconds)
        return not known

    async def _tick(self, ctx: ToolContext[Any], step: str, tick: int, seconds: float) -> None:
        ctx.progress({"step": step, "done": tick / 10})
        await asyncio.sleep(seconds * max(self.pace, 0.1) / 10)
        await self.hold(ctx.tool, tick, "")

    async def hold(self, who: str, at: int, after: str) -> None:
        """Wait at a kill point, when the program runs too fast for a signal to hit it."""
        if self.pace < 1 and any(p.who == who and p.at == at and after in ("", p.after) for p in self._points):
            await asyncio.sleep(30)  # long enough for the signal on a busy machine


def read_ledger(path: Path) -> list[Line]:
    """The ledger so far; a line torn by the kill itself is not a line."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]


# ---------------------------------------------------------------------- the tools


def tools(services: Services) -> list[Any]:
    """What the agent can do. Each says what may become of a call that a crash cuts off."""

    @tool(recovery="rerun")
    async def search_trains(to: str, day: str, ctx: ToolContext[Any]) -> list[dict[str, str]]:
        """Look up trains: only reads, so it may run again."""
        await services.serve(ctx, 1.0, f"{to}, {day}", ("asking the timetable", "reading", "sorting"))
        return [{"train": "IC 1512", "leaves": "08:12"}, {"train": "IC 1514", "leaves": "09:12"}]

    @tool(recovery="rerun")
    async def book_seat(train: str, ctx: ToolContext[Any]) -> dict[str, str]:
        """Take a seat: the office knows idempotency keys, so it may run again under the same one."""
        first = await services.serve(
            ctx, 2.0, f"{train} seat 12A", ("choosing a seat", "seat 12A is taken", "confirming")
        )
        (services.folder / "parts" / "ticket.txt").write_text(f"{train}, seat 12A\n")
        return {"seat": "12A", "booking": "new" if first else "known: same key, same seat"}

    @tool(recovery="rerun")
    async def reserve_room(hotel: str, ctx: ToolContext[Any]) -> dict[str, str]:
        """Reserve a room: the hotel knows idempotency keys too."""
        await services.serve(ctx, 1.1, hotel, ("calling the hotel", "room 7 is reserved", "confirming"))
        return {"room": "7", "hotel": hotel}

    @tool(recovery="once")
    async def charge_card(amount: float, reference: str, ctx: ToolContext[Any]) -> dict[str, Any]:
        """Move money: never twice, so a call that is cut off stays unknown."""
        await services.serve(
            ctx, 2.2, f"{amount:.2f} for {reference}", ("authorising", "the money has moved", "receipt")
        )
        return {"charged": amount}

    @tool(recovery="rerun")
    async def look_up_payment(reference: str, ctx: ToolContext[Any]) -> dict[str, bool]:
        """Ask the bank what it has booked: only reads."""
        await services.serve(ctx, 0.9, reference, ("asking the bank", "reading the account", "comparing"))
        return {"booked": any(x.who == "charge_card" and x.what == "effect" for x in services.lines())}

    @tool(recovery="rerun")
    async def write_plan(lines: list[str], ctx: ToolContext[Any]) -> str:
        """Write the plan: the same file with the same words, so it may run again."""
        path = services.folder / "parts" / "plan.txt"
        path.write_text(lines[0][:20])  # half a file is on disk while this runs
        await services.serve(ctx, 1.4, "plan.txt", ("writing", "half a page", "reading it over"))
        path.write_text("\n".join(lines) + "\n")
        return "plan.txt"

    return [search_trains, book_seat, reserve_room, charge_card, look_up_payment, write_plan]


# ---------------------------------------------------------------------- the model


def model(services: Services) -> FunctionModel:
    """A model without a network: what it says follows from the conversation alone, as with a real one."""

    async def answer(request: ModelRequest) -> AsyncIterator[Any]:
        services.note("asked", "model", request.call_id)
        text, calls = think(request.messages)
        last = request.messages[-1].tool_results
        for number, word in enumerate(text.split(" "), 1):
            yield f"{word} "
            await asyncio.sleep(0.045 * services.pace)
            await services.hold("model", number, last[0].name if last else "nothing")
        usage = Usage(input=sum(len(m.text) for m in request.messages) // 4 + 60, output=len(text) // 4)
        yield ModelResponse(f"{text} ", tuple(calls), usage, "tool_calls" if calls else "end", model="scripted")

    return FunctionModel(answer, "scripted")


def think(messages: Sequence[Message]) -> tuple[str, list[ToolCall]]:
    """The next thing to say and do, given what happened so far."""
    results: dict[str, list[ToolResult]] = {}
    for message in messages:
        for result in message.tool_results:
            results.setdefault(result.name, []).append(result)
    if "search_trains" not in results:
        return "Let me see which trains run on Friday.", [_call("search_trains", to="Ghent", day="Friday")]
    if "book_seat" not in results:
        return (
            "The 08:12 arrives in time. I take a seat and a room at the same time.",
            [_call("book_seat", train="IC 1512"), _call("reserve_room", hotel="Hotel Leie")],
        )
    paid = _pay(results)
    if paid is not None:
        return paid
    if "write_plan" not in results:
        plan = ["Friday: IC 1512 at 08:12, seat 12A", "Hotel Leie, room 7", f"Paid: {AMOUNT:.2f}"]
        return "It is paid. Now the plan for Ada.", [_call("write_plan", lines=plan)]
    return (
        "All done: seat 12A on the 08:12, room 7 at Hotel Leie, 184.50 paid exactly once, and the plan is in plan.txt. "
        "Have a good trip, Ada.",
        [],
    )


def _pay(results: dict[str, list[ToolResult]]) -> tuple[str, list[ToolCall]] | None:
    """Pay, and never twice: a payment that is unknown is looked up before anything else."""
    charge = _call("charge_card", amount=AMOUNT, reference="Ghent, Friday")
    charges, looks = results.get("charge_card", []), results.get("look_up_payment", [])
    if not charges:
        return "Both are held for me. Now I pay.", [charge]
    if charges[-1].status == "ok":
        return None
    if len(looks) < len(charges):
        return (
            "I was cut off while paying and cannot know whether the money moved. I will not pay again blindly: "
            "first I ask the bank.",
            [_call("look_up_payment", reference="Ghent, Friday")],
        )
    if looks[-1].content == {"booked": True}:
        return None
    return "The bank has booked nothing, so the payment never happened. I pay now.", [charge]


def _call(name: str, **args: Any) -> ToolCall:
    return ToolCall(f"call_{name}", name, args)


# ---------------------------------------------------------------------- the host


def agent(services: Services) -> Agent[str]:
    return Agent(model(services), name="travel", instructions="You book trips.", tools=tools(services))


async def main(services: Services) -> None:
    """The whole host program. Started again after a kill, it does the same, and the turn goes on."""
    async with Runtime(services.folder / "demo.db", agents=[agent(services)]) as runtime:
        session = await runtime.session(SESSION)
        async with session.stream(PROMPT, key="ada-1") as turn:
            async for event in turn:
                sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
                sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(
        main(Services(Path(sys.argv[1]), float(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=list[KillPoint])))
    )
