"""Lets `make.py` run on an older tree, whose package has another name.

    GOLDEN_PACKAGE=<its name> PYTHONPATH=<older tree>/src python -m tests.golden.make FOLDER

The modules of that package are then found under the present name too, under which everything here imports them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

PRESENT = "perdure"
PACKAGE = os.environ.get("GOLDEN_PACKAGE", PRESENT)

MODULES = (
    "", ".errors", ".mcp", ".model.code", ".model.message", ".model.monitor", ".model.plugin", ".model.process",
    ".plugins", ".processes.function.engine", ".testing",
)  # fmt: skip
"""The modules that the definitions and the maker import."""

for name in MODULES if PACKAGE != PRESENT else ():
    try:
        sys.modules[f"{PRESENT}{name}"] = import_module(f"{PACKAGE}{name}")
    except ModuleNotFoundError as error:
        # A tree that is old enough lacks some of these modules. All dependencies must be there.
        if error.name is None or not error.name.startswith(f"{PACKAGE}."):
            raise
