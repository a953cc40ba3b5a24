"""Code mode: executors that run the code of a model, and what they say of the tools that it may call.

`stubs` makes functions of tools, `check` refuses a cell before it runs, `plain` makes plain data of what a cell gives
away, `dumps` seals saved states, `places` shares few processes among many REPLs. `monty` is one executor, over
`worker`; `cpython` is the other, over `pipe`, whose other end is `inside.driver`. In `worker` and `pipe` everything
blocks. A turn sees `ports.code` alone.
"""

from __future__ import annotations

from importlib.util import find_spec

from perdure.errors import MissingExtra
from perdure.tools.run_code import run_code as run_code


def require_monty() -> None:
    """Refuse code mode where its sandbox is not installed. Looks for the package without importing it."""
    if find_spec("pydantic_monty") is None:
        raise MissingExtra("code mode", "code")
