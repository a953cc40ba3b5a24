"""`perdure run` and `call` with a Runtime in place of an agent: deps, limits and the store are the host's."""

from pathlib import Path

import pytest

from tests.cli.shell import process, shell, shell_json


def test_run_has_the_deps_the_limits_and_the_store_of_the_runtime(store: Path) -> None:
    first = shell("run", "sample_desk:desk", "whose is it?", "-s", "a", DESK=store)
    second = shell("run", "sample_desk:desk", "who is there?", "-s", "b", "--agent", "guard", DESK=store)
    third = shell("run", "sample_desk:desk", "and now?", "-s", "a", DESK=store)

    assert (first.exit_code, first.stdout) == (0, "it is Ada\n")
    assert (second.exit_code, second.stdout) == (0, "who goes there?\n")
    assert third.exit_code == 5
    assert third.stderr == "perdure: turn a.2: limit_reached: 2 of 2 turns are spent by all\n"
    assert {row["id"]: row["agent"] for row in shell_json("sessions", store=store)} == {
        "a": "clerk",
        "b": "guard",
    }


def test_run_begins_a_session_for_the_user_that_is_named(store: Path) -> None:
    begun = shell(
        "run", "sample_desk:guard", "hi", "-s", "a", "--metadata", "user=kim", "--metadata", "tenant=4", store=store
    )
    again = shell("run", "sample_desk:guard", "hi", "-s", "a", store=store)
    other = shell("run", "sample_desk:guard", "hi", "-s", "a", "--metadata", "user=bo", store=store)
    wrong = shell("run", "sample_desk:guard", "hi", "-s", "b", "--metadata", "kim", store=store)

    assert (begun.exit_code, again.exit_code, other.exit_code, wrong.exit_code) == (0, 0, 1, 2)
    assert "session 'a' has other metadata than the given one, in 'tenant', 'user'" in other.stderr
    assert "--metadata 'kim' is not usable: say KEY=VALUE" in wrong.stderr
    [row] = shell_json("sessions", "--where", "user=kim", "--where", "tenant=4", store=store)
    assert row["id"] == "a"


def test_a_runtime_of_a_module_is_run_as_it_is(store: Path) -> None:
    ran = process("run", "sample_desk:shared", "whose is it?", store=store, DESK=store)

    assert (ran.returncode, ran.stdout) == (0, "it is Bob\n")


def test_an_agent_alone_says_that_it_keeps_to_no_limit(store: Path) -> None:
    shell("run", "sample_desk:desk", "who?", "--agent", "guard", DESK=store)

    limited = shell("run", "sample_desk:desk", "who?", "--agent", "guard", DESK=store)
    alone = shell("run", "sample_desk:guard", "who?", store=store)

    assert "limits" not in limited.stderr
    assert (alone.exit_code, alone.stdout) == (0, "who goes there?\n")
    assert "this store has limits, which an agent alone does not keep to" in alone.stderr


def test_call_has_the_deps_of_the_runtime(store: Path) -> None:
    assert shell("call", "sample_desk:desk", "bell.ring", DESK=store).stdout == "rang for Ada\n"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["sample_desk:named", "hi"], "takes arguments: name an agent, a Runtime, or a function that makes one"),
        (["sample_desk:nothing", "hi"], "makes a NoneType, neither an Agent nor a Runtime; it has sample_desk:clerk"),
        (["sample_desk:later", "hi"], "makes a coroutine, neither an Agent nor a Runtime"),
        (["sample_desk:whose", "hi"], "is a Tool, neither an Agent nor a Runtime"),
        (["sample_desk:desk", "hi", "--store", "other.db"], "has a store of its own"),
        (["sample_desk:desk", "hi", "--model", "scripted"], "name the agent, not its Runtime"),
        (["sample_desk:clerk", "hi", "--agent", "guard"], "--agent chooses among the agents of a Runtime"),
        (["sample_desk:desk", "hi", "--agent", "nobody"], "this Runtime has no agent 'nobody'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_no_runtime_is_refused(words: list[str], refusal: str, store: Path) -> None:
    refused = shell("run", *words, DESK=store)

    assert refused.exit_code == 2
    assert refusal in refused.stderr
