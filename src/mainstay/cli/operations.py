"""`mainstay operations` and `mainstay call`: what may be asked of an agent's plugins, from any process."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer

from mainstay.cli.host import JsonOption, Refused, StoreOption, existing, finish, is_there, perform, store_path
from mainstay.cli.render import brief, complain, console, print_json, print_value, table, text_line
from mainstay.cli.run import EXIT_CODES, AgentArgument, load_agent, load_functions
from mainstay.errors import MissingSession
from mainstay.model.ids import split
from mainstay.model.outcome import kind_of
from mainstay.plugins.operations import OperationDefinition, OperationOutcome
from mainstay.runtime import Runtime
from mainstay.sessions.result import TurnResult
from mainstay.wire import result_json

SESSIONS = {"required": "on a session", "optional": "on a session, or without", "forbidden": "without a session"}


def operations(agent: AgentArgument, json: JsonOption = False) -> None:
    """List what may be asked of an agent's plugins: queries, commands, tasks."""

    async def work() -> int:
        found = load_agent(agent).definition().operations.definitions
        if json:
            print_json([each.to_json() for each in found])
            return 0
        out = console()
        if not found:
            text_line(out, "its plugins offer no operations")
            return 0
        rows = [[each.name, each.kind, _parameters(each), SESSIONS[each.session_param], _first(each)] for each in found]
        table(out, ["operation", "kind", "arguments", "works", "what"], rows, fold=(0, 2, 4))
        return 0

    perform(work, json)


def call(
    agent: AgentArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The operation; `mainstay operations` lists them.")],
    args: Annotated[str, typer.Argument(metavar="JSON", help="Its arguments, a JSON object; '-' reads stdin.")] = "{}",
    session: Annotated[str | None, typer.Option("--session", "-s", help="The session that it works on.")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Call an operation of an agent's plugins.

    Its output goes to stdout. Turns that it queues are run here, unless another process runs the session, and waited
    for, as is what it began in the background; Ctrl-C leaves them for later.

    Exit codes: 0 done, 1 failed, 2 usage error; of a turn that did not finish, that of `mainstay run`.
    """

    async def work() -> int:
        loaded, given = load_agent(agent), _arguments(args)
        loaded.definition()  # a model that does not exist is refused before a store is opened
        functions = load_functions(agent)
        async with Runtime(_where(store, session), agents=[loaded], processes=functions, recover=False) as runtime:
            try:
                outcome = await runtime.operations.call(name, given, session=session)
            except MissingSession as error:
                raise Refused(f"operation {error.operation!r} works on a session: name it with --session") from None
            if not json:
                print_value(outcome.output)
            results = [await _ended(runtime, turn) for turn in outcome.accepted]
            if json:
                print_json(_as_json(outcome, results))
            else:
                for result in results:
                    complain(f"turn {result.turn_id}: {kind_of(result.outcome)}: {brief(result.text, 200)}")
            await finish(runtime.wait_idle(), "waiting for work in the background")
        return next((code for result in results if (code := EXIT_CODES[kind_of(result.outcome)])), 0)

    perform(work, json)


def _where(store: str | None, session: str | None) -> str:
    """The store; none is made for an operation that may need none."""
    where = store_path(store)
    if session is not None or is_there(where):
        return existing(store)
    return "memory"


def _arguments(text: str) -> dict[str, Any]:
    data = sys.stdin.buffer.read() if text == "-" else text.encode(errors="surrogateescape")
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise Refused(f'the arguments are not JSON ({error}): write for example \'{{"word": "tea"}}\'') from None
    if not isinstance(found, dict):
        raise Refused('the arguments are a JSON object, for example \'{"word": "tea"}\'')
    return found


async def _ended(runtime: Runtime, turn: str) -> TurnResult[Any]:
    return await (await runtime.session(split(turn, 1)[0])).result(turn)


def _as_json(outcome: OperationOutcome, results: list[TurnResult[Any]]) -> dict[str, Any]:
    return outcome.to_json() | {"turns": [result_json(result) for result in results]}


def _parameters(definition: OperationDefinition) -> str:
    schema = definition.input_schema
    needed = schema.get("required", [])
    return ", ".join([name if name in needed else f"{name}?" for name in schema.get("properties", {})])


def _first(definition: OperationDefinition) -> str:
    return definition.description.partition("\n")[0]
