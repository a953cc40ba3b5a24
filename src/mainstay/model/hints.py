"""What people type first who come from elsewhere, and the word for it here.

An unknown keyword or attribute is an error in any case; with these it says what to write instead. To type checkers they
are unknown still.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never, NoReturn

from mainstay.errors import InvalidDefinition

_OUTPUT = "output= (a type: `Agent(…, output=Ticket)`)"
_BUDGET = "budget=Budget(steps=…, tokens=…, money=…, seconds=…) of the Agent"
_PLUGINS = "plugins=[…]: a Plugin has hooks before and after turns and tool calls"
_STORE = "the first argument: Runtime('agent.db', agents=[…])"
_DEPS = "Runtime(…, deps=…); a tool reads ctx.deps"
_SESSION = (
    "a session, which remembers what was said in it: `session = await runtime.session('chat-1')`, then `session.run(…)`"
)
_SAID = "what is said as the first argument: run('hello')"

AGENT = {
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
    **dict.fromkeys(("retries", "tool_retries", "max_retries"), "retries= of each tool: @tool(retries=2)"),
    **dict.fromkeys(
        ("memory", "checkpointer", "store", "session", "db"), "a Runtime: Runtime('agent.db', agents=[agent])"
    ),
    "description": "as_tool(description=…), where it is a tool of another agent",
    "interrupt_before": "@tool(approval='ask')",
}

RUNTIME = {
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

SAYING = {
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

RUNNING = SAYING | {"key": _SESSION}
"""`Agent.run` is one turn in memory: there is nothing that a key could be compared with."""

IN_SESSION = SAYING | {"deps": _DEPS}

TOOL = {
    **dict.fromkeys(("requires_approval", "needs_approval", "require_confirmation"), "approval='ask'"),
    **dict.fromkeys(("retry", "max_retries", "attempts"), "retries="),
    **dict.fromkeys(("name_override", "tool_name"), "name="),
    **dict.fromkeys(("description_override", "desc", "doc"), "description=, or a docstring"),
    **dict.fromkeys(("args_schema", "parameters", "schema", "input_schema"), "annotations of its parameters"),
    **dict.fromkeys(("takes_ctx", "context"), "a parameter annotated `ctx: ToolContext`"),
    **dict.fromkeys(("idempotent", "safe"), "recovery='rerun'"),
    **dict.fromkeys(("max_concurrency", "concurrency"), "limit="),
}

OF_AGENT = {
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

OF_RESULT = {
    **dict.fromkeys(("data", "final_output", "value", "result"), "result.output"),
    **dict.fromkeys(("content", "response", "answer"), "result.text"),
    **dict.fromkeys(("all_messages", "to_input_list"), "result.messages"),
    **dict.fromkeys(("status", "state"), "result.outcome"),
}

OF_SESSION = {
    **dict.fromkeys(("invoke", "ainvoke", "ask", "say", "chat", "prompt"), "session.run(…)"),
    **dict.fromkeys(("astream", "run_stream"), "session.stream(…)"),
    **dict.fromkeys(("messages", "get_messages", "get_items"), "session.history()"),
    **dict.fromkeys(("get_state", "status"), "session.pending(), session.history() or runtime.sessions.list()"),
    **dict.fromkeys(("interrupt", "stop", "abort"), "session.cancel()"),
    "delete": "runtime.sessions.delete(session.id)",
}


def refuse(name: str, foreign: Mapping[str, Never], words: Mapping[str, str]) -> NoReturn:
    """Refuse keywords that a function does not have, as Python would, with the word for one here if there is one.

    Such a function takes `**foreign: Never`, so that a type checker refuses every one of them.
    """
    word = next((each for each in foreign if each in words), None)
    if word is not None:
        raise InvalidDefinition(f"{name} has no {word}=: use {words[word]}")
    raise TypeError(f"{name}() got an unexpected keyword argument {next(iter(foreign))!r}")


def no_attribute(what: object, word: str, words: Mapping[str, str]) -> NoReturn:
    """For `__getattr__`: the usual error, with the word for it here if there is one."""
    kind = type(what).__name__
    hint = f": use {words[word]}" if word in words else ""
    raise AttributeError(f"{kind!r} object has no attribute {word!r}{hint}", name=word, obj=what)


def wrong_with(kind: str) -> NoReturn:
    raise InvalidDefinition(f"a {kind} is entered with `async with`, inside an `async def`: `with` cannot wait")


def wrong_model(model: Any) -> str:
    """What to give instead of something that is no model."""
    if callable(model) and not isinstance(model, type):
        return "a function is a model as FunctionModel(fn): `from mainstay.testing import FunctionModel`"
    return "name it ('anthropic:…'), pass a Provider object (it has `name` and `stream`), or use 'scripted'"
