"""Finding the agent that `module:attribute` names, and what is beside it, with errors that help."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from mainstay.agent import Agent
from mainstay.cli.host import Refused
from mainstay.processes.function.definition import Process


def load_agent(name: str) -> Agent[object]:
    """The agent behind `module:attribute` or `file.py:attribute`, looked for in the current folder first."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        module_name, attribute = name, ""
    if not module_name:
        raise Refused(f"{name!r} does not name an agent: write module:attribute, for example app:agent")
    module = _import(module_name)
    if not attribute:
        raise Refused(f"name the agent in {module_name}: {_choices(module_name, module)}")
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise Refused(f"module {module.__name__!r} has no {attribute!r}; {_choices(module_name, module)}")
        found = getattr(found, part)
    if not isinstance(found, Agent):
        raise Refused(f"{name} is a {type(found).__name__}, not an Agent; {_choices(module_name, module)}")
    return found


def load_functions(name: str) -> list[Process[Any, Any]]:
    """The durable functions in the module of the agent that `name` names: its tools may start them."""
    module = _import(name.rpartition(":")[0])
    return list({id(found): found for found in vars(module).values() if isinstance(found, Process)}.values())


def _import(name: str) -> ModuleType:
    folder = Path.cwd()
    if name.endswith(".py"):
        path = Path(name)
        if not path.exists():
            raise Refused(f"there is no file {name}")
        folder, name = path.resolve().parent, path.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise Refused(f"there is no module {name!r} in {folder} or on Python's path") from None
        raise Refused(f"module {name!r} needs {error.name!r}, which is not installed") from None
    except Exception as error:  # a user's module ran, and may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}, line {frame.lineno}"
        raise Refused(f"module {name!r} cannot be imported: {type(error).__name__}: {error} ({place})") from error


def _choices(name: str, module: ModuleType) -> str:
    agents = [key for key, value in vars(module).items() if isinstance(value, Agent)]
    if not agents:
        return "it defines no Agent"
    return "it has " + ", ".join(f"{name}:{agent}" for agent in agents)
