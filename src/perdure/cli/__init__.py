"""The `perdure` command: one module for each family of subcommands.

Only this file is certain to import: typer and rich are an extra.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from perdure import __version__
from perdure.cli import help

COMPLETION = "_PERDURE_COMPLETE"
"""Set by the shell function that asks for completions."""


def main() -> None:
    """Run the command line, or report missing packages in one line.

    Help and version are printed without importing the commands. A shell that asks for completions calls without
    arguments, too, with a variable that typer reads.
    """
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        sys.stderr.write(
            f"perdure: the command line needs {needed}: run `pip install -e '.[cli]'` in Perdure's folder\n"
        )
        raise SystemExit(2)
    given = sys.argv[1:]
    if COMPLETION not in os.environ and given in ([], ["-h"], ["--help"], ["--version"]):
        sys.stdout.write(f"perdure {__version__}\n" if given == ["--version"] else help.text())
        raise SystemExit(0 if given else 2)
    from perdure.cli.app import app

    app()
