"""Every workload runs once with little work, and the report says what it should of figures written by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from perdure.commands.sandbox import IMPLEMENTATIONS, examine
from tests.codemode.kit import require_sandbox

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def environment(out: Path) -> dict[str, str]:
    return {**os.environ, "BENCH_OUT": str(out)}


def sample(folder: Path, workload: str, params: dict[str, Any]) -> Any:
    """What an adapter process leaves behind."""
    out = folder / "out.json"
    command = [sys.executable, str(BENCHMARKS / "perdure_adapter.py"), workload, json.dumps(params)]
    ended = subprocess.run(command, env=environment(out), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(out.read_text())


def test_w1_runs_every_shape_in_memory(tmp_path: Path) -> None:
    found = sample(tmp_path, "w1", {"shapes": ["t1", "t10", "p4"], "seconds": 0})
    assert [found[shape]["tool_calls"] for shape in ("t1", "t10", "p4")] == [1, 10, 4]
    assert found["yard_ms"] > 0


def test_w2_counts_four_transactions_for_a_plain_turn(tmp_path: Path) -> None:
    found = sample(tmp_path, "w2", {"shapes": ["t1"], "seconds": 0, "turns": 8, "dir": str(tmp_path)})
    assert found["t1"]["commits"] == pytest.approx(4, abs=0.3)  # a renewal may fall into the sample
    assert found["t1"]["written_b"] > 1000


def test_w2_with_many_sessions_shares_transactions(tmp_path: Path) -> None:
    found = sample(tmp_path, "w2", {"at_once": 16, "seconds": 0.2, "dir": str(tmp_path)})
    assert found["t1"]["commits"] < 4


def test_w3_measures_its_marks_and_a_cold_session(tmp_path: Path) -> None:
    found = sample(tmp_path, "w3", {"marks": [2, 5], "repeats": 2, "deep": 30, "dir": str(tmp_path)})
    assert found["2"]["written_b"] > 0
    assert found["5"]["cpu_ms"] > 0
    assert found["cold"]["turns"] == 30


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_w5_runs_its_sessions_at_once(tmp_path: Path, store: str) -> None:
    params: dict[str, Any] = {"sessions": 20, "delay": 0.001}
    found = sample(tmp_path, "w5", params | ({"dir": str(tmp_path)} if store == "sqlite" else {}))
    assert found["wall_s"] > 0.002


def test_w6_answers_after_a_cold_start(tmp_path: Path) -> None:
    found = sample(tmp_path, "w6", {})
    assert 0 < found["cold_cpu_ms"] < found["answer_cpu_ms"]


def test_w7_sees_every_character(tmp_path: Path) -> None:
    together = sample(tmp_path, "w7", {"repeats": 1})
    apart = sample(tmp_path, "w7", {"repeats": 1, "apart": True})
    assert together["chunks_seen"] < apart["chunks_seen"]


@pytest.mark.parametrize("recovery", ["once", "rerun"])
def test_w4_shares_transactions_between_units(tmp_path: Path, recovery: str) -> None:
    found = sample(tmp_path, "w4", {"units": 60, "at_once": 20, "recovery": recovery, "dir": str(tmp_path)})
    assert 0 < found["commits"] < 2
    assert found["seq_p50_ms"] > 0


def test_w4_wakes_all_that_wait(tmp_path: Path) -> None:
    found = sample(tmp_path, "w4", {"what": "parked", "processes": 30, "before": 5, "dir": str(tmp_path)})
    assert (found["processes"], found["tasks"]) == (30, 0)
    assert found["due_s"] > 0


def test_models_over_http_are_measured_beside_bare_readers(tmp_path: Path) -> None:
    streams = sample(tmp_path, "wh", {"what": "streams", "repeats": 1})
    turns = sample(tmp_path, "wh", {"what": "turns", "turns": 2, "rounds": 1})
    building = sample(tmp_path, "wh", {"what": "building", "messages": 12})
    importing = sample(tmp_path, "wh", {"what": "importing"})
    assert set(streams["apart"]) == {"feed_us", "provider_us", "httpx2_us", "asyncio_us"}
    assert turns["http_ms"] > turns["scripted_ms"] > 0
    assert building["next_ms"] >= building["google"]["next_ms"] > 0
    assert importing["import_ms"] > 0


def test_sessions_are_found_among_many_and_results_brought_back(tmp_path: Path) -> None:
    listing = sample(
        tmp_path, "wi", {"what": "listing", "sessions": 400, "latest": 5, "times": 2, "dir": str(tmp_path)}
    )
    reviving = sample(tmp_path, "wi", {"what": "reviving", "times": 50})
    assert [listing[f"{which}_rows"] for which in ("user", "tenant", "both", "none", "latest")] == [20, 40, 20, 0, 100]
    assert listing["most_ms"] >= listing["user_ms"] > 0
    assert reviving["report_us"] > reviving["row_us"] > 0


def test_text_of_a_worker_is_read_in_another_process(tmp_path: Path) -> None:
    params = {"what": "elsewhere", "fast": 50, "paced": 20, "repeats": 1, "dir": str(tmp_path)}
    found = sample(tmp_path, "wi", params)
    assert found["deltas"] == 40
    assert found["fast"]["cpu_us"] > 0
    assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_commands_are_measured_from_call_to_handle_and_to_the_end(tmp_path: Path) -> None:
    folders = {what: tmp_path / what for what in ("starts", "output", "news", "tree")}
    for folder in folders.values():
        folder.mkdir()
    few = {"starts": 3, "shims": 2, "bytes": 1 << 20, "lines": 3, "processes": 5}
    found = {what: sample(folder, "wc", few | {"what": what, "dir": str(folder)}) for what, folder in folders.items()}
    assert 0 < found["starts"]["p50_ms"] <= found["starts"]["p99_ms"]
    assert 0 < found["starts"]["shim_mb"] < 20
    assert found["output"]["mb_per_s"] > 0
    assert found["news"]["most_ms"] > 0
    assert found["tree"]["processes"] == 5


def test_sandboxes_are_measured_against_a_start_without_one(tmp_path: Path) -> None:
    found = sample(tmp_path, "wc", {"what": "confined", "starts": 1, "dir": str(tmp_path)})
    usable = {f"{how}_added_ms" for how in IMPLEMENTATIONS if not examine(how).refused}
    assert found["plain_ms"] > 0
    assert {name for name in found if name.endswith("_added_ms")} == usable


def test_files_of_a_workspace_are_measured(tmp_path: Path) -> None:
    folders = {what: tmp_path / what for what in ("paths", "edits", "search", "first", "parsing")}
    for folder in folders.values():
        folder.mkdir()
    few = {"times": 2, "bytes": 100_000, "files": 500, "lines": 1000}
    found = {what: sample(folder, "wf", few | {"what": what, "dir": str(folder)}) for what, folder in folders.items()}
    assert 0 < found["paths"]["check_us"] < found["paths"]["locate_us"]
    assert found["edits"]["edit_ms"] > 0
    assert found["search"]["search_s"] > 0
    assert (
        0 < found["first"].get("first_ms", found["first"].get("first_without_ripgrep_ms")) <= found["first"]["all_ms"]
    )
    assert found["parsing"]["parse_ms_per_mb"] > 0


def test_servers_over_mcp_are_measured(tmp_path: Path) -> None:
    calls = sample(tmp_path, "wx", {"what": "calls", "times": 3, "dir": str(tmp_path)})
    idle = sample(tmp_path, "wx", {"what": "idle", "servers": 2, "dir": str(tmp_path)})
    assert calls["bare_cpu_ms"] > 0
    assert calls["call_cpu_ms"] > 0
    assert idle["held_kb"] < 10_000


def killed(folder: Path, workload: str, params: dict[str, Any]) -> tuple[str, Any]:
    """What an adapter process said that was killed when all was in flight, and what the next one left behind."""
    ready = folder / "ready"
    params |= {"dir": str(folder), "ready": str(ready)}
    command = [
        sys.executable,
        str(BENCHMARKS / "perdure_adapter.py"),
        workload,
        json.dumps(params | {"phase": "start"}),
    ]
    with subprocess.Popen(command, env=environment(folder / "first.json")) as first:
        try:
            end = time.monotonic() + 120
            while not ready.exists() and first.poll() is None and time.monotonic() < end:
                time.sleep(0.01)  # a real child process; bounded
            assert ready.exists()
        finally:
            first.kill()
    return ready.read_text(), sample(folder, workload, params | {"phase": "recover", "t0": time.time()})


@pytest.mark.kill
def test_w8_finishes_killed_turns_without_repeating_what_was_recorded(tmp_path: Path) -> None:
    _, found = killed(tmp_path, "w8", {"units": 5})
    assert found["units"] == 5


@pytest.mark.kill
def test_running_commands_are_adopted_and_go_on(tmp_path: Path) -> None:
    said, found = killed(tmp_path, "wc", {"what": "adopted", "units": 5})
    assert len(json.loads(said)["ids"]) == found["units"] == 5


@pytest.mark.kill
def test_w4_finishes_interrupted_processes_without_repeating_what_was_recorded(tmp_path: Path) -> None:
    said, found = killed(tmp_path, "w4", {"what": "interrupted", "units": 70})
    assert json.loads(said) == {"runtimes": 2}
    assert found["units"] == 70


@pytest.mark.kill
def test_w4_finishes_a_long_process_and_tells_what_its_steps_cost(tmp_path: Path) -> None:
    said, found = killed(tmp_path, "w4", {"what": "long", "steps": 50})
    assert len(json.loads(said)["cpu_ms_by_tenth"]) == 10
    assert found["steps"] == 50


# ---------------------------------------------------------------------- the report


def shown(tmp_path: Path, result: dict[str, Any], *options: str) -> str:
    source = tmp_path / "result.json"
    source.write_text(json.dumps(result))
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--from", str(source), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def result_of(rows: dict[str, Any], peers: dict[str, Any] | None = None) -> dict[str, Any]:
    machine = {"cores": 2, "cpu": "some", "python": "3.11.7", "sqlite": "3.40.1"}
    return {"started": "2026-01-01 00:00 UTC", "machine": machine, "rows": rows, "peers": peers}


def stored(workload: str, name: str, **figures: Any) -> dict[str, Any]:
    return {"workload": workload, "name": name, "samples": [{"yard_ms": 8.92, **figures}]}


def line(text: str, begins: str) -> str:
    """A line of the report, with its columns one space apart."""
    return next(" ".join(row.split()) for row in text.splitlines() if row.strip().startswith(begins))


def test_cpu_is_shown_at_the_speed_of_the_targets(tmp_path: Path) -> None:
    half_as_fast = {"t1": {"cpu_ms": 0.30}, "yard_ms": 17.84}
    text = shown(tmp_path, result_of({"w1": [half_as_fast]}))
    assert line(text, "1 tool call") == "1 tool call, CPU ms – 0.15 – – ≤ 0.17 met"


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"configured": []}, "CPython 3.11.7 (configured without --enable-optimizations, without --with-lto), SQLite"),
        (
            {"configured": ["--enable-optimizations"]},
            "CPython 3.11.7 (configured with --enable-optimizations, without --with-lto), SQLite",
        ),
        ({}, "CPython 3.11.7, SQLite 3.40.1"),
    ],
)
def test_the_report_says_how_its_python_was_configured(tmp_path: Path, machine: dict[str, Any], said: str) -> None:
    result = result_of({"w1": [{"t1": {"cpu_ms": 0.3}, "yard_ms": 8.92}]})
    result["machine"] |= machine
    assert said in shown(tmp_path, result)


def test_a_missed_target_says_by_how_much(tmp_path: Path) -> None:
    samples = [{"t1": {"cpu_ms": ms}, "yard_ms": 8.92} for ms in (0.1, 0.2125, 9.0)]
    text = shown(tmp_path, result_of({"w1": samples, "w2x64": [{"t1": {"turns_per_s": 2000}, "yard_ms": 8.92}]}))
    assert line(text, "1 tool call").endswith("MISSED by 25 %")
    assert line(text, "turns/s").endswith("MISSED by 25 %")


def test_peers_follow_the_speed_of_the_floor(tmp_path: Path) -> None:
    peers = {
        "rows": [
            stored("w1", "floor (hand-written)", t1={"cpu_ms": 0.004}),
            stored("w1", "Slow", t1={"cpu_ms": 3.0}),
            stored("w1", "Quick", t1={"cpu_ms": 0.5}),
        ]
    }
    rows = {
        "w1": [{"t1": {"cpu_ms": 0.16}, "yard_ms": 8.92}],
        "w1 floor": [{"t1": {"cpu_ms": 0.008}, "yard_ms": 8.92}],
    }
    text = shown(tmp_path, result_of(rows, peers))
    assert line(text, "1 tool call").startswith("1 tool call, CPU ms 0.008 0.16 20× 1 Quick ≤ 0.17 met")


def test_a_target_is_judged_by_the_floor_of_the_same_run_too(tmp_path: Path) -> None:
    """0.95 ms was set beside a floor of 0.35: 2.71 times as much, on whatever machine."""
    rows = {
        "w2": [{"t1": {"cpu_ms": 0.8, "wall_ms": 3.2}, "yard_ms": 8.92}],
        "w2 floor": [{"t1": {"cpu_ms": 0.25, "wall_ms": 1.6}, "yard_ms": 8.92}],
    }
    text = shown(tmp_path, result_of(rows))
    assert line(text, "CPU ms") == "CPU ms 0.25 0.8 3.2× – ≤ 0.95 met by ratio ≤ 2.71×: MISSED by 18 %"
    assert line(text, "wall ms") == "wall ms 1.6 3.2 2× – ≤ 1.7 MISSED by 88 % by ratio ≤ 2.5×: met"


def test_a_target_that_wants_more_is_judged_by_the_floor_too(tmp_path: Path) -> None:
    """4,200 units/s were set beside a floor of 23,195: 0.181 of it, on whatever machine."""
    rows = {
        "w4": [{"units_per_s": 2000, "yard_ms": 17.84}],
        "w4 floor": [{"units_per_s": 10_000, "yard_ms": 17.84}],
    }
    text = shown(tmp_path, result_of(rows))
    assert line(text, "units/s") == ("units/s 10,000 2,000 0.2× – ≥ 4,200 MISSED by 110 % by ratio ≥ 0.181×: met")
    assert line(text, "the same") == "the same at the targets’ speed 20,000 4,000 0.2× –"


def test_the_chart_is_a_picture_with_ours_first(tmp_path: Path) -> None:
    peers = {"rows": [stored("w8", "Restate (service killed)", since_start_s=0.8)]}
    chart = tmp_path / "chart.svg"
    shown(tmp_path, result_of({"w8": [{"since_start_s": 0.4, "yard_ms": 8.92}]}, peers), "--chart", str(chart))
    root = ElementTree.fromstring(chart.read_text())
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[1:5] == ["Perdure", "0.4", "Restate", "0.8  (2×)"]
    assert sum(1 for _ in root.iter("{http://www.w3.org/2000/svg}rect")) == 2


@pytest.mark.parametrize(
    "params",
    [
        {"what": "cells", "times": 1},
        {"what": "resume", "times": 1},
        {"what": "idle", "sessions": 3},
        {"what": "cpython", "times": 1},
    ],
)
def test_wm_runs_cells_resumes_one_and_holds_no_worker(tmp_path: Path, params: dict[str, Any]) -> None:
    if params["what"] == "cpython":
        require_sandbox()
    found = sample(tmp_path, "wm", {**params, "dir": str(tmp_path)})

    assert found.get("workers", 0) == 0
    assert found.get("loop_cpu_ms", 1) > 0
    assert found.get("held_kb", 0) < 64
    assert found.get("first_ms", 1) > 0


def test_rows_of_code_are_sampled_where_a_sandbox_of_code_is_installed(tmp_path: Path) -> None:
    """Other rows have an environment with Perdure alone, in which no cell can run."""
    child = """
import json, sys
from pathlib import Path
from run import ROWS, Sampler
sampler = Sampler(Path(sys.argv[1]), quick=True)
print(json.dumps([sampler.sample(row, False) for row in ROWS if row.name == "wmi"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", child, str(tmp_path)], cwd=BENCHMARKS, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads(ended.stdout)
    assert found["workers"] == 0
    assert found["held_kb"] > 0


WRITES_BYTE_CODE = """
import json, os, sys
out = os.environ.get("BENCH_OUT") or sys.argv[-1]
if out != "setup":
    with open(out, "w") as file:
        json.dump({"writes": not sys.dont_write_bytecode}, file)
"""


def test_programs_of_a_run_keep_byte_code_where_the_environment_says_otherwise(tmp_path: Path) -> None:
    """Without byte code each cold start compiles what it imports, and the floor and ours are no longer comparable."""
    peers = tmp_path / "peers"
    (peers / "adapters").mkdir(parents=True)
    for name in ("bench.py", "adapters/floor.py"):
        (peers / name).write_text(WRITES_BYTE_CODE)
    child = """
import argparse, json, sys
from pathlib import Path
from run import Row, Sampler, measure_peers
folder = sys.argv[1]
sample = Sampler(Path(folder), quick=True).sample(Row("w6", floor={}), floor=True)
peers = measure_peers(argparse.Namespace(tmp=folder, quick=False, only=None))
print(json.dumps([sample["writes"], peers["writes"]]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", child, str(tmp_path)],
        cwd=BENCHMARKS,
        env={**os.environ, "BENCH_PEERS": str(peers), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [True, True]
