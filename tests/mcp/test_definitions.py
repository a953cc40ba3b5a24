"""What a host says of servers: refused where it is unusable, before anything is started; and mcp.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Agent, Runtime
from perdure.errors import InvalidDefinition
from perdure.mcp import McpServer, read_mcp_json
from perdure.mcp.listing import LONGEST_NAME, exposed_name
from perdure.testing import ScriptedModel
from tests.kit import untyped


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("", {"command": ["x"]}, "cannot be named ''"),
        ("a__b", {"command": ["x"]}, "cannot be named 'a__b'"),
        ("a b", {"command": ["x"]}, "cannot be named 'a b'"),
        ("a" * 33, {"command": ["x"]}, "up to 32 letters"),
        ("a", {}, "give it a command or a url, and not both"),
        ("a", {"command": ["x"], "url": "https://x"}, "give it a command or a url, and not both"),
        ("a", {"command": "x y"}, "command='x y' is not usable"),
        ("a", {"command": []}, "give a program and its arguments"),
        ("a", {"command": ["x", 3]}, "give a program and its arguments"),
        ("a", {"url": "ftp://x"}, "begins with https:// or http://"),
        ("a", {"url": "https://x", "env": {"A": "b"}}, "env, cwd and sandbox are for a command"),
        ("a", {"command": ["x"], "headers": {"A": "b"}}, "headers and auth are for a url"),
        ("a", {"command": ["x"], "env": {"TOKEN": 3}}, "env: 'TOKEN' has no string as its value"),
        ("a", {"command": ["x"], "env": ["A=b"]}, "give a dict of strings"),
        ("a", {"command": ["x"], "recovery": "always"}, "recovery='always' is not usable"),
        ("a", {"command": ["x"], "approval": {"x": "maybe"}}, "give one of 'never', 'ask', or a dict"),
        ("a", {"command": ["x"], "tools": "x"}, "tools='x' is not usable: give a list"),
        ("a", {"command": ["x"], "timeout": -1}, "timeout=-1 is not usable"),
        ("a", {"command": ["x"], "start_timeout": 0}, "start_timeout must be"),
        ("a", {"command": ["x"], "elicit": "yes"}, "is no async function of an Elicitation"),
        ("a", {"command": ["x"], "sample": "yes"}, "is neither True nor an async function"),
        ("a", {"command": ["x"], "pin": 1}, "pin=1 is not usable"),
        ("a", {"command": ["x"], "sandbox": {"network": True}}, "give a Confinement"),
    ],
    ids=range(23),
)
def test_unusable_server_is_refused(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidDefinition if "Confinement" not in why else Exception, match=why):
        McpServer(name, **options)


@pytest.mark.parametrize(
    ("given_servers", "why"),
    [
        (["git"], "mcp: 'git' is no McpServer"),
        ("git", "mcp='git' is not usable: give a list"),
        ([McpServer("a", command=["x"]), McpServer("a", url="https://x")], "two MCP servers are named 'a'"),
        ([McpServer("a", command=["x"], agents=["b"])], "MCP server 'a' is for the agent 'b', which there is not"),
    ],
    ids=range(4),
)
def test_unusable_servers_of_a_runtime_are_refused(given_servers: Any, why: str) -> None:
    with pytest.raises(InvalidDefinition, match=why):
        Runtime("memory", agents=[Agent(ScriptedModel([]), name="a")], mcp=untyped(given_servers))


def test_secrets_of_a_server_are_not_in_its_errors() -> None:
    with pytest.raises(InvalidDefinition) as refused:
        McpServer("a", url="https://x", headers=untyped({"Authorization": b"hunter2"}))

    assert "hunter2" not in str(refused.value)


@given(st.text(max_size=200))
def test_every_name_of_a_tool_is_one_that_providers_take(name: str) -> None:
    exposed = exposed_name("server", name)

    assert exposed.startswith("mcp__server__")
    assert len(exposed) <= LONGEST_NAME
    assert all(sign.isascii() and (sign.isalnum() or sign in "_-") for sign in exposed)


def test_names_are_kept_where_they_can_be_and_told_apart_where_not() -> None:
    assert exposed_name("git", "git_status") == "mcp__git__git_status"
    assert exposed_name("git", "a.b") != exposed_name("git", "a b")
    assert exposed_name("git", "x" * 100 + "1") != exposed_name("git", "x" * 100 + "2")
    assert exposed_name("git", "") != "mcp__git__"


# ---------------------------------------------------------------------- mcp.json


def write(folder: Path, content: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_file_of_other_clients_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "t0k3n")
    git_entry = {"command": "uvx", "args": ["mcp-server-git", "${HOME_OF_IT:-/tmp}"], "env": {"A": "b"}}
    headers = {"Authorization": "Bearer ${MY_TOKEN}"}
    docs_entry = {"type": "http", "url": "https://example.com/mcp", "headers": headers}
    entries = {"git": git_entry, "docs": docs_entry, "off": {"command": "x", "disabled": True}}
    path = write(tmp_path, {"mcpServers": entries, "other": "ignored"})
    git, docs = read_mcp_json(path, approval="ask")

    assert git.command is not None
    assert git.command.argv == ("uvx", "mcp-server-git", "/tmp")
    assert git.command.env == {"A": "b"}
    assert (docs.url, docs.headers) == ("https://example.com/mcp", {"Authorization": "Bearer t0k3n"})
    assert {git.approval_of("x"), docs.approval_of("x")} == {"ask"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("not json", "is no mcp.json"),
        ({}, "is no mcp.json"),
        ({"mcpServers": []}, "is no mcp.json"),
        ({"mcpServers": {"a": {"command": 3}}}, "is no mcp.json"),
        ({"mcpServers": {"a": {"type": "sse", "url": "https://x"}}}, "is of type 'sse': use stdio or http"),
        ({"mcpServers": {"a": {}}}, "give it a command or a url"),
        ({"mcpServers": {"a b": {"command": "x"}}}, "cannot be named 'a b'"),
        ({"mcpServers": {"a": {"command": "${NO_SUCH_VARIABLE_HERE}"}}}, "needs the variable NO_SUCH_VARIABLE_HERE"),
        (" " * (1 << 20) + "{}", "has more than 1,048,576 bytes"),
    ],
    ids=range(9),
)
def test_unusable_file_is_refused(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(InvalidDefinition, match=why):
        read_mcp_json(write(tmp_path, content))


def test_file_that_is_not_there_is_refused_and_none_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"mcpServers": {"evil": {"command": "x"}}})
    monkeypatch.chdir(tmp_path)
    runtime = Runtime("memory", mcp=[])

    with pytest.raises(InvalidDefinition, match="cannot be read: No such file"):
        read_mcp_json(tmp_path / "other.json")
    assert runtime._mcp_given == ()
