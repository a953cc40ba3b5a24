"""Code that wants out, or wants everything: each attempt ends in the cell, and the next cell runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perdure.model.code import CodeLimits
from perdure.ports.code import Executor, Repl
from tests.codemode.kit import cpython, executing, run

LIMITS = CodeLimits(memory=30_000_000, output=100_000, recursion=200)


@pytest.fixture(scope="module")
async def executor() -> AsyncIterator[Executor]:
    async with executing(limits=LIMITS) as executor:
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
        "import perdure",
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


# CPython is the whole language: what would be an escape there is refused by the operating system around it.

OUTSIDE = [
    # Files
    "open('/etc/passwd').read()",
    "open('/etc/hostname').read()",
    "open('/tmp/x', 'w').write('x')",
    "open('/dev/shm/x', 'w').write('x')",
    "import tempfile\ntempfile.TemporaryFile().write(b'x')",
    "import os\nos.mkdir('/tmp/x')",
    "import os\nos.remove(os.__file__)",
    "import os\nopen(os.__file__, 'a')",
    "import os\nos.chmod(os.__file__, 0o777)",
    "import os\nos.listdir('/home')",
    "import pathlib\npathlib.Path('~').expanduser().read_text()",
    "import sqlite3\nsqlite3.connect('/tmp/x.db').execute('create table x (y)')",
    # Environment and processes
    "import os\nos.environ['HOME']",
    "import os\nos.fork()",
    "import os\nos.posix_spawn('/bin/sh', ['sh', '-c', 'id'], {})",
    "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'id'], check=True)",
    "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "import threading\nthreading.Thread(target=print).start()",
    "import asyncio\nawait asyncio.to_thread(print)",
    "open('/proc/1/environ', 'rb').read()",
    "open('/proc/1/mem', 'rb').read()",
    "import sys\nsys.exit(1)",
    # Network
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1/')",
    "import socket\nsocket.create_connection(('1.1.1.1', 53), 2)",
    "import socket\nsocket.getaddrinfo('example.org', 80)",
    "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('/run/x')",
    # Ours
    "import perdure",
    "import msgspec",
    "breakpoint()",
    "input()",
    # Deep
    "def f():\n    return f()\nf()",
    "import json\njson.loads('[' * 100_000)",
    "x = []\nfor i in range(50_000):\n    x = [x]\nrepr(x) + 1",
    "eval('(' * 10_000 + ')' * 10_000)",
    "int('9' * 1_000_000)",
]
LIMITED = [
    "'x' * 10 ** 12",
    "[0] * 10 ** 12",
    "list(range(10 ** 12))",
    "f'{1:1000000000}'",
    "1 << 10 ** 11",
    "x = 'x'\nwhile True:\n    x += x",
    "while True:\n    print('x' * 1000)",
]


@pytest.fixture(scope="module")
async def full() -> AsyncIterator[Executor]:
    async with cpython(limits=LIMITS) as executor:
        yield executor


@pytest.fixture(scope="module")
async def kept(full: Executor) -> Repl:
    """One REPL for all attempts: those that raise leave it as it is."""
    repl = await full.open()
    await run(repl, "kept = 1", check=False)
    return repl


@pytest.mark.parametrize("code", OUTSIDE)
async def test_no_attempt_gets_out_of_cpython(kept: Repl, code: str) -> None:
    ran = await run(kept, code, check=False)

    assert ran.calls == []
    assert ran.end.error is not None, ran.end.value
    assert ran.end.error.code in ("raised", "syntax"), ran.end.error
    assert "root:" not in ran.printed
    assert (await run(kept, "kept", check=False)).end.value == "1"


@pytest.mark.parametrize("code", LIMITED)
async def test_no_attempt_takes_more_than_it_may_of_cpython(kept: Repl, code: str) -> None:
    ran = await run(kept, code, check=False)

    assert ran.end.error is not None
    assert (ran.end.error.code, ran.end.error.which in ("memory", "output")) == ("limit", True)
    assert (await run(kept, "kept", check=False)).end.value == "1"


async def test_walks_to_what_lies_behind_find_nothing_but_python(kept: Repl) -> None:
    """There is no secret in the process of a cell: all of it may be looked at."""
    code = """
import ctypes, gc, inspect, sys
walked = [().__class__.__bases__[0].__subclasses__(), search.__globals__, sys._getframe().f_back, gc.get_objects()]
found = [each for each in sys.modules if each.startswith(('perdure', 'msgspec', 'tests'))]
(found, sys.argv, [path for path in sys.path if 'site-packages' in path or 'perdure' in path])
"""
    assert (await run(kept, code, check=False)).end.value == "([], [''], [])"
