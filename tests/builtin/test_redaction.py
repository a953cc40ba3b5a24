"""Redaction: secrets are replaced in tool results, in what a model says, however it is streamed, and in traces."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perdure import Agent, Document, FileRef, Image, ModelRequest, Retry, Runtime, ToolContext, ToolError, tool
from perdure.builtin.redaction import BUILTIN, InputRedaction, Pattern, RedactingSink, Redaction, Redactor, redact
from perdure.errors import InvalidDefinition, InvalidInput
from perdure.model.event import TextDelta, ToolFinished
from perdure.model.llm import Delta, ModelResponse
from perdure.model.message import Reasoning, Text, ToolCall
from perdure.model.plugin import ShortCircuit
from perdure.model.tool import BlobRef, Cancelled, Denied, Failed, Ok, OutcomeUnknown, ToolOutcome, ToolSpec
from perdure.plugins.calls import after_tool_call
from perdure.plugins.hooks import Plugin, SessionContext, StreamContext, ToolEndContext
from perdure.plugins.registry import PluginSet
from perdure.testing import ScriptedModel
from tests.fuzzing import cases
from tests.kit import untyped

HOST: Any = None  # nothing here needs it

# None of these was ever valid. They are put together here, so that no scanner takes this file for a leak.
OPENAI = "sk-" + "proj-abcDEF0123456789abcDEF"
GITHUB = "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789"
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0In0.c2lnbmF0dXJl"
BODY = "MIIEpAIBAAKCAQEAabcdefghijklmnop0123456789ABCDEFGHIJKLMNOPQRSTUV"
BEGIN, END = "-----BEGIN RSA PRIVATE " + "KEY-----", "-----END RSA PRIVATE KEY-----"
PEM = f"{BEGIN}\n{BODY}\n{BODY}\nabcd==\n{END}"

SECRETS = {
    f"use {OPENAI}, please": "use [redacted:api_key], please",
    f"git clone with {GITHUB}": "git clone with [redacted:api_key]",
    f"({AWS})": "([redacted:aws_key])",
    f"token {JWT}.": "token [redacted:jwt].",
    PEM: "[redacted:private_key]",
    f"key:\n{PEM}\nend": "key:\n[redacted:private_key]\nend",
    PEM.replace("\n", "\\n"): "[redacted:private_key]",
    PEM.replace("\n", " "): "[redacted:private_key]",
    f"{BEGIN}\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,AB12\n\n{BODY}\n{END}": "[redacted:private_key]",
    f"cut off: {BEGIN}\n{BODY}\n{BODY[:30]}": "cut off: [redacted:private_key]",
    "Authorization: Bearer abc": "Authorization: Bearer [redacted:authorization]",
    "authorization=abc": "authorization=[redacted:authorization]",
    '"Authorization": "Basic dXNlcjpw"': '"Authorization": "Basic [redacted:authorization]"',
    "curl -H 'bearer abcdefghijkl0123'": "curl -H 'bearer [redacted:authorization]'",
    f"Authorization: Bearer {OPENAI}": "Authorization: Bearer [redacted:api_key]",
    "password=hunter2": "password=[redacted:password]",
    "password = hunter2 # mine": "password = [redacted:password] # mine",
    "DB_PASSWORD: hunter2\nuser: ann": "DB_PASSWORD: [redacted:password]\nuser: ann",
    'passwd="two words", user': 'passwd="[redacted:password]", user',
    "passwd='it\\'s', user": "passwd='[redacted:password]', user",
    '{"api_key": "abc", "n": 1}': '{"api_key": "[redacted:password]", "n": 1}',
    '{\\"clientSecret\\": \\"abc\\"}': '{\\"clientSecret\\": \\"[redacted:password]\\"}',
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG": "aws_secret_access_key = [redacted:password]",
    "?access_token=abc&page=2": "?access_token=[redacted:password]&page=2",
    "Server=db;Pwd=abc;Port=1": "Server=db;Pwd=[redacted:password];Port=1",
    "export DEPLOY_TOKEN=abc": "export DEPLOY_TOKEN=[redacted:password]",
    "password=пароль и": "password=[redacted:password] и",
    "postgres://ann:p@ss@db/x": "postgres://ann:[redacted:url_password]@db/x",
    f"password={AWS},{GITHUB}": "password=[redacted:aws_key],[redacted:api_key]",
}

HARMLESS = [
    "",
    "The secret of good passwords is length.",
    "a basic understanding, a bearer of news",
    "sk-learn, sk-circle-fade-dot-animation, task-1234567890123456",
    "next_page_token=abc123 and max_tokens: 5",
    "PWD=/home/ann",
    "see https://example.com:8080/path and ann@example.com",
    "A file that begins with `-----BEGIN PRIVATE KEY-----` holds a key.",
    "-----BEGIN CERTIFICATE-----\n" + BODY + "\n-----END CERTIFICATE-----",
    "XAKIAIOSFODNN7EXAMPLE AKIAIOSFODNN7EXAMPLES",
]


# ---------------------------------------------------------------------- what is a secret


@pytest.mark.parametrize(("text", "shown"), SECRETS.items())
def test_a_secret_is_replaced_by_its_kind_and_the_rest_stays(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_resembles_a_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("shown", sorted(set(SECRETS.values())))
def test_what_is_redacted_already_stays_as_it_is(shown: str) -> None:
    assert redact(shown) == shown


def test_a_mark_that_somebody_wrote_does_not_protect_what_follows_it() -> None:
    assert redact("password=[redacted:x]hunter2") == "password=[redacted:password]"


def test_secrets_that_are_known_are_found_wherever_they_are() -> None:
    secrets = Redactor(literals=["correct horse", "horse battery", "пароль!"])

    assert secrets.text("xcorrect horsex") == "x[redacted:secret]x"
    assert secrets.text("correct horse battery staple") == "[redacted:secret] staple"
    assert secrets.text("это пароль!") == "это [redacted:secret]"
    assert secrets.text('password="a correct horse b"') == 'password="[redacted:password]"'


def test_patterns_of_the_host_come_beside_the_built_in_ones() -> None:
    secrets = Redactor(patterns=[Pattern("customer", r"CUST-[0-9]{4}")])

    assert secrets.text(f"CUST-1234 {AWS}") == "[redacted:customer] [redacted:aws_key]"


def test_a_host_may_pick_from_the_built_in_patterns() -> None:
    secrets = Redactor(builtin=["aws_key"])

    assert secrets.text(f"{AWS} password=x") == "[redacted:aws_key] password=x"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Redactor(builtin=["aws"]), "no built-in kind 'aws'"),
        (lambda: Redactor(literals=["abcde"]), "5 characters is too short"),
        (lambda: Redactor(literals=["redacted"]), "too short"),
        (lambda: Redactor(patterns=[Pattern("x", "(")]), "kind 'x' is no regular expression"),
        (lambda: Redactor(patterns=[Pattern("a kind", "x")]), "small letters"),
        (lambda: Redactor(patterns=[Pattern("x", "a*")]), "make it stricter"),
        (lambda: Redactor(patterns=[Pattern("x", "[a-z]{8}")]), "make it stricter"),
    ],
    ids=["kind", "short", "mark", "syntax", "name", "empty", "itself"],
)
def test_a_definition_that_makes_no_sense_is_refused(make: Any, says: str) -> None:
    with pytest.raises(InvalidDefinition, match=says):
        make()


# ---------------------------------------------------------------------- JSON


def test_secrets_are_found_in_all_of_a_value() -> None:
    value = {"rows": [{"note": f"my key is {AWS}"}, 5, None, True], AWS: 1.5}

    assert redact(value) == {
        "rows": [{"note": "my key is [redacted:aws_key]"}, 5, None, True],
        "[redacted:aws_key]": 1.5,
    }


@pytest.mark.parametrize(
    "key", ["password", "dbPassword", "API-Key", "token", "authorization", "AWS_SECRET_ACCESS_KEY"]
)
def test_a_value_is_a_secret_when_its_key_says_so(key: str) -> None:
    assert redact({key: "plain"}) == {key: "[redacted:password]"}
    assert redact({key: 1234}) == {key: "[redacted:password]"}


@pytest.mark.parametrize("key", ["next_page_token", "input_tokens", "passwords", "secretary", "keyboard"])
def test_a_value_is_no_secret_when_its_key_only_sounds_like_it(key: str) -> None:
    assert redact({key: "plain"}) == {key: "plain"}


@pytest.mark.parametrize("value", [None, True, "", {"strength": "weak"}, ["a"]])
def test_a_key_gives_away_texts_and_numbers_only(value: Any) -> None:
    assert redact({"password": value}) == {"password": value}


def test_keys_that_were_secrets_stay_apart() -> None:
    other = AWS[:-1] + "F"

    assert redact({AWS: 1, other: 2}) == {"[redacted:aws_key]": 1, "[redacted:aws_key]'": 2}


def test_what_cannot_be_looked_through_is_not_shown() -> None:
    deep: Any = "x"
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]

    assert redact({"thing": object()}) == {"thing": "[redacted:unreadable]"}
    assert "too_deep" in repr(redact(deep))
    assert redact({"text": Text(f"it is {AWS}")}) == {"text": {"type": "text", "text": "it is [redacted:aws_key]"}}


# ---------------------------------------------------------------------- streams

PIECES = [
    *(
        " ",
        "\n",
        "\t",
        "é",
        "日本",
        "=",
        ": ",
        '"',
        "'",
        "\\",
        "\\n",
        ";",
        ",",
        "&",
        "-",
        "-----",
        "x",
        "1234",
        "/",
        "@",
    ),
    *("://", "ann:", "sk-", OPENAI, GITHUB, AWS, AWS[:9], JWT, "postgres://ann:pw@db/", "abcdefghijklmnop1"),
    *("password", "Passwd", "token", "secret", "API_KEY", "MY_TOKEN", "pwd", "authorization", "Bearer", "basic "),
    *("[redacted:api_key]", "[redacted:", "correct ", "horse battery", "correct horse battery", "ключ от ", "дома"),
    *(
        PEM,
        PEM[:40],
        PEM[40:],
        BEGIN,
        "-----BEGIN",
        END,
        BODY,
        "Proc-Type: 4,ENCRYPTED\n",
        "4111 ",
        "4111 1111 1111 1111",
    ),
]
OWN = Redactor(
    literals=["correct horse battery", "ключ от дома", "abcdefghijklmnop1"],
    patterns=[Pattern("card", r"[0-9]{4}(?: [0-9]{4}){3}", open=r"[0-9][0-9 ]*")],
)
PLAIN = Redactor()
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def at(step: int = 1, final: bool = False, turn: str = "chat.1") -> StreamContext:
    return StreamContext("chat", turn, "assistant", None, step, final)


def streamed(redactor: Redactor, pieces: Iterable[str]) -> list[str]:
    """What people see of a stream, piece by piece; last comes what was held back until its end."""
    plugin = Redaction(redactor).for_session(SessionContext("chat", "assistant"))
    return [*[plugin.transform_text(at(), piece) for piece in pieces], plugin.transform_text(at(final=True), "")]


def cut(text: str, places: Iterable[int]) -> list[str]:
    borders = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


@settings(max_examples=cases(500, 10_000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts, st.lists(st.integers(0, 500), max_size=12), st.sampled_from([PLAIN, OWN]))
@example("password = password = x y", [20], PLAIN)
@example(f"{OPENAI}password = x", [len(OPENAI) + 10], PLAIN)
@example(f"{PEM}password = x", [len(PEM) + 10], PLAIN)
@example("é日本password=пароль и", [15, 16], PLAIN)
@example("correct horse correct horse battery", [20, 27], OWN)
def test_however_a_text_is_cut_its_pieces_together_are_the_redacted_whole(
    text: str, places: list[int], redactor: Redactor
) -> None:
    assert "".join(streamed(redactor, cut(text, places))) == redactor.text(text)
    assert "".join(streamed(redactor, text)) == redactor.text(text)


@pytest.mark.parametrize("text", [text for text, shown in SECRETS.items() if "[redacted" in shown])
def test_no_part_of_a_secret_slips_out_of_a_stream(text: str) -> None:
    shown = SECRETS[text]

    seen = ""
    for piece in streamed(PLAIN, text):
        seen += piece
        assert shown.startswith(seen)
    assert seen == shown


def test_words_are_shown_as_soon_as_they_are_whole() -> None:
    assert streamed(PLAIN, ["The answer", " is", " 42", ", I", " think."]) == [
        "The ",
        "answer ",
        "is ",
        "42, ",
        "I ",
        "think.",
    ]


def test_a_script_without_spaces_is_shown_at_once() -> None:
    assert streamed(PLAIN, ["東京は", "日本の", "首都です。"]) == ["東京は", "日本の", "首都です。", ""]


def test_text_goes_on_after_a_word_that_might_have_announced_a_secret() -> None:
    assert streamed(PLAIN, ["the password ", "is ", "long "]) == ["the ", "password is ", "long ", ""]


def test_the_mention_of_a_key_does_not_hold_back_what_follows() -> None:
    assert streamed(PLAIN, ["`-----BEGIN PRIVATE KEY-----` is ", "how it begins "]) == [
        "`-----BEGIN PRIVATE KEY-----` is ",
        "how it begins ",
        "",
    ]


def test_a_long_text_that_is_held_back_is_whole_in_the_end() -> None:
    text = f"{BEGIN}\n{BODY}\n" + "and then many words " * 400
    pieces = [text[i : i + 5] for i in range(0, len(text), 5)]

    assert "".join(streamed(PLAIN, pieces)) == PLAIN.text(text)


def test_what_was_held_back_of_an_attempt_that_failed_is_gone() -> None:
    plugin = Redaction()
    assert plugin.transform_text(at(), "the password=") == "the "
    plugin.stream_finished(at(), "attempt_reset")

    assert plugin.transform_text(at(), "the answer ") == "the answer "


def test_what_was_held_back_does_not_reach_another_stream() -> None:
    plugin = Redaction()
    plugin.transform_text(at(step=1), "password=")
    plugin.transform_text(at(step=2), "token=")

    assert plugin.transform_text(at(step=1, turn="chat.2", final=True), "") == ""


def test_sessions_hold_back_their_own_text_only() -> None:
    plugins = PluginSet([Redaction()])
    contexts = {"redaction": SessionContext("chat", "assistant")}
    first, second = (plugins.open(contexts).plugins[0] for _ in range(2))
    first.transform_text(at(), "half")

    assert second.transform_text(at(final=True), "") == ""
    assert first.transform_text(at(final=True), "") == "half"


# ---------------------------------------------------------------------- answers


def test_the_whole_answer_is_redacted_except_for_calls_and_what_the_provider_must_see_again() -> None:
    call = ToolCall("1", "login", {"password": "hunter2"})
    response = ModelResponse(
        f"it is {AWS}",
        (call,),
        reasoning=(Reasoning(f"hm, {AWS}", {"signature": AWS}),),
        parts=(Reasoning(f"hm, {AWS}", {"signature": AWS}), Text(f"it is {AWS}"), call),
        model="m",
    )
    thought = Reasoning("hm, [redacted:aws_key]", {"signature": AWS})

    assert Redaction().transform_response(at(), response) == ModelResponse(
        "it is [redacted:aws_key]",
        (call,),
        reasoning=(thought,),
        parts=(thought, Text("it is [redacted:aws_key]"), call),
        model="m",
    )


# ---------------------------------------------------------------------- tool results


def call_ended(outcome: ToolOutcome, again: bool = False) -> ToolEndContext:
    """A call has ended."""
    spec = ToolSpec("read")
    return ToolEndContext("chat", "chat.1", "assistant", None, HOST, "chat.1.1.0", spec, {}, outcome, again)


@pytest.mark.parametrize(
    ("outcome", "recorded"),
    [
        (Ok({"env": [f"KEY={AWS}"]}), Ok({"env": ["KEY=[redacted:aws_key]"]})),
        (
            Failed("tool_raised", f"bad {AWS}", [AWS]),
            Failed("tool_raised", "bad [redacted:aws_key]", ["[redacted:aws_key]"]),
        ),
        (Denied(f"not {AWS}", "ann"), Denied("not [redacted:aws_key]", "ann")),
        (Cancelled("ann", AWS), Cancelled("ann", "[redacted:aws_key]")),
        (OutcomeUnknown(AWS), OutcomeUnknown("[redacted:aws_key]")),
        (Ok("head … tail", BlobRef("ab", 99)), Ok("head … tail")),
    ],
    ids=["ok", "failed", "denied", "cancelled", "unknown", "cut off"],
)
def test_an_outcome_is_recorded_without_its_secrets(outcome: ToolOutcome, recorded: ToolOutcome) -> None:
    assert Redaction().after_tool_call(call_ended(outcome)) == ShortCircuit(recorded)


@pytest.mark.parametrize(
    "outcome", [Ok({"rows": [1, "two"]}), Ok(), Failed("x", "y"), Denied("no"), OutcomeUnknown("died")]
)
def test_an_outcome_without_secrets_is_left_alone(outcome: ToolOutcome) -> None:
    assert Redaction().after_tool_call(call_ended(outcome)) is None


class Saying(Plugin):
    """Puts its own outcome in place of whatever a tool returned."""

    id = "saying"

    def __init__(self, outcome: ToolOutcome) -> None:
        self.outcome = outcome

    def after_tool_call(self, ctx: ToolEndContext) -> ShortCircuit | None:
        return ShortCircuit(self.outcome)


async def recorded(plugins: Sequence[Plugin], outcome: ToolOutcome) -> ToolOutcome | None:
    session = PluginSet(plugins).open({"redaction": SessionContext("chat", "assistant")})
    return (await after_tool_call(session.hooks("after_tool_call"), call_ended, outcome)).outcome


@pytest.mark.parametrize("ended", [Ok("harmless"), Ok(AWS)])
async def test_a_secret_that_a_later_plugin_brings_in_is_not_recorded(ended: Ok) -> None:
    assert await recorded([Redaction(), Saying(Ok([AWS]))], ended) == Ok(["[redacted:aws_key]"])


async def test_a_secret_is_not_recorded_after_an_earlier_plugin_has_replaced_the_result() -> None:
    assert await recorded([Saying(Ok(f"short: {AWS}")), Redaction()], Ok("long")) == Ok("short: [redacted:aws_key]")


# ---------------------------------------------------------------------- traces


class Lines:
    """A trace sink that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Mapping[str, Any]]] = []

    def write(self, name: str, payload: Mapping[str, Any]) -> None:
        self.lines.append((name, payload))


def test_a_trace_is_written_without_secrets() -> None:
    lines = Lines()
    sink = RedactingSink(lines, Redactor(literals=["hunter2"]))
    sink.write("tool.started", {"args": {"password": "x", "text": "it is hunter2"}, "ms": 5})

    assert lines.lines == [
        ("tool.started", {"args": {"password": "[redacted:password]", "text": "it is [redacted:secret]"}, "ms": 5})
    ]


@pytest.mark.parametrize("pattern", BUILTIN, ids=lambda pattern: pattern.kind)
def test_hints_do_not_hide_what_a_pattern_would_find(pattern: Pattern) -> None:
    """A match that has none of the hints of its pattern would never be looked for."""
    found = [text for text in SECRETS if redact(text) != text and Redactor(builtin=[pattern.kind]).text(text) != text]

    assert found
    for text in SECRETS:
        bare = Redactor(builtin=(), patterns=[Pattern(pattern.kind, pattern.secret, pattern.open)])
        assert bare.text(text) == Redactor(builtin=[pattern.kind]).text(text)


# ---------------------------------------------------------------------- in a session


@tool
async def leak(lines: int) -> str:
    """Print a file, with a secret somewhere in the middle of it."""
    return "\n".join([f"key {number}: {AWS if number == lines // 2 else 'none'}" for number in range(lines)])


class Leaking:
    """A model that calls the tool and then tells what it knows, in pieces or as a whole only."""

    name = "leaking"

    def __init__(self, *pieces: str, streams: bool = True) -> None:
        self.pieces, self.streams = pieces, streams

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        if request.messages[-1].role == "user":
            yield ModelResponse(tool_calls=(ToolCall("1", "leak", {"lines": 2000}),), stop="tool_calls")
            return
        for piece in self.pieces if self.streams else ():
            yield piece
        yield ModelResponse("".join(self.pieces))


@pytest.mark.parametrize("streams", [True, False], ids=["in pieces", "as a whole"])
async def test_a_secret_reaches_neither_the_store_nor_those_who_watch(tmp_path: Path, streams: bool) -> None:
    model = Leaking("The key is AKIA", AWS[4:9], f"{AWS[9:]} ", "I think", ".", streams=streams)
    agent = Agent(model, tools=[leak], plugins=[Redaction()])

    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        async with session.stream("which key?") as turn:
            events = [event async for event in turn]
            result = await turn.result()
    stored = b"".join([path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()])

    assert result.text == "The key is [redacted:aws_key] I think."
    assert "".join([event.text for event in events if isinstance(event, TextDelta)]) == result.text
    assert AWS not in repr([event for event in events if isinstance(event, TextDelta | ToolFinished)])
    assert b"key 1000: [redacted:aws_key]" in stored  # the whole output too, beside what the model was shown
    assert AWS.encode() not in stored


async def test_a_secret_in_a_failure_that_is_tried_again_is_not_recorded(tmp_path: Path) -> None:
    attempts = 0

    @tool(name="leak", retries=1)
    async def flaky(lines: int) -> str:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise Retry(f"busy, said {AWS}", after=0.01)
        return "fine"

    async with Runtime(
        tmp_path / "agent.db", agents=[Agent(Leaking(), tools=[flaky], plugins=[Redaction()])]
    ) as runtime:
        result = await (await runtime.session("chat")).run("go")
    stored = b"".join([path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()])

    assert (attempts, result.tool_calls[0].outcome) == (2, Ok("fine"))
    assert AWS.encode() not in stored
    assert b"what it said is withheld" in stored


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_secret_in_the_last_words_of_a_cancelled_tool_is_not_recorded(tmp_path: Path, retries: int) -> None:
    begun = asyncio.Event()

    @tool(name="leak", retries=retries)
    async def stubborn(lines: int) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            kind = Retry if retries else ToolError
            raise kind(f"stopped at {AWS}") from None
        return ""

    agent = Agent(Leaking(), tools=[stubborn], plugins=[Redaction()])
    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        receipt = await session.send("go")
        await begun.wait()
        await session.cancel()
        result = await receipt.result()
    stored = b"".join([path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()])

    outcome = result.tool_calls[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.message == "stopped at [redacted:aws_key]"
    assert AWS.encode() not in stored


async def test_what_somebody_outside_says_of_a_deferred_call_is_recorded_redacted(tmp_path: Path) -> None:
    keys = dict[str, str]()

    @tool(deferred=True)
    async def order(ctx: ToolContext) -> None:
        keys[ctx.call_id] = ctx.defer()

    calls = [ToolCall("a", "order"), ToolCall("b", "order")]
    agent = Agent(ScriptedModel([calls, "done"]), tools=[order], plugins=[Redaction()])
    async with Runtime(tmp_path / "agent.db", agents=[agent]) as runtime:
        session = await runtime.session("chat")
        await session.run("go")
        await runtime.resolve(keys["chat.1.1.0"], {"used": GITHUB})
        await runtime.resolve(keys["chat.1.1.1"], {"used": GITHUB}, error=f"refused: {GITHUB}")
        result = await asyncio.wait_for(session.result("chat.1"), 60)
        row = await runtime.store.session("chat")
        assert row is not None
        written = b"".join([body for _, _, body in await runtime.store.nodes(row.sid, 1, 1)])

    assert [call.outcome for call in result.tool_calls] == [
        Ok({"used": "[redacted:api_key]"}),
        Failed("settled_as_failed", "refused: [redacted:api_key]", {"used": "[redacted:api_key]"}),
    ]
    assert GITHUB.encode() not in written


# ---------------------------------------------------------------------- inputs

CUSTOMER = "CUST-" + "12345678"
CUSTOMERS = Redactor(patterns=[Pattern("customer", r"CUST-[0-9]{8}")])


async def test_what_is_said_is_redacted_before_it_is_stored(tmp_path: Path) -> None:
    letter = Document.from_bytes(f"From {CUSTOMER}".encode(), "text/plain", f"{CUSTOMER}.txt")
    picture = Image.from_bytes(b"\x89PNG\xff", "image/png")
    agent = Agent(ScriptedModel(["Yes.", "No."]), plugins=[InputRedaction(CUSTOMERS)])
    async with Runtime(tmp_path / "store.db", agents=[agent]) as runtime:
        session = await runtime.session("s")
        await session.run([f"I am {CUSTOMER}, key {OPENAI}", letter, picture], key="k")
        said = (await session.history())[0]
        kept = [each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()]

    assert said.text == "I am [redacted:customer], key [redacted:api_key]"
    assert [part.name for part in said.parts if isinstance(part, Document)] == ["[redacted:customer].txt"]
    assert b"From [redacted:customer]" in b"".join(kept)
    assert b"\x89PNG\xff" in kept
    assert not any(secret.encode() in data for secret in (CUSTOMER, OPENAI) for data in kept)


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (Image.from_bytes(b"\x89PNG\xff", "image/png"), "takes no files but texts"),
        (FileRef("anthropic", "file-1"), "takes no files but texts"),
        (Image.url(f"https://example.org/{CUSTOMER}.png"), "the address of a file holds a secret"),
    ],
)
async def test_files_that_cannot_be_looked_through_may_be_refused(file: Any, why: str) -> None:
    agent = Agent("scripted", plugins=[InputRedaction(CUSTOMERS, binary="refuse")])
    async with Runtime("memory", agents=[agent]) as runtime:
        with pytest.raises(InvalidInput, match=why):
            await (await runtime.session("s")).run(["see", file])
        written = await runtime.store.session("s")

    assert written is None


def test_what_is_to_become_of_files_is_one_of_two() -> None:
    with pytest.raises(InvalidDefinition, match="'pass', or one says 'refuse'"):
        InputRedaction(binary=untyped("withhold"))
