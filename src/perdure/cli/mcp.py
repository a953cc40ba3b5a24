"""`perdure mcp`: agents as the tools of an MCP server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from typing import Annotated, Any

import typer

from perdure.cli.host import OK, Refusal, StoreOption, on_signals, perform, store_path
from perdure.cli.render import complain
from perdure.cli.run import (
    MetadataOption,
    load_agent,
    load_functions,
    load_runtime,
    metadata_of,
    warn_of_limits,
)
from perdure.runtime import Runtime
from perdure.server import mcp as make_server


def mcp(
    agents: Annotated[
        list[str],
        typer.Argument(
            metavar="AGENT…",
            help="Where the agents are, or the one Runtime that has them: module:attribute or file.py:attribute.",
        ),
    ],
    store: StoreOption = None,
    namespace: Annotated[
        str, typer.Option(help="What the ids of its sessions begin with; clients reach no others.")
    ] = "",
    metadata: MetadataOption = None,
    http: Annotated[
        int | None, typer.Option("--http", metavar="PORT", min=0, max=65535, help="Serve HTTP instead of stdio.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address for HTTP, on this machine.")] = "127.0.0.1",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the runtime logs.")] = False,
) -> None:
    """Serve agents to MCP clients: as tools, with their sessions as resources.

    On stdin and stdout, until the client closes them; with --http at http://127.0.0.1:PORT/mcp, for programs of this
    machine. A turn that a client asked for goes on when the client is gone, and after a crash when the server is
    started again on the same store.

    An agent alone has no deps, limits, prices or servers of tools: name the Runtime that is given them, or a function
    that makes it.
    """
    level = logging.INFO if verbose else logging.ERROR
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")

    async def work() -> int:
        if http is not None and not _is_local(host):
            raise Refusal(
                f"{host} can be reached from other machines, and this server asks nobody who they are: mount "
                "`perdure.server.mcp(runtime).streamable_http_app()` in an application of yours that does"
            )
        with _kept_off_stdout() if http is None else contextlib.nullcontext():
            runtime, alone = load_runtime(agents[0], store) if len(agents) == 1 else None, False
            if runtime is None:
                functions = {each.definition: each for name in agents for each in load_functions(name)}
                given, alone = [load_agent(name) for name in agents], True
                runtime = Runtime(store_path(store), agents=given, processes=list(functions.values()))
        server = make_server(runtime, namespace=namespace, metadata=metadata_of(metadata))
        await (_on_stdio(runtime, server, alone) if http is None else _over_http(runtime, server, host, http, alone))
        return OK

    perform(work)


def _kept_off_stdout() -> contextlib.AbstractContextManager[Any]:
    """What modules of agents and hooks print is for people: on stdout a client would take it for messages. The SDK sees
    to that from when it serves."""
    return contextlib.redirect_stdout(sys.stderr)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _on_stdio(runtime: Runtime, server: Any, alone: bool) -> None:
    from mcp.server.stdio import stdio_server  # an extra, checked before

    me = asyncio.current_task()
    assert me is not None
    with on_signals({signal.SIGINT: me.cancel, signal.SIGTERM: me.cancel}):
        async with contextlib.AsyncExitStack() as opened:
            with _kept_off_stdout():
                await opened.enter_async_context(runtime)
            reading, writing = await opened.enter_async_context(stdio_server())
            if alone:
                await warn_of_limits(runtime.store)
            await server.run(reading, writing, server.create_initialization_options())


async def _over_http(runtime: Runtime, server: Any, host: str, port: int, alone: bool) -> None:
    import uvicorn  # the extra brings it

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise Refusal(f"{host}:{port} cannot be listened at ({error.strerror}): choose another --http PORT") from None
    with listening:
        app = server.streamable_http_app(host=host)
        async with runtime:
            shown = f"[{host}]" if ":" in host else host
            if alone:
                await warn_of_limits(runtime.store)
            complain(f"serving http://{shown}:{listening.getsockname()[1]}/mcp (Ctrl-C ends it)")
            # Whoever stops it must not wait for turns: they go on in the next process.
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
            await uvicorn.Server(config).serve(sockets=[listening])
