"""A hundred small programs of the Python that cells may use, and one way to answer their calls.

The programs are put together by a seeded generator from statements that keep something across calls: loops half done,
comprehensions half built, handlers entered, closures, instances, several branches at once. Answers depend on the call
and on the seed, and so does the order in which calls that wait together are answered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec import Struct

from perdure.model.code import CodeAnswer, CodeCall, CodeStep, Given, Paused, Raise
from perdure.ports.code import Executor, Repl
from tests.codemode.kit import AT, tool
from tests.fuzzing import cases

TOOLS = [tool("search", "query:string"), tool("flaky", "number:integer"), tool("pay", "cents:integer")]

HEAD = """\
import asyncio
total, words, seen = 0, [], {}
def counter():
    count = 0
    def more(step):
        nonlocal count
        count += step
        return count
    return more
more = counter()
class Basket:
    def __init__(self):
        self.items = []
    async def add(self, word):
        self.items.append(await search(word))
        return len(self.items)
basket = Basket()
async def twice(word):
    first = await search(word)
    return first + await search(first)
"""

BLOCKS = [
    "total += {n}\nwords.append(await search('{w}'))\nprint(f'{{total}} {{words[-1]!r}}')",
    "for i in range({n}):\n    if i == 1:\n        continue\n    seen[i] = await search('{w}')\n    total += i",
    "words += [await search(w) for w in ['{w}', 'x', 'y'][:{n}]]",
    "seen.update({{w: await search(w) for w in ('{w}', 'b')}})",
    "words += await asyncio.gather(*[search(str(i)) for i in range({n})])",
    "words += await asyncio.gather(twice('{w}'), search('z'), twice('q'))",
    "for i in range({n}):\n    try:\n        words.append(await flaky(i))\n    except Exception as error:\n"
    "        words.append(str(error))\n    finally:\n        total += 1",
    "results = await settle(*[flaky(i) for i in range({n})])\nwords += [str(r) for r in results]",
    "try:\n    await asyncio.gather(flaky(1), search('{w}'))\nexcept RuntimeError as error:\n    print(error)",
    "while more(1) < {n}:\n    await sleep(more(1))\n    print('more')",
    "total += await basket.add('{w}') + await basket.add('{w}{w}')\nwords += basket.items",
    "match await pay({n}):\n    case 2 | 4:\n        words.append('even')\n    case other:\n        total += other",
    "pick = lambda rows: [r for r in rows if len(r) > 3]\nwords += pick([await search('{w}'), await search('')])",
    "def outer(n):\n    async def inner():\n        return n + await pay(n)\n    return inner\n"
    "total += await outer({n})()",
    "import random, time\ntotal += random.randint(1, 100)\nwords.append(await search(str(random.random())))\n"
    "seen['t'] = time.time()",
    "a, *rest = await asyncio.gather(pay(1), pay({n}), pay(3))\ntotal += a * sum(rest)",
    "if (found := await search('{w}')) and await pay({n}) > 1:\n    words.append(found.upper())",
    "rows = sorted([(await pay(i), i) for i in range({n})], key=lambda row: -row[0])\nwords.append(str(rows))",
]


class Program(Struct, frozen=True):
    seed: int
    code: str


def program(seed: int) -> Program:
    chance = random.Random(seed)
    blocks = chance.sample(BLOCKS, 2)
    parts = [block.format(n=chance.randint(2, 3), w=chance.choice(["tea", "milk", "sugar"])) for block in blocks]
    return Program(seed, "\n".join((HEAD, *parts, "(total, words, seen)")))


PROGRAMS = [program(seed) for seed in range(cases(100, 2_000))]


def answer(call: CodeCall) -> CodeAnswer:
    match call.name:
        case "search":
            return Given(call.number, f"{call.args['query']}{call.number}")
        case "flaky" if call.args["number"] % 2:
            return Raise(call.number, "failed", f"no {call.args['number']}")
        case "flaky":
            return Given(call.number, "fine")
        case "pay":
            return Given(call.number, call.args["cents"] * 2)
        case _:
            return Given(call.number)


def chosen(seed: int, answered: int, waiting: Sequence[CodeCall]) -> CodeCall:
    """Which of the calls that wait is answered next."""
    return waiting[random.Random(seed * 1000 + answered).randrange(len(waiting))]


class Trace(Struct, frozen=True):
    """What a program did from some point on."""

    calls: tuple[CodeCall, ...]
    printed: str
    value: str | None
    error: str


async def finish(repl: Repl, step: CodeStep | None, seed: int, answered: int) -> Trace:
    """Go on to the end, from a step or from the REPL's pause."""
    calls: list[CodeCall] = []
    printed = ""
    while True:
        if step is not None:
            printed += step.printed
            if not isinstance(step, Paused):
                error = step.error.message if step.error else ""
                return Trace(tuple(calls), printed, step.value, error)
            calls += step.calls
        paused = repl.paused
        assert paused is not None
        call = chosen(seed, answered, paused.calls)
        answered += 1
        step = await repl.resume(answer(call), at=AT + answered * 1000)


async def begin(executor: Executor, which: Program) -> tuple[Repl, CodeStep]:
    repl = await executor.open()
    return repl, await repl.begin(which.code, TOOLS, at=AT, seed=str(which.seed), check=False)
