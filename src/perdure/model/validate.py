"""Checks of what callers give, made where it comes in, so that a wrong type is an error of the call that gave it.

A value that passes is kept, compared and counted by every store alike, and can be read back. Each function takes the
value and the name that its caller knows it by; the usual types cost one comparison.

An unknown keyword or attribute is an error in any case; where other libraries have it, the error names the word for it
here. To type checkers such words are unknown still.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Never, NoReturn, TypeVar

from msgspec import Struct, ValidationError
from msgspec.json import decode as decode_as

from perdure.errors import InvalidDefinition, InvalidInput, quoted
from perdure.model.codec import INT_MAX, clean_text, encode
from perdure.model.message import Scalar

METADATA_BYTES = 4096
METADATA_KEY = 64
MOST_METADATA = 32
RESERVED_METADATA = ("perdure.", "mainstay.")
"""The second prefix was reserved before the project was renamed, and stored metadata may hold such keys."""

S = TypeVar("S", bound=Struct)
T = TypeVar("T")


def plain_text(value: object) -> str | None:
    """`value` as the plain string that a store can hold; None when it is none. An enum of strings is its value."""
    if not isinstance(value, str):
        return None
    text = value if type(value) is str else str.__str__(value)
    return text if clean_text(text) == text else None


def name(value: object, what: str, refuse: type[InvalidInput] = InvalidInput) -> str:
    """A string that something is called, or looked up, by."""
    text = plain_text(value)
    if text is None:
        raise refuse(f"{what}={quoted(value)} is not usable: give a string")
    return text


def seconds(value: object, what: str = "timeout", refuse: type[InvalidInput] = InvalidInput) -> float | None:
    """How long something may take; None is no limit."""
    if value is None or (type(value) is float and value >= 0) or (type(value) is int and 0 <= value <= INT_MAX):
        return value
    raise refuse(f"{what}={quoted(value)} is not usable: give seconds, 0 or more, or None for no limit")


def count(value: object, what: str, least: int = 0, refuse: type[InvalidInput] = InvalidInput) -> int:
    """A whole number: how many, or from where on."""
    if type(value) is int and least <= value <= INT_MAX:
        return value
    raise refuse(f"{what}={quoted(value)} is not usable: give a whole number, {least} or more")


def several(values: object, what: str, refuse: type[InvalidInput] = InvalidInput) -> tuple[Any, ...]:
    """Some of something. A string would be taken apart into its letters."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        return tuple(values)
    raise refuse(f"{what}={quoted(values)} is not usable: give a list")


def flag(value: object, what: str, refuse: type[InvalidInput] = InvalidInput) -> bool:
    if type(value) is bool:
        return value
    raise refuse(f"{what}={quoted(value)} is not usable: give True or False")


def having(value: T, what: str, *methods: str, refuse: type[InvalidInput] = InvalidInput) -> T:
    """A live object with all of these methods."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing:
        raise refuse(f"{what}={quoted(value)} is not usable: it has no {missing[0]}()")
    return value


def metadata(value: object, what: str = "metadata", refuse: type[InvalidInput] = InvalidInput) -> dict[str, Scalar]:
    """Small flat JSON that says whom something is for, as it is stored. Its keys are sorted, so that equal metadata is
    equal bytes."""
    if not isinstance(value, Mapping):
        raise refuse(f'{what}={quoted(value)} is not usable: give a dict, such as {{"user": "u-17"}}')
    if len(value) > MOST_METADATA:
        raise refuse(f"{what} has {len(value)} keys: {MOST_METADATA} are the most; keep more in a store of your own")
    found = dict[str, Scalar]()
    for key, each in value.items():
        text, place = plain_text(key), f"{what}[{quoted(key)}]"
        if not text or len(text) > METADATA_KEY:
            raise refuse(f"{place} is not usable: a key is text of 1 to {METADATA_KEY} characters, without NUL")
        if text.startswith(RESERVED_METADATA):
            reserved = " or ".join(map(repr, RESERVED_METADATA))
            raise refuse(f"{place} is not usable: keys that begin with {reserved} are Perdure's own")
        scalar: Scalar | None = None
        if isinstance(each, str):
            scalar = plain_text(each)
        elif isinstance(each, int) and abs(each) <= INT_MAX:
            scalar = each if type(each) is bool else int(each)
        elif isinstance(each, float) and math.isfinite(each):
            scalar = float(each)
        if scalar is None:
            raise refuse(
                f"{place}={quoted(each)} is not usable: give text, a number or a truth value; leave out the unknown"
            )
        found[text] = scalar
    if (size := len(encode(found))) > METADATA_BYTES:
        raise refuse(f"{what} is {size} bytes of JSON: {METADATA_BYTES} are the most; keep more in a store of your own")
    return dict(sorted(found.items()))


def read_back(value: S, what: str, refuse: type[InvalidInput] = InvalidInput) -> S:
    """A struct as it will be read back; refused when it cannot be."""
    try:
        return decode_as(encode(value), type=type(value))
    except (ValidationError, TypeError, ValueError, RecursionError) as error:
        raise refuse(f"{what} cannot be kept like this: {error}") from None


def readable(value: S, what: str, refuse: type[InvalidInput] = InvalidInput) -> S:
    """The same for one without values of callers in it: what would be read as something else is refused too."""
    read = read_back(value, what, refuse)
    if read != value:
        raise refuse(f"{what} cannot be kept like this: {quoted(value)} would be read as {quoted(read)}")
    return read


# ------------------------------------------------------------- words of other libraries

_OUTPUT = "output= (a type: `Agent(…, output=Ticket)`)"
_BUDGET = "budget=Budget(steps=…, tokens=…, money=…, seconds=…) of the Agent"
_PLUGINS = "plugins=[…]: a Plugin has hooks before and after turns and tool calls"
_STORE = "the first argument: Runtime('agent.db', agents=[…])"
_DEPS = "Runtime(…, deps=…); a tool reads ctx.deps"
_SESSION = (
    "a session, which remembers what was said in it: `session = await runtime.session('chat-1')`, then `session.run(…)`"
)
_SAID = "what is said as the first argument: run('hello')"

AGENT_KEYWORDS = {
    **dict.fromkeys(("system_prompt", "system", "prompt", "instruction", "role"), "instructions="),
    **dict.fromkeys(("output_type", "result_type", "response_format", "response_model"), _OUTPUT),
    **dict.fromkeys(("llm", "model_name", "provider", "client"), "model, the first argument"),
    **dict.fromkeys(("toolsets", "functions", "builtin_tools", "actions"), "tools=[…]"),
    **dict.fromkeys(("handoffs", "agents", "subagents", "sub_agents"), "tools=[other.as_tool()]"),
    **dict.fromkeys(("max_turns", "max_steps", "max_iterations", "recursion_limit", "usage_limits"), _BUDGET),
    **dict.fromkeys(
        ("hooks", "middleware", "callbacks", "history_processors", "input_guardrails", "output_guardrails", "state"),
        _PLUGINS,
    ),
    **dict.fromkeys(("deps", "deps_type", "context", "dependencies"), _DEPS),
    **dict.fromkeys(("max_retries", "retry"), "retries="),
    "tool_retries": "retries= of each tool: @tool(retries=2)",
    **dict.fromkeys(
        ("memory", "checkpointer", "store", "session", "db"), "a Runtime: Runtime('agent.db', agents=[agent])"
    ),
    "description": "as_tool(description=…), where it is a tool of another agent",
    "interrupt_before": "@tool(approval='ask')",
}

RUNTIME_KEYWORDS = {
    "agent": "agents=[agent]",
    **dict.fromkeys(
        ("path", "db", "db_path", "database", "url", "dsn", "storage", "checkpointer", "filename", "saver"), _STORE
    ),
    **dict.fromkeys(("workflows", "functions", "tasks", "activities"), "processes=[…]"),
    **dict.fromkeys(("dependencies", "context", "state"), "deps="),
    **dict.fromkeys(("max_concurrency", "workers", "max_workers"), "concurrency="),
    **dict.fromkeys(
        ("tools", "model", "instructions", "plugins", "budget", "output"), "an Agent: Runtime(agents=[Agent(…)])"
    ),
}

_INPUT_KEYWORDS = {
    **dict.fromkeys(
        ("message_history", "history", "messages", "thread_id", "session_id", "session", "conversation_id", "config"),
        _SESSION,
    ),
    **dict.fromkeys(("prompt", "input", "message", "text", "user_prompt", "query"), _SAID),
    **dict.fromkeys(("context", "dependencies", "state"), _DEPS),
    **dict.fromkeys(("idempotency_key", "request_id", "id", "message_id"), "key="),
    **dict.fromkeys(("usage_limits", "max_turns", "max_steps", "recursion_limit", "budget"), _BUDGET),
    **dict.fromkeys(("output_type", "response_format", "output"), _OUTPUT),
    **dict.fromkeys(("system_prompt", "instructions"), "instructions= of the Agent"),
    "stream": "session.stream(…): `async with session.stream('hello') as turn: async for event in turn: …`",
}

RUN_KEYWORDS = _INPUT_KEYWORDS | {"key": _SESSION}
"""`Agent.run` is one turn in memory: there is nothing that a key could be compared with."""

SESSION_KEYWORDS = _INPUT_KEYWORDS | {"deps": _DEPS}

TOOL_KEYWORDS = {
    **dict.fromkeys(("requires_approval", "needs_approval", "require_confirmation"), "approval='ask'"),
    **dict.fromkeys(("retry", "max_retries", "attempts"), "retries="),
    **dict.fromkeys(("name_override", "tool_name"), "name="),
    **dict.fromkeys(("description_override", "desc", "doc"), "description=, or a docstring"),
    **dict.fromkeys(("args_schema", "parameters", "schema", "input_schema"), "annotations of its parameters"),
    **dict.fromkeys(("takes_ctx", "context"), "a parameter annotated `ctx: ToolContext`"),
    **dict.fromkeys(("idempotent", "safe"), "recovery='rerun'"),
    **dict.fromkeys(("max_concurrency", "concurrency"), "limit="),
}

AGENT_ATTRIBUTES = {
    **dict.fromkeys(("tool", "tool_plain", "add_tool", "bind_tools"), "@tool on a function, and Agent(tools=[…])"),
    **dict.fromkeys(("system_prompt", "prompt"), "Agent(instructions=…), or a plugin's prompt()"),
    **dict.fromkeys(("output_validator", "result_validator", "override", "on"), "Agent(…, output=…, plugins=[…])"),
    **dict.fromkeys(
        ("run_stream", "stream", "iter", "astream", "run_streamed", "run_stream_events"), "session.stream(…)"
    ),
    **dict.fromkeys(("invoke", "call"), "agent.run_sync(…)"),
    **dict.fromkeys(("ainvoke", "arun"), "agent.run(…)"),
    **dict.fromkeys(("session", "chat", "start"), "a Runtime: `async with Runtime('agent.db', agents=[agent])`"),
}

RESULT_ATTRIBUTES = {
    **dict.fromkeys(("data", "final_output", "value", "result"), "result.output"),
    **dict.fromkeys(("content", "response", "answer"), "result.text"),
    **dict.fromkeys(("all_messages", "to_input_list"), "result.messages"),
    **dict.fromkeys(("status", "state"), "result.outcome"),
}

SESSION_ATTRIBUTES = {
    **dict.fromkeys(("invoke", "ainvoke", "ask", "say", "chat", "prompt"), "session.run(…)"),
    **dict.fromkeys(("astream", "run_stream"), "session.stream(…)"),
    **dict.fromkeys(("messages", "get_messages", "get_items"), "session.history()"),
    **dict.fromkeys(("get_state", "status"), "session.pending(), session.history() or runtime.sessions.list()"),
    **dict.fromkeys(("interrupt", "stop", "abort"), "session.cancel()"),
    "delete": "runtime.sessions.delete(session.id)",
}


def unknown_keywords(name: str, foreign: Mapping[str, Never], words: Mapping[str, str]) -> NoReturn:
    """Refuse keywords that a function does not have, as Python would, with the word for one here if there is one.

    Such a function takes `**foreign: Never`, so that a type checker refuses every one of them.
    """
    word = next((each for each in foreign if each in words), None)
    if word is not None:
        raise InvalidDefinition(f"{name} has no {word}=: use {words[word]}")
    raise TypeError(f"{name}() got an unexpected keyword argument {next(iter(foreign))!r}")


def unknown_attribute(what: object, word: str, words: Mapping[str, str]) -> NoReturn:
    """For `__getattr__`: the usual error, with the word for it here if there is one."""
    kind = type(what).__name__
    hint = f": use {words[word]}" if word in words else ""
    raise AttributeError(f"{kind!r} object has no attribute {word!r}{hint}", name=word, obj=what)


def not_a_context_manager(kind: str) -> NoReturn:
    raise InvalidDefinition(f"a {kind} is entered with `async with`, inside an `async def`: `with` cannot wait")


def not_a_model(model: Any) -> str:
    """What to give instead of something that is no model."""
    if callable(model) and not isinstance(model, type):
        return "a function is a model as FunctionModel(fn): `from perdure.testing import FunctionModel`"
    return "name it ('anthropic:…'), pass a Provider object (it has `name` and `stream`), or use 'scripted'"
