"""`perdure sessions`, `show`, `fork` and `delete` on real files."""

import asyncio
from pathlib import Path

import pytest

from perdure import Agent, Runtime, ToolCall, tool
from perdure.testing import ScriptedModel
from tests.cli.shell import prepare, say, shell, shell_json
from tests.kit import until


def table(text: str) -> list[list[str]]:
    """The cells of a printed table, without its head; columns are two spaces apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()[1:]]


@pytest.fixture
def talked(store: Path) -> Path:
    """A store with an idle session `chat` of two turns and a session `shop` that waits for an approval."""
    say(store, "chat", "hello", "look")
    say(store, "shop", "pay")
    return store


# ---------------------------------------------------------------------- sessions


def test_sessions_are_listed_with_their_state(talked: Path) -> None:
    result = shell("sessions", store=talked)

    assert result.exit_code == 0
    shop, chat = table(result.stdout)
    assert shop[:4] == ["shop", "helper", "parked", "0"]
    assert chat[:4] == ["chat", "helper", "idle", "2"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["--state", "parked"], ["shop"]),
        (["--state", "idle"], ["chat"]),
        (["--state", "running"], []),
        (["--agent", "nobody"], []),
        (["--prefix", "ch"], ["chat"]),
        (["--limit", "1"], ["shop"]),
    ],
    ids=["parked", "idle", "running", "agent", "prefix", "limit"],
)
def test_sessions_can_be_chosen(wanted: list[str], found: list[str], talked: Path) -> None:
    assert [s["id"] for s in shell_json("sessions", *wanted, store=talked)] == found


@pytest.fixture
def described(store: Path) -> Path:
    """Sessions of two tenants, one of them with a title."""

    async def work(runtime: Runtime) -> None:
        people: list[dict[str, str | int | bool]] = [
            {"user": "u-17", "tenant": 4},
            {"user": "u-17", "tenant": 5, "paying": True},
        ]
        for number, whom in enumerate(people):
            session = await runtime.session(f"s-{number}", metadata=whom)
            await session.run("hello")
            await session.update(title=f"Talk {number}")
        await (await runtime.session("text", metadata={"tenant": "4"})).run("hello")

    prepare(store, work)
    return store


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["user=u-17"], ["s-1", "s-0"]),
        (["user=u-17", "tenant=4"], ["s-0"]),
        (["paying=true"], ["s-1"]),
        (['tenant="4"'], ["text"]),
        (["user=nobody"], []),
    ],
    ids=["text", "two", "boolean", "quoted", "none"],
)
def test_sessions_are_found_by_their_metadata(wanted: list[str], found: list[str], described: Path) -> None:
    options = [word for each in wanted for word in ("--where", each)]

    assert [s["id"] for s in shell_json("sessions", *options, store=described)] == found


def test_metadata_and_title_are_shown(described: Path) -> None:
    [listed] = shell_json("sessions", "--where", "paying=true", store=described)

    assert (listed["title"], listed["metadata"]) == ("Talk 1", {"paying": True, "tenant": 5, "user": "u-17"})
    assert "Talk 1  paying=true tenant=5 user=u-17" in shell("sessions", store=described).stdout
    assert "“Talk 1” paying=true tenant=5 user=u-17" in shell("show", "s-1", store=described).stdout
    assert shell_json("show", "s-1", store=described)["metadata"] == {"paying": True, "tenant": 5, "user": "u-17"}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (["user"], "say KEY=VALUE"),
        (["=x"], "say KEY=VALUE"),
        (["a=[1]"], "text, a number or a truth value"),
        (["a=null"], "leave out the unknown"),
        (["perdure.x=1"], "Perdure's own"),
        (["a=1", "a=2"], "twice"),
    ],
)
def test_a_condition_that_is_none_is_a_usage_error(wanted: list[str], words: str, described: Path) -> None:
    result = shell("sessions", *[word for each in wanted for word in ("--where", each)], store=described)

    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_an_unknown_state_is_a_usage_error(talked: Path) -> None:
    result = shell("sessions", "--state", "asleep", store=talked)

    assert result.exit_code == 2
    assert "there is no state 'asleep'" in result.stderr


def test_long_ids_are_never_cut_in_a_pipe(store: Path) -> None:
    name = "customer-" + "0123456789" * 12
    say(store, name, "hello")

    assert name in shell("sessions", store=store).stdout


def test_an_input_that_nobody_has_begun_to_work_on_is_queued(store: Path) -> None:
    async def work(runtime: Runtime) -> None:
        async with Runtime(store, agents=[]) as other:
            await (await runtime.session("chat")).run("hello")
            await (await other.session("chat")).send("nobody here runs this")

    prepare(store, work)

    [row] = shell_json("sessions", store=store)
    assert (row["state"], row["open_turn"], row["owner"]) == ("queued", "chat.2", None)
    assert shell_json("sessions", "--state", "queued", store=store) == [row]
    assert shell_json("sessions", "--state", "interrupted", store=store) == []
    assert shell_json("show", "chat", store=store)["state"] == "queued"
    assert "queued" in shell("show", "chat", store=store).stdout
    assert shell_json("doctor", store=store)["open_turns"][0]["state"] == "queued"


def test_a_turn_that_was_let_go_after_it_was_begun_is_interrupted(store: Path) -> None:
    running = asyncio.Event()

    @tool
    async def work() -> None:
        running.set()
        await asyncio.Event().wait()

    async def leave() -> None:
        agent = Agent(ScriptedModel([[ToolCall("a", "work")]]), tools=[work])
        async with Runtime(store, agents=[agent], grace=0) as runtime:
            await (await runtime.session("chat")).send("go")
            await running.wait()

    asyncio.run(leave())

    [row] = shell_json("sessions", store=store)
    assert (row["state"], row["open_turn"], row["owner"]) == ("interrupted", "chat.1", None)


# ---------------------------------------------------------------------- show


def test_show_reads_like_a_conversation(talked: Path) -> None:
    result = shell("show", "chat", store=talked)

    head, *lines = result.stdout.splitlines()
    assert head.startswith("chat · agent helper · idle · changed ")
    assert lines == [
        "",
        "── chat.1",
        "user: hello",
        "assistant: you said hello, message 1",
        "  finished · 1 model call, 7 tokens in, 3 out",
        "",
        "── chat.2",
        "user: look",
        '  ✓ look(item="tea")',
        "      ok: tea is green",
        "assistant: look: ok: tea is green",
        "  finished · 2 model calls, 10 tokens in, 5 out, usage of 1 unknown",
    ]


def test_show_tells_what_an_open_turn_waits_for(talked: Path) -> None:
    result = shell("show", "shop", store=talked)

    assert '  … pay(item="tea")\n  parked · 1 model call' in result.stdout
    assert 'for approval of pay(item="tea")\n    perdure approve shop.1.1.0   (or reject)\n' in result.stdout


def test_show_json_has_turns_the_open_one_and_what_waits(talked: Path) -> None:
    chat, shop = (shell_json("show", name, store=talked) for name in ("chat", "shop"))

    assert [t["outcome"]["kind"] for t in chat["turns"]] == ["finished", "finished"]
    assert [m["role"] for m in chat["turns"][1]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [c["outcome"]["value"] for c in chat["turns"][1]["tool_calls"]] == ["tea is green"]
    assert chat["open"] is None
    assert (shop["turns"], shop["open"]["turn_id"], shop["open"]["outcome"]) == ([], "shop.1", None)
    assert shop["open"]["tool_calls"] == []
    assert [(p["call_id"], p["kind"]) for p in shop["pending"]] == [("shop.1.1.0", "approval")]


def test_show_lists_what_is_queued(talked: Path) -> None:
    async def work(runtime: Runtime) -> None:
        await (await runtime.session("shop")).send("and then?")

    prepare(talked, work)

    assert "queued shop.2: and then?" in shell("show", "shop", store=talked).stdout
    assert [q["input_id"] for q in shell_json("show", "shop", store=talked)["queued"]] == ["shop.2"]


def test_records_show_where_one_can_fork(talked: Path) -> None:
    rows = table(shell("show", "chat", "--records", store=talked).stdout)

    assert [row[:2] for row in rows] == [
        ["chat.1.0", "said"],
        ["chat.1.1", "closed"],
        ["chat.2.0", "said"],
        ["chat.2.1", "replied"],
        ["chat.2.2", "ended"],
        ["chat.2.3", "closed"],
    ]
    assert [row[0] for row in rows if row[2] == "yes"] == ["chat.1.0", "chat.1.1", "chat.2.0", "chat.2.2", "chat.2.3"]


def test_what_was_said_cannot_command_the_terminal(store: Path) -> None:
    say(store, "chat", "\x1b]0;pwned\x07 hello")

    shown = shell("show", "chat", store=store).stdout

    assert "\x1b" not in shown
    assert "\x07" not in shown


@pytest.mark.parametrize("command", [["show"], ["fork"], ["cancel"], ["delete", "--yes"]], ids=" ".join)
def test_an_unknown_session_is_a_usage_error(command: list[str], talked: Path) -> None:
    result = shell(*command, "nobody", store=talked)

    assert result.exit_code == 2
    assert "there is no session 'nobody' in this store: `perdure sessions` lists the sessions" in result.stderr


# ---------------------------------------------------------------------- fork and delete


def test_a_fork_shares_the_past_up_to_the_node(talked: Path) -> None:
    forked = shell("fork", "chat", "--at", "chat.1.1", "--as", "branch", store=talked)

    assert (forked.exit_code, forked.stdout) == (0, "branch\n")
    told = shell_json("show", "branch", store=talked)
    assert [t["turn_id"] for t in told["turns"]] == ["chat.1"]
    assert shell_json("sessions", "--prefix", "branch", store=talked)[0]["forked_at"] == "chat.1.1"
    assert "chat.1.1" in shell("sessions", store=talked).stdout


def test_a_fork_in_the_middle_of_a_turn_is_shown_as_cut(talked: Path) -> None:
    shell("fork", "chat", "--at", "chat.2.2", "--as", "branch", store=talked)

    shown = shell("show", "branch", store=talked).stdout

    assert "── chat.2 (shared history)" in shown
    assert "cut here by the fork" in shown
    assert "look: ok: tea is green" not in shown


def test_a_fork_without_a_name_gets_one(talked: Path) -> None:
    told = shell_json("fork", "chat", store=talked)

    assert told["session_id"].startswith("s-")
    assert len(shell_json("show", told["session_id"], store=talked)["turns"]) == 2


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--at", "chat.2.1"], 2, "tool calls before it have no result yet"),
        (["--at", "chat.9.0"], 2, "there is no such node"),
        (["--at", "shop.1.0"], 2, "it is not a node of session 'chat'"),
        (["--as", "shop"], 1, "there is a session 'shop' already"),
    ],
    ids=["open calls", "no node", "another session", "a name in use"],
)
def test_a_fork_that_cannot_be_is_explained(args: list[str], code: int, words: str, talked: Path) -> None:
    result = shell("fork", "chat", *args, store=talked)

    assert result.exit_code == code
    assert words in result.stderr


def test_delete_asks_first(talked: Path) -> None:
    refused = shell("delete", "chat", store=talked)
    deleted = shell("delete", "chat", "--yes", store=talked)
    again = shell("delete", "chat", "--yes", store=talked)

    assert (refused.exit_code, deleted.exit_code, again.exit_code) == (2, 0, 2)
    assert "say --yes" in refused.stderr
    assert "was deleted" in again.stderr
    assert [s["id"] for s in shell_json("sessions", store=talked)] == ["shop"]


def test_a_fork_keeps_what_its_deleted_source_said(talked: Path) -> None:
    shell("fork", "chat", "--as", "branch", store=talked)
    shell("delete", "chat", "--yes", store=talked)

    assert "assistant: you said hello, message 1" in shell("show", "branch", store=talked).stdout


def test_what_was_said_is_found_where_the_store_keeps_an_index(described: Path) -> None:
    refused = shell("sessions", "--search", "hello", store=described)

    async def index() -> None:
        async with Runtime(described, search=True) as runtime:

            async def whole() -> bool:
                return (await runtime.sessions.search("hello")).complete

            await until(whole)

    asyncio.run(index())
    found = shell_json("sessions", "--search", "hello", "--where", "tenant=5", store=described)
    shown = shell("sessions", "--search", "hello", store=described)
    narrowed = shell("sessions", "--search", "hello", "--state", "idle", store=described)

    assert (refused.exit_code, narrowed.exit_code) == (1, 2)
    assert "Runtime(search=True)" in refused.stderr
    assert ("s-1.1.0", "user") in [(hit["node_id"], hit["role"]) for hit in found["hits"]]
    assert {hit["session_id"] for hit in found["hits"]} == {"s-1"}
    assert found["indexed"] == 1.0
    assert "text.1.0" in shown.stdout


# ---------------------------------------------------------------------- usage


def test_usage_is_shown_in_sums_told_apart_as_asked(described: Path) -> None:
    say(described, "plain", "look")

    rows = table(shell("usage", "--by", "user", store=described).stdout)
    found = shell_json("usage", "--by", "user", "--by", "label", "--where", "tenant=5", store=described)

    assert [row[:2] for row in rows] == [["-", "3"], ["u-17", "2"], ["all", "5"]]
    assert [(each["metadata.user"], each["label"], each["usage"]["input"]) for each in found] == [("u-17", "turns", 7)]


def test_usage_of_a_store_in_which_nothing_was_said_is_nothing(described: Path) -> None:
    assert shell("usage", "--since", "2100-01-01", store=described).stdout == "nothing was spent\n"


@pytest.mark.parametrize(
    "wrong", [["--since", "soon"], ["--until", "2026-13-01"], ["--by", "metadata."], ["--by", "modle"]]
)
def test_usage_that_cannot_be_told_is_refused_in_words(described: Path, wrong: list[str]) -> None:
    result = shell("usage", *wrong, store=described)

    assert result.exit_code == 2
    assert wrong[0] in result.stderr
