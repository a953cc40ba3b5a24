"""The JSONL trace: one line per event, written by a thread of its own."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from perdure.tracing.jsonl import JsonlSink


def test_closing_writes_what_waits_however_much_that_is(tmp_path: Path) -> None:
    def write_and_close() -> None:
        for number in range(200):
            sink = JsonlSink(tmp_path / f"{number}.jsonl")
            for name in ("one", "two", "three"):
                sink.write(name, {"n": number})
            sink.close()

    thread = threading.Thread(target=write_and_close, daemon=True)  # a sink that never closes must not hold up the run
    thread.start()
    thread.join(timeout=60)

    assert not thread.is_alive()
    for number in range(200):
        lines = [json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text().splitlines()]
        assert [(line["name"], line["n"]) for line in lines] == [("one", number), ("two", number), ("three", number)]


def test_a_sink_that_was_closed_takes_more(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "trace.jsonl")
    sink.write("before", {})
    sink.close()
    sink.write("after", {})
    sink.close()

    names = [json.loads(line)["name"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert names == ["before", "after"]


def test_closing_without_a_line_writes_no_file(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "trace.jsonl").close()

    assert not (tmp_path / "trace.jsonl").exists()
