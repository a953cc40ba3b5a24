"""The `perdure` command: one module for each family of subcommands.

Only this file is certain to import: typer and rich are an extra.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line, or say in one line what it lacks."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        sys.stderr.write(
            f"perdure: the command line needs {needed}: run `pip install -e '.[cli]'` in Perdure's folder\n"
        )
        raise SystemExit(2)
    from perdure.cli.app import app

    app()
