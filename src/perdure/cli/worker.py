"""`perdure worker`: a Runtime of the host's, worked until the process is told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.host import FAILED, OK, Refusal, explained_wait, perform
from perdure.cli.render import complain
from perdure.cli.run import load_runtime
from perdure.engine.stopping import StopSignals, unless, unready
from perdure.ports.store import OnDisk
from perdure.runtime import STOP_GRACE, Runtime

LATE = 1.0
"""Seconds after which threads of the host's code that go on are ended with the process."""


def worker(
    runtime: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:NAME",
            help="A Runtime that has not been entered, or a function that returns one: module:attribute or "
            "file.py:attribute, found from the current folder.",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A file that exists while the worker accepts work."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running work has to end after SIGTERM or SIGINT.")
    ] = STOP_GRACE,
    check: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Run no worker: exit 1 if the worker of this ready file is not ready."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the runtime logs.")] = False,
) -> None:
    """Work on a store until SIGTERM or SIGINT, then drain and exit with status 0.

    After the signal nothing new is claimed; running turns and processes end or park. What still runs after the grace
    period is cancelled and recorded, and goes on at the next start. A second signal cuts off at once.

    The ready file is touched each time the worker renews its lease. `perdure worker --check PATH` is for probes of
    containers: it exits 1 if the file is missing or older than two renewals.
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")

    async def work() -> int:
        if check is not None:
            if runtime is not None:
                raise Refusal("--check looks at a worker that runs: leave out MODULE:NAME")
            if (why := unready(check)) is not None:
                complain(why)
                return FAILED
            return OK
        if runtime is None:
            raise Refusal("which Runtime? name one (module:attribute), for example app:runtime")
        if ready_file is not None:
            with contextlib.suppress(OSError):  # left by a worker that was killed
                ready_file.unlink()
        loaded = load_runtime(runtime, None)
        if loaded is None:
            raise Refusal(f"{runtime} is an Agent: name a Runtime that has it, such as Runtime('agent.db', agents=[…])")
        await _work(loaded, grace, ready_file)
        return OK

    perform(work)


async def _work(runtime: Runtime, grace: float, ready_file: Path | None) -> None:
    """Enter the Runtime and work until a stop signal, which may come while it is being entered."""
    with StopSignals() as stop:
        async with contextlib.AsyncExitStack() as opened:
            if await unless(stop.first, _entered(opened, runtime)):
                complain(f"worker {os.getpid()} is running (SIGTERM or Ctrl-C drains it)")
                await runtime.run_until_stopped(grace, ready_file=ready_file)
        _end_threads()


async def _entered(opened: contextlib.AsyncExitStack, runtime: Runtime) -> bool:
    store = runtime.store
    async with explained_wait(str(store.location) if isinstance(store, OnDisk) else "its store"):
        await opened.enter_async_context(runtime)
    return True


def _end_threads() -> None:
    """End the process `LATE` seconds after it is done, also if threads of the host's code go on.

    Python waits for threads that are no daemons, and `asyncio.run` for those of `asyncio.to_thread`. A call that was
    cut off may have such a thread, and what it does there is recorded as unknown.
    """

    def wait_and_end() -> None:
        time.sleep(LATE)  # threads of the OS take wall time to end, and this daemon thread ends with the process
        complain("threads that do not end are left behind")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(OK)

    threading.Thread(target=wait_and_end, name="perdure-end", daemon=True).start()
