"""`perdure run`: what it prints, how it exits, and what a signal does."""

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.shell import command, process, shell, shell_json, start, wait_for_lines


def read_terminal(*args: object, store: Path, **env: object) -> str:
    """Everything a command writes to a terminal of its own, and its exit code at the end."""
    controller, terminal = pty.openpty()
    line, options = command(*args, store=store, COLUMNS=80, LINES=24, **env)
    with subprocess.Popen(line, stdin=terminal, stdout=terminal, stderr=terminal, **options) as child:
        os.close(terminal)
        seen = b""
        while True:
            try:
                piece = os.read(controller, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            seen += piece
    os.close(controller)
    return f"{seen.decode()}rc={child.returncode}"


# ---------------------------------------------------------------------- what it says


def test_in_a_pipe_only_the_answer_is_printed(store: Path) -> None:
    ended = shell("run", "sample_agents:helper", "hello", "--session", "chat", store=store)

    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "you said hello, message 1\n", "")


def test_a_session_goes_on_where_it_was(store: Path) -> None:
    shell("run", "sample_agents:helper", "one", "-s", "chat", store=store)

    ended = shell("run", "sample_agents:helper", "two", "-s", "chat", store=store)

    assert ended.stdout == "you said two, message 3\n"


@pytest.mark.parametrize("dash", [[], ["-"]], ids=["piped", "dash"])
def test_the_prompt_may_come_from_stdin(dash: list[str], store: Path) -> None:
    ended = shell("run", "sample_agents:helper", *dash, store=store, stdin="grüße")

    assert ended.stdout == "you said grüße, message 1\n"


def test_an_empty_prompt_is_a_usage_error(store: Path) -> None:
    ended = shell("run", "sample_agents:helper", store=store, stdin="")

    assert (ended.exit_code, ended.stderr) == (2, "perdure: the input is empty: say something\n")


def test_json_is_one_object_with_everything(store: Path) -> None:
    ended = shell("run", "sample_agents:helper", "look", "-s", "chat", "--json", store=store)

    told = json.loads(ended.stdout)
    took = told["tool_calls"][0].pop("duration_ms")
    assert took >= 0
    calls = told.pop("model_calls")
    assert [(each["step"], each["stop"], len(each["attempts"])) for each in calls] == [
        (1, "tool_calls", 1),
        (2, "end", 1),
    ]
    assert told == {
        "turn_id": "chat.1",
        "session_id": "chat",
        "outcome": {"kind": "finished", "text": "look: ok: tea is green", "value": None},
        "text": "look: ok: tea is green",
        "output": "look: ok: tea is green",
        "usage": {
            "input": 10,
            "output": 5,
            "cache_read": None,
            "cache_write": None,
            "reasoning": None,
            "calls": 2,
            "unknown": 1,
            "cost": None,
            "missing": {"input": 1, "output": 1},
            "total": 15,
        },
        "tool_calls": [
            {
                "call_id": "chat.1.1.0",
                "tool": "look",
                "args": {"item": "tea"},
                "outcome": {"kind": "ok", "value": "tea is green", "whole": None, "files": []},
                "attempts": 1,
                "repeated": 0,
            }
        ],
    }


def test_a_typed_output_is_json_beside_its_text(store: Path) -> None:
    ended = shell("run", "sample_agents:typed", "x", "--json", store=store)

    told = json.loads(ended.stdout)
    assert (told["output"], told["text"]) == ({"green": True}, '{"green": true}')


def test_a_terminal_sees_words_tools_and_their_results(store: Path) -> None:
    seen = read_terminal("run", "sample_agents:helper", "look", "-s", "chat", store=store)

    assert 'look(item="tea")' in seen
    assert "tea is green" in seen
    assert "look: ok: tea is green" in seen
    assert seen.endswith("rc=0")


def test_a_tool_cannot_command_the_terminal(store: Path) -> None:
    seen = read_terminal("run", "sample_agents:helper", "odd", "-s", "chat", store=store)

    assert "\x1b]0;" not in seen
    assert "]0;pwned" in seen


def test_no_color_is_respected(store: Path) -> None:
    seen = read_terminal("run", "sample_agents:helper", "look", "-s", "chat", store=store, NO_COLOR="1")

    assert "\x1b[32m" not in seen
    assert "tea is green" in seen


# ---------------------------------------------------------------------- how it exits


@pytest.mark.parametrize(
    ("agent", "prompt", "code", "words"),
    [
        ("failing", "x", 1, "provider_failed: the key is not valid"),
        ("helper", "pay", 3, 'pay(item="tea") asks for approval: perdure approve chat.1.1.0 (or reject)'),
        ("endless", "x", 5, "budget_spent: steps"),
        ("short", "x", 6, "incomplete: length"),
    ],
)
def test_the_exit_code_tells_the_outcome(agent: str, prompt: str, code: int, words: str, store: Path) -> None:
    ended = shell("run", f"sample_agents:{agent}", prompt, "-s", "chat", store=store)

    assert ended.exit_code == code
    assert words in ended.stderr


def test_partial_text_of_a_turn_is_in_its_outcome_and_not_shown_as_its_answer(store: Path) -> None:
    turn = shell_json("run", "sample_agents:short", "x", "-s", "chat", store=store)

    assert (turn["text"], turn["output"]) == ("", None)
    assert turn["outcome"] == {"kind": "incomplete", "reason": "length", "text": "half a"}


def test_a_turn_behind_one_that_waits_is_shown_as_queued(store: Path) -> None:
    shell("run", "sample_agents:helper", "pay", "-s", "chat", store=store)

    ended = shell("run", "sample_agents:helper", "hello", "-s", "chat", "--timeout", "60", store=store)
    told = shell_json("run", "sample_agents:helper", "again", "-s", "chat", store=store)

    assert (ended.exit_code, ended.stdout) == (7, "")
    assert "turn chat.2 is queued: turn chat.1 waits for an answer to pay (chat.1.1.0)" in ended.stderr
    assert 'pay(item="tea") asks for approval: perdure approve chat.1.1.0 (or reject)' in ended.stderr
    assert (told["turn_id"], told["outcome"]["kind"], told["outcome"]["behind"]) == ("chat.3", "queued", "chat.1")
    assert [call["call_id"] for call in told["outcome"]["calls"]] == ["chat.1.1.0"]


def test_a_turn_that_takes_too_long_is_cancelled(store: Path, tmp_path: Path) -> None:
    ended = shell(
        "run", "sample_agents:helper", "wait", "-s", "chat", "--timeout", 0.3, "--json",
        store=store, WAIT=60, BEGUN=tmp_path / "begun",
    )  # fmt: skip

    assert ended.exit_code == 4
    assert json.loads(ended.stdout)["outcome"] == {
        "kind": "cancelled",
        "by": "timeout",
        "reason": "it did not end within 0.3 s",
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:agent", "there is no module 'nowhere' in"),
        ("sample_agents:nobody", "has no 'nobody'; it has sample_agents:helper, sample_agents:failing"),
        ("sample_agents:not_an_agent", "is a int, neither an Agent nor a Runtime; it has sample_agents:helper"),
        ("sample_agents", "name the agent in sample_agents: it has sample_agents:helper"),
        ("missing.py:agent", "there is no file missing.py"),
        (":agent", "write module:attribute"),
    ],
)
def test_an_agent_that_cannot_be_found_is_explained(name: str, words: str, store: Path) -> None:
    ended = shell("run", name, "hello", store=store)

    assert ended.exit_code == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not store.exists()


def test_a_module_that_breaks_says_where(store: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")

    ended = shell("run", f"{tmp_path}/broken.py:agent", "hello", store=store)

    assert ended.exit_code == 2
    assert f"ZeroDivisionError: division by zero ({tmp_path}/broken.py, line 2)" in ended.stderr


# ---------------------------------------------------------------------- once, and again


def test_the_same_key_is_the_same_turn(store: Path) -> None:
    first = shell("run", "sample_agents:helper", "hello", "-s", "chat", "--key", "k", store=store)
    again = shell("run", "sample_agents:helper", "hello", "-s", "chat", "--key", "k", store=store)
    other = shell("run", "sample_agents:helper", "bye", "-s", "chat", "--key", "k", store=store)

    assert first.stdout == again.stdout == "you said hello, message 1\n"
    assert (other.exit_code, other.stdout) == (1, "")
    assert "used for turn chat.1 with other content" in other.stderr
    assert shell_json("sessions", store=store)[0]["inputs"] == 1


def test_control_c_cancels_the_turn_on_disk(store: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with start("run", "sample_agents:helper", "wait", "-s", "chat", store=store, WAIT=60, BEGUN=begun) as child:
        wait_for_lines(begun)
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=60)

    assert child.returncode == 4
    assert "cancelled: Ctrl-C in the terminal" in told
    outcome = shell_json("show", "chat", store=store)["turns"][0]["outcome"]
    assert outcome == {"kind": "cancelled", "by": "user", "reason": "Ctrl-C in the terminal"}


def test_the_terminate_signal_leaves_the_turn_open_for_later(store: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with start("run", "sample_agents:helper", "wait", "-s", "chat", store=store, WAIT=60, BEGUN=begun) as child:
        wait_for_lines(begun)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)
    assert child.returncode == 130
    assert shell_json("sessions", store=store)[0]["state"] == "interrupted"

    ended = process("run", "sample_agents:helper", "-s", "chat", "--resume", store=store, WAIT=0, BEGUN=begun)

    assert (ended.returncode, ended.stdout) == (0, "wait: ok: waited for tea\n")


@pytest.mark.kill
def test_a_killed_turn_goes_on_before_what_is_said_next(store: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with start("run", "sample_agents:helper", "wait", "-s", "chat", store=store, WAIT=60, BEGUN=begun) as child:
        wait_for_lines(begun)
        child.kill()
        child.communicate(timeout=60)

    ended = process("run", "sample_agents:helper", "hello", "-s", "chat", "--json", store=store, WAIT=0, BEGUN=begun)

    told = json.loads(ended.stdout)
    assert (ended.returncode, told["turn_id"], told["text"]) == (0, "chat.2", "you said hello, message 5")
    recovered = shell_json("show", "chat", store=store)["turns"][0]
    assert recovered["outcome"]["text"] == "wait: ok: waited for tea"
    assert [(c["attempts"], c["repeated"]) for c in recovered["tool_calls"]] == [(2, 1)]
    assert begun.read_text().splitlines() == ["begun", "begun"]


@pytest.mark.kill
def test_what_else_was_interrupted_is_finished_with_its_subagents(store: Path, tmp_path: Path) -> None:
    """The other turn asks its subagent when this one has ended, and nothing new is taken up any more."""
    begun = tmp_path / "begun"
    for lines, (said, session) in enumerate((("dawdle", "other"), ("wait", "chat")), start=1):
        line = ("run", "sample_agents:chief", said, "-s", session)
        with start(*line, store=store, WAIT=60, DAWDLE=60, BEGUN=begun) as child:
            wait_for_lines(begun, lines)
            child.kill()
            child.communicate(timeout=60)

    ended = process("run", "sample_agents:chief", "-s", "chat", "--resume", store=store, DAWDLE=1, BEGUN=begun)

    assert (ended.returncode, ended.stdout) == (0, "wait: waited for tea\n")
    assert shell_json("show", "other", store=store)["turns"][0]["outcome"]["text"] == "deputy: done"


def test_an_approved_turn_goes_on_with_resume(store: Path) -> None:
    shell("run", "sample_agents:helper", "pay", "-s", "chat", store=store)
    still = shell("run", "sample_agents:helper", "-s", "chat", "--resume", store=store)
    shell("approve", "chat.1.1.0", store=store)

    ended = shell("run", "sample_agents:helper", "-s", "chat", "--resume", store=store)
    again = shell("run", "sample_agents:helper", "-s", "chat", "--resume", store=store)

    assert still.exit_code == 3
    assert (ended.exit_code, ended.stdout) == (0, "pay: ok: paid for tea\n")
    assert again.stdout == ended.stdout


def test_resume_needs_a_session_that_exists(store: Path) -> None:
    nameless = shell("run", "sample_agents:helper", "--resume", store=store)
    unknown = shell("run", "sample_agents:helper", "-s", "chat", "--resume", store=store)

    assert (nameless.exit_code, unknown.exit_code) == (2, 2)
    assert "name its --session" in nameless.stderr
    assert "there is no session 'chat'" in unknown.stderr
