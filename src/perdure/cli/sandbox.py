"""What confines commands on this machine, as this user, from a self-test: a line of `perdure doctor`, and all of
`perdure doctor --sandbox`."""

from __future__ import annotations

import getpass
import os
from typing import Any

from msgspec import Struct

from perdure.cli.host import FAILED, OK
from perdure.cli.render import console, heading, print_json, table, text_line
from perdure.commands.sandbox import (
    ALONE,
    IMPLEMENTATIONS,
    WORKS_IN_ALL,
    Examined,
    counts_processes,
    examine,
    examine_now,
)

ROOTS = "roots are read-only unless a workspace has accept=['git']"
NOTHING = "nothing confines commands here: they are refused unless Workspace(unsandboxed=True) lets them run without"


def report_sandbox(json: bool) -> int:
    """Try every sandbox, and tell what it stops; the first that stops all is the one that commands run in."""
    found = [examine_now(how) for how in IMPLEMENTATIONS]
    used = next((each for each in found if not each.refused), None)
    if json:
        print_json(
            {
                "user": _user(),
                "used": None if used is None else used.how,
                "sandboxes": [_as_json(each) for each in found],
            }
        )
        return OK if used else FAILED
    out = console()
    text_line(out, f"commands as {_user()}: {NOTHING if used is None else used.how}", "bold")
    rows = [[each.how, each.refused or "usable", "yes" if _counts(each) else "not enforced"] for each in found]
    table(out, ["sandbox", "self-test", "limit on processes"], rows, fold=(1,))
    tried = [each for each in found if each.attacks]
    if tried:
        heading(out, "attacks")
        names = [name for name in tried[0].attacks if name not in WORKS_IN_ALL]
        table(
            out, ["attack", *(each.how for each in tried)], [[name, *(_word(e, name) for e in tried)] for name in names]
        )
    return OK if used else FAILED


class Confining(Struct, frozen=True):
    """What commands run in on this machine, as this user; None if nothing is usable. `open` is what it cannot do."""

    used: str | None
    open: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        if self.used is None:
            return NOTHING
        return f"commands are confined by {self.used}" + (f"; {', '.join(self.open)}" if self.open else "")


def confining() -> Confining:
    """The first sandbox that stops every attack of the self-test: some tenths of a second."""
    for how in IMPLEMENTATIONS:
        if not examine(how).refused:
            gaps = [] if counts_processes(how) else ["a limit on processes is not enforced"]
            return Confining(how, (*gaps, *([ROOTS] if how == "landlock" else [])))
    return Confining(None)


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
