"""Which lane runs a test case: `make quick`, `make test` or `make gate`. It is decided here and nowhere else.

    --lane=test    every behaviour once: each test function, each store, each position of a cube in one way to die
    --lane=gate    every case that `test` leaves: both lanes together run everything, and no case twice
    --lane=quick   for the inner loop: a part of `test`, in memory, with one kill mode and few examples (`--quick`)
    no lane        everything

A cube is a test function that is called for many positions, and at each one for every way to die or on every store
(`Case.mode`, `Case.store`). `test` runs one case of each position, and takes the modes and the stores in turns. Of a
function with many real kills (`kill`) it runs a few cases from all over the list, because nearly each one has a twin in
one process that passes all its positions. A function that is marked `slow` is a cube however few its cases are, and
is run on one store.

A test marked `gate`, or a parameter (`pytest.param(…, marks=pytest.mark.gate)`), is the gate's alone. Use it for
real-kill permutations whose positions another test passes in process, and for what takes many seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple
from zlib import crc32

import pytest

LANES = ("quick", "test", "gate")

FEW = 8
"""A function with no more cases than these is no cube, unless it is marked `slow`: `test` runs all of them."""
REAL = 6
"""How many cases `test` runs of a function with many real kills."""
LONG = frozenset({"benchmarks", "soak"})
"""Folders whose tests are samples of long lanes (`make bench`, `make soak`): the gate's alone."""
VARIANTS = 2
"""How many variants of a test with parameters `quick` runs, from all over its list."""
SLOW = frozenset({"gate", "kill", "slow", "fuzz"})
"""Markers of tests that `quick` leaves to the other lanes."""
FOLDERS = frozenset({"benchmarks", "cli", "docs", "golden", "oracles", "smoke", "soak"})
"""Folders that `quick` leaves unless their files are named.

Their tests begin OS processes, take long, or change with the whole and not with one module.
"""


class Case(NamedTuple):
    """One case of a test function, as far as the lanes are concerned.

    `position` is what is left of its parameters without the way to die (`mode`) and the store.
    """

    test: str
    position: tuple[object, ...] = ()
    mode: str = ""
    store: str = ""
    gate: bool = False
    kill: bool = False
    slow: bool = False


def in_test(cases: Sequence[Case]) -> list[bool]:
    """True for each case that `make test` runs; `make gate` runs the others."""
    tests: dict[str, list[int]] = {}
    for number, case in enumerate(cases):
        if not case.gate:
            tests.setdefault(case.test, []).append(number)
    chosen = {number for numbers in tests.values() for number in _sample(cases, numbers)}
    return [number in chosen for number in range(len(cases))]


def _sample(cases: Sequence[Case], numbers: list[int]) -> list[int]:
    """Return the cases of one function that `test` runs."""
    first = cases[numbers[0]]
    modes, stores = ({getattr(cases[n], name) for n in numbers} for name in ("mode", "store"))
    if len(numbers) <= FEW and not first.slow:
        return numbers
    if len(modes) == len(stores) == 1:
        return numbers[:: -(-len(numbers) // REAL)] if first.kill and len(numbers) > FEW else numbers
    positions: dict[tuple[object, ...], list[int]] = {}
    for number in numbers:
        positions.setdefault(cases[number].position, []).append(number)
    used, sample = Counter[tuple[str, str]](), list[int]()

    turn = crc32(first.test.encode()) if first.slow else 0  # so that not every slow function is run on the same store

    def take(choice: Iterable[int]) -> None:
        of = list(choice)
        order = {number: (place - turn) % len(of) for place, number in enumerate(of)}
        taken = min(of, key=lambda n: (used["mode", cases[n].mode], used["store", cases[n].store], order[n]))
        used["mode", cases[taken].mode] += 1
        used["store", cases[taken].store] += 1
        sample.append(taken)

    groups = list(positions.values())
    for group in groups[:: -(-len(groups) // REAL)] if first.kill and len(numbers) > FEW else groups:
        take(group)
    for name, values in (("mode", modes), ("store", () if first.slow else stores)):
        for value in sorted(values):
            if not used[name, value]:
                take(n for n in numbers if getattr(cases[n], name) == value)
    return sample


# ---------------------------------------------------------------------- cases of pytest's items


def cases_of(items: Sequence[pytest.Item]) -> list[Case]:
    """Return the case of each item, in the same order."""
    tests: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        tests.setdefault(item.nodeid.partition("[")[0], []).append(number)
    found: dict[int, Case] = {}
    for test, numbers in tests.items():
        dependent = _dependent([items[number] for number in numbers])
        for number in numbers:
            found[number] = _case(test, items[number], dependent)
    return [found[number] for number in range(len(items))]


def _params(item: pytest.Item) -> dict[str, Any]:
    return dict(_callspec(item).params) if hasattr(item, "callspec") else {}


def _callspec(item: pytest.Item) -> Any:
    """Return pytest's record of the parameters of one case: `params` and `indices`, by their names."""
    return getattr(item, "callspec")  # noqa: B009  # only functions with parameters have it, and no type says so


def mode_of(value: object) -> str:
    """Return the way to die that a parameter is (`Crash.mode`), or "" if it is something else."""
    mode = getattr(value, "mode", None)
    return mode if isinstance(mode, str) and isinstance(getattr(value, "point", None), str) else ""


def _dependent(items: Sequence[pytest.Item]) -> set[str]:
    """Return the names of parameters that are given together with a crash, such as the fate that is expected of it.

    Names and functions that are given with it (a scenario) are part of the position all the same.
    """
    together: set[str] | None = None
    for item in items:
        params = _params(item)
        indices: dict[str, object] = dict(_callspec(item).indices) if params else {}
        crashes = {indices[name] for name, value in params.items() if mode_of(value)}
        here = {name for name, value in params.items() if indices[name] in crashes and not _names(value)}
        together = here if together is None else together & here
    return together or set()


def _names(value: object) -> bool:
    return isinstance(value, str) or callable(value)


def _case(test: str, item: pytest.Item, dependent: set[str]) -> Case:
    position: list[object] = []
    mode = store = ""
    for name, value in _params(item).items():
        if died := mode_of(value):
            mode = died
            position.append(getattr(value, "point", None))
        elif name == "mode" and isinstance(value, str):
            mode = value
        elif name in ("place", "store") and isinstance(value, str):
            store = value
        elif name not in dependent:
            position.append(_key(value))
    gate, kill, slow = (item.get_closest_marker(marker) is not None for marker in ("gate", "kill", "slow"))
    return Case(test, tuple(position), mode, store, gate or item.path.parent.name in LONG, kill, slow)


def _key(value: object) -> object:
    """Return what a value is told apart by: its name if it has one, else the object, which all its cases share.

    Pytest numbers parameters by case, so their indices cannot say that two cases have the same one.
    """
    if isinstance(value, str):
        return value
    if callable(value):
        return getattr(value, "__qualname__", str(value))
    return id(value)


# ---------------------------------------------------------------------- what each lane runs


def selected(lane: str, items: Sequence[pytest.Item], named: Sequence[str] = ()) -> list[pytest.Item]:
    """Return the items that a lane runs, in their order. `named` are the paths that pytest was given."""
    if lane == "quick":
        return _quick(items, FOLDERS - {PurePath(path.partition("::")[0]).parent.name for path in named})
    chosen = in_test(cases_of(items))
    return [item for item, is_test in zip(items, chosen, strict=True) if is_test == (lane == "test")]


def _quick(items: Sequence[pytest.Item], left: Collection[str]) -> list[pytest.Item]:
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name not in left and _is_quick(item):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for each in variants.values() for item in each[:: -(-len(each) // VARIANTS)]}
    return [item for item in items if item in kept]


def _is_quick(item: pytest.Item) -> bool:
    """True if `quick` runs a test: without markers that say otherwise, and of its variants the first kind only.

    Many tests run on every store and for every way to die (`before`, `lost`, …). In memory, and dying before a call is
    applied, they find most mistakes in a fraction of the time.
    """
    if any(marker.name in SLOW for marker in item.iter_markers()):
        return False
    params = _params(item)
    modes = [params.get("mode"), *(mode_of(value) for value in params.values())]
    on_file = any(str(params.get(name)).startswith("sqlite") for name in ("place", "store"))
    return not on_file and not any(mode in ("lost", "hang", "late", "unheard") for mode in modes)


# ---------------------------------------------------------------------- what a lane says at its end


class Counts(NamedTuple):
    """What one run came to. `left` counts the cases of the tree or the given paths that the lane does not run."""

    ran: int
    skipped: Sequence[str]
    left: int = 0


def summary(lane: str, counts: Counts) -> list[str]:
    """Return the lines that a lane prints at its end: how many cases ran, and the skips by their reason."""
    others = {"test": " (make gate runs them)", "gate": " (make test runs them)", "quick": ""}
    left = f", {counts.left:,} left to other lanes{others.get(lane, '')}" if counts.left else ""
    lines = [f"lane {lane or 'all'}: {counts.ran:,} cases ran, {len(counts.skipped):,} skipped{left}"]
    for reason, number in sorted(Counter(counts.skipped).items(), key=lambda each: (-each[1], each[0])):
        lines.append(f"  skipped {number:,}: {reason}")
    return lines


def reason_of(longrepr: object) -> str:
    """Return why a test was skipped, from what its report holds."""
    words = str(longrepr[2]) if isinstance(longrepr, tuple | list) and len(longrepr) == 3 else str(longrepr)
    return words.removeprefix("Skipped: ").partition("\n")[0].strip() or "no reason is given"
