"""What users may rely on: the names at the root, what importing them costs, and the tree of errors."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import perdure
from perdure import builtin, errors, events, outcomes
from perdure.model import event as model_event
from perdure.model import outcome as model_outcome
from perdure.model import plugin
from perdure.model import tool as model_tool
from perdure.model.outcome import Finished, Outcome, Queued, Waiting

PUBLIC = [
    "Agent",
    "Audio",
    "Budget",
    "Caller",
    "Document",
    "FileRef",
    "Image",
    "Limit",
    "Message",
    "ModelRequest",
    "ModelResponse",
    "ModelSettings",
    "NoAnswer",
    "PerdureError",
    "Plugin",
    "Price",
    "Process",
    "ProcessContext",
    "ProcessHandle",
    "ProviderTool",
    "RateLimit",
    "Receipt",
    "Retention",
    "Retries",
    "Retry",
    "Runtime",
    "Session",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "ToolProvider",
    "ToolResult",
    "TurnFailed",
    "TurnPending",
    "TurnResult",
    "Usage",
    "Workspace",
    "call",
    "process",
    "tool",
]

# What a Runtime in memory must not wait for, nor need installed.
LAZY = [
    "anyio",
    "asyncpg",
    "http",
    "httpx2",
    "hypothesis",
    "importlib.metadata",
    "perdure.builtin",
    "perdure.cli",
    "perdure.providers",
    "perdure.stores.memory",
    "perdure.stores.sqlite",
    "perdure.testing",
    "perdure.workspace.tools",
    "pydantic",
    "pytest",
    "rich",
    "sqlite3",
    "starlette",
    "typer",
    "unittest",
    "urllib.request",
    "uvicorn",
    "xml",
]

EXCEPTIONS = [
    thing
    for thing in vars(errors).values()
    if inspect.isclass(thing) and issubclass(thing, BaseException) and thing.__module__ == errors.__name__
]


# ---------------------------------------------------------------------- names


def test_the_public_names_are_these() -> None:
    assert perdure.__all__ == PUBLIC
    assert len(PUBLIC) <= 50


def test_earlier_names_of_what_was_renamed_can_still_be_imported() -> None:
    assert builtin.OutputBudget is builtin.OutputLimit
    assert plugin.Compaction is plugin.CompactedHistory


def test_outcomes_and_events_of_applications_are_those_that_there_are() -> None:
    ends = {*get_args(model_outcome.Outcome), *get_args(model_tool.ToolOutcome)}

    assert {getattr(outcomes, name) for name in outcomes.__all__} >= ends
    assert {getattr(events, name) for name in events.__all__} >= set(get_args(model_event.AnyEvent))
    assert outcomes.Outcome == model_outcome.Outcome
    assert events.AnyEvent == model_event.AnyEvent


def test_type_checker_finds_the_outcomes_that_turns_share_with_calls(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from perdure.model.outcome import Cancelled, Failed\n"
        "from perdure.outcomes import Failed as Same\n"
        "print(Failed is Same, Cancelled)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", program], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    thing = getattr(perdure, name)

    assert thing.__doc__
    assert thing.__name__ == name
    # Structs and dataclasses make up a signature where nobody wrote a sentence.
    assert not thing.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_methods_of_a_public_name_say_what_they_do(name: str) -> None:
    thing = getattr(perdure, name)
    if not inspect.isclass(thing) or getattr(thing, "_is_protocol", False):
        return  # a protocol's own sentence says what its methods must do

    silent = [
        method
        for method, value in vars(thing).items()
        if inspect.isfunction(value) and not method.startswith("_") and not value.__doc__
    ]

    assert silent == []


def test_nothing_else_is_public_at_the_root() -> None:
    names = {n for n, v in vars(perdure).items() if not n.startswith("_") and not inspect.ismodule(v)}

    assert names == set(PUBLIC)


def test_a_star_import_brings_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from perdure import *", namespace)

    assert sorted(n for n in namespace if not n.startswith("__")) == PUBLIC


def test_the_version_is_that_of_the_package() -> None:
    assert perdure.__version__.count(".") == 2


# ---------------------------------------------------------------------- importing


def modules_after(statement: str) -> set[str]:
    child = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-c", child], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_perdure_loads_no_driver_no_provider_and_no_tool_of_ours() -> None:
    loaded = modules_after("import perdure")

    assert [m for m in LAZY if m in loaded] == []
    assert [m for m in loaded if m.startswith("perdure.providers.")] == []


def test_what_importing_perdure_needs_beyond_the_standard_library_is_msgspec() -> None:
    # What the interpreter loads at its start is not ours, and msgspec looks for typing_extensions by itself.
    before = {m.partition(".")[0] for m in modules_after("")} | {"typing_extensions"}
    roots = {m.partition(".")[0] for m in modules_after("import perdure")}

    assert roots - before - sys.stdlib_module_names == {"perdure", "msgspec"}


def test_a_turn_in_memory_needs_no_driver() -> None:
    loaded = modules_after("import perdure; assert perdure.Agent().run_sync('hi').text == 'You said: hi'")

    assert "sqlite3" not in loaded
    assert "pydantic" not in loaded


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda e: e.__name__)
def test_an_error_is_in_the_tree_that_its_module_draws(error: type[BaseException]) -> None:
    assert errors.__doc__ is not None
    drawn = [line.strip("│├└─ ").split()[0].rstrip(",") for line in errors.__doc__.splitlines() if line.strip("│├└─ ")]
    drawn += ["Retry"]  # shares a line with ToolError

    assert error.__name__ in drawn


def test_the_tree_shows_who_inherits_from_whom() -> None:
    assert errors.__doc__ is not None
    stack: list[str] = []
    found: dict[str, str] = {}
    for line in errors.__doc__.splitlines():
        branch = max(line.find("├──"), line.find("└──"))
        if branch < 0:
            stack = [line.strip()] if line.strip() == "PerdureError" else stack
            continue
        level, name = (branch - 4) // 4 + 1, line[branch + 3 :].split()[0]
        stack = [*stack[:level], name]
        found[name] = stack[level - 1]

    actual = {
        e.__name__: e.__bases__[0].__name__ for e in EXCEPTIONS if e.__bases__[0].__name__ in {*found, "PerdureError"}
    }
    assert found == actual


def test_every_error_of_ours_has_a_code_of_its_own() -> None:
    codes = [vars(e)["code"] for e in EXCEPTIONS if issubclass(e, errors.PerdureError) and "code" in vars(e)]
    silent = [e.__name__ for e in EXCEPTIONS if issubclass(e, errors.PerdureError) and "code" not in vars(e)]

    assert len(codes) == len(set(codes))
    assert all(code.isidentifier() and code == code.lower() for code in codes)
    assert silent == []


def test_errors_for_callers_are_the_builtins_they_expect_too() -> None:
    assert issubclass(errors.InvalidInput, ValueError)
    assert issubclass(errors.NotFound, LookupError)
    assert issubclass(errors.PerdureError, Exception)
    assert not issubclass(errors.ToolError, errors.PerdureError)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.InvalidSessionId(""), "use 1 to 200 printable characters"),
        (errors.InvalidCursor("x", "is malformed"), "start again without a cursor"),
        (errors.TooLarge("it", 5_000, 10), "it has 5,000 bytes, the limit is 10: store it outside"),
        (errors.KeyConflict("s", "k", "s.1"), "use a new key"),
        (errors.WrongAgent("s", "a", "b"), "open it with agent='b'"),
        (errors.AlreadyAnswered("call s.1.1.0", {"by": "ann"}), "the first answer stands"),
        (errors.HeadMoved("s", 1, 2), "reload it"),
        (errors.UnknownSession("s"), "runtime.sessions.list()"),
        (errors.UnknownTurn("s.9"), "turn ids come from a receipt or result"),
        (errors.UnknownCall("s.1.1.0"), "session.pending()"),
        (errors.UnknownNode("s.1", "there is no such node"), "cannot fork at 's.1': there is no such node"),
        (errors.UnknownWait("key"), "works only in the store that issued it"),
        (errors.SessionDeleted("s"), "choose another"),
        (errors.TurnFailed("s.1", "cancelled", {}), "turn s.1 did not finish: cancelled"),
        (errors.Fenced("s.1", 3), "generation 3 of s.1 was relieved"),
        (errors.StoreDamaged("f.db", "a hole"), "restore it from a backup"),
        (errors.StoreTooNew("f.db", 9, 1), "upgrade perdure"),
        (errors.StoreInherited(1, 2), "open it only after forking"),
        (errors.BlobMissing("ab"), "put it again"),
        (errors.RuntimeClosed(), "use it inside `async with`"),
        (errors.WrongLoop(), "make one Runtime per loop"),
        (errors.Retry(), "asked for another attempt"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else "",
)
def test_an_error_says_what_to_do(error: Exception, says: str) -> None:
    assert says in str(error)


@pytest.mark.parametrize(
    ("kind", "outcome", "says"),
    [
        ("stuck", {"reason": "no disk"}, "stuck: no disk"),
        ("provider_failed", {"code": "busy", "message": "try later"}, "provider_failed: busy: try later"),
        ("budget_spent", {"which": "steps", "limit": 3}, "budget_spent: steps"),
        (
            "limit_reached",
            {"kind": "money", "limit": 0.02, "spent": 0.0192, "per": "metadata.user", "key": "u-17", "window": "day"},
            "limit_reached: 0.0192 of 0.02 money are spent by metadata.user 'u-17', window day",
        ),
        (
            "limit_reached",
            {"kind": "turns", "limit": 2000, "spent": 2000},
            "limit_reached: 2,000 of 2,000 turns are spent by all",
        ),
    ],
    ids=["stuck", "provider_failed", "budget_spent", "limit of a user", "limit of all"],
)
def test_a_turn_that_did_not_finish_says_why_in_words(kind: str, outcome: dict[str, object], says: str) -> None:
    error = errors.TurnFailed("s.1", kind, outcome)

    assert error.summary == f"turn s.1 did not finish: {says}"
    assert str(error) == f"{error.summary}; {errors.AFTER_FAILURE[kind]}"


def test_every_outcome_without_an_answer_comes_with_advice() -> None:
    endings = [each for each in get_args(Outcome) if each not in (Finished, Waiting, Queued)]

    assert {each.__struct_config__.tag for each in endings} == errors.AFTER_FAILURE.keys() - {"stuck"}


def waits(kind: str, number: int = 0) -> dict[str, object]:
    return {"tool": "pay", "call_id": f"s.1.1.{number}", "kind": kind}


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("approval", "answer with session.approve('s.1.1.0') or session.reject('s.1.1.0', 'reason'), then"),
        ("recovery", "answer with session.settle('s.1.1.0', 'done' | 'failed' | 'rerun'), then"),
        ("deferred", "answer with runtime.resolve(key, value) with the key of s.1.1.0, then"),
        ("input", "answer with session.answer('s.1.1.0', {…}), then"),
        ("sleep", "once it has ended,"),
        ("process", "once it has ended,"),
    ],
)
def test_a_turn_that_waits_says_for_what_and_which_method_answers_it(kind: str, answer: str) -> None:
    error = errors.TurnPending("s.1", "waiting", {"calls": [waits(kind)]})

    assert error.summary == f"turn s.1 has no answer yet: waiting: pay (s.1.1.0) waits for {kind}"
    assert error.hint == f"; {answer} read it with `await session.result('s.1')`"


def test_a_turn_that_waits_for_many_calls_names_the_method_for_the_first_ones() -> None:
    error = errors.TurnPending("s.1", "waiting", {"calls": [waits("input", number) for number in range(5)]})

    assert error.hint.count("session.answer(") == 3
    assert "2 more in result.pending" in error.hint


def test_an_answer_that_comes_too_late_hears_who_was_first() -> None:
    late = errors.AlreadyAnswered("call s.1.1.0", {"verdict": "approved", "by": "ann"})

    assert str(late) == "call s.1.1.0 was answered before with 'approved' by ann: the first answer stands"


def test_a_provider_error_carries_its_own_code_and_what_happens_next() -> None:
    plain = errors.ProviderError("busy")
    rich = errors.ProviderError("busy", retryable=True, after=2.5, code="overloaded")

    assert (plain.code, plain.retryable, plain.after) == ("provider_error", False, None)
    assert (rich.code, rich.retryable, rich.after) == ("overloaded", True, 2.5)
    assert errors.ProviderError.code == "provider_error"
