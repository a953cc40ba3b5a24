"""Code that wants out, or wants everything: each attempt ends in the cell, and the next cell runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from mainstay.model.code import CodeLimits
from mainstay.ports.code import Executor
from tests.codemode.kit import executing, run


@pytest.fixture(scope="module")
async def executor() -> AsyncIterator[Executor]:
    async with executing(limits=CodeLimits(memory=30_000_000, output=100_000, recursion=200)) as executor:
        yield executor


@pytest.mark.parametrize(
    "code",
    [
        # Files
        "open('/etc/passwd').read()",
        "open('/tmp/x', 'w').write('x')",
        "from pathlib import Path\nPath('/etc/passwd').read_text()",
        "from pathlib import Path\nlist(Path('/').iterdir())",
        "import os\nos.listdir('/')",
        "import os\nos.remove('/etc/passwd')",
        "import os\nos.system('id')",
        # Environment and process
        "import os\nos.environ['HOME']",
        "import os\nos.getenv('HOME')",
        "import os\nos.kill(1, 9)",
        "import sys\nsys.exit(1)",
        "exit()",
        "quit()",
        # Network and other modules
        "import socket",
        "import subprocess",
        "import ctypes",
        "import urllib.request",
        "import pydantic_monty",
        "import mainstay",
        "from importlib import import_module",
        "__import__('os').system('id')",
        # Walks to what lies behind
        "().__class__.__bases__[0].__subclasses__()",
        "''.__class__.__mro__",
        "(lambda: 0).__globals__",
        "(lambda: 0).__code__",
        "search.__globals__",
        "search.__self__",
        "settle.__globals__",
        "[].__reduce_ex__(2)",
        "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__.tb_frame.f_globals",
        "globals()",
        "vars()",
        "dir()",
        "breakpoint()",
        "input()",
        "compile('1', 'x', 'eval')",
        "getattr('', '__class__')",
        "'{0.__class__}'.format('')",
        # Deep
        "def f():\n    return f()\nf()",
        "f = lambda n: f(n + 1)\nf(0)",
        "eval('(' * 10_000 + ')' * 10_000)",
        "class A:\n    def __repr__(self):\n        return repr(self)\nrepr(A())",
        "x = []\nfor i in range(50_000):\n    x = [x]\nrepr(x) + 1",
        "import json\njson.loads('[' * 100_000)",
        # Out of its depth in C calls
        "10 ** 10 ** 10",
        "'x' * 10 ** 12",
        "[0] * 10 ** 12",
        "list(range(10 ** 12))",
        "bytes(10 ** 12)",
        "'%1000000000d' % 1",
        "f'{1:1000000000}'",
        "'x'.ljust(10 ** 11)",
        "int('9' * 1_000_000)",
        "1 << 10 ** 11",
        "import itertools\nlist(itertools.product(range(100), repeat=10))",
        "import math\nmath.factorial(10 ** 7)",
        "x = 'x'\nwhile True:\n    x += x",
        "while True:\n    print('x' * 1000)",
    ],
)
async def test_no_attempt_gets_out_or_takes_more_than_it_may(executor: Executor, code: str) -> None:
    repl = await executor.open()
    await run(repl, "kept = 1", check=False)
    ran = await run(repl, code, check=False)

    assert ran.calls == []
    assert ran.end.error is not None, ran.end.value
    assert ran.end.error.code in ("raised", "syntax", "limit")
    assert "/etc" not in ran.printed
    assert (await run(repl, "kept", check=False)).end.value == "1"
    await repl.close()


async def test_a_regular_expression_takes_time_in_proportion_to_its_text(executor: Executor) -> None:
    ran = await run(await executor.open(), "import re\nre.match('(a+)+$', 'a' * 5000 + 'b')", check=False)

    assert (ran.end.error, ran.end.value) == (None, None)


async def test_code_that_a_check_cannot_read_harms_no_other_check(executor: Executor) -> None:
    for code in ("x = " + "[" * 3000 + "]" * 3000, "\0", "'\ud800'", "x = 1\n" * 2000 + "y = x" + " + x" * 3000):
        await run(await executor.open(), code)

    ran = await run(await executor.open(), "serch('a')")
    assert ran.end.error is not None
    assert ran.end.error.code == "check"
