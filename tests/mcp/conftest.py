"""A scripted server, Runtimes that it is attached to, and the check that no server is left behind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Runtime
from perdure.mcp import McpServer
from tests.kit import SOON, Place

STUB = Path(__file__).with_name("stub.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and sys.platform != "linux":
            item.add_marker(pytest.mark.skip(reason="servers over pipes run on Linux"))


class Stub:
    """The scripted server `stub.py`, and what it was asked to do."""

    def __init__(self, folder: Path, name: str = "stub") -> None:
        self.name, self._file, self._ledger = name, folder / f"{name}.json", folder / f"{name}.ledger"
        self._does: dict[str, Any] = {"ledger": str(self._ledger)}
        self.does()

    def does(self, **behaviour: Any) -> None:
        """Change what it does from its next request on."""
        self._does |= behaviour
        whole = self._file.with_suffix(".new")
        whole.write_text(json.dumps(self._does))
        whole.replace(self._file)

    def server(self, **options: Any) -> McpServer:
        return McpServer(self.name, command=[sys.executable, "-I", "-S", str(STUB), str(self._file)], **options)

    @property
    def file(self) -> str:
        """Where it is said what it does."""
        return str(self._file)

    @property
    def ledger(self) -> list[str]:
        """The calls that have reached it, in their order."""
        return self._ledger.read_text().splitlines() if self._ledger.exists() else []


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(tmp_path)


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


def runtime_with(place: Place, agent: Agent[Any], *servers: McpServer, **options: Any) -> Runtime:
    return place.runtime(agent, mcp=servers, **options)


@pytest.fixture(autouse=True)
def no_server_left(tmp_path: Path) -> Iterator[None]:
    yield
    end = time.monotonic() + SOON
    while found := servers_in(tmp_path):
        assert time.monotonic() < end, found
        time.sleep(0.005)


def servers_in(folder: Path) -> list[int]:
    """Living processes that were started with a path in this folder."""
    found = []
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(os.fsencode(folder)) for word in words):
            found.append(int(pid))
    return found
