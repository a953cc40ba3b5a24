"""Sessions that go on: with another provider's model, in another process, with what a provider has cached."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import Agent, Plugin, Runtime, tool
from perdure.model.message import ProviderPart
from perdure.ports.provider import Provider
from perdure.providers.registry import provider
from perdure.testing.model_server import Asked, ModelServer, Reply
from tests.providers.wire import ANSWERS, MODEL

NAMES = list(ANSWERS)
SECRETS = {"c2ln": "a signature", "b3BhcXVl": "redacted reasoning", "Z2VoZWlt": "what is encrypted"}


@tool
def get(city: str) -> str:
    """Look it up."""
    return f"rain in {city}"


def cases(name: str) -> list[str]:
    """A call, reasoning with what signs or encrypts it, and what the provider's own tools did, where it has any."""
    own = [case for case in ("web search", "code execution") if case in ANSWERS[name]]
    return ["tool", "reasoning", *own, "text"]


class Served:
    """A server that answers from a list of cases, one request after the other, and then with text."""

    def __init__(self, name: str, *script: str) -> None:
        self._name, self._script = name, list(script)

    def __call__(self, asked: Asked) -> Reply:
        case = self._script.pop(0) if self._script else "text"
        return ANSWERS[self._name][case].reply


def model(name: str, server: ModelServer) -> Provider:
    return provider(f"{name}:{MODEL}", base_url=server.url, key="k")


def in_words(part: ProviderPart) -> str:
    """What is told of a part, as it stands in the JSON of a request."""
    return msgspec.json.encode(part.text)[1:-1].decode()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(NAMES, NAMES)))
async def test_a_session_goes_on_with_every_other_model_and_back(first: str, second: str, tmp_path: Path) -> None:
    script = cases(first)
    async with ModelServer(Served(first, *script)) as one, ModelServer(Served(second, "reasoning")) as other:
        models = {"one": model(first, one), "other": model(second, other)}
        agent = Agent(models["one"], tools=[get])
        async with Runtime(tmp_path / "a.db", agents=[agent], models=models) as runtime:
            session = await runtime.session("s")
            for index in range(len(script) - 1):  # the call and the reasoning are one turn
                (await session.run(f"question {index}")).raise_for_outcome()
            before = await session.history()
            await session.configure(model="other")
            changed = await session.run("And now?")
        async with Runtime(tmp_path / "a.db", agents=[agent], models=models) as runtime:
            session = await runtime.session("s")
            await session.configure(model="one")
            back = await session.run("And then?")
    own = [part for message in before for part in message.parts if isinstance(part, ProviderPart)]
    shown, again = other.asked[0].body.decode(), one.asked[-1].body.decode()

    assert (changed.text, back.text) == ("Done.", "Grüße, Welt 😀")
    assert len(own) >= len(script) - 2
    assert "rain in Paris" in shown
    if first != "openai-chat":  # it wants no reasoning back
        assert all(part.body in again for part in own)
    if second == first:
        assert second == "openai-chat" or all(part.body in shown for part in own)
        return
    for secret, what in SECRETS.items():
        assert secret not in shown, what
    for part in own:
        assert part.body not in shown
        assert in_words(part) in shown
    for part in [part for message in changed.new_messages for part in message.parts if isinstance(part, ProviderPart)]:
        assert second == "openai-chat" or part.body not in again, "its body is the words and nothing else"
        assert in_words(part) in again


# ---------------------------------------------------------------------- prompt caching


class Habits(Plugin):
    """Adds to the prompt, and tools."""

    id = "habits"

    def prompt(self, ctx: Any) -> list[str]:
        return ["Answer in one sentence."]

    def tools(self) -> list[Any]:
        return [self.put]

    @tool
    def put(self, text: str) -> str:
        """Keep it."""
        return text


ANTHROPIC, BEDROCK = b',"cache_control":{"type":"ephemeral"}', b',{"cachePoint":{"type":"default"}}'
MARKERS = {"anthropic": ANTHROPIC, "bedrock": BEDROCK}


def cached(name: str, body: bytes) -> bytes:
    """What a provider may keep of a request: up to its last marker, or all of its conversation where it needs none."""
    marker = MARKERS.get(name)
    if marker is None:
        return body.rstrip(b"]}")
    assert marker in body
    return plain(body[: body.rindex(marker)])


def plain(body: bytes) -> bytes:
    return body.replace(ANTHROPIC, b"").replace(BEDROCK, b"")


@pytest.mark.parametrize("name", NAMES)
async def test_a_request_begins_as_the_one_before_it_did_after_a_restart_and_with_plugins(
    name: str, tmp_path: Path
) -> None:
    which = "anthropic.claude-sonnet-4-5" if name == "bedrock" else MODEL
    async with ModelServer(Served(name, *cases(name))) as server:
        for said in ("How is Paris?", "And now?", "And then?", "Thanks."):
            made = provider(f"{name}:{which}", base_url=server.url, key="k")  # as another process would make it
            agent = Agent(made, instructions="Be brief.", tools=[get], plugins=[Habits()])
            async with Runtime(tmp_path / "a.db", agents=[agent]) as runtime:
                await (await runtime.session("s")).run(said)
        bodies = [asked.body for asked in server.asked]

    assert len(bodies) == 5
    assert all(b"Answer in one sentence." in body and b"Keep it." in body for body in bodies)
    for earlier, later in itertools.pairwise(bodies):
        assert plain(later).startswith(cached(name, earlier))
    assert len(bodies[-1]) > len(bodies[0]) + 400
