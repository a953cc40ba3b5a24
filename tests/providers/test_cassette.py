"""Cassettes: recorded from a provider once, replayed without it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, tool
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.outcome import Finished, ProviderFailed
from perdure.testing import FunctionModel
from perdure.testing.cassette import Cassette, Recorded, with_numbered_ids


@tool
def weather(city: str) -> str:
    """Look it up."""
    return f"rain in {city}"


def model(request: ModelRequest) -> str | list[ToolCall]:
    last = request.messages[-1]
    return "Take an umbrella." if last.role == "tool" else [ToolCall("c1", "weather", {"city": "Bern"})]


CALL = ToolCall(name="weather", args={"city": "Bern"})


def recorded(path: Path) -> list[Recorded]:
    return msgspec.convert(msgspec.json.decode(path.read_bytes())["recorded"], list[Recorded])


async def run(cassette: Cassette, said: str = "Do I need an umbrella?") -> object:
    async with Runtime("memory", agents=[Agent(cassette, tools=[weather])]) as runtime:
        return (await (await runtime.session("s")).run(said)).outcome


async def test_what_was_recorded_is_replayed_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    real = FunctionModel(model)
    path = tmp_path / "tapes" / "weather.json"

    first = await run(Cassette(path, real))
    asked = real.requests
    again = await run(Cassette(path, real))
    alone = await run(Cassette(path, mode="replay"))

    assert first == again == alone
    assert (asked, real.requests) == (2, 2)


async def test_a_missing_key_is_not_replayed_when_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    failures = iter([ProviderError("set it", code="missing_key"), ProviderError("too long", code="invalid_request")])

    def unready(request: ModelRequest) -> str:
        raise next(failures)

    first = await run(Cassette(tmp_path / "a.json", FunctionModel(unready)))
    assert isinstance(first, ProviderFailed)
    assert first.code == "missing_key"

    second = await run(Cassette(tmp_path / "a.json", FunctionModel(unready)))
    assert isinstance(second, ProviderFailed)
    assert second.code == "invalid_request"  # what the model itself refused is part of the tape

    assert await run(Cassette(tmp_path / "a.json", mode="replay")) == second


async def test_a_miss_shows_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    path = tmp_path / "weather.json"
    await run(Cassette(path, FunctionModel(model)))

    outcome = await run(Cassette(path, mode="replay"), "Do I need a coat?")

    assert isinstance(outcome, ProviderFailed)
    assert outcome.code == "cassette_miss"
    assert "-" in outcome.message
    assert "umbrella" in outcome.message
    assert "coat" in outcome.message


async def test_nothing_is_ever_asked_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    real = FunctionModel(model)

    outcome = await run(Cassette(tmp_path / "none.json", real))

    assert isinstance(outcome, ProviderFailed)
    assert real.requests == 0


@pytest.mark.parametrize("data", [b"", b"[1, 2]", b'{"model":"\xff","recorded":[]}', b"[" * 100_000, None])
def test_a_file_that_is_no_cassette_is_refused(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "x.json"
    path.mkdir() if data is None else path.write_bytes(data)
    with pytest.raises(InvalidDefinition, match="no cassette"):
        Cassette(path, mode="replay")


async def talk(cassette: Cassette, session: str | None) -> list[str]:
    async with Runtime("memory", agents=[Agent(cassette, tools=[weather])]) as runtime:
        chat = await (runtime.session() if session is None else runtime.session(session))
        return [(await chat.run(said)).text for said in ("Do I need an umbrella?", "And now?")]


@pytest.mark.parametrize("session", [None, "a session.1.2.3"])
async def test_calls_of_a_model_that_gives_no_ids_are_replayed_in_another_session(
    tmp_path: Path, session: str | None
) -> None:
    def asking(request: ModelRequest) -> str | list[ToolCall]:
        last = request.messages[-1]
        calls = [ToolCall(name="weather", args={"city": each}) for each in ("Bern", "Oslo")]
        return "Take an umbrella." if last.role == "tool" else calls

    path = tmp_path / "weather.json"
    first = await talk(Cassette(path, FunctionModel(asking), mode="record"), None)
    again = await talk(Cassette(path, mode="replay"), session)

    assert first == again == ["Take an umbrella.", "Take an umbrella."]
    assert {each.asked["messages"][-1]["parts"][0].get("call_id") for each in recorded(path)} == {None, "#2", "#4"}


async def test_recording_of_an_earlier_version_is_replayed(tmp_path: Path) -> None:
    """It has the ids of the session that was recorded."""
    path = tmp_path / "weather.json"
    given = FunctionModel(lambda request: model(request) if request.messages[-1].role == "tool" else [CALL])
    await run(Cassette(path, given, mode="record"))
    path.write_text(path.read_text().replace('"#1"', '"s-before.1.1.0"'))

    assert isinstance(await run(Cassette(path, mode="replay")), Finished)


async def test_two_results_in_another_order_are_another_question(tmp_path: Path) -> None:
    def question(first: str, second: str) -> list[dict[str, object]]:
        parts = [{"type": "tool_call", "id": f"s.1.1.{n}", "name": "w"} for n in range(2)]
        results = [{"type": "tool_result", "call_id": f"s.1.1.{n}", "name": "w"} for n in (first, second)]
        return [{"role": "assistant", "parts": parts}, {"role": "tool", "parts": results}]

    one, other = (with_numbered_ids({"messages": question(*order)}) for order in ("01", "10"))

    assert one != other
