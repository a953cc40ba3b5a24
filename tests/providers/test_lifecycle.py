"""Who opens and closes the connections of a model: a Runtime those that it made, a host its own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import pytest

from perdure import Agent, ModelRequest, ModelResponse, Runtime
from perdure.errors import InvalidDefinition
from perdure.ports.provider import Connecting
from perdure.providers import http
from perdure.providers.fallback import Fallback
from perdure.providers.registry import provider


class Pool:
    """A provider with connections that are gone for good once it is closed."""

    made: ClassVar[list[Pool]] = []

    def __init__(self, model: str, **options: Any) -> None:
        self.name, self.options, self.closed = f"pool:{model}", options, 0
        Pool.made.append(self)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelResponse]:
        assert not self.closed
        yield ModelResponse("fine")

    async def aclose(self) -> None:
        self.closed += 1
        if self.name == "pool:broken":
            raise OSError("it is stuck")


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """What the entry point `pool` of an installed distribution makes."""
    installed = tmp_path / "pool-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pool\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[perdure.providers]\npool = {__name__}:Pool\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Pool, "made", [])
    return Pool.made


async def ask(runtime: Runtime, session: str = "s", **options: Any) -> str:
    return (await (await runtime.session(session)).run("hello", **options)).text


async def test_a_runtime_closes_what_it_made_from_a_string_and_makes_it_anew_for_the_next(pools: list[Pool]) -> None:
    agent = Agent("pool:one")
    for _ in range(2):
        async with Runtime("memory", agents=[agent]) as runtime:
            texts = [await ask(runtime), await ask(runtime, model="pool:two"), await ask(runtime, model="pool:two")]
            assert texts == ["fine"] * 3
            assert [pool.closed for pool in pools[-2:]] == [0, 0]

    assert [(pool.name, pool.closed) for pool in pools] == [("pool:one", 1), ("pool:two", 1)] * 2
    assert pools[0].options == {"base_url": None, "key": None, "headers": None}


async def test_a_model_that_several_turns_ask_for_at_once_is_made_once(pools: list[Pool]) -> None:
    async with Runtime("memory", agents=[Agent("scripted")]) as runtime:
        await asyncio.gather(*[ask(runtime, f"s{number}", model="pool:two") for number in range(8)])

    assert [pool.closed for pool in pools] == [1]


async def test_a_provider_object_of_the_host_is_the_hosts_to_close(pools: list[Pool]) -> None:
    own, other, third = Pool("own"), Pool("other"), Pool("third")
    agent = Agent(Fallback(own, third))
    for _ in range(2):
        async with Runtime("memory", agents=[agent], models={"other": other}) as runtime:
            assert [await ask(runtime), await ask(runtime, model="other")] == ["fine", "fine"]

    assert [pool.closed for pool in (own, other, third)] == [0, 0, 0]


def test_sync_code_may_ask_again_of_a_model_that_was_named(pools: list[Pool]) -> None:
    agent = Agent("pool:one")
    assert [agent.run_sync("one").text, agent.run_sync("two").text] == ["fine", "fine"]
    assert [pool.closed for pool in pools] == [1, 1]


async def test_a_model_that_cannot_be_closed_does_not_keep_others_from_it(pools: list[Pool]) -> None:
    with pytest.raises(OSError, match="stuck"):
        async with Runtime("memory", agents=[Agent("pool:one", name="a"), Agent("pool:broken", name="b")]):
            pass

    assert [pool.closed for pool in pools] == [1, 1]


def test_what_no_entry_point_offers_is_refused_with_what_there_is(pools: list[Pool]) -> None:
    with pytest.raises(InvalidDefinition, match="choose one of anthropic"):
        Agent("puddle:one")
    assert pools == []


async def test_certificates_are_loaded_off_the_loop_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def load() -> ssl.SSLContext:
        threads.append(threading.current_thread().name)
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    monkeypatch.setattr(httpx2, "create_ssl_context", load)
    http._tls.cache_clear()
    try:
        for name in ("openai", "mistral"):
            model: Any = provider(f"{name}:m", key="k", base_url="https://127.0.0.1:1")
            async with model.connected():
                await model._client()
                await model._client()
    finally:
        http._tls.cache_clear()

    assert len(threads) == 1
    assert threads[0] != threading.current_thread().name


def test_event_loops_of_other_threads_may_come_while_one_begins() -> None:
    model, begun = provider("ollama:any"), list[asyncio.AbstractEventLoop]()
    assert isinstance(model, Connecting)

    def begin(loop: asyncio.AbstractEventLoop) -> None:
        begun.append(loop)
        loop.run_until_complete(contextlib.AsyncExitStack().enter_async_context(model.connected()))

    class Slow(asyncio.SelectorEventLoop):
        """While it is asked whether it is closed, another thread begins to use the model."""

        def is_closed(self) -> bool:
            if len(begun) == 2:
                other = threading.Thread(target=begin, args=(asyncio.new_event_loop(),))
                other.start()
                other.join()
            return super().is_closed()

    begin(Slow())
    begin(asyncio.new_event_loop())
    for loop in begun:
        loop.close()

    assert len(begun) == 3
