"""Cassettes: recorded from a provider once, replayed without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import Agent, ModelRequest, Runtime, ToolCall, tool
from perdure.errors import InvalidDefinition, ProviderError
from perdure.model.outcome import ProviderFailed
from perdure.testing import FunctionModel
from perdure.testing.cassette import Cassette


@tool
def weather(city: str) -> str:
    """Look it up."""
    return f"rain in {city}"


def model(request: ModelRequest) -> str | list[ToolCall]:
    last = request.messages[-1]
    return "Take an umbrella." if last.role == "tool" else [ToolCall("c1", "weather", {"city": "Bern"})]


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
