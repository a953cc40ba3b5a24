"""The gate for speed, and the checker behind it."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import opcodes
from benchmarks.opcodes import ENTRIES, ROOT, ChildCounter, Counted, OpcodesError, Table, check, compare, complaint

HERE = "an interpreter"
BEFORE = 20_000.0
FIGURES: Mapping[str, float] = dict.fromkeys(ENTRIES, BEFORE)


class FixedCounter:
    """Figures written by hand. Fails if the older tree is counted but has no figures."""

    def __init__(self, present: Mapping[str, float], older: Mapping[str, float] | None = None) -> None:
        self._present, self._older = present, older

    def count(self, source: Path, entry: str) -> Counted:
        figures = self._present if source == ROOT / "src" else self._older
        assert figures is not None, "the older tree was counted"
        return Counted(figures[entry], {"a.py:f": figures[entry] - 5_000, "b.py:g": 5_000})


def table_at(path: Path, environment: str = HERE, **changed: float) -> Path:
    Table(environment, {**FIGURES, **changed}, FIGURES).write(path)
    return path


@pytest.mark.slow
def test_no_entry_costs_other_instructions_than_the_table_says(tmp_path: Path) -> None:
    # Each entry has its own timeout. In another environment than the table's, both trees are counted, which takes long.
    faulthandler.cancel_dump_traceback_later()
    found = complaint(check(ChildCounter(tmp_path)))
    assert found is None, found


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["one", "sqlite", "process"])
def test_settings_of_the_interpreter_do_not_change_a_count(
    tmp_path: Path, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = ChildCounter(tmp_path)
    first = counter.count(ROOT / "src", entry)

    for name, value in {"PYTHONHASHSEED": "7", "PYTHONASYNCIODEBUG": "1", "PYTHONDONTWRITEBYTECODE": "1"}.items():
        monkeypatch.setenv(name, value)
    second = counter.count(ROOT / "src", entry)

    assert second.instructions == pytest.approx(first.instructions, rel=0.001)


# The comparison


@pytest.mark.parametrize(
    ("factor", "moved"), [(1.011, True), (1.009, False), (1, False), (0.991, False), (0.989, True)]
)
def test_an_entry_may_move_by_one_percent_in_either_direction(factor: float, moved: bool) -> None:
    rows = compare(Table(HERE, FIGURES, FIGURES), HERE, {**FIGURES, "four": BEFORE * factor})
    assert [row.entry for row in rows if row.moved] == (["four"] if moved else [])


def test_the_complaint_names_the_entry_both_figures_and_the_way_out() -> None:
    rows = compare(Table(HERE, FIGURES, FIGURES), HERE, {**FIGURES, "hook": 20_220, "cell": 19_780})
    assert complaint(rows) == (
        "hook: 20,000 -> 20,220 instructions (+1.10%; 1% is allowed): one call, and a plugin that looks at it\n"
        "cell: 20,000 -> 19,780 instructions (-1.10%; 1% is allowed): one call from a code cell\n"
        "See where they are executed: python -m benchmarks.opcodes --by 25 hook\n"
        "If the change is meant, write the table, commit it, and say in the commit why: "
        "python -m benchmarks.opcodes --write"
    )


@pytest.mark.parametrize(("counted", "moved"), [(19_800, False), (19_990, False), (20_020, True), (19_500, True)])
def test_in_another_environment_the_older_tree_sets_what_is_expected(
    tmp_path: Path, counted: float, moved: bool
) -> None:
    # 22,000 of 20,000 in the table; the older tree costs 18,000 here.
    table = table_at(tmp_path / "table.json", "another interpreter", one=22_000)
    here = dict.fromkeys(ENTRIES, 18_000.0)

    rows = check(FixedCounter({**here, "one": counted}, here), table, HERE)

    one = next(row for row in rows if row.entry == "one")
    assert one.expected == pytest.approx(19_800)
    assert one.moved == moved
    assert one.of_older == pytest.approx(counted / 18_000)
    assert not any(row.moved for row in rows if row.entry != "one")


def test_in_the_environment_of_the_table_the_older_tree_is_not_counted(tmp_path: Path) -> None:
    rows = check(FixedCounter(FIGURES), table_at(tmp_path / "table.json"), HERE)
    assert complaint(rows) is None


def test_the_older_tree_is_needed_in_another_environment() -> None:
    with pytest.raises(OpcodesError, match="count 82f0b67 here as well"):
        compare(Table("another interpreter", FIGURES, FIGURES), HERE, FIGURES)


# The command


def test_a_table_that_was_written_is_what_the_next_run_expects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, counter = tmp_path / "table.json", FixedCounter({**FIGURES, "ten": 30_000}, FIGURES)

    written = opcodes.run(["--write", "--table", str(table)], counter)
    again = opcodes.run(["--table", str(table)], counter)

    assert (written, again) == (0, 0)
    assert "ten            30,000      30,000    +0.00%       1.500  ten calls" in capsys.readouterr().out


def test_an_entry_that_moved_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = table_at(tmp_path / "table.json", opcodes.environment())

    status = opcodes.run(["--table", str(table), "--json"], FixedCounter({**FIGURES, "limit": 20_300}))

    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert status == 1
    assert found["entries"]["limit"] == {
        "entry": "limit",
        "expected": 20_000,
        "counted": 20_300,
        "of_older": 1.015,
        "change": pytest.approx(0.015),
        "moved": True,
    }
    assert not found["entries"]["one"]["moved"]
    assert "limit: 20,000 -> 20,300 instructions" in printed.err


def test_functions_are_listed_by_their_cost(capsys: pytest.CaptureFixture[str]) -> None:
    status = opcodes.run(["--by", "2", "one"], FixedCounter(FIGURES))
    assert status == 0
    assert capsys.readouterr().out.splitlines() == [
        "      20,000         all",
        "      15,000  75.0%  a.py:f",
        "       5,000  25.0%  b.py:g",
    ]


@pytest.mark.parametrize("wrong", [["--by", "many", "one"], ["--by", "25", "seven"]])
def test_by_refuses_a_wrong_number_or_entry(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        opcodes.run(wrong, FixedCounter(FIGURES))
    assert "a number and one of these entries: import, one, ten" in capsys.readouterr().err


def test_a_missing_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = opcodes.run(["--table", str(tmp_path / "none.json")], FixedCounter(FIGURES))
    assert status == 2
    assert f"there is no table at {tmp_path / 'none.json'}: restore it from git, or run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"environment": "x", "present": 1, "82f0b67": {}}',
        '{"environment": "x", "present": {"one": "many"}, "82f0b67": {}}',
        '{"environment": "x", "present": {}, "82f0b67": {"one": 0}}',
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "table.json"
    table.write_text(text)
    with pytest.raises(OpcodesError, match=r"cannot be read .* restore it from git, or run `python -m bench"):
        Table.read(table)


@pytest.mark.parametrize("part", ["present", "82f0b67"])
@pytest.mark.parametrize(("removed", "added"), [("cell", None), (None, "eleven")])
def test_missing_and_unknown_entries_of_the_table_are_named(
    tmp_path: Path, part: str, removed: str | None, added: str | None
) -> None:
    table = table_at(tmp_path / "table.json")
    data = json.loads(table.read_text())
    data[part].pop(removed, None)
    data[part].update({added: 1} if added else {})
    table.write_text(json.dumps(data))

    with pytest.raises(OpcodesError, match=rf"different entries \({removed or added}\): run `python -m benchmarks"):
        Table.read(table)


# Trees


def test_an_archive_that_is_not_the_frozen_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "82f0b67.tar.xz").write_bytes(b"another archive")
    with (
        pytest.raises(OpcodesError, match=r"82f0b67.tar.xz is missing, or .* restore it from git"),
        opcodes.older_tree(tmp_path),
    ):
        pass


def package(source: Path, text: str) -> Path:
    (source / "tiny").mkdir(parents=True)
    (source / "tiny" / "__init__.py").write_text(text)
    return source


def test_an_import_counts_the_instructions_of_its_modules(tmp_path: Path) -> None:
    counter = ChildCounter(tmp_path)

    short = counter.count(package(tmp_path / "short", "a = 1\n"), "import")
    long = counter.count(package(tmp_path / "long", "a = 1\n" * 50), "import")

    assert long.by["perdure/__init__.py:<module>"] - short.by["perdure/__init__.py:<module>"] == 2 * 49


def test_a_tree_that_cannot_be_imported_is_named_with_its_error(tmp_path: Path) -> None:
    source = package(tmp_path / "src", "raise ValueError('broken')")
    with pytest.raises(OpcodesError, match=r"(?s)'import' cannot be counted in .*src: .*ValueError: broken"):
        ChildCounter(tmp_path).count(source, "import")


def test_a_tree_that_keeps_no_byte_code_is_refused(tmp_path: Path) -> None:
    source = package(tmp_path / "src", "a = 1\n")
    (source / "tiny" / "__pycache__").touch()
    with pytest.raises(OpcodesError, match=r"cannot keep byte code, .*: make .*__pycache__.* writable"):
        ChildCounter(tmp_path).count(source, "import")


def test_a_folder_with_two_packages_is_refused(tmp_path: Path) -> None:
    package(tmp_path / "src", "")
    (tmp_path / "src" / "more").mkdir()
    (tmp_path / "src" / "more" / "__init__.py").touch()
    with pytest.raises(OpcodesError, match=r"expected one package in .*, found 2"):
        opcodes.package_of(tmp_path / "src")


def test_an_entry_that_does_not_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OpcodesError, match=r"'one' did not end within 0 s: .* nothing in it may wait for a timer"):
        ChildCounter(tmp_path, timeout=0).count(ROOT / "src", "one")
