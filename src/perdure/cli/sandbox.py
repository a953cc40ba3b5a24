"""What confines commands on this machine, as this user, from a self-test: a line of `perdure doctor`, and all of
`perdure doctor --sandbox`."""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from msgspec import Struct

from perdure.cli.host import FAILED, OK
from perdure.cli.render import console, heading, print_json, table, text_line
from perdure.commands.job import Job
from perdure.commands.sandbox import (
    ALONE,
    EXAMINE_SECONDS,
    IMPLEMENTATIONS,
    PROBE,
    WORKS_IN_ALL,
    Examined,
    counts_processes,
    examine,
    examine_now,
    rules_of,
)
from perdure.commands.spawner import Spawner, SpawnFailed, StartRequest
from perdure.model.sandbox import Confinement, Implementation
from perdure.workspace.confinement import with_paths

ROOTS = "roots are read-only unless a workspace has accept=['git']"
TEMPORARY = os.path.realpath(tempfile.gettempdir())
PYTHON_ADVICE = (
    "make the environment with a Python of the system, or grant the folders that it needs, Workspace(read=[…])"
)
NOTHING = "nothing confines commands here: they are refused unless Workspace(unsandboxed=True) lets them run without"


def report_sandbox(json: bool) -> int:
    """Try every sandbox, and tell what it stops; the first that stops all is the one that commands run in."""
    found = [examine_now(how) for how in IMPLEMENTATIONS]
    used = next((each for each in found if not each.refused), None)
    why = "" if used is None else asyncio.run(try_python(used.how))
    code = FAILED if used is None or why else OK
    if json:
        print_json(
            {
                "user": _user(),
                "used": None if used is None else used.how,
                "python": why,
                "sandboxes": [_as_json(each) for each in found],
            }
        )
        return code
    out = console()
    text_line(out, f"commands as {_user()}: {NOTHING if used is None else used.how}", "bold")
    if why:
        text_line(out, f"{no_python(why)}: {PYTHON_ADVICE}", "yellow")
    rows = [[each.how, each.refused or "usable", "yes" if _counts(each) else "not enforced"] for each in found]
    table(out, ["sandbox", "self-test", "limit on processes"], rows, fold=(1,))
    tried = [each for each in found if each.attacks]
    if tried:
        heading(out, "attacks")
        names = [name for name in tried[0].attacks if name not in WORKS_IN_ALL]
        table(
            out, ["attack", *(each.how for each in tried)], [[name, *(_word(e, name) for e in tried)] for name in names]
        )
    return code


class Confining(Struct, frozen=True):
    """The sandbox of commands on this machine, as this user; None if nothing is usable. `open` lists its gaps, and
    `python` says why this Python does not run in it; empty if it does."""

    used: str | None
    open: tuple[str, ...] = ()
    python: str = ""

    @property
    def line(self) -> str:
        if self.used is None:
            return NOTHING
        return f"commands are confined by {self.used}" + (f"; {', '.join(self.open)}" if self.open else "")


async def confining() -> Confining:
    """Find the first sandbox that stops every attack of the self-test, and run this Python in it: some tenths of a
    second."""
    for how in IMPLEMENTATIONS:
        if not (await asyncio.to_thread(examine, how)).refused:
            gaps = [] if counts_processes(how) else ["a limit on processes is not enforced"]
            gaps += [ROOTS] if how == "landlock" else []
            return Confining(how, tuple(gaps), await try_python(how))
    return Confining(None)


async def try_python(how: Implementation) -> str:
    """Run this Python in a sandbox, as a command of a workspace would. Returns why it does not run, or nothing."""
    with tempfile.TemporaryDirectory(prefix=PROBE, dir=TEMPORARY) as made:
        folder = Path(made)
        root, job, spawner = folder / "root", Job(folder / "job"), Spawner()
        root.mkdir()
        job.create()
        rules = rules_of(with_paths(Confinement(write=(str(root),), how=how), None))
        argv = [sys.executable, "-c", "import encodings, json"]
        env = {"PATH": os.environ.get("PATH", os.defpath)}
        try:
            started = await spawner.start(
                StartRequest(
                    job.folder, secrets.token_hex(16), argv, env, str(root), timeout=EXAMINE_SECONDS, rules=rules
                )
            )
            if isinstance(started, SpawnFailed):
                return started.reason
            status = await job.wait()
        finally:
            await spawner.close()
        if status is not None and (status.end, status.code) == ("exited", 0):
            return ""
        errors = job.folder / "stderr"
        said = errors.read_text(errors="replace").strip() if errors.exists() else ""
        return said.splitlines()[-1] if said else "it ended before it said why"


def no_python(why: str) -> str:
    return f"this Python, {sys.executable}, does not run in the sandbox of commands: {why}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        return str(os.geteuid())


def _counts(found: Examined) -> bool:
    return not found.refused and counts_processes(found.how)


def _word(found: Examined, attack: str) -> str:
    if found.attacks.get(attack):
        return "stopped"
    return "refused before" if found.how == "landlock" and attack in ALONE else "NOT STOPPED"


def _as_json(found: Examined) -> dict[str, Any]:
    return {
        "name": found.how,
        "usable": not found.refused,
        "why_not": found.refused or None,
        "limits_processes": _counts(found),
        "attacks": {name: _word(found, name) for name in found.attacks if name not in WORKS_IN_ALL},
    }
